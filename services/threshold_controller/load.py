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

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

Works = tuple[float, ...]  # instance-seconds of one request, by threshold, never falling; all alike if it is pinned
Floats = NDArray[np.float64]  # one of each request


class Claims:
    """What requests claim until one horizon is over (rule 1)."""

    def __init__(self, works: Sequence[Works], low: Floats, high: Floats, most: Floats, length_s: float) -> None:
        """By request: its works, the first and the last of them, and the most that it can claim."""
        self.works, self.length_s = works, length_s
        self._most = most
        self._low = np.minimum(low, most)
        self._extra = np.cumsum(np.minimum(high, most) - self._low)  # up to each request, everybody at the highest
        self.floor_s = float(np.cumsum(self._low)[-1])  # everybody at the lowest

    def fits(self, spare_s: float) -> int:
        """How many may have the highest."""
        return int(np.searchsorted(self._extra, spare_s, side="right"))

    def after(self, place: int, index: int) -> float:
        """What all up to that one claim beyond the lowest, those before it at the highest."""
        before = self._extra[place - 1] if place else 0.0
        return float(before + (min(self.works[place][index], self._most[place]) - self._low[place]))

    def demand_s(self, caps: Sequence[int]) -> float:
        """What all claim at these thresholds."""
        granted = [works[cap] for works, cap in zip(self.works, caps, strict=True)]
        return float(np.minimum(granted, self._most).sum())


def claims_of(works: Sequence[Works], horizons_s: Sequence[float], shares: Sequence[float]) -> list[Claims]:
    """By horizon, ascending (rules 1 and 5). By request: its works, horizon, and share 1 / n of an instance, or 0."""
    low, high = np.array([w[0] for w in works]), np.array([w[-1] for w in works])
    lengths_s, places = np.array(horizons_s), np.array(shares)
    octaves = np.frexp(lengths_s)[1]
    claims = []
    for octave in np.unique(octaves):
        length_s = float(lengths_s[octaves == octave].min())
        most = np.where(octaves <= octave, inf, places * length_s)
        claims.append(Claims(works, low, high, most, length_s))
    return claims


def walk(claims: Sequence[Claims], num_instances: float) -> list[int]:
    """Everybody's cap, an index (rules 2 and 3).

    `num_instances` may be less than there are, to see what a reserve would leave.
    """
    if not claims:
        return []
    works = claims[0].works
    caps = [0] * len(works)
    spare_s = [c.length_s * num_instances - c.floor_s for c in claims]
    if min(spare_s) < 0:
        return caps
    top = len(works[0]) - 1
    place = min(c.fits(spare) for c, spare in zip(claims, spare_s, strict=True))
    caps[:place] = [top] * place
    if place < len(works):
        fitting = (
            index
            for index in range(top, 0, -1)
            if all(c.after(place, index) <= spare for c, spare in zip(claims, spare_s, strict=True))
        )
        caps[place] = next(fitting, 0)
    return caps


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
