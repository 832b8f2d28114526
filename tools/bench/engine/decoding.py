"""Tokens per second of the engine and of the plain reference, and where the engine's steps spend their time.

1. Both sides decode the same prompts with the same weights, threads and number format, in turns in one process.
2. The engine decodes a prompt alone, and a batch of prompts that are admitted at once; the reference has no batch: what
   it would take for several is one after the other.
3. In float32 both sides must commit the same tokens, and so take the same steps. In bfloat16 a different sum ends in
   other tokens, and in more steps or fewer. To compare equal work, the reference is charged the engine's steps: how
   many of each length, times what a step of that length takes the reference (median).
4. Without a cache all steps are alike, so the first block stands for all.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from services.denoiser.engine import CacheMode, Engine, EngineConfig, FixedSchedule, StepResult, Threshold
from services.denoiser.loader import DTYPES, load_model
from tools.bench import reference
from tools.bench.engine.workload import Workload

TOO_CLOSE = 1e-4  # decisions with a smaller margin may fall either way in float32


class Cell(NamedTuple):
    """What is compared."""

    cache: CacheMode
    dtype: str
    threads: int


class Pass(NamedTuple):
    """One step of the engine."""

    kind: Literal["recompute", "cache", "mixed"]
    forward_s: float
    commit_s: float
    overhead_s: float


class Ours(NamedTuple):
    """What the engine did with some requests, until the last was done."""

    seconds: float
    step_rows: list[int]  # of each step of each request
    outputs: list[list[int]]
    passes: list[Pass]


class Comparison(NamedTuple):
    """One row of the table: medians over the repeats."""

    cell: Cell
    batch: int
    repeats: int
    plain_tokens_per_s: float
    ours_tokens_per_s: float
    speedup: float
    tokens_per_step: float
    agreement: float  # share of the output positions where both sides have the same token


class CellResult(NamedTuple):
    """All about one cell."""

    alone: Comparison
    batched: Comparison
    passes: dict[int, list[Pass]]  # by batch
    broken: list[str]  # what must not be: other tokens in float32


class Sides(NamedTuple):
    """The two models, from the same weights."""

    engine: Engine
    plain: reference.PlainModel


def load_sides(folder: Path, workload: Workload, dtype: str) -> Sides:
    """Both sides in one number format."""
    config = EngineConfig(kv_budget_tokens=workload.batch * workload.canvas_tokens)
    return Sides(Engine(load_model(folder, dtype=dtype), config=config), reference.load_plain(folder, DTYPES[dtype]))


def measure_cell(sides: Sides, workload: Workload, cell: Cell, *, repeats: int, limit_s: float) -> CellResult:
    """Repeats, each with a prompt of its own, until there are enough or `limit_s` has passed: at least one."""
    torch.set_num_threads(cell.threads)
    unseen_step_s = _warm_up(sides, workload, cell.cache)
    prompts = workload.prompts()
    plain_step_s: dict[int, list[float]] = defaultdict(list)  # by rows
    alone: list[Ours] = []
    batched: list[Ours] = []
    checks: list[_Check] = []
    started = time.perf_counter()
    for repeat in range(repeats):
        number = repeat % len(prompts)
        decoded = run_plain(sides.plain, workload, prompts[number], cell.cache)
        for step in decoded.steps:
            plain_step_s[step.num_rows].append(step.seconds)
        alone.append(run_ours(sides.engine, workload, [prompts[number]], cell.cache))
        batched.append(run_ours(sides.engine, workload, prompts, cell.cache))
        checks.append(_Check(number, decoded.output_ids, alone[-1].outputs[0], batched[-1].outputs[number]))
        if time.perf_counter() - started > limit_s:
            break
    for rows, seconds in unseen_step_s.items():
        plain_step_s.setdefault(rows, [seconds])
    return CellResult(
        compare(cell, 1, alone, plain_step_s, [check.agreement(check.alone) for check in checks]),
        compare(cell, len(prompts), batched, plain_step_s, [check.agreement(check.batched) for check in checks]),
        {1: [p for run in alone for p in run.passes], len(prompts): [p for run in batched for p in run.passes]},
        [text for check in checks for text in _broken(sides.plain, workload, cell, check)],
    )


def run_plain(
    model: reference.PlainModel, workload: Workload, prompt: list[int], cache: CacheMode, *, margins: bool = False
) -> reference.Decoded:
    """One request on the reference."""
    return reference.decode(
        model,
        prompt,
        max_tokens=workload.output_tokens,
        block_size=workload.block_size,
        cache=cache,
        choice=Threshold(workload.threshold),
        num_blocks=blocks_measured(workload, cache),
        margins=margins,
    )


def run_ours(engine: Engine, workload: Workload, prompts: Sequence[list[int]], cache: CacheMode) -> Ours:
    """Requests that are admitted at once."""
    started = time.perf_counter()
    ids = [str(number) for number in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.admit(workload.job(request_id, prompt, cache))
    outputs: dict[str, list[int]] = {}
    results = []
    for result in _steps(engine):
        results.append(result)
        for step in result.requests:
            if step.block_done and step.block_index + 1 == blocks_measured(workload, cache):
                outputs[step.request_id] = engine.output_ids(step.request_id)
                engine.remove(step.request_id)
    seconds = time.perf_counter() - started
    rows = [step.num_rows for result in results for step in result.requests]
    return Ours(seconds, rows, [outputs[request_id] for request_id in ids], [_pass(result) for result in results])


def blocks_measured(workload: Workload, cache: CacheMode) -> int:
    """How many of a request's blocks are decoded (rule 4)."""
    return 1 if cache == "none" else workload.num_blocks


def _steps(engine: Engine) -> Iterator[StepResult]:
    while (result := engine.step()).requests:
        yield result


def _pass(result: StepResult) -> Pass:
    kinds = {step.kind for step in result.requests}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"
    return Pass(kind, result.forward_s, result.commit_s, result.total_s - result.forward_s - result.commit_s)


def compare(
    cell: Cell, batch: int, runs: list[Ours], plain_step_s: dict[int, list[float]], agreement: list[float]
) -> Comparison:
    """Medians over runs with one batch size; `plain_step_s` are the reference's times of a step, by rows (rule 3)."""
    step_s = {rows: statistics.median(seconds) for rows, seconds in plain_step_s.items()}
    tokens = [sum(map(len, run.outputs)) for run in runs]
    plain_s = [sum(step_s[rows] for rows in run.step_rows) for run in runs]
    return Comparison(
        cell=cell,
        batch=batch,
        repeats=len(runs),
        plain_tokens_per_s=statistics.median(n / s for n, s in zip(tokens, plain_s, strict=True)),
        ours_tokens_per_s=statistics.median(n / run.seconds for n, run in zip(tokens, runs, strict=True)),
        speedup=statistics.median(s / run.seconds for s, run in zip(plain_s, runs, strict=True)),
        tokens_per_step=sum(tokens) / sum(len(run.step_rows) for run in runs),
        agreement=statistics.fmean(agreement),
    )


def _warm_up(sides: Sides, workload: Workload, cache: CacheMode) -> dict[int, float]:
    """Two steps of each measured block on the reference, a recompute and a cache step on ours.

    Returns the reference's time of a step by rows: for the passes that none of the measured runs happens to make.
    """
    prompt = workload.prompts()[0]
    decoded = reference.decode(
        sides.plain,
        prompt,
        max_tokens=workload.output_tokens,
        block_size=workload.block_size,
        cache=cache,
        choice=FixedSchedule(2 * workload.num_blocks),
        num_blocks=blocks_measured(workload, cache),
    )
    job = workload.job("warm up", prompt, cache)
    sides.engine.admit(job)
    for _ in range(2):
        sides.engine.step()
    sides.engine.remove(job.request_id)
    return {step.num_rows: step.seconds for step in reversed(decoded.steps)}


# --- the same tokens ----------------------------------------------------------------------------------------------


class _Check(NamedTuple):
    """The outputs for one prompt."""

    number: int
    plain: list[int]
    alone: list[int]
    batched: list[int]

    def agreement(self, ours: list[int]) -> float:
        """Share of the positions with the same token."""
        return statistics.fmean(a == b for a, b in zip(self.plain, ours, strict=True))


def _broken(plain: reference.PlainModel, workload: Workload, cell: Cell, check: _Check) -> list[str]:
    if cell.dtype != "float32" or check.plain == check.alone == check.batched:
        return []
    margin = run_plain(plain, workload, workload.prompts()[check.number], cell.cache, margins=True).margin
    if margin < TOO_CLOSE:
        return []
    return [f"{cell.cache}, {cell.threads} threads, prompt {check.number}: other tokens, closest decision {margin:.1e}"]
