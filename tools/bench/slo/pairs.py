"""How much more or less often answers are correct under one policy than under another, on the same requests. Pure.

1. A pair is one request that both policies have answered: same seed, same rate, same number, so same prompt and same
   time of arrival. Pairs of all seeds are pooled.
2. The interval is the normal approximation for the mean of the pairs' differences, with pairs of the same prompt taken
   as one cluster: the same question asked again is little news. One made-up pair for either side (as in Agresti and Min
   2005, who add half of one to each cell) keeps it from collapsing where hardly any pair differs.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

_Z = 1.959964  # 95 %, both sides


class Pair(NamedTuple):
    """Whether one request was answered correctly."""

    prompt: int
    here: bool
    there: bool


class Difference(NamedTuple):
    """Of the shares of correct answers, here less there, in points of a hundred."""

    pairs: int
    points: float
    low: float  # of the 95 % interval
    high: float


def difference(pairs: Iterable[Pair]) -> Difference | None:
    """Rule 2; None without pairs."""
    by_prompt: defaultdict[int, list[int]] = defaultdict(list)
    for pair in pairs:
        by_prompt[pair.prompt].append(pair.here - pair.there)
    clusters = [*by_prompt.values(), [1], [-1]]
    count = sum(map(len, clusters))
    if count == 2:
        return None
    total = sum(map(sum, clusters))
    mean = total / count
    squares = math.fsum((sum(cluster) - mean * len(cluster)) ** 2 for cluster in clusters)
    error = math.sqrt(squares * len(clusters) / (len(clusters) - 1)) / count
    return Difference(count - 2, 100 * total / (count - 2), 100 * (mean - _Z * error), 100 * (mean + _Z * error))
