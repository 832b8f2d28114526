"""Comparing the engine with the plain reference: the same work, the same tokens, and what is made of the times."""

from pathlib import Path

import pytest
import torch

from services.denoiser.engine import CacheMode
from tools.bench.engine import decoding
from tools.bench.engine.decoding import Cell, Ours, Sides, load_sides, measure_cell, run_ours, run_plain
from tools.bench.engine.workload import Workload

SMALL = Workload(
    num_layers=2,
    width=32,
    num_heads=4,
    mlp_width=48,
    vocab_size=64,
    prompt_tokens=20,
    output_tokens=16,
    block_size=8,
    threshold=0.7,
    batch=3,
)
CACHES: tuple[CacheMode, ...] = ("none", "prefix", "dual")
each_cache = pytest.mark.parametrize("cache", CACHES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALL.write_model(tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="module")
def sides(folder: Path) -> Sides:
    return load_sides(folder, SMALL, "float32")


@each_cache
def test_engine_and_reference_take_the_same_steps(sides: Sides, cache: CacheMode) -> None:
    prompts = SMALL.prompts()
    batched = run_ours(sides.engine, SMALL, prompts, cache)
    rows: list[int] = []
    for prompt, of_batch in zip(prompts, batched.outputs, strict=True):
        decoded = run_plain(sides.plain, SMALL, prompt, cache, margins=True)
        assert decoded.margin > decoding.TOO_CLOSE
        alone = run_ours(sides.engine, SMALL, [prompt], cache)
        assert decoded.output_ids == alone.outputs[0] == of_batch
        assert [step.num_rows for step in decoded.steps] == alone.step_rows
        rows += alone.step_rows
    assert sorted(batched.step_rows) == sorted(rows)
    assert sides.engine.num_running == 0


def test_without_a_cache_the_first_block_stands_for_all(sides: Sides) -> None:
    outputs = {cache: run_ours(sides.engine, SMALL, SMALL.prompts(), cache).outputs for cache in CACHES}
    assert {cache: [len(ids) for ids in of_cache] for cache, of_cache in outputs.items()} == {
        "none": [8, 8, 8],
        "prefix": [16, 16, 16],
        "dual": [16, 16, 16],
    }


def test_a_cell_compares_a_prompt_alone_and_a_batch(sides: Sides) -> None:
    result = measure_cell(sides, SMALL, Cell("dual", "float32", 1), repeats=2, limit_s=60.0)
    assert [(c.batch, c.repeats, c.agreement) for c in (result.alone, result.batched)] == [(1, 2, 1.0), (3, 2, 1.0)]
    assert result.broken == []
    assert {p.kind for p in result.passes[1]} == {"recompute", "cache"}
    assert all(p.forward_s > 0 and p.overhead_s > 0 for p in result.passes[3])


def test_one_repeat_is_made_whatever_the_limit(sides: Sides) -> None:
    assert measure_cell(sides, SMALL, Cell("dual", "float32", 1), repeats=5, limit_s=0.0).alone.repeats == 1


def test_other_tokens_in_float32_are_told(sides: Sides, tmp_path: Path) -> None:
    other = SMALL.write_model(tmp_path / "model", seed=1)
    mixed = Sides(sides.engine, load_sides(other, SMALL, "float32").plain)
    result = measure_cell(mixed, SMALL, Cell("dual", "float32", 1), repeats=1, limit_s=60.0)
    assert result.alone.agreement < 1.0
    (text,) = result.broken
    assert text.startswith("dual, 1 threads, prompt 0: other tokens, closest decision ")
    bfloat16 = measure_cell(mixed, SMALL, Cell("dual", "bfloat16", 1), repeats=1, limit_s=60.0)
    assert bfloat16.broken == []  # there they may differ


def test_reference_is_charged_the_engine_s_steps() -> None:
    runs = [
        Ours(seconds=2.0, step_rows=[40, 8, 8], outputs=[[1, 2, 3, 4]], passes=[]),
        Ours(seconds=1.0, step_rows=[40, 8], outputs=[[1, 2, 3, 4]], passes=[]),
        Ours(seconds=4.0, step_rows=[40, 8, 8, 8], outputs=[[1, 2, 3, 4]], passes=[]),
    ]
    plain_step_s = {40: [5.0, 3.0, 4.0], 8: [1.0, 2.0, 1.0, 9.0]}  # medians 4 and 1.5
    c = decoding.compare(Cell("dual", "float32", 1), 1, runs, plain_step_s, [1.0, 0.5])
    assert c.plain_tokens_per_s == pytest.approx(4 / 7.0)  # of 4/7, 4/5.5 and 4/8.5
    assert c.ours_tokens_per_s == pytest.approx(2.0)  # of 2, 4 and 1
    assert c.speedup == pytest.approx(3.5)  # of 7/2, 5.5/1 and 8.5/4
    assert c.tokens_per_step == pytest.approx(12 / 9)
    assert (c.agreement, c.repeats) == (0.75, 3)


def test_prompts_hold_neither_mask_nor_eos_and_are_the_same_every_time() -> None:
    prompts = SMALL.prompts()
    assert prompts == SMALL.prompts()
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert max(max(prompt) for prompt in prompts) < 62  # EOS is 62, the mask 63


def test_bfloat16_is_bfloat16_on_both_sides(folder: Path) -> None:
    sides = load_sides(folder, SMALL, "bfloat16")
    assert sides.engine.model.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in sides.plain.parameters()} == {torch.bfloat16}
