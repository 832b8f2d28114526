"""One system against another in the same runs, and what counts as better."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from tools.experiments.cells import Cell

NOISE_POINTS = 0.5  # of a hundred: less is no difference


class Paired(NamedTuple):
    """One system against another; differences by seed, in points of a hundred."""

    setup: str
    rate: float
    slo_factor: float
    seeds: list[int]
    attainment: list[float]
    accuracy: list[float]
    right_in_time: list[float]


def paired(cells: Sequence[Cell], system: str, base: str) -> list[Paired]:
    """In the order of the cells."""
    there = {(c.setup, c.rate, c.slo_factor, c.seed): c for c in cells if c.system == base}
    groups: dict[tuple[str, float, float], list[tuple[Cell, Cell]]] = {}
    for cell in cells:
        other = there.get((cell.setup, cell.rate, cell.slo_factor, cell.seed))
        if cell.system == system and other is not None:
            groups.setdefault((cell.setup, cell.rate, cell.slo_factor), []).append((cell, other))
    return [
        Paired(
            *key,
            [cell.seed for cell, _ in pairs],
            differences(pairs, lambda cell: cell.attainment),
            differences(pairs, lambda cell: cell.accuracy),
            differences(pairs, lambda cell: cell.right_in_time),
        )
        for key, pairs in groups.items()
    ]


def differences(pairs: Sequence[tuple[Cell, Cell]], of: Callable[[Cell], float | None]) -> list[float]:
    return [100 * (a - b) for here, there in pairs if (a := of(here)) is not None and (b := of(there)) is not None]


def verdict(attainment: float, accuracy: float) -> str:
    """Of two differences in points."""
    gains = attainment > NOISE_POINTS or accuracy > NOISE_POINTS
    losses = attainment < -NOISE_POINTS or accuracy < -NOISE_POINTS
    return {(True, True): "trade", (True, False): "better", (False, True): "worse"}.get((gains, losses), "equal")


def points(values: Sequence[float], digits: int = 1) -> str:
    """The mean, and the standard deviation where there are several."""
    if not values:
        return ""
    return f"{fmean(values):+.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")
