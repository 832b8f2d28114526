from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tools.tiny_model.evaluate import (
    EvaluationJob,
    Outcome,
    Setting,
    evaluate,
    markdown,
    paired_difference,
    problems_of,
    report,
)
from tools.tiny_model.export import export_model
from tools.tiny_model.network import TinyLLaDA
from tools.tiny_model.tasks import is_held_out
from tools.tiny_model.train import make_model_config


def test_problems_are_held_out_and_all_different() -> None:
    problems = problems_of(300, seed=1)
    assert len({problem.prompt for problem in problems}) == 300
    assert all(is_held_out(problem.key) for problem in problems)
    assert problems[:50] == problems_of(50, seed=1)


def test_the_paired_difference_counts_problem_by_problem() -> None:
    above = [Outcome(True, 20, "")] * 90 + [Outcome(False, 20, "")] * 10
    below = [Outcome(True, 10, "")] * 80 + [Outcome(False, 10, "")] * 20
    found = paired_difference(above, below)
    assert found["points_lost"] == 10.0
    # Ten of a hundred pairs differ: standard error 3.015 points.
    assert found["points_lost_low"] == pytest.approx(10 - 1.96 * 3.015, abs=0.01)
    assert found["points_lost_high"] == pytest.approx(10 + 1.96 * 3.015, abs=0.01)
    assert found["steps_saved_percent"] == 50.0


def test_the_report_has_a_row_for_each_setting_and_compares_with_nine_tenths() -> None:
    settings = (*(Setting("dual", threshold) for threshold in (0.5, 0.9, 0.95)), Setting("dual", 0.6, 0.7))
    job = EvaluationJob(Path("unused"), settings, count=20)
    outcomes = {
        setting: [Outcome(index < 20 * setting.threshold, index + 1, "") for index in range(20)] for setting in settings
    }
    content = report(job, outcomes)
    assert [row["exact_percent"] for row in content["settings"]] == [50.0, 90.0, 95.0, 60.0]
    assert content["settings"][0]["steps_mean"] == 10.5
    assert sum(task["count"] for task in content["settings"][0]["tasks"].values()) == 20
    found = [(row["from"], row["to"], row["points_lost"]) for row in content["paired"]]
    assert found == [("0.9", "0.5", 40.0), ("0.9", "0.6 after 70% at 0.9", 30.0)]
    table = markdown(content)
    assert "| dual | 0.9 | 90.0 % | 10.5 | 2 | 11 | 20 | 20 |" in table
    assert "| dual | 0.9 | 0.5 | 40.0 (" in table


@pytest.mark.parametrize(
    "wrong",
    [
        {"settings": (Setting("some", 0.9),)},
        {"settings": (Setting("dual", 1.5),)},
        {"settings": (Setting("dual", 0.5, 1.5),)},
        {"count": 1},
    ],
)
def test_a_job_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no such setting|too small"):
        EvaluationJob(**({"model_folder": Path("unused"), "settings": ()} | wrong))  # type: ignore[arg-type]


def test_a_model_without_training_is_evaluated_and_wrong(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = make_model_config(tokenizer, d_model=32, n_layers=1, mlp_hidden_size=32)
    export_model(tmp_path, config, TinyLLaDA(config).state_dict(), tokenizer)
    settings = tuple(Setting(cache, 0.9) for cache in ("none", "prefix", "dual"))
    outcomes = evaluate(EvaluationJob(tmp_path, settings, count=20, max_tokens=32))
    for found in outcomes.values():
        assert len(found) == 20
        assert not any(outcome.is_correct for outcome in found)
        assert all(1 <= outcome.num_steps <= 32 for outcome in found)
