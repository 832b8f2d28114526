"""How much each request may cost, so that all of them together fit into the instances' time. Pure.

1. Everybody gets the lowest threshold. What the capacity leaves beyond that is spare; if nothing is, that is all.
2. In the order given, each gets the highest threshold whose extra work fits into what is spare.
3. After the first that gets less than the highest, everybody gets the lowest. Else one request more could push an
   earlier one down so far that a later one rises. What is spare then is less than one request's step up.
   `paper`: it goes to the later ones.
4. A pinned request has one threshold, so it is counted and asks for nothing.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Works = tuple[float, ...]  # instance-seconds of one request, by threshold, never falling; one number if it is pinned


class Grant(NamedTuple):
    """What load control allows."""

    caps: list[int]  # by request: index into the threshold set
    spare_s: float  # of the capacity, not given to anybody; negative: even the lowest thresholds do not fit
    is_open: bool  # rule 3 has not struck: one more would be given something


def grant(requests: Sequence[Works], capacity_s: float, *, paper: bool = False) -> Grant:
    """Shares `capacity_s` instance-seconds out, first to the first."""
    spare = capacity_s - sum([works[0] for works in requests])
    caps = []
    is_open = spare >= 0
    for works in requests:
        index = len(works) - 1
        if index:
            if is_open:
                affordable = works[0] + spare
                if works[index] > affordable:
                    is_open = paper
                    while works[index] > affordable:
                        index -= 1
                spare = affordable - works[index]
            else:
                index = 0
        caps.append(index)
    return Grant(caps, spare, is_open)


def horizon(slos: Iterable[tuple[float, float]]) -> float | None:
    """The mean SLO (seconds), weighted by work, of pairs (SLO, work); None for none."""
    least, most, weighted, weights = float("inf"), 0.0, 0.0, 0.0
    for slo_s, work in slos:
        least, most = min(least, slo_s), max(most, slo_s)
        weighted += slo_s * work
        weights += work
    if weights <= 0 or least == most:  # equal ones have no mean but themselves, whatever the rounding
        return most or None
    return weighted / weights
