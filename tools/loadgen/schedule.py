"""What is sent when: arrivals, prompts, SLOs and tiers put together. Pure; all randomness follows from the seed.

Each of the four is drawn from a generator of its own, so that another SLO or another file of prompts leaves the
arrivals as they were.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from random import Random
from typing import Generic, NamedTuple, TypeVar

from tools.loadgen.arrivals import Source
from tools.loadgen.asks import Ask

T = TypeVar("T")


class Mix(NamedTuple, Generic[T]):
    """Values that are drawn by their shares."""

    values: tuple[T, ...]
    shares: tuple[float, ...]  # positive; they need not sum to one

    def draw(self, rng: Random) -> T:
        return rng.choices(self.values, self.shares)[0]


class Send(NamedTuple):
    """One request that is due."""

    number: int  # from 0
    due_s: float  # from the start of the run
    ask: Ask
    slo_ms: float | None
    tier: str | None


def parse_mix(text: str, value_of: Callable[[str], T]) -> Mix[T]:
    """`500` or `500:0.7,2000:0.3`. Raises ValueError, as `value_of` does."""
    values, shares = [], []
    for word in text.split(","):
        value, _, share = word.partition(":")
        values.append(value_of(value))
        shares.append(float(share or 1))
        if not 0 < shares[-1] < float("inf"):
            raise ValueError(f"the share of {value} is not positive")
    return Mix(tuple(values), tuple(shares))


def sends(
    source: Source,
    seed: int,
    until_s: float,
    *,
    asks: Sequence[Ask],
    slo_ms: Mix[float] | None = None,
    tiers: Mix[str] | None = None,
) -> Iterator[Send]:
    """All that is due before `until_s`. Prompts are drawn from `asks`, each time from all of them."""
    for_arrivals, for_asks, for_slos, for_tiers = (
        Random(f"loadgen/{what}/{seed}") for what in ("arrivals", "asks", "slos", "tiers")
    )
    for number, due_s in enumerate(takewhile(lambda at: at < until_s, source.arrivals(for_arrivals))):
        yield Send(
            number,
            due_s,
            for_asks.choice(asks),
            None if slo_ms is None else slo_ms.draw(for_slos),
            None if tiers is None else tiers.draw(for_tiers),
        )
