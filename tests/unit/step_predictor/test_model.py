"""Forecasts: features, the trees after their conversion, and what is certain whatever the trees say."""

from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import messages as m
from services.opening import PLAIN, Manner, Opening
from services.settings import ConfigError
from services.step_predictor.config import CARD_FILE, MODEL_FILE
from services.step_predictor.features import FEATURES, THRESHOLD, feature_rows
from services.step_predictor.model import BLOCKS, STEPS, StepModel, bounded, read_card
from tests.predictors import THRESHOLDS, make_boosters, make_card, write_predictor
from tests.unit.step_predictor.builders import make_state
from tools.predictor.export import convert
from tools.predictor.train import write_card


@pytest.fixture(scope="module")
def model() -> StepModel:
    return StepModel(convert(make_boosters()), make_card())


def profile_at(
    folder: Path,
    model: str = "test-model",
    block_size: int = 16,
    thresholds: tuple[float, ...] = THRESHOLDS,
    manner: Manner = PLAIN,
) -> SimpleNamespace:
    decoding = SimpleNamespace(block_size=block_size, thresholds=thresholds, manner=manner)
    return SimpleNamespace(folder=str(folder), model=model, decoding=decoding, weights_folder=folder / "model")


def test_a_row_says_what_the_report_says() -> None:
    state = make_state(ends_in_block=True)
    rows_XF = feature_rows([state, make_state(steps=0, tokens_committed=0)], [0.5, 0.9], block_size=16)
    assert rows_XF.shape == (4, len(FEATURES))
    assert rows_XF.dtype == np.float32
    named = dict(zip(FEATURES, rows_XF[1].tolist(), strict=True))
    assert named == pytest.approx(
        {
            "steps / O": 6 / 64,
            "tokens committed / O": 20 / 64,
            "block / blocks": 1 / 4,
            "tokens committed in block / B": 4 / 16,
            "steps in block / B": 2 / 16,
            "tokens left in block / B": 12 / 16,
            "block holds an EOS": 1.0,
            "O": 64.0,
            "prompt tokens": 32.0,
            "threshold so far": 0.9,
            "confidence min": 0.5,
            "confidence q25": 0.6,
            "confidence median": 0.7,
            "confidence q75": 0.8,
            "confidence max": 0.9,
            "threshold": 0.9,
        }
    )
    assert rows_XF[:, THRESHOLD].tolist() == pytest.approx([0.5, 0.9, 0.5, 0.9])
    assert rows_XF[2, FEATURES.index("threshold so far")] == 0.0, "nothing was applied before the first step"


def test_the_converted_trees_say_what_lightgbm_says(model: StepModel) -> None:
    rows_XF = np.random.default_rng(5).random((300, len(FEATURES)), dtype=np.float32)
    boosters = make_boosters()
    for name, share_X in zip((STEPS, BLOCKS), model.shares(rows_XF), strict=True):
        np.testing.assert_allclose(share_X, boosters[name].predict(rows_XF), rtol=1e-4)


def test_a_forecast_has_a_number_for_each_threshold(model: StepModel) -> None:
    states = [make_state("a"), make_state("b", tokens_committed=40, block_index=2, attempt=2, steps=9)]
    first, second = model.forecast(states, THRESHOLDS, level=1)
    assert (first.request_id, first.attempt, first.steps) == ("a", 1, 6)
    assert (second.request_id, second.attempt, second.steps) == ("b", 2, 9)
    # the rule that the trees have learnt: 44 of 64 tokens are masked, times the threshold
    assert first.steps_left == pytest.approx((44 * 0.5, 44 * 0.9), rel=0.15)
    assert second.steps_left == pytest.approx((24 * 0.5, 24 * 0.9), rel=0.15)
    assert first.blocks_left == (2.0, 2.0), "2.75 of them by the trees, but only two are still to begin"
    assert first.steps_left_upper == pytest.approx([1.5 * steps for steps in first.steps_left])


def test_requests_are_forecast_alike_alone_and_together(model: StepModel) -> None:
    states = [make_state(str(number), tokens_committed=number, steps=number // 2) for number in range(1, 60)]
    together = model.forecast(states, THRESHOLDS, level=0)
    assert together == [model.forecast([state], THRESHOLDS, level=0)[0] for state in states]
    assert model.forecast([], THRESHOLDS, level=0) == []


def test_the_upper_bound_goes_by_predicted_steps_and_by_whether_the_end_is_in_sight(model: StepModel) -> None:
    states = [make_state(), make_state(ends_in_block=True)]
    steps_NT = np.array([[4.0, 8.0], [4.0, 8.0]], dtype=np.float32)
    np.testing.assert_allclose(model.upper(states, steps_NT, 0), [[7.0, 10.0], [4.4, 8.8]])
    np.testing.assert_allclose(model.upper(states, steps_NT, 1), [[8.0, 12.0], [5.0, 10.0]])


def bounds_of(state: m.RequestReport, steps: float, blocks: float) -> tuple[float, float]:
    """What becomes of these shares."""
    steps_NT, blocks_NT = bounded([state], np.array([[steps]], np.float32), np.array([[blocks]], np.float32), 16)
    return float(steps_NT[0, 0]), float(blocks_NT[0, 0])


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({}, (1, 0), (12 + 32, 2)),  # in the second of four blocks, 12 tokens of it left
        ({"ends_in_block": True, "tokens_left_in_block": 3}, (1, 0), (3, 0)),
        ({"steps_in_block": 0, "tokens_committed_in_block": 0, "tokens_left_in_block": 16}, (1, 1), (48, 3)),
        ({"block_index": 3, "tokens_left_in_block": 2}, (1, 0), (2, 0)),
    ],
)
def test_no_forecast_is_less_or_more_than_can_be(
    changes: dict[str, int], least: tuple[float, float], most: tuple[float, float]
) -> None:
    assert bounds_of(make_state(**changes), 0.0, 0.0) == least
    assert bounds_of(make_state(**changes), 9.0, 9.0) == most


@given(st.integers(1, 8), st.data(), st.floats(0, 2, width=32), st.floats(0, 2, width=32), st.booleans(), st.booleans())
def test_blocks_and_steps_agree(
    num_blocks: int, data: st.DataObject, steps: float, blocks: float, begun: bool, ends: bool
) -> None:
    state = make_state(
        num_blocks=num_blocks,
        block_index=data.draw(st.integers(0, num_blocks - 1)),
        steps_in_block=int(begun),
        tokens_left_in_block=data.draw(st.integers(1, 16)),
        ends_in_block=begun and ends,
    )
    steps_left, blocks_left = bounds_of(state, steps, blocks)
    assert steps_left >= max(1, blocks_left + begun) - 1e-6  # float32
    assert blocks_left <= num_blocks - state.block_index - begun
    assert steps_left <= state.tokens_left_in_block + 16 * (num_blocks - state.block_index)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_profile_without_a_predictor_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no step predictor at .*json: train one, `python -m tools.predictor train`"):
        StepModel.of(profile_at(tmp_path))  # type: ignore[arg-type]
    write_predictor(tmp_path)
    StepModel.of(profile_at(tmp_path))  # type: ignore[arg-type]
    (tmp_path / MODEL_FILE).unlink()
    with pytest.raises(ConfigError, match=r"no step predictor at .*onnx"):
        StepModel.of(profile_at(tmp_path))  # type: ignore[arg-type]


def test_another_version_of_the_features_is_refused_by_their_names(tmp_path: Path) -> None:
    write_predictor(tmp_path, features=[*FEATURES[:-1], "mood"])
    with pytest.raises(ConfigError, match=r"lacks \['threshold'\], has besides \['mood'\]"):
        StepModel.of(profile_at(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "block_size"), [("other", 16), ("test-model", 32)])
def test_a_predictor_of_another_model_is_refused(tmp_path: Path, model: str, block_size: int) -> None:
    write_card(tmp_path / CARD_FILE, make_card())
    with pytest.raises(ConfigError, match=f"test-model with blocks of 16, the profile serves {model}"):
        StepModel.of(profile_at(tmp_path, model, block_size))  # type: ignore[arg-type]


def test_a_predictor_for_another_manner_is_refused(tmp_path: Path) -> None:
    third = Manner(opening=Opening(share=0.3, threshold=0.9), blocks_ahead=1)
    write_predictor(tmp_path, manner=third)
    with pytest.raises(
        ConfigError, match=r"with an opening of 0\.3 at 0\.9 and 1 blocks ahead in sight, the profile serves with no op"
    ):
        StepModel.of(profile_at(tmp_path))  # type: ignore[arg-type]
    StepModel.of(profile_at(tmp_path, manner=third))  # type: ignore[arg-type]


def test_a_predictor_for_other_weights_is_refused_by_both_hashes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile: Any = profile_at(tmp_path)
    profile.weights_folder.mkdir()
    write_predictor(tmp_path, weights="d0d0caca00000000")
    StepModel.of(profile)
    assert f"no weights in {profile.weights_folder}: not checked" in caplog.text
    (profile.weights_folder / "model.safetensors").write_bytes(b"weights")
    theirs = blake2b(b"weights", digest_size=8).hexdigest()
    with pytest.raises(ConfigError, match=f"for the weights d0d0caca00000000, those in .*model are {theirs}"):
        StepModel.of(profile)
    write_predictor(tmp_path, weights=theirs)
    StepModel.of(profile)


def test_a_predictor_that_has_not_seen_a_threshold_of_the_profile_is_refused(tmp_path: Path) -> None:
    write_predictor(tmp_path)
    with pytest.raises(ConfigError, match=r"at the thresholds \[0\.5, 0\.9\], the profile also has \[0\.7\]"):
        StepModel.of(profile_at(tmp_path, thresholds=(0.5, 0.7, 0.9)))  # type: ignore[arg-type]
    StepModel.of(profile_at(tmp_path, thresholds=(0.9,)))  # type: ignore[arg-type]


def test_a_card_that_cannot_be_read_is_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / CARD_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"step_predictor\.json cannot be read: Is a directory"):
        StepModel.of(profile_at(tmp_path))  # type: ignore[arg-type]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_card(tmp_path / CARD_FILE, make_card())
    (tmp_path / MODEL_FILE).write_bytes(b"no model")
    with pytest.raises(ConfigError, match="cannot be used"):
        StepModel.of(profile_at(tmp_path))  # type: ignore[arg-type]
    text = (tmp_path / CARD_FILE).read_text()
    (tmp_path / CARD_FILE).write_text(text.replace("8.0", "8.0, 9.0", 1))
    with pytest.raises(ConfigError, match="another version or damaged"):
        read_card(tmp_path / CARD_FILE)


def test_a_level_that_was_not_measured_is_refused() -> None:
    upper = make_card().upper
    assert [upper.level_for(wanted) for wanted in (0.5, 0.8, 0.85, 0.9)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match=r"upper_level 0.95 is above the highest that the predictor knows, 0.9"):
        upper.level_for(0.95)
