"""Fits the trees, and the upper bounds on what the trees had not seen.

Steps left are positive and their spread grows with them, so the trees fit their logarithm's mean under a gamma
likelihood; blocks left may be none: Poisson. Both are shares (of the output length, of the blocks). More steps are left
at a higher threshold: a constraint on the trees, though single requests may break it.
"""

# ruff: noqa: N815 -- array names end in their shape

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import lightgbm
import msgspec
import numpy as np
import numpy.typing as npt

from services.settings import ConfigError
from services.step_predictor.config import CARD_FILE
from services.step_predictor.features import FEATURES, PAPER, PROGRESS, THRESHOLD, Floats, feature_rows
from services.step_predictor.model import Card, Factors, FirstForecast, Upper, bounded
from tools.predictor.rows import Row, training_rows
from tools.traces.reader import Traces

LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
_FOLDS = 4
_BUCKETS = 8
_FEWEST_PROMPTS = 20  # below, no upper bound means anything
_COMMON: dict[str, Any] = {"verbose": -1, "deterministic": True, "force_row_wise": True, "seed": 1}
_STEPS = _COMMON | {"objective": "gamma", "num_leaves": 31, "learning_rate": 0.1, "min_data_in_leaf": 20}
_BLOCKS = _COMMON | {"objective": "poisson", "num_leaves": 15, "learning_rate": 0.1, "min_data_in_leaf": 50}
STEPS_TREES, BLOCKS_TREES = 100, 50
VARIANTS = {"progress": PROGRESS, "paper": PAPER}  # what it is compared with, trained on the same rows


class Data(NamedTuple):
    """X rows, F features."""

    rows: list[Row]
    features_XF: Floats
    steps_share_X: npt.NDArray[np.float64]
    blocks_share_X: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rows: list[Row], block_size: int) -> "Data":
        features_XF = feature_rows([row.request for row in rows], [0.0], block_size)
        features_XF[:, THRESHOLD] = [row.threshold for row in rows]
        num_blocks_X = np.array([row.request.num_blocks for row in rows])
        steps_X = np.array([row.steps_left for row in rows]) / (num_blocks_X * block_size)
        return cls(rows, features_XF, steps_X, np.array([row.blocks_left for row in rows]) / num_blocks_X)

    def where(self, chosen_X: npt.NDArray[np.bool_]) -> "Data":
        """The chosen rows."""
        rows = [self.rows[index] for index in np.flatnonzero(chosen_X)]
        return Data(rows, self.features_XF[chosen_X], self.steps_share_X[chosen_X], self.blocks_share_X[chosen_X])


def train(traces: Traces, out: Path, num_threads: int = 1) -> Card:
    """Writes the trees as LightGBM's text, and their card, into the folder. Raises ConfigError."""
    recording = traces.recording
    rows = training_rows(traces)
    prompts = {row.prompt for row in rows}
    if len(prompts) < _FEWEST_PROMPTS:
        raise ConfigError(f"{traces.folder} holds {len(prompts)} prompts: at least {_FEWEST_PROMPTS} are needed")
    data = Data.of(rows, recording.block_size)
    threads = {"num_threads": num_threads}
    out.mkdir(parents=True, exist_ok=True)
    fit_steps(data, FEATURES, threads).save_model(out / "steps.txt")
    fit_blocks(data, threads).save_model(out / "blocks.txt")
    for name, features in VARIANTS.items():
        fit_steps(data, features, threads).save_model(out / f"{name}.txt")
    card = Card(
        features=list(FEATURES),
        model=recording.model,
        weights=recording.weights,
        block_size=recording.block_size,
        manner=recording.manner,
        thresholds=recording.thresholds,
        trained_on={"source": recording.source, "prompts": len(prompts), "rows": len(rows)},
        first=first_forecasts(rows, recording.thresholds),
        upper=_upper(data, recording.block_size, threads),
    )
    write_card(out / CARD_FILE, card)
    return card


def write_card(path: Path, card: Card) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")


def fit_steps(data: Data, features: Sequence[str], more: dict[str, Any]) -> lightgbm.Booster:
    """The trees for the share of steps left, from these features alone."""
    columns = [FEATURES.index(name) for name in features]
    constraints = [int(column == THRESHOLD) for column in columns]
    dataset = lightgbm.Dataset(data.features_XF[:, columns], data.steps_share_X)
    return lightgbm.train(_STEPS | more | {"monotone_constraints": constraints}, dataset, STEPS_TREES)


def fit_blocks(data: Data, more: dict[str, Any]) -> lightgbm.Booster:
    """The trees for the share of blocks left."""
    return lightgbm.train(_BLOCKS | more, lightgbm.Dataset(data.features_XF, data.blocks_share_X), BLOCKS_TREES)


def first_forecasts(rows: Sequence[Row], thresholds: Sequence[float]) -> list[FirstForecast]:
    """What requests of the recorded output length took in all."""
    first = [row for row in rows if row.kind == "fixed" and row.request.steps == 0]
    found = []
    for threshold in thresholds:
        here = [row for row in first if row.threshold == threshold]
        steps, blocks = fmean(row.steps_left for row in here), fmean(row.blocks_left for row in here)
        found.append(FirstForecast(threshold, round(steps, 3), round(blocks, 3)))
    return found


def _upper(data: Data, block_size: int, more: dict[str, Any]) -> Upper:
    """Factors from predictions for prompts that the trees, of another fold, had not seen."""
    fold_X = np.array([row.prompt % _FOLDS for row in data.rows])
    whole_X = np.array([row.kind != "short" for row in data.rows])
    predicted, true, in_sight = [], [], []
    for fold in range(_FOLDS):
        seen, unseen = data.where(fold_X != fold), data.where((fold_X == fold) & whole_X)
        steps_X = fit_steps(seen, FEATURES, more).predict(unseen.features_XF)
        blocks_X = fit_blocks(seen, more).predict(unseen.features_XF)
        requests = [row.request for row in unseen.rows]
        steps_N1, _ = bounded(requests, np.reshape(steps_X, (-1, 1)), np.reshape(blocks_X, (-1, 1)), block_size)
        predicted.append(steps_N1[:, 0])
        true += [row.steps_left for row in unseen.rows]
        in_sight += [request.ends_in_block for request in requests]
    predicted_X, true_X, in_sight_X = np.concatenate(predicted), np.array(true), np.array(in_sight)
    open_end, end_in_sight = (_factors(predicted_X[m], true_X[m]) for m in (~in_sight_X, in_sight_X))
    return Upper(levels=list(LEVELS), open_end=open_end, end_in_sight=end_in_sight)


def _factors(predicted_X: npt.NDArray[Any], true_X: npt.NDArray[Any]) -> Factors:
    """By buckets with as many predictions in each."""
    if not len(predicted_X):
        return Factors(edges=[], factors=[[1.0] for _ in LEVELS])
    inner = np.quantile(predicted_X, np.arange(1, _BUCKETS) / _BUCKETS)
    edges = np.unique(np.round(inner, 1))
    bucket_X = np.searchsorted(edges, predicted_X, side="right")
    ratio_X = true_X / predicted_X
    ratios = [np.sort(ratio_X[bucket_X == bucket]) for bucket in range(len(edges) + 1)]
    factors = [[_conformal(ratio_B, level) for ratio_B in ratios] for level in LEVELS]
    return Factors(edges=edges.tolist(), factors=factors)


def _conformal(ratio_B: npt.NDArray[Any], level: float) -> float:
    """The quantile that a further one stays below with that probability; at least the mean itself."""
    if not len(ratio_B):
        return 1.0
    rank = int(np.ceil((len(ratio_B) + 1) * level))
    return round(max(1.0, float(ratio_B[min(rank, len(ratio_B)) - 1])), 3)
