"""`python -m tools.experiments rates`: the paper's experiments in the simulator, beside the published figures."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.settings import ConfigError
from tools.experiments import rates, report

ROOT = Path(__file__).parents[2]


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line (or these words) and run the experiment."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments", description=__doc__)
    commands = parser.add_subparsers(required=True)
    _add_rates(commands)
    arguments = parser.parse_args(words)
    try:
        arguments.run(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def _add_rates(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("rates", help="attainment and accuracy over the rate on GSM8K; can be resumed")
    parser.add_argument("--models", type=_words, default=tuple(rates.MODELS), help="of llada, dream (default: both)")
    parser.add_argument("--systems", type=_words, default=rates.SYSTEMS, help=f"(default: {','.join(rates.SYSTEMS)})")
    parser.add_argument("--rates", type=_numbers, help="per second and GPU (default: the published ones)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each (default: 1)")
    parser.add_argument("--requests", type=int, default=rates.REQUESTS, help="of each run (default: %(default)s)")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of RESULTS.md (default: docs)")
    parser.add_argument(
        "--report-only", action="store_true", help="run nothing; RESULTS.md from the rows that are there"
    )
    parser.set_defaults(run=_rates)


def _rates(arguments: argparse.Namespace) -> None:
    if unknown := [name for name in arguments.models if name not in rates.MODELS]:
        raise ConfigError(f"models: {unknown[0]!r} is not of {', '.join(rates.MODELS)}")
    path = arguments.docs / "results" / "gsm8k-rates.csv"
    for name in arguments.models if not arguments.report_only else ():
        model = rates.MODELS[name]
        rates.sweep(
            model,
            path,
            systems=arguments.systems,
            rates=arguments.rates or model.rates,
            seeds=range(arguments.seeds),
            requests=arguments.requests,
            on_cell=_teller(),
        )
    write_report(arguments.docs, rates.read_cells(path))


def write_report(docs: Path, cells: Sequence[rates.Cell]) -> None:
    """RESULTS.md and its plots. Raises ConfigError where there is nothing to report."""
    if not cells:
        raise ConfigError("there are no rows yet: run without --report-only")
    published = rates.read_published()
    (docs / "RESULTS.md").write_text(report.results_text(cells, published), encoding="utf-8")
    for name, model in rates.MODELS.items():
        if ours := [cell for cell in cells if cell.model == model.name]:
            report.draw(model, ours, published if name == "llada" else None, docs / "results" / report.plot_name(model))


def _teller() -> "Callable[[rates.Cell], None]":
    started = time.monotonic()

    def tell(cell: rates.Cell) -> None:
        seconds = time.monotonic() - started
        in_time = "-" if cell.attainment is None else f"{100 * cell.attainment:.1f}%"
        text = f"{seconds:5.0f} s  {cell.model} {cell.system} at {cell.rate:g}, seed {cell.seed}: {in_time} in time"
        print(text, file=sys.stderr, flush=True)

    return tell


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between them") from None


if __name__ == "__main__":
    main()
