"""Puts trained trees into a profile: one ONNX file with both ensembles, and their card."""

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import onnx
from onnx import compose
from onnxmltools.convert import convert_lightgbm
from onnxmltools.convert.common.data_types import FloatTensorType

from services.settings import ConfigError
from services.step_predictor.config import CARD_FILE, MODEL_FILE
from services.step_predictor.features import FEATURES
from services.step_predictor.model import BLOCKS, INPUT, STEPS, StepModel, read_card
from tools.predictor.train import write_card

_TOLERANCE = 1e-3  # of a share, relative: LightGBM adds in float64, onnxruntime in float32


def export(trained: Path, profile: Path) -> Path:
    """Writes both files into the profile's folder, and returns the path of the model.

    Raises ConfigError if there are no trees, and RuntimeError if the converted ones say something else.
    """
    card = read_card(trained / CARD_FILE)
    boosters = {name: load_booster(trained / f"{name}.txt") for name in (STEPS, BLOCKS)}
    content = convert(boosters)
    _compare(StepModel(content, card), boosters)
    path = profile / MODEL_FILE
    path.write_bytes(content)
    write_card(profile / CARD_FILE, card)
    return path


def load_booster(path: Path) -> lightgbm.Booster:
    """Raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"no trained trees at {path}: `python -m tools.predictor train` first")
    return lightgbm.Booster(model_file=path)


def convert(boosters: dict[str, lightgbm.Booster]) -> bytes:
    """The ONNX model that has one input and the prediction of each booster as an output of its name."""
    parts = [_part(name, booster) for name, booster in boosters.items()]
    graph = onnx.helper.make_graph(
        [node for part in parts for node in part.graph.node],
        "step_predictor",
        [onnx.helper.make_tensor_value_info(INPUT, onnx.TensorProto.FLOAT, [None, len(FEATURES)])],
        [part.graph.output[0] for part in parts],
        [tensor for part in parts for tensor in part.graph.initializer],
    )
    opsets = {entry.domain: entry.version for part in parts for entry in part.opset_import}
    model = onnx.helper.make_model(
        graph,
        opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in sorted(opsets.items())],
        ir_version=max(part.ir_version for part in parts),
    )
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _part(name: str, booster: lightgbm.Booster) -> Any:
    """The booster alone, its inner names told apart by a prefix."""
    model = convert_lightgbm(booster, initial_types=[(INPUT, FloatTensorType([None, len(FEATURES)]))], zipmap=False)
    model = compose.add_prefix(model, f"{name}_", rename_inputs=False, rename_outputs=False)
    (output,) = model.graph.output
    for node in model.graph.node:
        node.output[:] = [name if known == output.name else known for known in node.output]
    output.name = name
    return model


def _compare(model: StepModel, boosters: dict[str, lightgbm.Booster]) -> None:
    """On rows over the range of all features."""
    rows_XF = np.random.default_rng(0).random((2000, len(FEATURES)), dtype=np.float32)
    rows_XF[:, FEATURES.index("O")] *= 256
    rows_XF[:, FEATURES.index("prompt tokens")] *= 512
    for name, found_X in zip((STEPS, BLOCKS), model.shares(rows_XF), strict=True):
        wanted_X = np.asarray(boosters[name].predict(rows_XF))
        worst = float(np.max(np.abs(found_X - wanted_X) / np.maximum(wanted_X, 1e-6)))
        if worst > _TOLERANCE:
            raise RuntimeError(f"the converted trees differ from LightGBM's by up to {worst:.1%} in {name}")
