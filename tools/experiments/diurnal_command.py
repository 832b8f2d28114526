"""`python -m tools.experiments diurnal`, `layouts`."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.settings import ConfigError
from tools.experiments import diurnal, diurnal_layouts, diurnal_report
from tools.experiments.diurnal_layouts import Window

ROOT = Path(__file__).parents[2]
Write = Callable[[Path], object]


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", write: Write) -> None:
    """`write`: what makes RESULTS.md, in the folder that it is given."""
    names = ",".join(variant.name for variant in diurnal.VARIANTS)
    parser = commands.add_parser("diurnal", help="the two-hour trace, with a layout that follows the load")
    parser.add_argument("--minutes", type=int, default=120, help="of the trace, from its beginning (default: 120)")
    parser.add_argument("--variants", default=names, help=f"(default: {names})")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each (default: 1)")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of RESULTS.md (default: docs)")
    parser.set_defaults(run=lambda arguments: _run_diurnal(arguments, write))
    layouts = commands.add_parser("layouts", help="what layouts the planner makes of that trace at other peak rates")
    layouts.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of RESULTS.md (default: docs)")
    layouts.set_defaults(run=lambda arguments: _run_layouts(arguments, write))


def _run_diurnal(arguments: argparse.Namespace, write: Write) -> None:
    """Raises ConfigError."""
    last = len(diurnal.read_published().arrivals_rps)
    if not 1 <= arguments.minutes <= last:
        raise ConfigError(f"minutes: {arguments.minutes} is not from 1 to {last}")
    by_name = {variant.name: variant for variant in diurnal.VARIANTS}
    chosen = [name for name in arguments.variants.split(",") if name]
    if unknown := [name for name in chosen if name not in by_name]:
        raise ConfigError(f"variants: {unknown[0]!r} is not of {', '.join(by_name)}")
    began = time.monotonic()

    def tell(run: diurnal.Run) -> None:
        seconds, all_ = time.monotonic() - began, run.periods["all"]
        text = f"{seconds:5.0f} s  {run.variant}, {run.minutes} minutes, seed {run.seed}: {all_.attainment:.1%} in time"
        print(text, file=sys.stderr, flush=True)

    path = arguments.docs / "results" / diurnal_report.RUNS
    variants = [by_name[name] for name in chosen]
    diurnal.run_missing(path, variants, arguments.minutes, range(arguments.seeds), tell)
    write(arguments.docs)


def _run_layouts(arguments: argparse.Namespace, write: Write) -> None:
    def tell(window: Window) -> None:
        text = f"peak {window.peak_rps} requests/s, window {window.number}: {window.layout}, {window.reason}"
        print(text, file=sys.stderr, flush=True)

    diurnal_layouts.run_missing(arguments.docs / "results" / diurnal_report.LAYOUTS, tell)
    write(arguments.docs)
