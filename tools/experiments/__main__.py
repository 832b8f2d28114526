"""`python -m tools.experiments all`: the paper's experiments in the simulator, beside the published figures.

Rows lie in docs/results, docs/RESULTS.md is made of them. What is interrupted goes on where it was; rows of other code
than today's are run anew.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from services.settings import ConfigError
from tools.experiments import diurnal_command, plan, report, sweep, validate
from tools.experiments.plan import BY_NAME, EXPERIMENTS, Point
from tools.experiments.recordings import ROOT
from tools.experiments.setups import SETUPS
from tools.traces.recorder import ProcessLost


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line (or these words) and run the command."""
    arguments = _parser().parse_args(words)
    try:
        arguments.run(arguments)
    except (ConfigError, ProcessLost) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    _add_sweep(commands, "all", "all of them, one after the other")
    for experiment in EXPERIMENTS:
        _add_sweep(commands, experiment.name, experiment.title.lower())
    only = commands.add_parser("report", help="docs/RESULTS.md from the rows that there are")
    only.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder (default: docs)")
    only.set_defaults(run=lambda arguments: report.write(arguments.docs))
    validate.add_command(commands)
    diurnal_command.add_command(commands, report.write, _tell)
    return parser


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _add_sweep(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, about: str) -> None:
    parser = commands.add_parser(name, help=about)
    add = parser.add_argument
    add("--setups", type=_words, default=tuple(SETUPS), metavar="A,B", help=f"of {', '.join(SETUPS)} (default: all)")
    add("--systems", type=_words, metavar="A,B", help="(default: all of the experiment)")
    add("--seeds", type=int, default=5, help="at most so many runs of each (default: 5)")
    add("--requests", type=int, help="of each run, at most (default: as many as the paper)")
    add("--anew", action="store_true", help="also what is there of today's code")
    add("--processes", type=int, default=2, help="(default: 2)")
    add("--docs", type=Path, default=ROOT / "docs", help="folder of RESULTS.md (default: docs)")
    if name == "all":
        add("--minutes", type=int, default=120, help="of the two-hour trace; 0: leave it out (default: 120)")
    parser.set_defaults(run=_sweep, experiment=name)


def _sweep(arguments: argparse.Namespace) -> None:
    experiments = EXPERIMENTS if arguments.experiment == "all" else (BY_NAME[arguments.experiment],)
    _check(arguments, experiments)

    def is_wanted(point: Point) -> bool:
        systems = arguments.systems or (point.system,)
        return point.setup in arguments.setups and point.system in systems and point.seed < arguments.seeds

    works = sweep.point_works(
        experiments,
        arguments.docs / "results",
        requests=arguments.requests,
        is_wanted=is_wanted,
        anew=arguments.anew,
    )
    if arguments.experiment == "all" and arguments.minutes:
        works += diurnal_command.trace_works(arguments.docs, arguments.minutes, anew=arguments.anew)
        works += diurnal_command.layouts_works(arguments.docs)
    sweep.run_all(works, arguments.processes, _tell)
    report.write(arguments.docs)


def _check(arguments: argparse.Namespace, experiments: Sequence[plan.Experiment]) -> None:
    """Raises ConfigError."""
    known = {point.system for experiment in experiments for point in experiment.points()}
    for name, chosen, all_names in (
        ("setups", arguments.setups, SETUPS),
        ("systems", arguments.systems or (), sorted(known)),
    ):
        if unknown := [word for word in chosen if word not in all_names]:
            raise ConfigError(f"{name}: {unknown[0]!r} is not of {', '.join(all_names)}")
    for name in ("seeds", "processes", "requests"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"{name}: {value} is not positive")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


if __name__ == "__main__":
    main()
