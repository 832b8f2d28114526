"""`python -m tools.experiments diurnal`, `layouts`; and their part of `all`."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from services.settings import ConfigError
from tools.experiments import diurnal, diurnal_layouts, diurnal_report, sweep
from tools.experiments.cells import code_digest
from tools.experiments.diurnal import Errand, Run, Variant
from tools.experiments.diurnal_layouts import Window
from tools.experiments.sweep import Work

ROOT = Path(__file__).parents[2]
LONGEST = 120  # minutes of the trace
Write = Callable[[Path], object]
_TAKES = {"tedi": 4, "paper": 4}  # by system: before and after all else


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", write: Write, tell: sweep.Tell
) -> None:
    """`write`: what makes RESULTS.md, in the folder that it is given."""
    names = ",".join(variant.name for variant in diurnal.VARIANTS)
    trace = commands.add_parser("diurnal", help="the two-hour trace, with a layout that follows the load")
    trace.add_argument("--minutes", type=int, default=LONGEST, help="of the trace, from its beginning (default: 120)")
    trace.add_argument("--variants", default=names, help=f"(default: {names})")
    trace.add_argument("--seeds", type=int, default=1, help="runs of each (default: 1)")
    layouts = commands.add_parser("layouts", help="what layouts the planner makes of that trace at other peak rates")
    for parser, works in ((trace, _trace_works), (layouts, lambda arguments: layouts_works(arguments.docs))):
        parser.add_argument("--processes", type=int, default=2, help="(default: 2)")
        parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of RESULTS.md (default: docs)")
        parser.set_defaults(run=partial(_run, works, write, tell))


def _run(
    works: Callable[[argparse.Namespace], list[Work]], write: Write, tell: sweep.Tell, arguments: argparse.Namespace
) -> None:
    """Raises ConfigError."""
    sweep.run_all(works(arguments), arguments.processes, tell)
    write(arguments.docs)


def _trace_works(arguments: argparse.Namespace) -> list[Work]:
    by_name = {variant.name: variant for variant in diurnal.VARIANTS}
    chosen = [name for name in arguments.variants.split(",") if name]
    if unknown := [name for name in chosen if name not in by_name]:
        raise ConfigError(f"variants: {unknown[0]!r} is not of {', '.join(by_name)}")
    return trace_works(arguments.docs, arguments.minutes, [by_name[name] for name in chosen], arguments.seeds)


def trace_works(
    docs: Path, minutes: int, variants: Sequence[Variant] = diurnal.MAIN, seeds: int = 1, *, anew: bool = False
) -> list[Work]:
    """What the file of runs lacks. Raises ConfigError."""
    if not 1 <= minutes <= LONGEST:
        raise ConfigError(f"minutes: {minutes} is not from 1 to {LONGEST}")
    path, code = docs / "results" / diurnal_report.RUNS, code_digest(layouts=True)
    errands = [Errand(variant, minutes, seed) for seed in range(seeds) for variant in variants]
    return [
        Work(diurnal.run, (errand, code), partial(_keep_run, path), _TAKES.get(errand.variant.system, 1))
        for errand in diurnal.missing(path, errands, code, anew=anew)
    ]


def layouts_works(docs: Path) -> list[Work]:
    """What the file of layouts lacks. Raises ConfigError."""
    path, code = docs / "results" / diurnal_report.LAYOUTS, code_digest(layouts=True)
    return [
        Work(diurnal_layouts.run, (peak, code), partial(_keep_windows, path))
        for peak in diurnal_layouts.missing(path, code)
    ]


def _keep_run(path: Path, made: Run) -> str:
    diurnal.add_run(path, made)
    share, seed = made.periods["all"].attainment, made.seed
    return f"two hours, {made.minutes} minutes, seed {seed}: {made.variant} {share:.1%} in time"


def _keep_windows(path: Path, made: list[Window]) -> str:
    diurnal_layouts.add_windows(path, made)
    return f"layouts, peak {made[0].peak_rps} requests/s: {made[-1].layout} at last"
