"""What the engine takes of a process's memory is what it should take, and requests that come and go leave nothing."""

import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from services.denoiser import engine as engine_module
from services.denoiser.engine import CacheMode, Engine, EngineConfig, Job, Threshold
from services.denoiser.kv_pool import kv_bytes_per_token
from services.denoiser.loader import load_model
from tools.bench.engine import memory
from tools.bench.engine.workload import Workload

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process's anonymous memory"),
]

SMALL = Workload(
    num_layers=2, width=64, num_heads=4, mlp_width=192, vocab_size=1024, prompt_tokens=64, output_tokens=32
)
MAX_GROWTH_BYTES = 2 << 20  # over 200 sequences, of some 1,500 requests

CACHES: tuple[CacheMode, ...] = ("none", "prefix", "dual")


def test_expectation_counts_what_is_there(tmp_path: Path) -> None:
    model = load_model(SMALL.write_model(tmp_path / "model"))
    measured = memory.Measured(while_loading=0, after_passes=0, pass_rows=100, scored_rows=10)
    expected = memory.expected(SMALL, model.dtype, measured)
    shape = model.shape
    slot_bytes = kv_bytes_per_token(
        num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=model.dtype
    )
    file_bytes = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert 0 < file_bytes - expected.weights < 4096  # names and shapes
    assert expected.pool == slot_bytes * SMALL.batch * SMALL.canvas_tokens
    assert expected.activations == 100 * (2 * 64 + 3 * 192) * 4
    assert expected.total == expected.weights + expected.pool + expected.activations


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pass_holds_no_more_tensors_than_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(engine_module, "_COPIED_BYTES", 16 * 4 * SMALL.vocab_size)  # 16 rows
    model = load_model(SMALL.write_model(tmp_path / "model"), dtype=dtype)
    engine = Engine(model, config=EngineConfig(kv_budget_tokens=SMALL.batch * SMALL.canvas_tokens))
    for number, prompt in enumerate(SMALL.prompts()):
        engine.admit(SMALL.job(str(number), prompt, "dual"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = engine.step()
    held = held_bytes(profiler, tmp_path / "trace.json")
    measured = memory.Measured(
        while_loading=0,
        after_passes=0,
        pass_rows=step.tokens_in_pass,
        scored_rows=len(step.requests) * SMALL.block_size,
    )
    expected = memory.expected(SMALL, model.dtype, measured).activations
    assert expected / 2 < max(held) - held[0] <= expected


def held_bytes(profiler: profile, file: Path) -> list[int]:
    """Bytes of all tensors, after each that was made or freed."""
    profiler.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_bytes())["traceEvents"] if event["name"] == "[memory]"]
    return [event["args"]["Total Allocated"] for event in sorted(events, key=lambda event: event["ts"])]


def test_logits_that_are_copied_to_float32_some_at_a_time_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(SMALL.write_model(tmp_path / "model"), dtype="bfloat16")
    results = []
    for num_rows in (1000, 3):
        monkeypatch.setattr(engine_module, "_COPIED_BYTES", num_rows * 4 * SMALL.vocab_size)
        engine = Engine(model, config=EngineConfig(kv_budget_tokens=SMALL.canvas_tokens))
        engine.admit(SMALL.job("r", SMALL.prompts()[0], "dual"))
        results.append([engine.step().requests[0].commits for _ in range(3)])
    assert results[0] == results[1]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices on shared cores are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_requests_that_join_leave_and_are_cancelled_leave_nothing(tmp_path: Path) -> None:
    model = load_model(SMALL.write_model(tmp_path / "model"))
    engine = Engine(model, config=EngineConfig(kv_budget_tokens=150, max_requests=4))
    rng = random.Random(0)
    for _ in range(50):  # until the allocator has seen every size
        come_and_go(engine, rng)
    before = memory.anonymous_bytes()
    counts: Counter[str] = Counter()
    for _ in range(200):
        counts += come_and_go(engine, rng)
        assert engine.running == []
        assert engine.free_kv_tokens == 150
        engine.pool.slots.check_invariants()
    assert min(counts["refused"], counts["cancelled"], counts["finished"]) > 100, f"no good sequences: {counts}"
    gc.collect()
    assert memory.anonymous_bytes() - before < MAX_GROWTH_BYTES  # before the next line's list, which takes more
    assert not [thing for thing in gc.get_objects() if type(thing).__name__ == "_Running"]


def come_and_go(engine: Engine, rng: random.Random) -> Counter[str]:
    """A random sequence that ends with an empty engine; how many requests were refused, cancelled or finished."""
    counts: Counter[str] = Counter()
    for number in range(rng.randrange(4, 24)):
        match rng.choice(("join", "join", "join", "step", "step", "cancel")):
            case "join":
                job = random_job(str(number), rng)
                if engine.refusal(job) is None:
                    engine.admit(job)
                else:
                    counts["refused"] += 1
            case "step":
                for step in engine.step().requests:
                    if step.finished:
                        engine.remove(step.request_id)
                        counts["finished"] += 1
            case "cancel" if engine.running:
                engine.remove(rng.choice(engine.running))
                counts["cancelled"] += 1
    counts["cancelled"] += engine.num_running
    for request_id in engine.running:
        engine.remove(request_id)
    return counts


def random_job(request_id: str, rng: random.Random) -> Job:
    return Job(
        request_id=request_id,
        prompt_ids=rng.choices(range(1000), k=rng.randrange(1, 48)),
        max_tokens=rng.randrange(1, 16),
        block_size=rng.choice((4, 8, 16)),
        cache=rng.choice(CACHES),
        choice=Threshold(rng.choice((0.1, 0.9))),
        temperature=rng.choice((0.0, 0.8)),
        seed=rng.randrange(100),
    )
