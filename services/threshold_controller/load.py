"""How much each request may cost, so that all of them together fit into the instances' time. Pure.

A horizon is a length of time: an SLO, or the time limit of a request that has none.
1. Until a horizon H is over, N instances have N * H. Of that a request with work w claims
   - w, if its own horizon is no longer than H;
   - min(w, H / n) otherwise, where n such requests fill an instance: as long as it stands beside the others, it takes
     its place among them, whatever time it has to spare, for an instance serves all that it holds alike. Who waits
     for an instance and has no deadline takes none: the others are placed before it.
   So loose requests give way where tight ones would not get through, and a request that has until tomorrow cannot claim
   more of the next second than its place is worth. With one SLO this is the paper's sum over all requests.
2. Everybody gets the lowest threshold. What the claims leave of a horizon is spare; if one is short, that is all.
3. In the order given, each gets the highest threshold as long as what it claims beyond the lowest is spare, at each
   horizon. The first for whom it is not gets the highest that fits, and everybody after it the lowest. Else one request
   more could push an earlier one down so far that a later one rises.
4. A pinned request has one threshold, so it is counted and asks for nothing.
5. Horizons are told apart by factors of two, and the shortest of each octave counts: so they are few.
All claims grow with each request, and the shortest of an octave only falls: one request more raises nobody's cap.
`paper`: one horizon, the mean SLO weighted by work; and what the first limited one leaves goes to the later ones.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import floor, inf, log2
from operator import sub
from typing import NamedTuple

Works = tuple[float, ...]  # instance-seconds of one request, by threshold, never falling; one number if it is pinned


class Reach(NamedTuple):
    """How far the walk came (rule 3): the highest for all before that place, and this for the one that stands there."""

    place: int
    threshold: int  # index


class Horizons:
    """The octaves of some horizons."""

    def __init__(self, lengths_s: Iterable[float]) -> None:
        shortest: dict[int, float] = {}
        for length_s in set(lengths_s):
            octave = floor(log2(length_s))
            shortest[octave] = min(length_s, shortest.get(octave, inf))
        self._number = {octave: number for number, octave in enumerate(sorted(shortest))}
        self.lengths_s = [shortest[octave] for octave in self._number]  # ascending

    def number_of(self, lengths_s: Iterable[float]) -> list[int]:
        """The number of each one's octave."""
        number = {length_s: self._number[floor(log2(length_s))] for length_s in set(lengths_s)}
        return [number[length_s] for length_s in lengths_s]


class Claims:
    """What requests claim until one horizon is over (rule 1)."""

    def __init__(
        self,
        works: Sequence[Works],
        length_s: float,
        horizons: Sequence[int] = (),
        shares: Sequence[float] = (),
        horizon: int = 0,
    ) -> None:
        """By request: its works, its horizon's number, and its share 1 / n of an instance, or 0.

        `horizon`: this one's number. Without numbers no request has a longer one.
        """
        self.works, self.length_s = works, length_s
        if max(horizons, default=horizon) <= horizon:
            self._most = [inf] * len(works)
            low = [w[0] for w in works]
            high = [w[-1] for w in works]
        else:
            self._most = [
                inf if own <= horizon else share * length_s for own, share in zip(horizons, shares, strict=True)
            ]
            low = [min(w[0], most) for w, most in zip(works, self._most, strict=True)]
            high = [min(w[-1], most) for w, most in zip(works, self._most, strict=True)]
        self.floor_s = sum(low)  # everybody at the lowest
        self._extra = list(accumulate(map(sub, high, low)))  # by request: up to it, everybody at the highest

    def fits(self, spare_s: float) -> int:
        """How many may have the highest."""
        return bisect_right(self._extra, spare_s)

    def after(self, place: int, index: int) -> float:
        """What all up to that one claim beyond the lowest, those before it at the highest."""
        works, most = self.works[place], self._most[place]
        before = self._extra[place - 1] if place else 0.0
        return before + (min(works[index], most) - min(works[0], most))

    def demand_s(self, caps: Sequence[int]) -> float:
        """What all claim at these thresholds."""
        granted = [works[min(cap, len(works) - 1)] for works, cap in zip(self.works, caps, strict=True)]
        return sum(map(min, granted, self._most))


def reach(claims: Sequence[Claims], num_instances: float) -> Reach:
    """The walk (rules 2 and 3). `num_instances` may be less than there are, to see what a reserve would leave."""
    spare_s = [c.length_s * num_instances - c.floor_s for c in claims]
    if any(spare < 0 for spare in spare_s):
        return Reach(0, 0)
    place = min((c.fits(spare) for c, spare in zip(claims, spare_s, strict=True)), default=0)
    if not claims or place == len(claims[0].works):
        return Reach(place, 0)
    index = len(claims[0].works[place]) - 1
    while any(c.after(place, index) > spare for c, spare in zip(claims, spare_s, strict=True)):
        index -= 1
    return Reach(place, index)


def paper_caps(requests: Sequence[Works], capacity_s: float) -> list[int]:
    """Algorithm 2 of the paper: each gets the highest that fits with all later ones at the lowest."""
    spare = capacity_s - sum([works[0] for works in requests])
    caps = []
    for works in requests:
        index = len(works) - 1
        while index and works[index] - works[0] > spare:
            index -= 1
        spare -= works[index] - works[0]
        caps.append(index)
    return caps


def paper_horizon(slos: Iterable[tuple[float, float]]) -> float | None:
    """The mean SLO (seconds), weighted by work, of pairs (SLO, work); None for none."""
    least, most, weighted, weights = inf, 0.0, 0.0, 0.0
    for slo_s, work in slos:
        least, most = min(least, slo_s), max(most, slo_s)
        weighted += slo_s * work
        weights += work
    if weights <= 0 or least == most:  # equal ones have no mean but themselves, whatever the rounding
        return most or None
    return weighted / weights
