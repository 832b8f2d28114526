"""From a problem to a plan: both stages, and what is planned where the stages have no answer.

1. No requests: today's layout stays.
2. Classes that no batch holds are left out; a promise that a class could not keep even alone is taken back, and the rest
   is planned as usual. The plan names them.
3. No layout keeps all promises within stability: all instances at the lowest TP degree, which carries the most load. The
   plan says whether it is the load, or whose promises stand in the way.
4. No answer in time: today's layout stays. An answer that time has cut short is used, with its gap.
5. What today's layout could reach is worked out beside it, with the same promises, so that the two can be compared.
"""

import time
from typing import Literal, NamedTuple

from services.reconfigurator.capacity import (
    Capacity,
    Figures,
    Layout,
    broken_promises,
    figures_of,
    most_instances,
    plan_capacity,
)
from services.reconfigurator.demand import Demand, Workload, workload_of
from services.reconfigurator.milp import Solver, solver_named
from services.reconfigurator.placement import Placed, place
from services.reconfigurator.problem import Problem

Outcome = Literal[
    "planned",
    "no_requests",  # rule 1
    "overload",  # rule 3: too many requests, whatever was promised
    "broken_promises",  # rule 3: too many requests for what was promised
    "out_of_time",  # rule 4
]


class Plan(NamedTuple):
    """What should run, and why."""

    outcome: Outcome
    layout: Layout
    instances: tuple[Placed, ...]
    figures: Figures | None  # none: without requests, or more than the layout can carry
    today: Figures | None  # of today's layout; none: it breaks a promise, or is overloaded
    because: str
    softened: tuple[str, ...] = ()
    too_long: tuple[str, ...] = ()
    gap: float = 0.0
    proven: bool = True  # no layout is better
    solver: str = ""
    seconds: float = 0.0  # stages 1 and 2

    @property
    def kept(self) -> int:
        """Instances that run on as they are."""
        return sum(bool(one.instance_id) for one in self.instances)


class Alternative(NamedTuple):
    """A layout that was not asked for, and what it could reach."""

    name: str
    layout: Layout
    figures: Figures | None


def plan(problem: Problem) -> Plan:
    """The best layout and its placement. Raises SolverFault."""
    started = time.monotonic()
    solver = solver_named(problem.planning.solver)
    workload = workload_of(problem)
    if not workload.demands:
        return _as_today(problem, workload, "no_requests", "no class has requests")
    clock = _Clock(started, problem.planning.time_limit_s)
    capacity = plan_capacity(problem, workload.demands, solver, clock.left_s)
    if capacity.status == "none":
        return _as_today(
            problem, workload, "out_of_time", f"no layout was found in {problem.planning.time_limit_s:g} s"
        )
    if capacity.status == "infeasible":
        planned = _lowest_degree(problem, workload, solver, clock)
    else:
        planned = _planned(problem, workload, capacity)
    instances = place(problem, planned.layout, solver, clock.left_s)
    if instances is None:
        return _as_today(problem, workload, "out_of_time", "no placement was found in time")
    planned = planned._replace(instances=instances, seconds=clock.passed_s)
    return planned._replace(today=_today(problem, workload.demands, planned, solver))


def alternatives(problem: Problem) -> tuple[Alternative, ...]:
    """What other layouts could reach: today's, and each TP degree alone. Raises SolverFault."""
    demands = workload_of(problem).demands
    solver = solver_named(problem.planning.solver)
    layouts = {"today": problem.layout_today} if problem.today else {}
    layouts |= {f"all TP-{degree}": {degree: most_instances(problem, degree)} for degree in problem.usable_degrees}
    limit_s = problem.planning.time_limit_s
    return tuple(
        Alternative(name, layout, figures_of(problem, demands, layout, solver, limit_s) if demands else None)
        for name, layout in layouts.items()
    )


class _Clock:
    """How much of the time limit is left."""

    def __init__(self, started: float, limit_s: float) -> None:
        self._started = started
        self._limit_s = limit_s

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        return self._limit_s - self.passed_s


def _as_today(problem: Problem, workload: Workload, outcome: Outcome, because: str) -> Plan:
    instances = tuple(sorted(Placed(one.node_id, one.devices, one.instance_id) for one in problem.today))
    return Plan(
        outcome=outcome,
        layout=problem.layout_today,
        instances=instances,
        figures=None,
        today=None,
        because=because,
        softened=workload.softened,
        too_long=workload.too_long,
        proven=outcome != "out_of_time",
    )


def _planned(problem: Problem, workload: Workload, capacity: Capacity) -> Plan:
    return Plan(
        outcome="planned",
        layout=capacity.layout,
        instances=(),
        figures=capacity.figures,
        today=None,
        because="highest threshold, then lowest latency, of all layouts",
        softened=workload.softened,
        too_long=workload.too_long,
        gap=capacity.gap,
        proven=capacity.status == "optimal",
        solver=capacity.solver,
    )


def _lowest_degree(problem: Problem, workload: Workload, solver: Solver, clock: _Clock) -> Plan:
    """Rule 3."""
    degree = problem.usable_degrees[0]
    layout = {degree: most_instances(problem, degree)}
    broken = broken_promises(problem, workload.demands, solver, clock.left_s)
    promised = _without_promises(workload.demands)
    return Plan(
        outcome="broken_promises" if broken else "overload",
        layout=layout,
        instances=(),
        figures=figures_of(problem, promised, layout, solver, clock.left_s),
        today=None,
        because=_why_infeasible(problem, workload.demands, layout, broken),
        softened=workload.softened,
        too_long=workload.too_long,
        solver=solver.name,
    )


def _why_infeasible(
    problem: Problem, demands: tuple[Demand, ...], layout: Layout, broken: tuple[str, ...] | None
) -> str:
    if broken:
        return f"SLO: at this load no layout keeps the promises of {', '.join(broken)} beside the others'"
    ((degree, instances),) = layout.items()
    needed = sum(d.rate_per_s * d.least(problem.cache != "none", degree)[1] for d in demands)
    heaviest = max(demands, key=lambda d: d.rate_per_s * d.least(problem.cache != "none", degree)[1])
    return (
        f"stability: at the lowest threshold requests keep {needed:.1f} instances at TP-{degree} busy, of {instances}, "
        f"which may be {problem.planning.max_utilisation:.0%} busy; most of it is {heaviest.name}"
    )


def _without_promises(demands: tuple[Demand, ...]) -> tuple[Demand, ...]:
    return tuple(d._replace(slo_s=None) for d in demands)


def _today(problem: Problem, demands: tuple[Demand, ...], planned: Plan, solver: Solver) -> Figures | None:
    """Rule 5."""
    if planned.layout == problem.layout_today:
        return planned.figures
    if planned.outcome != "planned" or not problem.today:
        return None
    return figures_of(problem, demands, problem.layout_today, solver, problem.planning.time_limit_s)
