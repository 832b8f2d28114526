"""What the rows were to show, and whether they do: the lines under the tables. Every verdict is computed from rows.

1. A difference has the published size where it is at most `SIZE_POINTS` smaller than the published one.
2. A difference below `NOISE_POINTS` is none.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from tools.experiments.cells import Cell
from tools.experiments.compare import NOISE_POINTS, Paired, paired
from tools.experiments.published import Figures
from tools.experiments.setups import SETUPS

SIZE_POINTS = 10.0
_BASELINES = ("llumnix", "infaas", "proteus")
_SLO_CLAIMS = {"infaas": 33.9, "llumnix": 42.3}  # "up to", at three times the time alone and more
_MOST_LOST = 1.0  # points of accuracy that the paper says its gains cost at most, by length
_LENGTH_CLAIMS = (("input", ("2-shot", "8-shot"), 81.0), ("output", ("out-64", "out-256", "out-1024"), 82.3))
_MOVES = (("tedi", "no-migration"), ("llumnix", "infaas"))
_LESS_MEAN, _LESS_P99 = 0.02, 0.07  # the least that was published


class Finding(NamedTuple):
    """A goal and what came of it."""

    goal: str
    here: str
    met: bool

    @property
    def line(self) -> str:
        return f"Goal: {self.goal}. Here: {self.here}. **{'Met' if self.met else 'Not met'}.**"


def lines(findings: Iterable[Finding]) -> str:
    """A paragraph; "" without any."""
    return "".join(f"- {finding.line}\n" for finding in findings)


# --- under a table ------------------------------------------------------------------------------------------------


def of_table(experiment: str, cells: Sequence[Cell], figures: Figures) -> Iterator[Finding]:
    """`cells`: of one setup."""
    match experiment:
        case "rates":
            yield from _at_least("in time no less often than the baselines, at any rate", cells, "tedi", _BASELINES)
        case "slos":
            yield from _slo_claims(cells)
        case "ablations":
            parts = ("no-load-control", "no-deadline-control", "no-migration", "no-caching")
            yield from _at_least("no part is better left out", cells, "tedi", parts)
        case "forecasts":
            yield from _forecasts(cells)
        case "migration":
            yield from _moves(cells)
    yield from _near_published(experiment, cells, figures)


def _at_least(goal: str, cells: Sequence[Cell], system: str, others: Sequence[str]) -> Iterator[Finding]:
    """In time."""
    found = [(fmean(pair.attainment), other, pair) for other in others for pair in paired(cells, system, other)]
    if found:
        least, other, pair = min(found, key=lambda one: one[0])
        met = sum(points >= -NOISE_POINTS for points, _, _ in found)
        here = f"in {met} of {len(found)} comparisons; least {least:+.1f} points, to `{other}` at {_where(pair)}"
        yield Finding(f"`{system}`: {goal}", here, met == len(found))


def _slo_claims(cells: Sequence[Cell]) -> Iterator[Finding]:
    for base, claimed in _SLO_CLAIMS.items():
        if pairs := [pair for pair in paired(cells, "tedi", base) if pair.slo_factor >= 3]:
            best = max(pairs, key=lambda pair: fmean(pair.attainment))
            gained = fmean(best.attainment)
            goal = f"up to {claimed:+.1f} points over `{base}` at SLO x 3 and more"
            yield Finding(goal, f"{gained:+.1f} at {_where(best)}", gained >= claimed - SIZE_POINTS)


def _forecasts(cells: Sequence[Cell]) -> Iterator[Finding]:
    """In time, of two neighbours in quality each."""
    kinds = [
        system
        for kind in ("oracle", "blurred", "trees", "first")
        for system in [f"no-load-control:{kind}"]
        if any(cell.system == system for cell in cells)
    ]
    found = []
    for better, worse in pairwise(kinds):
        found += [(fmean(pair.attainment), better, worse) for pair in paired(cells, better, worse)]
    if found:
        told = ", ".join(f"`{a.split(':')[1]}` over `{b.split(':')[1]}` {points:+.1f}" for points, a, b in found)
        goal = "better forecasts, no fewer in time"
        yield Finding(goal, f"{told} points", all(points >= -NOISE_POINTS for points, _, _ in found))


def _moves(cells: Sequence[Cell]) -> Iterator[Finding]:
    for moving, staying in _MOVES:
        means, tails = (
            [_mean(getattr(cell, name) for cell in cells if cell.system == system) for system in (moving, staying)]
            for name in ("latency_mean_s", "latency_p99_s")
        )
        if None in (*means, *tails):
            continue
        mean, tail = (1 - one[0] / one[1] for one in (means, tails))  # type: ignore[operator]
        goal = (
            f"`{moving}` takes at least {_LESS_MEAN:.0%} less than `{staying}` in the mean, and {_LESS_P99:.0%} at the "
            "99th percentile"
        )
        yield Finding(goal, f"{mean:.1%} and {tail:.1%}", mean >= _LESS_MEAN and tail >= _LESS_P99)


def _near_published(experiment: str, cells: Sequence[Cell], figures: Figures) -> Iterator[Finding]:
    off: dict[tuple[str, float, float], list[float]] = {}
    for cell in cells:
        theirs = figures.find(experiment, cell.setup, cell.system, cell.rate, cell.slo_factor)
        if theirs is not None and cell.attainment is not None:
            key = cell.system, cell.rate, cell.slo_factor
            off.setdefault(key, []).append(100 * (cell.attainment - theirs.attainment))
    if off:
        (system, rate, _), furthest = max(off.items(), key=lambda one: abs(fmean(one[1])))
        near = sum(abs(fmean(points)) <= SIZE_POINTS for points in off.values())
        here = f"{near} of {len(off)} rows; furthest `{system}` at {rate:g}, {fmean(furthest):+.1f} points"
        yield Finding(f"in time as published, within {SIZE_POINTS:g} points", here, near == len(off))


# --- under several tables -----------------------------------------------------------------------------------------


def of_experiment(experiment: str, cells: Sequence[Cell]) -> Iterator[Finding]:
    """What no table shows alone."""
    if experiment != "lengths":
        return
    for kind, setups, claimed in _LENGTH_CLAIMS:
        pairs = [pair for pair in paired(cells, "tedi", "infaas") if pair.setup in setups and pair.accuracy]
        if pairs:
            best = max(pairs, key=lambda pair: fmean(pair.attainment))
            gained, lost = fmean(best.attainment), -min(fmean(pair.accuracy) for pair in pairs)
            goal = (
                f"by {kind} length up to {claimed:+.1f} points over `infaas`, for at most {_MOST_LOST:.1f} of accuracy"
            )
            met = gained >= claimed - SIZE_POINTS and lost <= _MOST_LOST
            yield Finding(goal, f"{gained:+.1f} ({SETUPS[best.setup].title}), for at most {lost:.1f}", met)


def _where(pair: Paired) -> str:
    return f"rate {pair.rate:g}, SLO x {pair.slo_factor:.3g}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
