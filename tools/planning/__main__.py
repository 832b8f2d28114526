"""python -m tools.planning PROBLEM CURVE: what the reconfigurator would do over a day of request rates."""

import argparse
import sys
from pathlib import Path

from services.reconfigurator.report import load_problem
from services.settings import ConfigError
from tools.planning.draw import draw, table
from tools.planning.follow import follow, read_curve, scaled_to


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.planning", description=__doc__)
    parser.add_argument("problem", type=Path, help="problem file (docs/planning.md); the curve sets its rates")
    parser.add_argument("curve", type=Path, help="CSV with the columns start_s and total_rps")
    parser.add_argument("--peak", type=float, required=True, help="requests a second at the curve's highest point")
    parser.add_argument("--day", type=int, default=0, help="of the curve (default: %(default)s, the first)")
    parser.add_argument("--days", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="SVG file to draw")
    arguments = parser.parse_args()
    try:
        problem = load_problem(arguments.problem)
        curve = read_curve(arguments.curve, 86400.0 * arguments.day, 86400.0 * arguments.days)
        windows = list(follow(problem, scaled_to(curve, arguments.peak)))
    except ConfigError as error:
        print(f"planning: {error}", file=sys.stderr)
        sys.exit(2)
    print(table(windows))
    if arguments.out:
        draw(windows, arguments.out)


if __name__ == "__main__":
    main()
