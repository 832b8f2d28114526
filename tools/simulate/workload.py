"""Who asks what, and when. Reproducible by seed.

1. Arrivals are a Poisson process: at one rate, or at a rate that changes (`Phase`s, one after the other).
2. Prompts are dealt like cards: all of them in random order, then again. So each is asked as often as any other.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple


class Phase(NamedTuple):
    """A rate for a while."""

    rate: float  # requests per second, of the whole cluster
    seconds: float


class Arrival(NamedTuple):
    """One request."""

    at: float  # seconds
    prompt: int  # its number
    seed: int  # of what else is random about it


def arrivals(phases: Sequence[Phase], num_prompts: int, seed: int, *, most: int | None = None) -> Iterator[Arrival]:
    """In order; at most so many."""
    times = _times(phases, Random(f"{seed}/arrivals"))
    deck = _deal(num_prompts, Random(f"{seed}/prompts"))
    for number, (at, prompt) in enumerate(zip(times, deck, strict=False)):
        if number == most:
            return
        yield Arrival(at, prompt, number)


def _times(phases: Sequence[Phase], rng: Random) -> Iterator[float]:
    begin = 0.0
    for phase in phases:
        end = begin + phase.seconds
        at = begin
        while phase.rate > 0 and (at := at + rng.expovariate(phase.rate)) < end:
            yield at  # a Poisson process forgets: at the next rate it begins anew
        begin = end


def _deal(num_prompts: int, rng: Random) -> Iterator[int]:
    deck = list(range(num_prompts))
    while True:
        rng.shuffle(deck)
        yield from deck
