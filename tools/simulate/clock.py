"""Virtual time: what happens next, and how long messages are under way. Seconds from the start.

1. What is due first happens first; of what is due at one time, what was planned first.
2. A message takes `delay_s`, and by chance up to `jitter_s` more. On one link none overtakes another.
"""

import heapq
from collections.abc import Callable, Hashable
from random import Random
from typing import Any


class Clock:
    """`now` moves from one planned thing to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []  # a heap
        self._count = 0

    def at(self, time: float, do: Callable[..., object], *arguments: Any) -> None:
        """Plans it; what lies in the past is due now."""
        self._count += 1
        heapq.heappush(self._planned, (max(time, self.now), self._count, do, arguments))

    def step(self) -> bool:
        """Lets the next thing happen. False: nothing is planned."""
        if not self._planned:
            return False
        self.now, _, do, arguments = heapq.heappop(self._planned)
        do(*arguments)
        return True


class Timer:
    """One alarm, which each `set` moves: as the services carry WakeAt out."""

    def __init__(self, clock: Clock, ring: Callable[[], object]) -> None:
        self._clock, self._ring = clock, ring
        self._at: float | None = None

    def set(self, at: float) -> None:
        self._at = at
        self._clock.at(at, self._due, at)

    def _due(self, at: float) -> None:
        if self._at == at:
            self._at = None
            self._ring()


class Network:
    """Carries messages (rule 2)."""

    def __init__(self, clock: Clock, rng: Random, delay_s: float, jitter_s: float) -> None:
        self._clock, self._rng = clock, rng
        self._delay_s, self._jitter_s = delay_s, jitter_s
        self._last: dict[Hashable, float] = {}  # arrival of the last message, by link

    def send(self, link: Hashable, arrive: Callable[..., object], *arguments: Any) -> None:
        """`link`: who sends what to whom."""
        at = self._clock.now + self._delay_s
        if self._jitter_s:
            at += self._jitter_s * self._rng.random()
        at = max(at, self._last.get(link, 0.0))
        self._last[link] = at
        self._clock.at(at, arrive, *arguments)
