"""Who asks what, and when. Reproducible by seed.

1. Arrivals are a Poisson process: at one rate, or at a rate that changes (`Phase`s, one after the other).
2. Prompts are dealt like cards: all of them in random order, then again. So each is asked as often as any other.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from services.profile import Profile
from services.settings import ConfigError
from tools.simulate.denoising import Lengths

_LENGTH_COLUMNS = (("contexttokens", "generatedtokens"), ("context_tokens", "generated_tokens"))


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


def read_lengths(path: Path, profile: Profile) -> tuple[Lengths, ...]:
    """Of the rows of a CSV file, outputs as whole blocks; those that the profile's limits allow. Raises ConfigError."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{(key or "").strip().lower(): value for key, value in row.items()} for row in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"cannot read the lengths: {error}") from None
    columns = next((pair for pair in _LENGTH_COLUMNS if rows and set(pair) <= rows[0].keys()), None)
    if columns is None:
        raise ConfigError(f"{path}: a column of ContextTokens and one of GeneratedTokens were expected")
    block_size, limits = profile.decoding.block_size, profile.limits
    try:
        pairs = [(max(1, int(row[columns[0]])), max(1, int(row[columns[1]]))) for row in rows]
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: a row holds no whole number of tokens") from None
    found = [Lengths(prompt, -(-output // block_size) * block_size) for prompt, output in pairs]
    fitting = tuple(
        one for one in found if one.output_tokens <= limits.max_output_tokens and sum(one) <= limits.max_context_tokens
    )
    if not fitting:
        raise ConfigError(f"{path}: no row fits into {limits.max_context_tokens} tokens of context")
    return fitting
