"""The one queue of requests that wait for an instance. Pure.

1. Time is cut into windows of `ageing_s`. Each window that a request has waited longer than another is worth one level
   of priority; higher comes first. So low priority does not starve: whoever comes more than so many windows later as
   there are levels between them comes behind.
2. Then the earlier deadline; none is latest. Then the earlier arrival.
3. Who is late already, or certain to be, shall not make others late: it counts as one without a deadline that comes at
   half its time limit. Then its turn comes all the same.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple


class Rank(NamedTuple):
    """Sorts the queue: the lowest comes first."""

    level: int
    deadline: float
    seq: int


def rank_of(*, priority: int, arrived_at: float, deadline: float | None, seq: int, ageing_s: float) -> Rank:
    window = math.floor(arrived_at / ageing_s)
    return Rank(window - priority, math.inf if deadline is None else deadline, seq)


def rank_if_late(rank: Rank, *, arrived_at: float, expires_at: float, ageing_s: float) -> Rank:
    """Rule 3."""
    windows = math.floor((expires_at - arrived_at) / (2 * ageing_s))
    return rank._replace(level=rank.level + windows, deadline=math.inf)


class WaitingQueue:
    """Request ids, in order of their rank."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, str]] = []

    def add(self, rank: Rank, request_id: str) -> None:
        insort(self._entries, (rank, request_id))

    def remove(self, rank: Rank, request_id: str) -> None:
        index = bisect_left(self._entries, (rank, request_id))
        assert self._entries[index] == (rank, request_id)
        del self._entries[index]

    def holds(self, rank: Rank, request_id: str) -> bool:
        index = bisect_left(self._entries, (rank, request_id))
        return index < len(self._entries) and self._entries[index] == (rank, request_id)

    def at(self, place: int) -> str:
        return self._entries[place][1]

    def place_of(self, rank: Rank, request_id: str) -> int:
        """How many wait ahead of it."""
        return bisect_left(self._entries, (rank, request_id))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        """In order; the queue must not change meanwhile."""
        return (request_id for _, request_id in self._entries)

    def check_invariants(self) -> None:
        assert self._entries == sorted(set(self._entries))
