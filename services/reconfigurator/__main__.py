"""`python -m services.reconfigurator`, or `python -m services.reconfigurator plan PROBLEM`."""

import argparse
import logging
import sys
from pathlib import Path

from services.settings import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.reconfigurator", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("serve", help="the service, as without a command; settings: [reconfigurator]")
    plan = commands.add_parser("plan", help="plan a layout from a problem file (docs/planning.md)")
    plan.add_argument("problem", type=Path, help="JSON: classes, thresholds, degrees, nodes, today's layout")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    arguments = parser.parse_args()
    try:
        if arguments.command == "plan":
            run_plan(arguments.problem, as_json=arguments.json)
        else:
            run_service()
    except ConfigError as error:
        print(f"{arguments.command or 'reconfigurator'}: {error}", file=sys.stderr)
        sys.exit(2)


# The solver is imported late: a mistake in the file is told without it.


def run_service() -> None:
    """Until asked to stop."""
    from services.reconfigurator.config import ReconfiguratorConfig
    from services.reconfigurator.service import make_serve
    from services.runtime import start

    start("reconfigurator", ReconfiguratorConfig, make_serve, words=())


def run_plan(path: Path, as_json: bool) -> None:
    """Prints a plan, and what other layouts could have reached. Raises ConfigError."""
    from services.reconfigurator import report
    from services.reconfigurator.policy import judge

    problem = report.load_problem(path)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    from services.reconfigurator.planning import alternatives, plan

    made = plan(problem)
    verdict = judge(problem, made)
    others = alternatives(problem)
    if as_json:
        print(report.as_json(problem, made, verdict, others).decode())
    else:
        print(report.as_text(problem, made, verdict, others), end="")


if __name__ == "__main__":
    main()
