"""A step predictor that tests can foresee: trees that have learnt a rule of two lines."""

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

from services.digest import weights_digest
from services.profile import load_profile
from services.step_predictor.config import CARD_FILE, MODEL_FILE
from services.step_predictor.features import FEATURES
from services.step_predictor.model import BLOCKS, STEPS, Card, Factors, FirstForecast, Upper
from tools.predictor.export import convert
from tools.predictor.train import write_card

THRESHOLDS = (0.5, 0.9)


def make_card(**changes: Any) -> Card:
    """Bounds twice the mean below 8 steps, 1.5 times from there on; 1.25 times where the end is in sight."""
    values: dict[str, Any] = {
        "features": list(FEATURES),
        "model": "test-model",
        "weights": "0123456789abcdef",
        "block_size": 16,
        "thresholds": list(THRESHOLDS),
        "trained_on": {"prompts": 1},
        "first": [FirstForecast(0.5, 10.0, 4.0), FirstForecast(0.9, 20.0, 4.0)],
        "upper": Upper(
            levels=[0.8, 0.9],
            open_end=Factors(edges=[8.0], factors=[[1.75, 1.25], [2.0, 1.5]]),
            end_in_sight=Factors(edges=[], factors=[[1.1], [1.25]]),
        ),
        "refresh_tokens": 4,
    }
    return Card(**(values | changes))


def make_boosters(rounds: int = 60) -> dict[str, lightgbm.Booster]:
    """Steps left: as a share of O, what is still masked, times the threshold from now on. Blocks: what is masked."""
    rows_XF = np.random.default_rng(0).random((4000, len(FEATURES)), dtype=np.float32)
    masked_X = 1 - rows_XF[:, FEATURES.index("tokens committed / O")]
    targets = {STEPS: masked_X * rows_XF[:, FEATURES.index("threshold")] + 1e-3, BLOCKS: masked_X}
    objectives = {STEPS: "gamma", BLOCKS: "poisson"}
    common = {"verbose": -1, "num_threads": 1, "deterministic": True, "force_row_wise": True}
    return {
        name: lightgbm.train(common | {"objective": objectives[name]}, lightgbm.Dataset(rows_XF, target_X), rounds)
        for name, target_X in targets.items()
    }


def write_predictor(profile: Path, **changes: Any) -> Card:
    """Puts it into the folder of a profile, and makes it fit that one's weights and thresholds."""
    fitting: dict[str, Any] = {}
    if (profile / "profile.toml").exists():
        served = load_profile(profile)
        fitting["thresholds"] = list(served.decoding.thresholds)
        fitting["weights"] = weights_digest(served.weights_folder)
    card = make_card(**(fitting | changes))
    (profile / MODEL_FILE).write_bytes(convert(make_boosters()))
    write_card(profile / CARD_FILE, card)
    return card
