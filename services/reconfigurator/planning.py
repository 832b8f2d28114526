"""From a problem to a plan: both stages, and what is planned where the stages have no answer.

1. No requests: today's layout stays.
2. Classes that no batch holds are left out; a promise that a class could not keep even alone is taken back, and the
   rest is planned as usual. The plan names them.
3. No layout keeps all promises within stability: all instances at the lowest TP degree, which carries the most load.
   The plan says whether it is the load, or whose promises stand in the way.
4. No answer in time: today's layout stays. An answer that time has cut short is used, with its gap.
5. What today's layout could reach is worked out beside it, with the same promises, so that the two can be compared:
   the new one for `headroom` times the rates, today's for the rates as they are.
"""

import time

import msgspec

from services.reconfigurator.capacity import Capacity, assess, broken_promises, most_instances, plan_capacity
from services.reconfigurator.demand import Demand, Workload, workload_of
from services.reconfigurator.milp import Solver, solver_named
from services.reconfigurator.placement import as_it_runs, place
from services.reconfigurator.plan import Alternative, Outcome, Plan
from services.reconfigurator.problem import Problem


def plan(problem: Problem) -> Plan:
    """The best layout and its placement. Raises SolverFault."""
    workload = workload_of(problem)
    if not workload.demands:
        return _as_today(problem, workload, "no_requests", "no class has requests that could be planned for")
    limit_s = problem.planning.time_limit_s
    clock = _Clock(limit_s)
    solver = solver_named(problem.planning.solver)
    demands = _with_headroom(problem, workload.demands)
    capacity = plan_capacity(problem, demands, solver, clock.left_s)
    if capacity.status == "none":
        return _as_today(problem, workload, "out_of_time", f"no layout was found in {limit_s:g} s")
    planned = _lowest_degree(problem, demands, solver, clock) if capacity.status == "infeasible" else _planned(capacity)
    instances = place(problem, planned.layout, solver, clock.left_s)
    if instances is None:
        return _as_today(problem, workload, "out_of_time", f"no placement was found in {limit_s:g} s")
    planned = msgspec.structs.replace(
        planned,
        instances=instances,
        softened=workload.softened,
        too_long=workload.too_long,
        seconds=clock.passed_s,
    )
    return _beside_today(problem, workload.demands, planned, solver)


def alternatives(problem: Problem) -> tuple[Alternative, ...]:
    """What other layouts could reach: today's, and each TP degree alone. Raises SolverFault."""
    demands = workload_of(problem).demands
    solver = solver_named(problem.planning.solver)
    layouts = {"today": problem.layout_today} if problem.today else {}
    layouts |= {f"all TP-{degree}": {degree: most_instances(problem, degree)} for degree in problem.usable_degrees}
    return tuple(
        Alternative(
            name=name,
            layout=layout,
            figures=assess(problem, demands, layout, solver, problem.planning.time_limit_s).figures
            if demands
            else None,
        )
        for name, layout in layouts.items()
    )


class _Clock:
    """How much of the time limit is left."""

    def __init__(self, limit_s: float) -> None:
        self._started = time.monotonic()
        self._limit_s = limit_s

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        return self._limit_s - self.passed_s


def _as_today(problem: Problem, workload: Workload, outcome: Outcome, because: str) -> Plan:
    return Plan(
        outcome=outcome,
        layout=problem.layout_today,
        because=because,
        instances=tuple(sorted(as_it_runs(instance) for instance in problem.today)),
        softened=workload.softened,
        too_long=workload.too_long,
        proven=outcome == "no_requests",
    )


def _with_headroom(problem: Problem, demands: tuple[Demand, ...]) -> tuple[Demand, ...]:
    return tuple(d._replace(rate_per_s=problem.planning.headroom * d.rate_per_s) for d in demands)


def _planned(capacity: Capacity) -> Plan:
    return Plan(
        outcome="planned",
        layout=capacity.layout,
        because="of all layouts that keep the promises it has the highest threshold, then the lowest latency",
        figures=capacity.figures,
        gap=capacity.gap,
        proven=capacity.status == "optimal",
        solver=capacity.solver,
    )


def _lowest_degree(problem: Problem, demands: tuple[Demand, ...], solver: Solver, clock: _Clock) -> Plan:
    """Rule 3."""
    degree = problem.usable_degrees[0]
    layout = {degree: most_instances(problem, degree)}
    broken = broken_promises(problem, demands, solver, clock.left_s)
    best_effort = assess(problem, _without_promises(demands), layout, solver, clock.left_s)
    return Plan(
        outcome="overload" if broken is None else "broken_promises",
        layout=layout,
        because=_what_load(problem, demands, degree) if broken is None else _whose_promises(broken),
        figures=best_effort.figures,
        solver=best_effort.solver,
    )


def _whose_promises(broken: tuple[str, ...]) -> str:
    if not broken:
        return "SLO: at this load no layout keeps all promises"
    return f"SLO: at this load no layout keeps the promises to {', '.join(broken)} besides the others'"


def _what_load(problem: Problem, demands: tuple[Demand, ...], degree: int) -> str:
    busy = {d.name: d.rate_per_s * d.least(problem.cache != "none", degree)[1] for d in demands}
    return (
        f"stability: at the lowest threshold requests keep at least {sum(busy.values()):.1f} instances at TP-{degree} "
        f"busy, of {most_instances(problem, degree)}, which may be busy for {problem.planning.max_utilisation:.0%} of "
        f"the time; most of it is {max(busy, key=lambda name: busy[name])}"
    )


def _without_promises(demands: tuple[Demand, ...]) -> tuple[Demand, ...]:
    return tuple(d._replace(slo_s=None) for d in demands)


def _beside_today(problem: Problem, demands: tuple[Demand, ...], planned: Plan, solver: Solver) -> Plan:
    """Rule 5."""
    if not problem.today:
        return planned
    today = assess(problem, demands, problem.layout_today, solver, problem.planning.time_limit_s)
    return msgspec.structs.replace(planned, today=today.figures, today_is_known=today.status != "none")
