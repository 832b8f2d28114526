"""How many steps a request still needs, under each threshold of the set. Pure.

1. A forecast holds for the number of steps that the request had run by then. Since then it counts down: one a step,
   and one block for each block that has begun.
2. It is used until two more blocks have begun without a newer one: then its maker is gone.
3. Without one, the profile's mean steps per block count for each block to begin, and for the open block as far as it
   is still masked. How many blocks will begin is what finished requests say that got as far; the whole canvas where
   the request ignores the end of text, or too few have finished.
4. `risk` says which number is meant: 0 the mean, 1 the upper bound, -1 as far below the mean as the bound is above it.
   Without a forecast the bound is `_SPREAD` of the mean away, and at -1 a text may end with its open block.
5. A request that is not finished needs one step at least, and at a block's end one block; it cannot need more blocks
   than its canvas has, and none behind an open block that ends the text. A higher threshold never needs less.
6. The first step of a block is a recompute step, the others are cache steps; without a cache all are recompute steps.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from contracts.messages import CacheMode, RequestForecast

_SPREAD = 0.25
_MOST_BLOCKS_SINCE = 2  # begun since its forecast: then it is stale
_MOST_LENGTHS = 512  # finished requests that are remembered
_FEWEST_LENGTHS = 8  # that say something


class Need(NamedTuple):
    """Steps."""

    recompute: float
    cache: float


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a request is."""

    steps: int = 0
    blocks_done: int = 0
    steps_in_block: int = 0
    masked_in_block: float = 1.0  # share of the open block
    is_last_block: bool = False  # the open block ends the text

    @property
    def begun(self) -> int:
        """Blocks whose first step has run."""
        return self.blocks_done + (self.steps_in_block > 0)


class Lengths:
    """How many blocks the answers of finished requests have."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_MOST_LENGTHS)
        self._means: dict[tuple[int, int], float] = {}  # what was asked since the last one came

    def note(self, blocks: int) -> None:
        self._last.append(blocks)
        self._means.clear()

    def mean_left(self, begun: int, num_blocks: int) -> float:
        """Blocks still to begin, on average, where `begun` of `num_blocks` have (rule 3)."""
        found = self._means.get((begun, num_blocks))
        if found is None:
            found = self._means[begun, num_blocks] = self._count(begun, num_blocks)
        return found

    def _count(self, begun: int, num_blocks: int) -> float:
        longer = [blocks for blocks in self._last if blocks >= begun]
        if len(longer) < _FEWEST_LENGTHS:
            return float(num_blocks - begun)
        return sum(min(blocks, num_blocks) - begun for blocks in longer) / len(longer)


class Shape(NamedTuple):
    """What of a request bears on its steps."""

    num_blocks: int
    cache: CacheMode
    ignore_eos: bool


class Outlook:
    """One request's forecast and what has happened since."""

    def __init__(self) -> None:
        self.forecast: RequestForecast | None = None
        self._said: dict[float, list[tuple[float, float]]] = {}  # steps and blocks by threshold, by risk
        self._begun_at: deque[tuple[int, int]] = deque([(0, 0)], maxlen=64)  # (steps, blocks begun), ascending

    def note_standing(self, standing: Standing) -> None:
        if standing.steps > self._begun_at[-1][0]:
            self._begun_at.append((standing.steps, standing.begun))

    def note_forecast(self, forecast: RequestForecast) -> bool:
        """False: an older one, which says nothing new."""
        if self.forecast is not None and forecast.steps < self.forecast.steps:
            return False
        self.forecast = forecast
        self._said.clear()
        return True

    def reset(self) -> None:
        """The request starts again from an earlier point."""
        self.forecast = None
        self._said.clear()
        self._begun_at.clear()
        self._begun_at.append((0, 0))

    def usable(self, standing: Standing) -> bool:
        """Whether there is a forecast that is not stale (rule 2)."""
        return self._begun_since(standing) < _MOST_BLOCKS_SINCE

    def _begun_since(self, standing: Standing) -> int:
        """Blocks since the forecast; without one, as many as make one stale."""
        if self.forecast is None:
            return _MOST_BLOCKS_SINCE
        while len(self._begun_at) > 1 and self._begun_at[1][0] <= self.forecast.steps:
            self._begun_at.popleft()  # no forecast will be about it any more
        return standing.begun - self._begun_at[0][1]

    def needs(
        self, standing: Standing, shape: Shape, means: Sequence[float], lengths: Lengths, risk: float, count: int
    ) -> list[Need]:
        """What is still needed, at the lowest `count` thresholds. `means`: the profile's steps per block, at each."""
        forecast, begun_since, steps_since = self.forecast, self._begun_since(standing), 0
        if forecast is None or begun_since >= _MOST_BLOCKS_SINCE:
            pairs, begun_since = _from_means(standing, shape, means, lengths, risk), 0
        else:
            pairs, steps_since = self._pairs_at(forecast, risk), standing.steps - forecast.steps
        fewest_blocks = 0.0 if standing.steps_in_block else 1.0
        behind = 0 if standing.is_last_block else shape.num_blocks - standing.begun
        most_blocks = float(max(behind, fewest_blocks))
        needs = []
        total, recomputes = 1.0, fewest_blocks  # neither falls (rule 5); without calls of max and min, for it is hot
        for steps_then, blocks_then in pairs[:count]:
            steps, blocks = steps_then - steps_since, blocks_then - begun_since
            if blocks > recomputes:
                recomputes = blocks if blocks < most_blocks else most_blocks
            if steps > total or recomputes > total:
                total = steps if steps > recomputes else recomputes
            needs.append(Need(total, 0.0) if shape.cache == "none" else Need(recomputes, total - recomputes))
        return needs

    def _pairs_at(self, forecast: RequestForecast, risk: float) -> list[tuple[float, float]]:
        said = self._said.get(risk)
        if said is None:
            said = self._said[risk] = _said_by(forecast, risk)
        return said


def _said_by(forecast: RequestForecast, risk: float) -> list[tuple[float, float]]:
    """Steps and blocks, by threshold, at its time (rule 4)."""
    pairs = []
    for mean, upper, blocks in zip(forecast.steps_left, forecast.steps_left_upper, forecast.blocks_left, strict=True):
        steps = mean + risk * max(upper - mean, 0.0)
        pairs.append((steps, blocks * steps / mean if mean > 0 else blocks))  # more steps come in more blocks
    return pairs


def _from_means(
    standing: Standing, shape: Shape, means: Sequence[float], lengths: Lengths, risk: float
) -> list[tuple[float, float]]:
    """Rule 3."""
    if standing.is_last_block:
        blocks = 0.0
    elif shape.ignore_eos:
        blocks = float(shape.num_blocks - standing.begun)
    elif risk < 0:
        blocks = 0.0 if standing.steps_in_block else 1.0
    else:
        blocks = lengths.mean_left(standing.begun, shape.num_blocks)
    stretch = 1.0 + risk * _SPREAD
    pairs = []
    for mean in means:
        open_block = max(1.0, mean * standing.masked_in_block) if standing.steps_in_block else 0.0
        pairs.append((stretch * (open_block + mean * blocks), blocks))
    return pairs
