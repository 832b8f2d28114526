"""From measured passes to what passes cost: a fit in which no time is negative, and how far it is off.

1. What is fitted is `PassCost`: a curve over the rows of a pass, and a time for each step, key and pair. Points of the
   curve are measured row counts, each at least twice the one before: few enough that noise does not bend it.
2. The sum of squared *relative* errors is least: a millisecond matters in a short pass.
3. What a fit is worth is how well it tells passes that it has not seen: each is left out in turn. All mixed passes are
   left out together, since what decides about them is whether costs add up.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from services.costs import FitError, MeasuredPass, PassCost, PassKind

FloatArray: TypeAlias = NDArray[np.float64]

_KINDS: tuple[PassKind, ...] = ("recompute", "cache", "mixed")


def fit(passes: Sequence[MeasuredPass]) -> PassCost:
    """The cost that is nearest to what was measured. Raises ValueError without a pass."""
    if not passes:
        raise ValueError("there is nothing to fit a cost to")
    knots = _knots([measured.load.tokens for measured in passes])
    ms = np.array([measured.ms for measured in passes])
    times = nonnegative_least_squares(_columns(passes, knots) / ms[:, None], np.ones(len(passes)))
    base_ms, slopes, terms = times[0], times[1 : len(knots)], times[len(knots) :]
    curve_ms = base_ms + np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
    recompute_step_ms, cache_step_ms, key_ms, pair_ms = (_rounded(term) for term in terms)
    return PassCost(
        curve=tuple((tokens, _rounded(at)) for tokens, at in zip(knots, curve_ms, strict=True)),
        recompute_step_ms=recompute_step_ms,
        cache_step_ms=cache_step_ms,
        key_ms=key_ms,
        pair_ms=pair_ms,
    )


def errors_of(cost: PassCost, passes: Sequence[MeasuredPass]) -> list[FitError]:
    """How far the cost fitted to these passes is off, for each kind of pass that is among them (rule 3)."""
    found = []
    unmixed = [measured for measured in passes if measured.load.kind != "mixed"]
    for kind in _KINDS:
        ours = [measured for measured in passes if measured.load.kind == kind]
        if not ours:
            continue
        seen = [relative_error(cost, measured) for measured in ours]
        if kind == "mixed" and unmixed:
            blind = fit(unmixed)
            unseen = [relative_error(blind, measured) for measured in ours]
        else:
            unseen = [relative_error(_fit_without(measured, passes), measured) for measured in ours]
        found.append(
            FitError(
                kind=kind,
                passes=len(ours),
                median=_quantile(seen, 0.5),
                p95=_quantile(seen, 0.95),
                unseen_median=_quantile(unseen, 0.5),
                unseen_p95=_quantile(unseen, 0.95),
            )
        )
    return found


def relative_error(cost: PassCost, measured: MeasuredPass) -> float:
    """Of the fitted time; positive where it is too long."""
    return cost.ms(measured.load) / measured.ms - 1.0


def _fit_without(left_out: MeasuredPass, passes: Sequence[MeasuredPass]) -> PassCost:
    return fit([measured for measured in passes if measured is not left_out] or passes)


def _knots(tokens: Sequence[float]) -> list[float]:
    """The smallest, then each time the next that is at least twice as large, and the largest."""
    knots: list[float] = []
    for count in sorted(set(tokens)):
        if not knots or count >= 2 * knots[-1]:
            knots.append(count)
    if len(knots) > 1:
        knots[-1] = max(tokens)
    return knots


def _columns(passes: Sequence[MeasuredPass], knots: Sequence[float]) -> FloatArray:
    """By pass: 1; rows in each segment of the curve, the last one without end; steps, keys, pairs."""
    load = np.array([measured.load for measured in passes])
    tokens = load[:, 0]
    ends = [*knots[1:-1], np.inf]
    segments = [np.clip(tokens - start, 0.0, end - start) for start, end in zip(knots[:-1], ends, strict=False)]
    return np.column_stack([np.ones(len(passes)), *segments, load[:, 1:]])


def nonnegative_least_squares(columns: FloatArray, wanted: FloatArray) -> FloatArray:
    """x >= 0 for which |columns @ x - wanted| is least (the active-set method of Lawson and Hanson, 1974)."""
    lengths = np.linalg.norm(columns, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    scaled = columns / scale
    x = np.zeros(columns.shape[1])
    free = np.zeros(columns.shape[1], dtype=bool)  # the others are held at 0
    for _ in range(3 * len(x)):  # it ends long before; rounding alone could make it go round in circles
        pull = np.where(free, -np.inf, scaled.T @ (wanted - scaled @ x))
        if pull.max() <= 1e-10 * np.linalg.norm(wanted):
            break
        free[pull.argmax()] = True
        while True:
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(scaled[:, free], wanted, rcond=None)[0]
            sunk = free & (best <= 0)
            if not sunk.any():
                break
            # As far towards the best as nothing falls below 0; what arrives there is held.
            x += (x[sunk] / np.maximum(x[sunk] - best[sunk], 1e-300)).min() * (best - x)
            free &= x > 1e-12
        x = best
    return x / scale


def _quantile(errors: Sequence[float], share: float) -> float:
    return round(float(np.quantile(np.abs(errors), share)), 4)


def _rounded(ms: float) -> float:
    return float(f"{ms:.6g}")
