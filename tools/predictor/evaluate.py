"""How good a profile's predictor is on prompts that it has not seen: tables and plots.

Errors are those of the mean forecast, as a share of what was really left: the sum of absolute errors over the sum of
steps left, in ten parts of a request's progress (steps run of all its steps); the mean over the parts is what variants
are compared by. Variants without the service's rules still say at least one step.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from services.step_predictor.features import FEATURES, PAPER, PROGRESS
from services.step_predictor.model import Card, StepModel
from tools.predictor.export import load_booster
from tools.predictor.rows import Row, fixed_rows, kept_rows
from tools.predictor.train import Data
from tools.traces.reader import Traces

Floats: TypeAlias = npt.NDArray[np.float64]

PARTS = 10  # of a request's progress
REFRESHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)
ALLOWED = 1.05  # error at g over the error at 1
_CHUNK = 2048  # rows predicted at once


class Refresh(NamedTuple):
    """What comes of renewing forecasts once so many more tokens are committed."""

    tokens: int
    error: float  # mean over progress
    forecasts: float  # a request
    cost_us: float  # microseconds of processor time a request, in batches of 256


class Evaluation(NamedTuple):
    """Everything that is printed, plotted and kept."""

    prompts: int
    states: int
    errors: dict[str, list[float]]  # by variant, in each part of progress
    kept_states: int
    kept_errors: dict[str, float]  # by variant, after a change of the threshold
    refreshes: list[Refresh]
    refresh_tokens: int
    coverage: dict[str, list[float]]  # by level: open end, end in sight, all
    blocks_error: float  # mean absolute, in blocks
    batch_ms: float  # processor time for 256 requests at 5 thresholds

    @property
    def means(self) -> dict[str, float]:
        """Error of each variant, averaged over progress."""
        return {name: float(np.mean(parts)) for name, parts in self.errors.items()}

    @property
    def gain(self) -> float:
        """How much lower the service's error is than the one-shot mean's."""
        return 1 - self.means["all"] / self.means["one-shot"]

    def kept(self) -> dict[str, Any]:
        """For the card."""
        return {
            "held-out prompts": self.prompts,
            "states": self.states,
            "error averaged over progress": {name: round(value, 4) for name, value in self.means.items()},
            "after a change of the threshold": {name: round(value, 4) for name, value in self.kept_errors.items()},
            "lower than one-shot by": round(self.gain, 4),
            "error by refresh tokens": {str(r.tokens): round(r.error, 4) for r in self.refreshes},
            "share below the upper bound": {level: round(shares[-1], 4) for level, shares in self.coverage.items()},
            "mean absolute error in blocks": round(self.blocks_error, 3),
        }


def evaluate(traces: Traces, model: StepModel, trained: Path) -> Evaluation:
    """`trained`: the folder with the trees that it is compared with. Raises ConfigError."""
    fixed, kept = fixed_rows(traces), kept_rows(traces)
    steps_X, blocks_X = _means(model, fixed)
    predicted = _variants(model.card, fixed, trained) | {"all": steps_X}
    predicted_kept = _variants(model.card, kept, trained) | {"all": _means(model, kept)[0]}
    batch_s = _batch_s(model, fixed)
    refreshes = [_refresh(fixed, steps_X, tokens, batch_s / 256) for tokens in REFRESHES]
    return Evaluation(
        prompts=len({row.prompt for row in fixed}),
        states=len(fixed),
        errors={name: errors_by_progress(fixed, values_X) for name, values_X in predicted.items()},
        kept_states=len(kept),
        kept_errors={name: float(np.mean(errors_by_progress(kept, v_X))) for name, v_X in predicted_kept.items()},
        refreshes=refreshes,
        refresh_tokens=chosen_refresh(refreshes),
        coverage=_coverage(model, fixed, steps_X),
        blocks_error=float(np.mean(np.abs(blocks_X - [row.blocks_left for row in fixed]))),
        batch_ms=1e3 * batch_s,
    )


def _means(model: StepModel, rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Steps and blocks left of each row, at its own threshold, as the service says them."""
    steps_X, blocks_X = np.empty((2, len(rows)))
    thresholds = sorted({row.threshold for row in rows})
    column_X = [thresholds.index(row.threshold) for row in rows]
    for start in range(0, len(rows), _CHUNK):
        part = slice(start, start + _CHUNK)
        requests = [row.request for row in rows[part]]
        steps_NT, blocks_NT = model.means(requests, thresholds)
        own = np.arange(len(requests)), column_X[part]
        steps_X[part], blocks_X[part] = steps_NT[own], blocks_NT[own]
    return steps_X, blocks_X


def _variants(card: Card, rows: Sequence[Row], trained: Path) -> dict[str, Floats]:
    first = {one.threshold: one.steps for one in card.first}
    one_shot_X = np.array([first[row.threshold] - row.request.steps for row in rows])
    data = Data.of(list(rows), card.block_size)
    output_X = np.array([row.request.num_blocks for row in rows]) * card.block_size
    found = {"one-shot": np.maximum(one_shot_X, 1.0)}
    for name, features in (("progress", PROGRESS), ("paper", PAPER)):
        columns = [FEATURES.index(feature) for feature in features]
        share_X = np.asarray(load_booster(trained / f"{name}.txt").predict(data.features_XF[:, columns]))
        found[name] = np.maximum(share_X * output_X, 1.0)
    return found


def errors_by_progress(rows: Sequence[Row], predicted_X: Floats) -> list[float]:
    """Sum of absolute errors over the sum of steps left, in each of PARTS parts of progress that has rows."""
    part_X = np.array([row.request.steps * PARTS // row.total_steps for row in rows])
    true_X = np.array([row.steps_left for row in rows])
    weight_X = np.array([row.weight for row in rows])
    error_X = np.abs(predicted_X - true_X)
    parts = [part_X == part for part in range(PARTS) if (part_X == part).any()]
    return [float((weight_X * error_X)[m].sum() / (weight_X * true_X)[m].sum()) for m in parts]


def renewed(rows: Sequence[Row], predicted_X: Floats, tokens: int) -> tuple[Floats, int]:
    """What readers have at each state of runs (rows in the order of steps), and how many forecasts were made.

    The state before the first step has no report, so the first forecast comes after it.
    """
    known_X = predicted_X.copy()
    made, last = 0, -1
    for index, row in enumerate(rows):
        if row.request.steps == 0:
            last = -1
        elif last < 0 or row.request.tokens_committed - rows[last].request.tokens_committed >= tokens:
            last, made = index, made + 1
        else:
            passed = row.request.steps - rows[last].request.steps
            known_X[index] = max(1.0, predicted_X[last] - passed)
    return known_X, made


def _refresh(rows: Sequence[Row], predicted_X: Floats, tokens: int, request_s: float) -> Refresh:
    known_X, made = renewed(rows, predicted_X, tokens)
    begun_X = np.array([row.request.steps > 0 for row in rows])
    begun = [row for row in rows if row.request.steps]
    runs = len(rows) - len(begun)
    error = float(np.mean(errors_by_progress(begun, known_X[begun_X])))
    return Refresh(tokens, error, made / runs, 1e6 * made / runs * request_s)


def chosen_refresh(refreshes: Sequence[Refresh]) -> int:
    """The largest whose error stays within ALLOWED of the smallest's."""
    return max(one.tokens for one in refreshes if one.error <= ALLOWED * refreshes[0].error)


def _coverage(model: StepModel, rows: Sequence[Row], steps_X: Floats) -> dict[str, list[float]]:
    requests = [row.request for row in rows]
    true_X = np.array([row.steps_left for row in rows])
    in_sight_X = np.array([request.ends_in_block for request in requests])
    found = {}
    for index, level in enumerate(model.card.upper.levels):
        upper_N1 = model.upper(requests, steps_X.astype(np.float32)[:, None], index)
        below_X = true_X <= upper_N1[:, 0]
        groups = (below_X[~in_sight_X], below_X[in_sight_X], below_X)
        found[f"{level:g}"] = [float(group.mean()) for group in groups if len(group)]
    return found


def _batch_s(model: StepModel, rows: Sequence[Row]) -> float:
    """Processor time of one batch of 256 requests at 5 thresholds: the median of 50."""
    requests = [rows[index % len(rows)].request for index in range(256)]
    return timed(lambda: model.forecast(requests, (0.5, 0.6, 0.7, 0.8, 0.9), 0), 50, time.process_time)[0]


def timed(
    work: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Median and 95th percentile of its duration, in seconds, after one that does not count."""
    work()
    seconds = []
    for _ in range(repeats):
        started = clock()
        work()
        seconds.append(clock() - started)
    p50, p95 = np.percentile(seconds, [50, 95])
    return float(p50), float(p95)


# --- as text ---

_TITLES = {
    "one-shot": "one-shot mean",
    "progress": "progress features",
    "paper": "and confidences (the paper's)",
    "all": "all features and rules",
}


def describe(e: Evaluation) -> str:
    """As Markdown."""
    shown = list(e.errors)
    lines = [
        f"{e.states} states of {e.prompts} held-out prompts, at each threshold. Relative error of the steps left:",
        "",
        "| progress | " + " | ".join(_TITLES[name] for name in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for part in range(len(e.errors["all"])):
        cells = " | ".join(f"{e.errors[name][part]:.1%}" for name in shown)
        lines.append(f"| {part * 100 // PARTS} to {(part + 1) * 100 // PARTS} % | {cells} |")
    lines += [
        "| **mean** | " + " | ".join(f"**{e.means[name]:.1%}**" for name in shown) + " |",
        f"| mean, the threshold has just changed ({e.kept_states} states) | "
        + " | ".join(f"{e.kept_errors[name]:.1%}" for name in shown)
        + " |",
        "",
        f"Against the one-shot mean the error is {e.gain:.0%} lower. Blocks left: mean absolute error "
        f"{e.blocks_error:.2f} blocks.",
        "",
        "| new forecast after | error | against each token | forecasts a request | microseconds a request |",
        "|---|---|---|---|---|",
    ]
    for r in e.refreshes:
        name = f"**{r.tokens} tokens**" if r.tokens == e.refresh_tokens else f"{r.tokens} tokens"
        more = r.error / e.refreshes[0].error - 1
        lines.append(f"| {name} | {r.error:.1%} | {more:+.1%} | {r.forecasts:.2f} | {r.cost_us:.0f} |")
    lines += [
        "",
        f"256 requests at 5 thresholds take {e.batch_ms:.2f} ms of processor time (median), on one core.",
        "",
        "| upper bound at | open end | end in sight | all |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {float(level):.0%} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"
        for level, shares in e.coverage.items()
    ]
    return "\n".join(lines)
