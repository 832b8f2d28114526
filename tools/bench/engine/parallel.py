"""One step of a model on two ranks against the same step on one, with one thread a rank.

Both run in the same processes, step by step in turns: rank 1 waits while rank 0 runs the whole model alone.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from services.denoiser.batching import StepKind
from services.denoiser.engine import Engine, EngineConfig, FixedSchedule
from services.denoiser.loader import load_model
from services.denoiser.parallel import Ranks
from services.denoiser.shared_memory import SharedMemoryRanks
from tools.bench.engine.workload import Workload

NUM_RANKS = 2
_LIMIT_S = 120.0  # of one collective
_SETTLING_STEPS = 2  # not counted


class Step(NamedTuple):
    """Medians of one kind of step of one request."""

    dtype: str
    kind: StepKind
    rows: int
    alone_s: float
    shared_s: float


def measure(folder: Path, workload: Workload, dtypes: list[str], *, repeats: int) -> list[Step]:
    """Starts the ranks, has them measure, and returns what rank 0 saw."""
    processes = ProcessPoolExecutor(NUM_RANKS, mp_context=multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory(prefix="tediserve-bench-") as meeting, processes:
        plan = _Plan(str(folder), meeting, workload, dtypes, repeats)
        ranks = [processes.submit(_run_rank, rank, plan) for rank in range(NUM_RANKS)]  # each waits for the other
        of_rank_0, *_ = [rank.result() for rank in ranks]
        return of_rank_0


class _Plan(NamedTuple):
    folder: str
    meeting: str  # folder in which the ranks find each other
    workload: Workload
    dtypes: list[str]
    repeats: int


def _run_rank(rank: int, plan: _Plan) -> list[Step]:
    torch.set_num_threads(1)
    ranks = SharedMemoryRanks(rank, NUM_RANKS, folder=Path(plan.meeting), limit_s=_LIMIT_S)
    try:
        return [step for dtype in plan.dtypes for step in _measure_dtype(ranks, plan, dtype)]
    finally:
        ranks.close()


def _measure_dtype(ranks: Ranks, plan: _Plan, dtype: str) -> list[Step]:
    config = EngineConfig(kv_budget_tokens=plan.workload.canvas_tokens)
    shared = Engine(load_model(plan.folder, dtype=dtype, ranks=ranks), config=config)
    alone = Engine(load_model(plan.folder, dtype=dtype), config=config) if ranks.rank == 0 else None
    return [_measure_kind(ranks, alone, shared, plan, dtype, kind) for kind in _KINDS]


_KINDS: tuple[StepKind, ...] = ("recompute", "cache")


def _measure_kind(ranks: Ranks, alone: Engine | None, shared: Engine, plan: _Plan, dtype: str, kind: StepKind) -> Step:
    block = plan.workload.block_size
    job = plan.workload.job("only", plan.workload.prompts()[0], "none" if kind == "recompute" else "dual")
    job = msgspec.structs.replace(job, choice=FixedSchedule(job.num_blocks * block))  # a token a step: many steps alike
    engines = [engine for engine in (alone, shared) if engine is not None]
    for engine in engines:
        engine.admit(job)
    times: dict[str, list[float]] = {"alone": [], "shared": []}
    rows = 0
    for number in range(min(_SETTLING_STEPS + plan.repeats, block)):
        if alone is not None:
            times["alone"].append(_seconds(alone.step))
        ranks.all_reduce_(torch.zeros(1))  # rank 1 has waited here
        began = time.perf_counter()
        result = shared.step()
        times["shared"].append(time.perf_counter() - began)
        rows = result.tokens_in_pass
        assert number == 0 or result.requests[0].kind == kind
    for engine in engines:
        engine.remove(job.request_id)
    alone_s, shared_s = (statistics.median(seconds[_SETTLING_STEPS:]) if seconds else 0.0 for seconds in times.values())
    return Step(dtype, kind, rows, alone_s, shared_s)


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
