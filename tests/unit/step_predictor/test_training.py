"""From a recording to a profile's predictor, by the command line; and what `evaluate` counts."""

from pathlib import Path

import numpy as np
import pytest

from services.profile import load_profile
from services.step_predictor.config import CARD_FILE
from services.step_predictor.model import StepModel, read_card
from tests.unit.step_predictor.builders import make_state
from tools.predictor import __main__ as command_line
from tools.predictor.evaluate import Refresh, chosen_refresh, errors_by_progress, renewed
from tools.predictor.rows import Row
from tools.predictor.train import _conformal, _factors
from tools.traces.reader import Traces
from tools.traces.runs import RecordedRun


def make_rows(total: int, tokens_a_step: int = 2) -> list[Row]:
    """One run, before each of its steps."""
    return [
        Row("fixed", 0, make_state(steps=s, tokens_committed=tokens_a_step * s), 0.9, total - s, 1, total)
        for s in range(total)
    ]


def test_the_error_is_taken_in_ten_parts_of_progress() -> None:
    rows = make_rows(10)
    true_X = np.arange(10, 0, -1.0)
    assert errors_by_progress(rows, true_X) == [0.0] * 10
    assert errors_by_progress(rows, true_X + 1) == pytest.approx([1 / left for left in range(10, 0, -1)])
    twice = make_rows(2) + [row._replace(weight=3.0) for row in make_rows(2)]
    predicted_X = np.array([2.0, 1.0, 4.0, 1.0])  # the second run's start is off by 2 of 2, and weighs 3
    assert errors_by_progress(twice, predicted_X) == pytest.approx([3 * 2 / (2 + 3 * 2), 0.0])


def test_between_two_forecasts_the_last_one_counts_down() -> None:
    rows = make_rows(6)
    predicted_X = np.array([9.0, 5.0, 9.0, 4.5, 9.0, 0.5])
    # the first report comes after a step; then each 4 tokens, which are two steps
    known_X, made = renewed(rows, predicted_X, tokens=4)
    assert known_X.tolist() == [9.0, 5.0, 4.0, 4.5, 3.5, 0.5]
    assert made == 3
    known_X, made = renewed(rows + rows, np.concatenate([predicted_X, predicted_X]), tokens=100)
    assert known_X.tolist() == [9.0, 5.0, 4.0, 3.0, 2.0, 1.0] * 2
    assert made == 2, "each run has a first one of its own"


def test_the_largest_refresh_within_five_percent_is_chosen() -> None:
    errors = {1: 0.20, 4: 0.2099, 8: 0.208, 16: 0.2101}
    assert chosen_refresh([Refresh(tokens, error, 1.0, 1.0) for tokens, error in errors.items()]) == 8


def test_a_conformal_factor_holds_for_one_more() -> None:
    ratios = np.arange(1, 20) / 10  # 19 of them: the 90 % bound for a twentieth is the 18th
    assert _conformal(ratios, 0.9) == 1.8
    assert _conformal(ratios, 0.99) == 1.9, "more than all cannot be asked of 19"
    assert _conformal(ratios, 0.1) == 1.0, "never below the mean"


def test_factors_go_by_what_was_predicted() -> None:
    predicted_X = np.concatenate([np.full(500, 2.0), np.full(500, 10.0)])
    true_X = predicted_X * np.concatenate([np.full(500, 1.5), np.full(500, 1.1)])
    factors = _factors(predicted_X, true_X)
    low, high = factors.of(3, np.array([2.0, 10.0], dtype=np.float32))
    assert (low, high) == pytest.approx((1.5, 1.1))


def test_train_export_and_evaluate_make_a_profiles_predictor(
    traces: Traces, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, plots = tmp_path / "trained", tmp_path / "plots"
    command_line.main(["train", "--traces", str(traces.folder), "--out", str(trained)])
    command_line.main(["export", "--trained", str(trained), "--profile", str(profile)])
    model = StepModel.of(load_profile(profile))
    runs = [run for run in traces.runs() if run.schedule == "0.45"]
    (first,) = (one for one in model.card.first if one.threshold == 0.45)
    assert first.steps == pytest.approx(np.mean([run.num_steps for run in runs]), abs=1e-3)
    check_forecasts(model, runs)

    capsys.readouterr()
    judge = ["evaluate", "--traces", str(traces.folder), "--profile", str(profile), "--trained", str(trained)]
    command_line.main([*judge, "--plots", str(plots), "--keep"])
    printed = capsys.readouterr().out
    assert "| progress | one-shot mean | progress features |" in printed
    assert {path.name for path in plots.iterdir()} == {"step_predictor_progress.svg", "step_predictor_refresh.svg"}
    card = read_card(profile / CARD_FILE)
    errors = card.evaluation["error averaged over progress"]
    assert 0 < errors["all"] < errors["one-shot"], "it has even seen these prompts"
    assert f"**{card.refresh_tokens} tokens**" in printed


def check_forecasts(model: StepModel, runs: list[RecordedRun]) -> None:
    """More steps are left at higher thresholds, and fewer the further a run is."""
    states = [make_state(num_blocks=3, block_index=i, steps=4 * i + 2, tokens_committed=8 * i + 4) for i in range(3)]
    forecasts = model.forecast(states, (0.2, 0.3, 0.45), level=0)
    for forecast in forecasts:
        assert list(forecast.steps_left) == sorted(forecast.steps_left)
        assert all(u >= s for s, u in zip(forecast.steps_left, forecast.steps_left_upper, strict=True))
    lengths = [forecast.steps_left[2] for forecast in forecasts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] < max(run.num_steps for run in runs)


def test_what_is_missing_or_does_not_match_is_said(
    traces: Traces, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            command_line.main(words)
        assert stopped.value.code == 2
        return capsys.readouterr().err

    assert "holds no recording" in fails("train", "--traces", str(tmp_path), "--out", str(tmp_path / "out"))
    assert "no step predictor" in fails("export", "--trained", str(tmp_path), "--profile", str(profile))
