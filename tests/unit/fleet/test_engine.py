"""Simulated passes take what the profile says, and requests denoise as the published ones did."""

import pytest

from services.costs import PassCost, step_load
from services.denoiser.engine import EngineConfig, Job, RequestStep, StepResult, Threshold
from tools.fleet.engine import TOKEN_ID, SleepingEngine
from tools.simulate.denoising import Counted, StepCounts

COST = PassCost(curve=((32.0, 10.0), (128.0, 40.0)), recompute_step_ms=3.0)
COUNTS = StepCounts(
    source="made up",
    output_tokens=64,
    block_size=32,
    prompt_tokens=(40, 40),
    prompt_tokens_source="made up",
    thresholds=(0.5, 0.9),
    steps=((4, 8), (6, 20)),
)


@pytest.fixture
def engine() -> SleepingEngine:
    config = EngineConfig(kv_budget_tokens=1000, max_batch_tokens=512, max_recompute_tokens=128)
    return SleepingEngine(config, 200, COST, Counted(COUNTS))


def make_job(request_id: str = "a", *, seed: int = 0, threshold: float = 0.9, blocks_done: int = 0) -> Job:
    return Job(
        request_id=request_id,
        prompt_ids=[TOKEN_ID] * 40,
        max_tokens=64,
        seed=seed,
        choice=Threshold(threshold),
        committed_ids=[TOKEN_ID] * (32 * blocks_done),
    )


def run(engine: SleepingEngine) -> StepResult:
    return engine.step(engine.begin_pass())


def test_a_request_takes_its_published_steps_and_commits_each_position_once(engine: SleepingEngine) -> None:
    engine.admit(make_job())
    steps: list[RequestStep] = []
    while not steps or not steps[-1].finished:
        (step,) = run(engine).requests
        steps.append(step)
    assert len(steps) == 8
    assert [step.block_done for step in steps] == 2 * [False, False, False, True]
    assert [step.kind for step in steps] == 2 * ["recompute", "cache", "cache", "cache"]
    assert [position for step in steps for position in step.commits.positions] == list(range(64))
    assert steps[-1].finished == "length"


def test_a_lower_threshold_applies_from_the_next_pass(engine: SleepingEngine) -> None:
    engine.admit(make_job(seed=1))
    engine.begin_pass()
    engine.set_threshold("a", 0.5)
    assert engine.step(0.01).requests[0].threshold == 0.9
    assert run(engine).requests[0].threshold == 0.5


def test_a_pass_takes_what_its_load_costs(engine: SleepingEngine) -> None:
    engine.admit(make_job())
    assert engine.begin_pass() == pytest.approx(COST.ms(step_load("recompute", 104, 104)) / 1e3)
    engine.step(1.0)
    engine.admit(make_job("b"))
    both = step_load("cache", 32, 104).plus(step_load("recompute", 104, 104))
    assert engine.begin_pass() == pytest.approx(COST.ms(both) / 1e3)
    done = engine.step(1.0)
    assert done.total_s - done.forward_s == pytest.approx(1.0 - COST.ms(both) / 1e3)


def test_recompute_steps_beyond_the_limit_wait_for_another_pass(engine: SleepingEngine) -> None:
    engine.admit(make_job("a"))
    engine.admit(make_job("b"))
    assert [step.request_id for step in run(engine).requests] == ["a"]
    assert [step.request_id for step in run(engine).requests] == ["a", "b"]


def test_a_request_goes_on_after_the_blocks_that_it_comes_with(engine: SleepingEngine) -> None:
    engine.admit(make_job(blocks_done=1))
    assert engine.progress("a").step_in_block == 0
    (step,) = run(engine).requests
    assert (step.block_index, step.kind, step.commits.positions[0]) == (1, "recompute", 32)
