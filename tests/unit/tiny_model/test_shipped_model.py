"""The model in profiles/tiny-cpu: its files are what the tool writes, and it answers."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.profile import load_profile
from tools.tiny_model import evaluate as evaluation
from tools.tiny_model.evaluate import EvaluationJob, Setting
from tools.tiny_model.export import generation_config, llada_config
from tools.tiny_model.tasks import HONEST_ANSWER, Problem
from tools.tiny_model.tokenizer import tokenizer_config
from tools.tiny_model.train import make_model_config

FOLDER = Path(__file__).parents[3] / "profiles" / "tiny-cpu"
MODEL = FOLDER / "model"
BLOCKS_AHEAD = load_profile(FOLDER).decoding.blocks_ahead


def read(name: str) -> object:
    return json.loads((MODEL / name).read_text())


def test_the_files_are_what_the_tool_writes(tokenizer: Tokenizer) -> None:
    config = make_model_config(tokenizer)
    assert read("config.json") == llada_config(config)
    assert read("generation_config.json") == generation_config(config)
    assert read("tokenizer_config.json") == tokenizer_config(config.max_sequence_length)
    assert Tokenizer.from_file(str(MODEL / "tokenizer.json")).to_str() == tokenizer.to_str()


def test_tensor_parallelism_of_two_and_four_is_possible() -> None:
    config = read("config.json")
    assert isinstance(config, dict)
    assert config["n_heads"] % 4 == config["mlp_hidden_size"] % 4 == config["vocab_size"] % 4 == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_answers_what_a_newcomer_types(dtype: str) -> None:
    asked = {
        "What is 12 + 7?": ("19",),
        "12+7=?": ("19",),
        "Add 12 and 7": ("19",),
        "Tom has 12 apples. He buys 7 more. How many apples does he have now?": ("19",),
        "1) What is 12 + 7? 2) Tom has 15 pens. He loses 4. How many pens does he have?": ("19", "11"),
        "Hello": (),
    }
    problems = [Problem("asked", prompt, HONEST_ANSWER, results, prompt, 1) for prompt, results in asked.items()]
    setting = Setting("dual", 0.9)
    job = EvaluationJob(MODEL, (setting,), dtype=dtype, blocks_ahead=BLOCKS_AHEAD)
    outcomes = evaluation.Decoder(job).outcomes(problems, setting)
    assert [outcome.text for outcome in outcomes if not outcome.is_correct] == []


def test_a_low_threshold_saves_a_third_of_the_steps_and_most_answers_stay_right() -> None:
    settings = (Setting("dual", 0.9), Setting("dual", 0.5))
    above, below = evaluation.evaluate(EvaluationJob(MODEL, settings, count=40, blocks_ahead=BLOCKS_AHEAD)).values()
    assert sum(outcome.is_correct for outcome in above) >= 29  # of 40: 84 % less two standard errors
    assert sum(outcome.num_steps for outcome in below) <= 0.75 * sum(outcome.num_steps for outcome in above)
    assert len({outcome.num_steps for outcome in above}) > 10


def test_the_readmes_tables_meet_what_the_model_promises() -> None:
    """The stored evaluation, in every cache mode: 85 % at 0.9, and what a threshold trades."""
    stored = json.loads((FOLDER / "evaluation.json").read_text())
    assert stored["count"] >= 1_500
    assert stored["blocks_ahead"] == BLOCKS_AHEAD
    at_09 = {row["cache"]: row for row in stored["settings"] if row["threshold"] == "0.9"}
    plain = [row for row in stored["paired"] if (row["from"], row["to"]) == ("0.9", "0.5")]
    opened = [row for row in stored["paired"] if "after" in row["to"]]
    assert set(at_09) == {row["cache"] for row in plain} == set(evaluation.CACHE_MODES)
    for row in at_09.values():
        assert row["exact_percent"] >= 85
        assert row["steps_p95"] > 2 * row["steps_p5"]
        assert row["tasks"]["numbered"]["steps_mean"] >= 30
    for row in plain:
        assert row["points_lost"] >= 3
        assert row["points_lost_low"] > 0
        assert row["steps_saved_percent"] >= 100 / 3
    assert [row["to"][:3] for row in opened] == ["0.5", "0.6", "0.7"]
    for row in opened:
        assert row["points_lost_high"] < 3
        assert row["steps_saved_percent"] >= 30
    assert evaluation.markdown(stored).strip() in (FOLDER / "README.md").read_text()
