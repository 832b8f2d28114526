"""The reconfigurator's policy and planner over a curve of rates, on a virtual clock.

1. The classes of a problem keep their proportions; their rates together follow the curve.
2. Each period the policy sees the rate of that time, and the planner answers. What is adopted runs at once.
3. A reversal is a change back to the layout before last, within `REVERSAL_S` of leaving it: flapping.
"""

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from services.reconfigurator.plan import Figures, Layout, Plan
from services.reconfigurator.planning import plan
from services.reconfigurator.policy import Adopt, Keep, MakePlan, PlanMade, ProblemSeen, Reconfigurator, Tick, Verdict
from services.reconfigurator.problem import Instance, Problem
from services.settings import ConfigError

REVERSAL_S = 3600.0


class Rate(NamedTuple):
    """A point of the curve."""

    at_s: float
    per_s: float


class Window(NamedTuple):
    """What was decided at a time."""

    at_s: float
    rate_per_s: float
    verdict: Verdict
    layout: Layout  # after the decision
    figures: Figures | None  # that the layout reaches at this rate, where they are known


def read_curve(path: Path, from_s: float, length_s: float) -> list[Rate]:
    """Points of a CSV file with the columns start_s and total_rps, times from the first one on. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = [Rate(float(row["start_s"]), float(row["total_rps"])) for row in csv.DictReader(lines)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a CSV file with numbers in columns start_s and total_rps: {error}") from None
    curve = [Rate(row.at_s - from_s, row.per_s) for row in rows if from_s <= row.at_s < from_s + length_s]
    if not curve:
        raise ConfigError(f"{path} has no row from {from_s:g} s on")
    return curve


def scaled_to(curve: Sequence[Rate], peak_per_s: float) -> list[Rate]:
    """The curve's shape, with another peak."""
    highest = max(rate.per_s for rate in curve)
    return [Rate(rate.at_s, rate.per_s * peak_per_s / highest) for rate in curve]


def follow(problem: Problem, curve: Sequence[Rate]) -> Iterator[Window]:
    """One window a point of the curve."""
    period_s = curve[1].at_s - curve[0].at_s if len(curve) > 1 else 1.0
    policy = Reconfigurator(period_s)
    names = (f"i{number}" for number in itertools.count())
    policy.handle(ProblemSeen(at_rate(problem, curve[0].per_s)), curve[0].at_s - period_s)
    for rate in curve:
        problem = at_rate(problem, rate.per_s)
        policy.handle(ProblemSeen(problem), rate.at_s)
        (made, decided) = _decide(policy, problem, rate.at_s)
        if isinstance(decided, Adopt):
            problem = replace(problem, today=_running(made, names))
            policy.handle(ProblemSeen(problem), rate.at_s)
        figures = made.figures if made.layout == problem.layout_today else made.today
        yield Window(rate.at_s, rate.per_s, decided.verdict, problem.layout_today, figures)


def _decide(policy: Reconfigurator, problem: Problem, now: float) -> tuple[Plan, Adopt | Keep]:
    asked = [command for command in policy.handle(Tick(), now) if isinstance(command, MakePlan)]
    asked = asked or [MakePlan(problem)]
    made = plan(asked[0].problem)
    (decided,) = (c for c in policy.handle(PlanMade(asked[0].problem, made), now) if isinstance(c, Adopt | Keep))
    return made, decided


def _running(made: Plan, names: Iterator[str]) -> tuple[Instance, ...]:
    """The plan's instances, the new ones with new names."""
    return tuple(
        Instance(instance_id=one.instance_id or next(names), node_id=one.node_id, devices=one.devices)
        for one in made.instances
    )


def at_rate(problem: Problem, rate_per_s: float) -> Problem:
    """Rule 1. Raises ConfigError for a problem without requests."""
    total = sum(one.rate_per_s for one in problem.classes)
    if total <= 0:
        raise ConfigError("classes: at least one needs a rate_per_s above 0, for the proportions")
    scaled = tuple(replace(one, rate_per_s=one.rate_per_s * rate_per_s / total) for one in problem.classes)
    return replace(problem, classes=scaled)


def changes(windows: Sequence[Window]) -> list[Window]:
    """Those that changed the layout, but for the first one."""
    return [window for window in windows[1:] if window.verdict.change]


def reversals(windows: Sequence[Window]) -> int:
    """Rule 3."""
    runs = [(next(group), layout) for layout, group in itertools.groupby(windows, key=lambda window: window.layout)]
    return sum(
        layout == before_last and window.at_s - left.at_s < REVERSAL_S
        for (_, before_last), (left, _), (window, layout) in zip(runs, runs[1:], runs[2:], strict=False)
    )
