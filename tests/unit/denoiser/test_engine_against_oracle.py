"""Whatever the jobs and however they are batched, the engine does what the oracle does."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.denoiser.engine import Engine, EngineConfig, Factor, FixedSchedule, Job, RequestStep, Threshold
from services.denoiser.loader import load_model
from services.denoiser.models import Model
from tests.unit.denoiser import random_model
from tests.unit.denoiser.oracle import Decoded, OracleModel, decode
from tests.unit.denoiser.thread_ranks import on_ranks

SAFE_MARGIN = 1e-4  # closer decisions may go either way in float32

few = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


@pytest.fixture(scope="module", params=["llada", "dream"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write(tmp_path_factory.mktemp("model") / request.param, dream=request.param == "dream")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> OracleModel:
    return OracleModel(folder)


@st.composite
def jobs(draw: Callable[..., Any], temperatures: tuple[float, ...] = (0.0, 0.0, 0.8), ids_below: int = 64) -> Job:
    block_size = draw(st.sampled_from([1, 3, 8, 16]))
    num_blocks = draw(st.integers(1, 3))
    max_tokens = draw(st.integers((num_blocks - 1) * block_size + 1, num_blocks * block_size))
    steps_per_block = draw(st.integers(1, block_size + 1))
    ids = st.integers(0, ids_below - 1).filter(lambda i: i != random_model.MASK_ID)
    return Job(
        request_id="job",
        prompt_ids=draw(st.lists(ids, max_size=25)),
        max_tokens=max_tokens,
        block_size=block_size,
        cache=draw(st.sampled_from(["none", "prefix", "dual"])),
        blocks_ahead=draw(st.sampled_from([None, 0, 1])),
        choice=draw(
            st.one_of(
                st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.9, 1.0]).map(Threshold),
                st.sampled_from([0.5, 1.0, 2.0]).map(Factor),
                st.just(FixedSchedule(steps_per_block * num_blocks)),
            )
        ),
        temperature=draw(st.sampled_from(temperatures)),
        seed=draw(st.integers(-(2**70), 2**70)),
        ignore_eos=draw(st.booleans()),
    )


def run(
    engine: Engine, jobs: list[Job], starts: list[int]
) -> tuple[dict[str, list[RequestStep]], dict[str, list[int]]]:
    """Decode jobs, each admitted once the pass of its start has come and there is room."""
    waiting = sorted(zip(starts, jobs, strict=True), key=lambda pair: pair[0])
    steps: dict[str, list[RequestStep]] = {job.request_id: [] for job in jobs}
    outputs: dict[str, list[int]] = {}
    for number in range(5_000):
        while waiting and waiting[0][0] <= number and engine.refusal(waiting[0][1]) is None:
            engine.admit(waiting.pop(0)[1])
        for step in engine.step().requests:
            steps[step.request_id].append(step)
            if step.finished:
                outputs[step.request_id] = engine.output_ids(step.request_id)
                engine.remove(step.request_id)
        engine.pool.slots.check_invariants()
        if not waiting and not engine.running:
            return steps, outputs
    raise AssertionError("not done")


def assert_same(steps: list[RequestStep], output: list[int], expected: Decoded) -> None:
    assert len(steps) == len(expected.steps)
    for step, other in zip(steps, expected.steps, strict=True):
        assert (step.kind, step.block_index) == (other.kind, other.block)
        assert dict(zip(step.commits.positions, step.commits.token_ids, strict=True)) == other.commits
        assert step.commits.confidences == pytest.approx(
            [other.confidences[p] for p in step.commits.positions], abs=1e-4
        )
    assert output == expected.output
    assert [step.finished for step in steps] == [None] * (len(steps) - 1) + [expected.finished]


def tokens_of(step: RequestStep) -> tuple[Any, ...]:
    return (
        step.kind,
        step.block_index,
        step.step_in_block,
        step.commits.positions,
        step.commits.token_ids,
        step.finished,
    )


def engine_of(model: Model, **config: Any) -> Engine:
    return Engine(model, config=EngineConfig(**({"kv_budget_tokens": 1000} | config)))


@st.composite
def models(draw: Callable[..., Any], num_ranks: int) -> dict[str, Any]:
    """Arguments of `random_model.write`: any size of both architectures that so many ranks can share."""
    kv_heads = draw(st.sampled_from([1, num_ranks, 2 * num_ranks]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3])) * (num_ranks if kv_heads == 1 else 1)
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "layers": draw(st.integers(1, 3)),
        "width": heads * 2 * draw(st.integers(1, 4)),
        "mlp": num_ranks * draw(st.integers(1, 24)),
        "vocab": num_ranks * draw(st.integers(41 // num_ranks + 1, 50)),  # room for mask and EOS
        "tied": draw(st.booleans()),
    }
    dream = draw(st.booleans())
    names = random_model.DREAM_NAMES if dream else random_model.LLADA_NAMES
    changes: dict[str, Any] = {names[name]: value for name, value in sizes.items()}
    return changes | {
        "dream": dream,
        "rope_theta": draw(st.sampled_from([100.0, 1e4, 1e6])),
        "seed": draw(st.integers(0, 99)),
    }


@settings(few, max_examples=60)
@given(data=st.data(), num_ranks=st.sampled_from([1, 1, 2]), job=jobs(ids_below=41))
def test_any_model_over_any_ranks_does_what_the_oracle_does(data: st.DataObject, num_ranks: int, job: Job) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = random_model.write(Path(name) / "model", **data.draw(models(num_ranks)))
        expected = decode(OracleModel(folder), job)
        assume(expected.margin > SAFE_MARGIN)
        ran = on_ranks(num_ranks, lambda ranks: run(engine_of(load_model(folder, ranks=ranks)), [job], [0]))
    for steps, outputs in ran:
        assert_same(steps["job"], outputs["job"], expected)
    assert all(steps == ran[0][0] for steps, _ in ran), "every rank decides from the same bits"


@few
@given(
    drawn=st.lists(st.tuples(jobs(), st.integers(0, 6)), min_size=2, max_size=6),
    batch_tokens=st.integers(1, 200),
    recompute_tokens=st.integers(1, 100),
    kv_tokens=st.integers(80, 300),
    logits_rows=st.integers(1, 40),
)
def test_a_request_gets_the_same_tokens_in_any_batch(
    model: Model,
    oracle: OracleModel,
    drawn: list[tuple[Job, int]],
    batch_tokens: int,
    recompute_tokens: int,
    kv_tokens: int,
    logits_rows: int,
) -> None:
    jobs = [msgspec.structs.replace(job, request_id=str(number)) for number, (job, _) in enumerate(drawn)]
    expected = {job.request_id: decode(oracle, job) for job in jobs}
    assume(all(decoded.margin > SAFE_MARGIN for decoded in expected.values()))
    engine = engine_of(
        model,
        kv_budget_tokens=kv_tokens,
        max_batch_tokens=batch_tokens,
        max_recompute_tokens=recompute_tokens,
        max_logits_bytes=4 * model.shape.vocab_size * logits_rows,
    )
    steps, outputs = run(engine, jobs, [start for _, start in drawn])
    for name, decoded in expected.items():
        assert_same(steps[name], outputs[name], decoded)
    assert engine.free_kv_tokens == kv_tokens


@few
@given(job=jobs(temperatures=(0.0, 0.8)), data=st.data())
def test_a_request_taken_over_at_any_block_goes_on_the_same(model: Model, job: Job, data: st.DataObject) -> None:
    steps, outputs = run(engine_of(model), [job], [0])
    blocks_done = data.draw(st.integers(0, steps["job"][-1].block_index))
    committed = {
        position: token
        for step in steps["job"]
        for position, token in zip(step.commits.positions, step.commits.token_ids, strict=True)
    }
    moved = msgspec.structs.replace(job, committed_ids=[committed[p] for p in range(blocks_done * job.block_size)])
    steps_after, outputs_after = run(engine_of(model), [moved], [0])
    rest = [step for step in steps["job"] if step.block_index >= blocks_done]
    assert [tokens_of(step) for step in steps_after["job"]] == [tokens_of(step) for step in rest]
    assert outputs_after == outputs


@few
@given(job=jobs(temperatures=(0.0, 0.8)), data=st.data())
def test_threshold_turned_on_the_way_changes_nothing_before(model: Model, job: Job, data: st.DataObject) -> None:
    job = msgspec.structs.replace(job, choice=Threshold(0.9))
    steps, _ = run(engine_of(model), [job], [0])
    turn_after = data.draw(st.integers(1, len(steps["job"])))
    engine = engine_of(model)
    engine.admit(job)
    before = [engine.step().requests[0] for _ in range(turn_after)]
    assert [tokens_of(step) for step in before] == [tokens_of(step) for step in steps["job"][:turn_after]]
    if before[-1].finished:
        return
    engine.set_threshold("job", 0.0)
    after = engine.step().requests[0]
    if model.shape.shifted and job.cache != "none" and after.step_in_block == 0 and not after.block_done:
        assert len(after.commits.positions) == 1
        after = engine.step().requests[0]
    assert after.block_done  # at threshold 0 all that is eligible is committed
    assert after.threshold == 0.0
