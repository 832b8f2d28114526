"""What the matrix products of a pass take: bfloat16 with plain and with packed weights, and float32 (linears.py).

1. All matrices of all layers once, so that weights come from memory as in a pass.
2. With the same number of rows again and again (median), and with another number each time, as in serving (mean).
3. Each in a process of its own: what is left of it in that process's memory counts too.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from random import Random
from typing import Literal, NamedTuple, TypeAlias

import torch

from services.denoiser.linears import PackedLinear, PlainLinear, linear_on_cpu
from services.denoiser.loader import DTYPES
from tools.bench.engine.memory import anonymous_bytes
from tools.bench.engine.workload import Workload

Weights: TypeAlias = Literal["plain", "packed"]

SAME_ROWS = (32, 256, 384)  # a cache step, eight of them, a recompute step
OTHER_ROWS = tuple(Random(0).choices(range(1, 513), k=600))  # any that a pass may have
_PASSES = 20
_LIMIT_S = 300.0


class Products(NamedTuple):
    """Of one pass."""

    dtype: str
    weights: Weights
    rows: str
    seconds: float
    left_bytes: int  # more anonymous memory after all passes


def measure(workload: Workload, dtypes: Sequence[str], threads: int) -> Iterator[Products]:
    """Both kinds of weights where the format has both here."""
    for dtype in dtypes:
        kinds: list[Weights] = ["plain"]
        if linear_on_cpu(DTYPES[dtype]) is PackedLinear:
            kinds.append("packed")
        for rows in (*((number,) for number in SAME_ROWS), OTHER_ROWS):
            for kind in kinds:
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                    yield process.submit(_measure, workload, dtype, kind, rows, threads).result(_LIMIT_S)


@torch.inference_mode()
def _measure(w: Workload, dtype: str, kind: Weights, rows: tuple[int, ...], threads: int) -> Products:
    torch.set_num_threads(threads)
    make = PackedLinear if kind == "packed" else PlainLinear
    sizes = ((3 * w.width, w.width), (w.width, w.width), (2 * w.mlp_width, w.width), (w.width, w.mlp_width))
    layers = [[(make(torch.ones(*size, dtype=DTYPES[dtype])), size[1]) for size in sizes] for _ in range(w.num_layers)]

    def run(number: int) -> float:
        inputs = {columns: torch.ones(number, columns, dtype=DTYPES[dtype]) for columns in (w.width, w.mlp_width)}
        began = time.perf_counter()
        for layer in layers:
            for linear, columns in layer:
                linear(inputs[columns])
        return time.perf_counter() - began

    run(1)
    before = anonymous_bytes()
    if len(rows) == 1:
        told, seconds = str(rows[0]), statistics.median([run(number) for number in rows * _PASSES])
    else:
        told, seconds = f"{min(rows)} to {max(rows)}, {len(rows)} passes", statistics.fmean(map(run, rows))
    return Products(dtype, kind, told, seconds, anonymous_bytes() - before)
