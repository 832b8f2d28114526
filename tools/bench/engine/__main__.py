"""python -m tools.bench.engine: prints Markdown for BENCHMARKS.md.

Parts: `decode` (tokens per second against the plain reference, and how steps divide), `ranks` (two ranks against one),
`memory` (what the process takes against what it should), `products` (matrices with plain and with packed weights). Run
it on an otherwise idle machine; the ratios travel, the absolute numbers do not.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from services.denoiser.engine import CacheMode
from services.denoiser.loader import DTYPES
from tools.bench.engine import memory, parallel, products
from tools.bench.engine.decoding import Cell, CellResult, Comparison, Pass, load_sides, measure_cell
from tools.bench.engine.workload import Workload
from tools.bench.machine import describe_machine, describe_matrix_units, usable_cores

_PARTS = ("decode", "ranks", "memory", "products")
_CACHES: tuple[CacheMode, ...] = ("none", "prefix", "dual")
_HEAD_DIM = 64


def main() -> None:
    options = _options()
    workload = _workload(options, options.width)
    print(f"Hardware: {describe_machine()}; {describe_matrix_units()}.\n")
    print(f"{_describe(workload)}\n", flush=True)
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tediserve-bench-") as folder:
        model = workload.write_model(Path(folder) / "model")
        if "decode" in options.parts:
            broken += _decode(model, workload, options)
        if "memory" in options.parts:
            broken += _memory(model, workload, options.formats)
        if "products" in options.parts:
            _products(workload, options)
        if "ranks" in options.parts:
            _ranks(Path(folder), options)
    if broken:
        sys.exit("\n".join(broken))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.engine", description="Measures the engine.")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--caches", nargs="+", choices=_CACHES, default=_CACHES)
    parser.add_argument("--formats", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[n for n in (1, 2) if n <= usable_cores()])
    parser.add_argument("--repeats", type=int, default=3, help="of each comparison (default: %(default)s)")
    parser.add_argument(
        "--cell-limit-s", type=float, default=25.0, help="no more repeats after so long (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help=f"a multiple of {_HEAD_DIM} (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument(
        "--rank-widths", nargs="+", type=int, default=(512, 1024), help="of the models that two ranks share"
    )
    return parser.parse_args()


def _workload(options: argparse.Namespace, width: int) -> Workload:
    return Workload(
        num_layers=options.layers,
        width=width,
        num_heads=width // _HEAD_DIM,
        mlp_width=3 * width,
        vocab_size=options.vocabulary,
    )


def _describe(w: Workload) -> str:
    return (
        f"Model: LLaDA with random weights, {w.num_layers} layers, width {w.width}, {w.num_heads} heads, MLP "
        f"{w.mlp_width}, vocabulary {w.vocab_size}. The head is scaled so that a step commits about as many tokens as "
        f"a trained model's. Requests: prompt {w.prompt_tokens}, output {w.output_tokens}, block {w.block_size}, "
        f"threshold {w.threshold}. Batch {w.batch}: the engine takes them at once, the plain reference one by one."
    )


def _table(header: Sequence[str]) -> None:
    print(f"| {' | '.join(header)} |")
    print(f"|{'---|' * len(header)}", flush=True)


def _row(*values: object) -> None:
    print(f"| {' | '.join(map(str, values))} |", flush=True)


# --- tokens per second --------------------------------------------------------------------------------------------


def _decode(model: Path, workload: Workload, options: argparse.Namespace) -> list[str]:
    results: list[CellResult] = []
    speeds = ("plain tokens/s", "ours tokens/s", "speed-up")
    _table(("cache", "format", "threads", "batch", *speeds, "tokens a step", "same tokens", "repeats"))
    for dtype in options.formats:
        sides = load_sides(model, workload, dtype)
        for cache in options.caches:
            for threads in options.threads:
                cell = Cell(cache, dtype, threads)
                result = measure_cell(sides, workload, cell, repeats=options.repeats, limit_s=options.cell_limit_s)
                results.append(result)
                for comparison in (result.alone, result.batched):
                    _comparison_row(comparison)
    print("\nWhere a step of the engine spends its time, medians, in ms:\n")
    _division(results)
    return [text for result in results for text in result.broken]


def _comparison_row(c: Comparison) -> None:
    _row(
        *(c.cell.cache, c.cell.dtype, c.cell.threads, c.batch),
        *(f"{c.plain_tokens_per_s:.1f}", f"{c.ours_tokens_per_s:.1f}", f"**{c.speedup:.2f}**"),
        *(f"{c.tokens_per_step:.2f}", f"{c.agreement:.0%}", c.repeats),
    )


def _division(results: list[CellResult]) -> None:
    _table(("cache", "format", "threads", "batch", "step", "passes", "forward", "commit", "overhead"))
    for result in results:
        cell = result.alone.cell
        for batch, passes in result.passes.items():
            for kind in ("recompute", "mixed", "cache"):
                if of_kind := [p for p in passes if p.kind == kind]:
                    parts = [_median_ms(of_kind, part) for part in (_forward, _commit, _overhead)]
                    _row(cell.cache, cell.dtype, cell.threads, batch, kind, len(of_kind), *parts)
    print(flush=True)


def _median_ms(passes: list[Pass], part: Callable[[Pass], float]) -> str:
    return f"{1e3 * statistics.median(map(part, passes)):.2f}"


def _forward(p: Pass) -> float:
    return p.forward_s


def _commit(p: Pass) -> float:
    return p.commit_s


def _overhead(p: Pass) -> float:
    return p.overhead_s


# --- memory -------------------------------------------------------------------------------------------------------


def _memory(model: Path, workload: Workload, formats: list[str]) -> list[str]:
    print(
        "Anonymous memory that the model, an engine and its first passes add to a process after its imports, in MiB:\n"
    )
    header = ("format", "weights", "pool", "activations", "expected", "measured", "against expected", "peak of loading")
    _table(header)
    broken = []
    for dtype in formats:
        measured = memory.measure(model, workload, dtype)
        expected = memory.expected(workload, DTYPES[dtype], measured)
        ratio = measured.after_passes / expected.total
        amounts = (*expected, expected.total, measured.after_passes)
        _row(
            dtype, *(f"{n / 2**20:.0f}" for n in amounts), f"{ratio - 1:+.1%}", f"{measured.while_loading / 2**20:.0f}"
        )
        if abs(ratio - 1) > memory.TOLERANCE:
            broken.append(f"{dtype}: memory is {ratio - 1:+.1%} off, more than {memory.TOLERANCE:.0%}")
    print(flush=True)
    return broken


# --- products -----------------------------------------------------------------------------------------------------


def _products(workload: Workload, options: argparse.Namespace) -> None:
    print("All matrix products of the layers once, and what is left of them in memory:\n")
    _table(("format", "threads", "weights", "rows", "ms a pass", "MiB left"))
    for threads in options.threads:
        for p in products.measure(workload, options.formats, threads):
            _row(p.dtype, threads, p.weights, p.rows, f"{1e3 * p.seconds:.2f}", f"{p.left_bytes / 2**20:.0f}")
    print(flush=True)


# --- two ranks ----------------------------------------------------------------------------------------------------


def _ranks(folder: Path, options: argparse.Namespace) -> None:
    print("Two ranks against one, one thread each, one request, medians in ms:\n")
    _table(("width", "format", "step", "rows", "1 rank", "2 ranks", "speed-up"))
    for width in options.rank_widths:
        workload = _workload(options, width)
        model = workload.write_model(folder / f"width-{width}")
        for s in parallel.measure(model, workload, options.formats, repeats=7):
            ratio = s.alone_s / s.shared_s
            _row(
                width, s.dtype, s.kind, s.rows, f"{1e3 * s.alone_s:.1f}", f"{1e3 * s.shared_s:.1f}", f"**{ratio:.2f}**"
            )
    print(flush=True)


if __name__ == "__main__":
    main()
