"""The rules of decoding one by one, with a model that says what the test wants."""

import math
from typing import Any

import msgspec
import pytest

from services.denoiser.engine import (
    Budget,
    Engine,
    EngineConfig,
    EntropySchedule,
    Factor,
    FixedSchedule,
    Job,
    RequestStep,
    StepResult,
    Threshold,
)
from services.opening import Opening
from tests.unit.denoiser.scripted_model import EOS_ID, MASK_ID, VOCAB, ScriptedModel

SURE, UNSURE = 0.95, 0.6


def make_job(**changes: Any) -> Job:
    return msgspec.structs.replace(
        Job(request_id="a", prompt_ids=[3, 3], max_tokens=8, block_size=4, choice=Threshold(0.9)), **changes
    )


def script(*entries: tuple[int, float], prompt: int = 2) -> dict[int, tuple[int, float]]:
    """What the model sees at the output positions, from the first."""
    return {prompt + number: entry for number, entry in enumerate(entries)}


def make_engine(model: ScriptedModel, **config: Any) -> Engine:
    return Engine(model, config=EngineConfig(**({"kv_budget_tokens": 64} | config)))


def run_one(model: ScriptedModel, job: Job) -> tuple[list[RequestStep], list[int]]:
    engine = make_engine(model)
    engine.admit(job)
    steps: list[RequestStep] = []
    while not steps or steps[-1].finished is None:
        (step,) = engine.step().requests
        steps.append(step)
    return steps, engine.output_ids(job.request_id)


def positions(steps: list[RequestStep]) -> list[list[int]]:
    return [step.commits.positions for step in steps]


# --- what a step commits ----------------------------------------------------------------------------------------------


def test_a_step_commits_all_that_reach_the_threshold_or_else_the_surest() -> None:
    model = ScriptedModel(script((4, SURE), (5, UNSURE), (6, SURE), (7, 0.7)))
    steps, output = run_one(model, make_job(max_tokens=4))
    assert positions(steps) == [[0, 2], [3], [1]]
    assert steps[0].commits.token_ids == [4, 6]
    assert steps[0].commits.confidences == pytest.approx([SURE, SURE])
    assert output == [4, 5, 6, 7]
    assert [step.finished for step in steps] == [None, None, "length"]


def test_an_opening_asks_for_more_until_its_share_of_the_block_is_committed() -> None:
    model = ScriptedModel(script((4, SURE), (5, UNSURE), (6, SURE), (7, 0.7)))
    opening = Opening(share=0.5, threshold=0.9)
    steps, _ = run_one(model, make_job(max_tokens=4, choice=Threshold(0.5, opening)))
    assert positions(steps) == [[0, 2], [1, 3]]
    assert [step.threshold for step in steps] == [0.9, 0.5]
    more = msgspec.structs.replace(opening, share=0.75)
    steps, _ = run_one(model, make_job(max_tokens=4, choice=Threshold(0.5, more)))
    assert positions(steps) == [[0, 2], [3], [1]]
    assert [step.threshold for step in steps] == [0.9, 0.9, 0.5]
    steps, _ = run_one(model, make_job(max_tokens=4, choice=Threshold(0.97, opening)))
    assert steps[0].threshold == 0.97, "an opening lowers nothing"


def test_what_an_eos_cuts_off_is_not_waited_for_by_an_opening() -> None:
    model = ScriptedModel(script((4, SURE), (5, UNSURE), (EOS_ID, SURE), (7, 0.7)))
    steps, _ = run_one(model, make_job(max_tokens=4, choice=Threshold(0.5, Opening(share=0.6, threshold=0.9))))
    assert [step.threshold for step in steps] == [0.9, 0.5], "2 of 3, where 2 of 4 would not do"


def test_a_turned_threshold_keeps_its_opening() -> None:
    engine = make_engine(ScriptedModel(script((4, SURE), (5, UNSURE), (6, SURE), (7, 0.7))))
    engine.admit(make_job(max_tokens=4, choice=Threshold(0.9, Opening(share=0.5, threshold=0.9))))
    engine.set_threshold("a", 0.5)
    assert engine.progress("a").threshold == 0.5
    assert [step.threshold for step in engine.step().requests] == [0.9]


def test_an_engine_that_keeps_scores_tells_what_each_step_chose_from() -> None:
    model = ScriptedModel(script((4, SURE), (5, UNSURE), (6, SURE), (7, 0.7)))
    engine = Engine(model, config=EngineConfig(kv_budget_tokens=64), keep_scores=True)
    engine.admit(make_job(max_tokens=4))
    first, second = (step.scores for _ in range(2) for step in engine.step().requests)
    assert first is not None
    assert second is not None
    assert first.positions.tolist() == [0, 1, 2, 3]
    assert first.token_ids.tolist() == [4, 5, 6, 7]
    assert first.confidences == pytest.approx([SURE, UNSURE, SURE, 0.7])
    assert second.positions.tolist() == [1, 3]
    steps, _ = run_one(model, make_job(max_tokens=4))
    assert {step.scores for step in steps} == {None}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Factor(1.0), [[0, 2], [1, 3]]),
        (FixedSchedule(2), [[0, 2], [1, 3]]),
        (FixedSchedule(3), [[0, 2], [3], [1]]),
        (Budget(0.5, 4), [[0], [2], [3], [1]]),
        (Budget(0.9, 2), [[0, 2], [3], [1]]),
        (Budget(0.9, 1), [[0, 2], [3], [1]]),
        (EntropySchedule(3), [[0], [2], [1, 3]]),
        (EntropySchedule(1), [[0, 1, 2, 3]]),
        (Threshold(0.0), [[0, 1, 2, 3]]),
        (Threshold(1.0), [[0], [2], [3], [1]]),
    ],
)
def test_each_request_has_its_own_rule(rule: Any, expected: list[list[int]]) -> None:
    model = ScriptedModel(script((4, SURE), (5, UNSURE), (6, SURE - 0.01), (7, UNSURE + 0.01)))
    steps, _ = run_one(model, make_job(max_tokens=4, choice=rule))
    assert positions(steps) == expected


def test_blocks_are_done_one_after_the_other() -> None:
    model = ScriptedModel(script(*[(4, SURE)] * 8))
    steps, output = run_one(model, make_job())
    assert positions(steps) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [(step.block_index, step.step_in_block, step.block_done) for step in steps] == [(0, 0, True), (1, 0, True)]
    assert output == [4] * 8


def test_only_eligible_positions_get_logits() -> None:
    model = ScriptedModel(script((4, SURE), (5, UNSURE), (6, SURE), (7, UNSURE), *[(4, SURE)] * 4))
    engine = make_engine(model)
    engine.admit(make_job())
    engine.step()
    assert model.asked == [2, 3, 4, 5]
    engine.step()
    assert model.asked == [3, 5]


@pytest.mark.parametrize(
    ("cache", "rows"), [("none", [10, 10, 10, 10]), ("prefix", [10, 8, 10, 4]), ("dual", [10, 4, 10, 4])]
)
def test_which_rows_a_step_passes(cache: Any, rows: list[int]) -> None:
    model = ScriptedModel(script(*[(4, SURE), (4, SURE), (4, SURE), (5, UNSURE)] * 2))
    steps, _ = run_one(model, make_job(cache=cache))
    assert [step.num_rows for step in steps] == rows
    kinds = ["recompute"] * 4 if cache == "none" else ["recompute", "cache"] * 2
    assert [step.kind for step in steps] == kinds


def test_a_threshold_applies_from_the_next_step() -> None:
    model = ScriptedModel(script(*[(4, UNSURE)] * 8))
    engine = make_engine(model)
    engine.admit(make_job())
    first = engine.step().requests[0]
    engine.set_threshold("a", 0.5)
    second = engine.step().requests[0]
    assert (first.threshold, first.commits.positions) == (0.9, [0])
    assert (second.threshold, second.commits.positions) == (0.5, [1, 2, 3])
    assert engine.progress("a").threshold == 0.5


def test_a_threshold_does_not_touch_another_rule() -> None:
    engine = make_engine(ScriptedModel(script(*[(4, SURE)] * 8)))
    engine.admit(make_job(choice=FixedSchedule(8)))
    engine.set_threshold("a", 0.0)
    step = engine.step().requests[0]
    assert (step.threshold, step.commits.positions) == (None, [0])


def test_wrong_thresholds_are_refused() -> None:
    engine = make_engine(ScriptedModel({}))
    with pytest.raises(KeyError):
        engine.set_threshold("a", 0.5)
    engine.admit(make_job())
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="not between 0 and 1"):
            engine.set_threshold("a", value)


# --- a shifted model: row p predicts position p + 1 -------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_shifted_model_with_a_cache_settles_the_first_position_alone(cache: Any) -> None:
    sure_but_the_first = [(4, UNSURE), (5, SURE), (6, SURE), (7, 0.7)]
    model = ScriptedModel(script(*sure_but_the_first * 2), shifted=True)
    steps, output = run_one(model, make_job(cache=cache))
    assert positions(steps) == [[0], [1, 2], [3], [4], [5, 6], [7]]
    assert [step.kind for step in steps] == ["recompute", "cache", "cache"] * 2
    assert output == [4, 5, 6, 7] * 2
    assert steps[0].commits.confidences == pytest.approx([UNSURE])


def test_a_shifted_model_without_a_cache_decides_as_others_do() -> None:
    entries = [(4, UNSURE), (5, SURE), (6, SURE), (7, 0.7)] * 2
    steps, output = run_one(ScriptedModel(script(*entries), shifted=True), make_job(cache="none"))
    others, other_output = run_one(ScriptedModel(script(*entries)), make_job(cache="none"))
    assert positions(steps) == positions(others) == [[1, 2], [3], [0], [5, 6], [7], [4]]
    assert output == other_output


@pytest.mark.parametrize(
    ("cache", "rows"), [("none", [[1, 2, 3, 4], [1, 2, 3]]), ("dual", [[1], [2, 3, 4]]), ("prefix", [[1], [2, 3, 4]])]
)
def test_the_rows_before_the_eligible_positions_get_logits(cache: Any, rows: list[list[int]]) -> None:
    model = ScriptedModel(script(*[(4, UNSURE)] * 3, (4, SURE)), shifted=True)
    engine = make_engine(model)
    engine.admit(make_job(cache=cache))
    for asked in rows:
        engine.step()
        assert model.asked == asked


@pytest.mark.parametrize(("cache", "rows"), [("none", [[0, 0, 1, 2]]), ("dual", [[0], [0, 1, 2]])])
def test_without_a_prompt_the_first_row_predicts_two_positions(cache: Any, rows: list[list[int]]) -> None:
    model = ScriptedModel({1: (4, SURE), 2: (5, SURE), 3: (6, SURE)}, shifted=True)
    engine = make_engine(model)
    engine.admit(make_job(prompt_ids=[], max_tokens=4, cache=cache))
    for asked in rows:
        engine.step()
        assert model.asked == asked
    assert engine.output_ids("a") == [4, 4, 5, 6]


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_an_eos_in_the_first_place_ends_a_shifted_request_at_once(cache: Any) -> None:
    model = ScriptedModel(script(*[(4, SURE)] * 4, (EOS_ID, SURE), *[(4, UNSURE)] * 3), shifted=True)
    steps, output = run_one(model, make_job(cache=cache))
    assert (steps[-1].block_index, steps[-1].step_in_block, steps[-1].commits.token_ids) == (1, 0, [EOS_ID])
    assert (steps[-1].finished, output) == ("eos", [4] * 4)


def test_a_shifted_block_of_one_wanted_token_takes_one_step() -> None:
    model = ScriptedModel(script(*[(4, SURE)] * 5), shifted=True)  # asking for more would fail
    steps, output = run_one(model, make_job(max_tokens=5))
    assert positions(steps) == [[0], [1, 2, 3], [4]]
    assert (steps[-1].finished, output) == ("length", [4] * 5)


def test_a_shifted_request_that_is_taken_over_reads_the_last_committed_row() -> None:
    model = ScriptedModel(script(*[(4, SURE)] * 8), shifted=True)
    engine = make_engine(model)
    engine.admit(make_job(committed_ids=[5, 6, 7, 8]))
    step = engine.step().requests[0]
    assert (step.commits.positions, model.asked) == ([4], [5])
    engine.step()
    assert engine.output_ids("a") == [5, 6, 7, 8, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (FixedSchedule(2), [[0], [1, 2], [3]]),
        (FixedSchedule(8), [[0], [1], [2], [3]]),
        (Factor(2.0), [[0], [1, 2, 3]]),
        (Budget(0.5, 2), [[0], [1, 2, 3]]),
        (EntropySchedule(2), [[0], [1, 2, 3]]),
        (EntropySchedule(1), [[0], [1, 2, 3]]),
    ],
)
def test_every_rule_goes_on_after_the_first_position(rule: Any, expected: list[list[int]]) -> None:
    model = ScriptedModel(script((4, UNSURE), (5, SURE), (6, 0.8), (7, 0.7)), shifted=True)
    steps, _ = run_one(model, make_job(max_tokens=4, choice=rule))
    assert positions(steps) == expected


# --- how a request ends -----------------------------------------------------------------------------------------------


def test_after_an_eos_only_what_is_before_it_is_computed() -> None:
    model = ScriptedModel(script((4, UNSURE), (5, 0.55), (EOS_ID, SURE), (7, UNSURE), *[(4, SURE)] * 4))
    steps, output = run_one(model, make_job())
    assert positions(steps) == [[2], [0], [1]]
    assert steps[-1].finished == "eos"
    assert output == [4, 5]
    assert model.asked == [3]


def test_an_earlier_eos_that_comes_later_counts() -> None:
    model = ScriptedModel(script((4, 0.7), (EOS_ID, UNSURE), (6, 0.55), (EOS_ID, SURE)))
    steps, output = run_one(model, make_job())
    assert positions(steps) == [[3], [0], [1]]
    assert output == [4]


def test_the_first_of_several_in_one_step_counts() -> None:
    model = ScriptedModel(script((4, SURE), (EOS_ID, SURE), (6, UNSURE), (EOS_ID, SURE)))
    steps, output = run_one(model, make_job())
    assert positions(steps) == [[0, 1, 3]]
    assert (steps[0].block_done, steps[0].finished, output) == (True, "eos", [4])


def test_an_eos_in_the_first_place_is_an_empty_answer() -> None:
    steps, output = run_one(ScriptedModel(script((EOS_ID, SURE), *[(4, UNSURE)] * 7)), make_job())
    assert (len(steps), steps[0].finished, output) == (1, "eos", [])


def test_an_eos_in_a_later_block_keeps_the_blocks_before() -> None:
    model = ScriptedModel(script(*[(4, SURE)] * 4, (5, SURE), (EOS_ID, SURE), (4, UNSURE), (4, UNSURE)))
    steps, output = run_one(model, make_job())
    assert [step.finished for step in steps] == [None, "eos"]
    assert output == [4, 4, 4, 4, 5]


def test_eos_is_a_token_like_others_when_ignored() -> None:
    model = ScriptedModel(script((4, UNSURE), (EOS_ID, SURE), *[(4, SURE)] * 6))
    steps, output = run_one(model, make_job(ignore_eos=True))
    assert output == [4, EOS_ID, 4, 4, 4, 4, 4, 4]
    assert steps[-1].finished == "length"


def test_an_eos_in_the_prompt_ends_nothing() -> None:
    _, output = run_one(ScriptedModel(script(*[(4, SURE)] * 8)), make_job(prompt_ids=[EOS_ID, 3]))
    assert output == [4] * 8


def test_max_tokens_that_is_no_multiple_of_the_block_is_honoured() -> None:
    model = ScriptedModel(script(*[(4, SURE)] * 5))  # nothing is known of positions after that: asking would fail
    steps, output = run_one(model, make_job(max_tokens=5))
    assert positions(steps) == [[0, 1, 2, 3], [4]]
    assert (steps[-1].finished, output) == ("length", [4] * 5)
    assert steps[-1].num_rows == 10  # the canvas is whole blocks


def test_output_grows_by_whole_blocks_and_carries_its_confidences() -> None:
    model = ScriptedModel(script(*[(4, SURE)] * 4, (5, SURE), (6, 0.7), (7, UNSURE), (8, SURE)))
    engine = make_engine(model)
    engine.admit(make_job())
    assert engine.output_ids("a") == []
    engine.step()
    assert engine.output_ids("a") == [4] * 4
    engine.step()
    assert engine.output_ids("a") == [4] * 4
    assert engine.progress("a").tokens_committed == 6
    while engine.step().requests:
        pass
    assert engine.output_ids("a") == [4, 4, 4, 4, 5, 6, 7, 8]
    assert engine.output_confidences("a") == pytest.approx([SURE] * 5 + [0.7, UNSURE, SURE])


def test_a_request_that_is_taken_over_starts_at_the_next_block() -> None:
    model = ScriptedModel(script(*[(4, SURE)] * 8))
    engine = make_engine(model)
    engine.admit(make_job(committed_ids=[5, 6, 7, 8], committed_confidences=[0.1, 0.2, 0.3, 0.4]))
    assert engine.output_ids("a") == [5, 6, 7, 8]
    progress = engine.progress("a")
    assert (progress.block_index, progress.tokens_committed, progress.next_kind) == (1, 4, "recompute")
    step = engine.step().requests[0]
    assert (step.block_index, step.commits.positions, step.finished) == (1, [4, 5, 6, 7], "length")
    assert engine.output_ids("a") == [5, 6, 7, 8, 4, 4, 4, 4]
    assert engine.output_confidences("a") == pytest.approx([0.1, 0.2, 0.3, 0.4] + [SURE] * 4)
    assert model.batch is not None
    assert model.batch.token_ids_T.tolist() == [3, 3, 5, 6, 7, 8] + [MASK_ID] * 4


def test_progress_says_how_far_a_request_is() -> None:
    model = ScriptedModel(script(*[(4, SURE)] * 4, (4, SURE), (EOS_ID, SURE), (4, SURE), (4, SURE)))
    engine = make_engine(model)
    engine.admit(make_job())
    before = engine.progress("a")
    assert (before.block_index, before.num_blocks, before.tokens_committed, before.finished) == (0, 2, 0, None)
    engine.step()
    assert engine.progress("a").block_index == 1
    engine.step()
    after = engine.progress("a")
    assert (after.block_index, after.tokens_committed, after.finished) == (2, 5, "eos")


# --- who is held ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"max_tokens": 0}, "bad_request", "max_tokens = 0"),
        ({"block_size": 0}, "bad_request", "block_size = 0"),
        ({"temperature": -1.0}, "bad_request", "temperature"),
        ({"temperature": math.nan}, "bad_request", "temperature"),
        ({"cache": "sometimes"}, "bad_request", "cache"),
        ({"choice": Threshold(1.5)}, "bad_request", "threshold = 1.5"),
        ({"choice": Threshold(math.nan)}, "bad_request", "threshold"),
        ({"choice": Factor(-1.0)}, "bad_request", "factor"),
        ({"choice": FixedSchedule(3)}, "bad_request", "2 blocks"),
        ({"choice": FixedSchedule(0)}, "bad_request", "steps = 0"),
        ({"choice": Budget(1.5, 2)}, "bad_request", "threshold = 1.5"),
        ({"choice": Budget(0.5, 3)}, "bad_request", "2 blocks"),
        ({"choice": EntropySchedule(3)}, "bad_request", "2 blocks"),
        ({"prompt_ids": [3, MASK_ID]}, "bad_request", "mask token"),
        ({"prompt_ids": [3, VOCAB]}, "bad_request", "outside 0 to 9"),
        ({"prompt_ids": [-1]}, "bad_request", "outside 0 to 9"),
        ({"committed_ids": [4] * 3}, "bad_request", "whole blocks"),
        ({"committed_ids": [4] * 8}, "bad_request", "whole blocks"),
        ({"committed_ids": [4, EOS_ID, 4, 4]}, "bad_request", "EOS"),
        ({"committed_ids": [4, MASK_ID, 4, 4]}, "bad_request", "mask token"),
        ({"committed_ids": [4] * 4, "committed_confidences": [1.0]}, "bad_request", "committed_confidences"),
        ({"prompt_ids": [3] * 100}, "too_long", "100 prompt tokens and 8 output tokens"),
        ({"prompt_ids": [3] * 57}, "too_long", "at most 64"),
        ({"request_id": "held"}, "duplicate", "held"),
        ({"prompt_ids": [3] * 47}, "kv_full", "55 tokens needed, 54 of the K/V pool free"),
    ],
)
def test_refusals_say_why(changes: dict[str, Any], reason: str, text: str) -> None:
    engine = make_engine(ScriptedModel({}))
    engine.admit(make_job(request_id="held"))
    job = make_job(**changes)
    refusal = engine.refusal(job)
    assert refusal is not None
    assert refusal.reason == reason
    assert text in refusal.text
    with pytest.raises(ValueError, match=reason):
        engine.admit(job)
    assert engine.running == ["held"]
    assert engine.free_kv_tokens == 54


def test_an_eos_is_welcome_in_committed_ids_when_ignored() -> None:
    job = make_job(committed_ids=[4, EOS_ID, 4, 4], ignore_eos=True)
    assert make_engine(ScriptedModel({})).refusal(job) is None


def test_no_more_requests_than_allowed() -> None:
    engine = make_engine(ScriptedModel({}), max_requests=1)
    engine.admit(make_job())
    refusal = engine.refusal(make_job(request_id="b"))
    assert refusal is not None
    assert refusal.reason == "batch_full"


def test_removing_frees_and_leaves_the_others_alone() -> None:
    model = ScriptedModel(script(*[(4, SURE), (4, SURE), (4, SURE), (5, UNSURE)] * 2))
    engine = make_engine(model)
    for name in ("a", "b", "c"):
        engine.admit(make_job(request_id=name))
    engine.step()
    engine.remove("b")
    assert engine.running == ["a", "c"]
    assert engine.free_kv_tokens == 64 - 20
    with pytest.raises(KeyError):
        engine.remove("b")
    assert [step.request_id for step in engine.step().requests] == ["a", "c"]
    while engine.step().requests:
        pass
    assert engine.output_ids("a") == engine.output_ids("c") == [4, 4, 4, 5] * 2


def test_a_finished_request_is_held_but_rides_no_more() -> None:
    engine = make_engine(ScriptedModel(script(*[(4, SURE)] * 8)))
    engine.admit(make_job())
    engine.step()
    engine.step()
    assert engine.step() == StepResult(requests=[], tokens_in_pass=0, forward_s=0.0, commit_s=0.0, total_s=0.0)
    assert engine.running == ["a"]
    engine.remove("a")
    assert (engine.running, engine.free_kv_tokens) == ([], 64)


def slots(model: ScriptedModel) -> list[int]:
    assert model.batch is not None
    return [slot for run in model.batch.attention.runs for slot in range(run.start, run.stop)]


def test_a_request_id_can_come_again_in_other_slots() -> None:
    """Nothing remembered of the old one may be used for the new one."""
    model = ScriptedModel(script(*[(4, SURE), (4, SURE), (4, SURE), (5, UNSURE)] * 2))
    engine = make_engine(model, max_batch_tokens=10)
    engine.admit(make_job(request_id="a"))
    engine.admit(make_job(request_id="b"))
    engine.step()
    engine.step()
    assert slots(model) == list(range(10, 20))
    engine.remove("a")
    engine.remove("b")
    engine.admit(make_job(request_id="b", prompt_ids=[6, 6]))
    engine.step()
    assert slots(model) == list(range(10))
    assert model.batch is not None
    assert model.batch.token_ids_T[:2].tolist() == [6, 6]


def test_a_request_whose_slots_moved_goes_on_in_the_new_ones() -> None:
    model = ScriptedModel(script(*[(4, UNSURE)] * 8))
    engine = make_engine(model, kv_budget_tokens=30, max_batch_tokens=10)
    engine.admit(make_job(request_id="a"))
    engine.admit(make_job(request_id="b"))
    engine.remove("a")
    engine.step()
    engine.step()
    assert slots(model) == list(range(12, 16))
    engine.admit(make_job(request_id="c", prompt_ids=[3] * 12))  # needs both gaps; its 20 rows have to wait
    engine.step()
    assert slots(model) == list(range(2, 6))


def test_a_step_says_how_long_its_parts_took() -> None:
    engine = make_engine(ScriptedModel(script(*[(4, SURE)] * 8)))
    engine.admit(make_job())
    result = engine.step()
    assert result.tokens_in_pass == 10
    assert 0.0 < result.forward_s + result.commit_s <= result.total_s


@pytest.mark.parametrize("name", ["kv_budget_tokens", "max_requests", "max_batch_tokens", "max_recompute_tokens"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0"):
        EngineConfig(**({"kv_budget_tokens": 64} | {name: 0}))
