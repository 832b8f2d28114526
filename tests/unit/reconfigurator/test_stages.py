"""Both stages against a search that tries everything."""

import random
from collections import Counter
from functools import cache

import pytest
from msgspec.structs import replace

from services.reconfigurator.capacity import assess, plan_capacity
from services.reconfigurator.demand import workload_of
from services.reconfigurator.milp import GurobiOrHighs, Solver, solver_named
from services.reconfigurator.placement import place
from services.reconfigurator.problem import Problem
from tests.unit.reconfigurator import brute_force
from tests.unit.reconfigurator.build import random_problem

INSTANCES = 200
LIMIT_S = 60.0


@pytest.fixture(params=["highs", "gurobi"])
def solver(request: pytest.FixtureRequest) -> Solver:
    solver = solver_named(request.param)
    if request.param == "gurobi" and not isinstance(solver, GurobiOrHighs):
        pytest.skip("gurobipy is not installed, or has no licence")
    return solver


def feasible_alone(seed: int, caching: bool, time_sharing: bool) -> Problem:
    """Of promises that are impossible by themselves stage 1 knows nothing; neither may the search."""
    problem = random_problem(seed, caching, time_sharing)
    softened = workload_of(problem).softened
    return replace(problem, classes=tuple(replace(k, slo_s=None) if k.name in softened else k for k in problem.classes))


@cache
def searched(caching: bool, time_sharing: bool) -> list[tuple[Problem, brute_force.Best | None]]:
    problems = [feasible_alone(seed, caching, time_sharing) for seed in range(INSTANCES)]
    problems = [problem for problem in problems if not workload_of(problem).too_long]
    return list(zip(problems, brute_force.best_of_each(problems), strict=True))


cases = pytest.mark.parametrize(
    ("caching", "time_sharing"),
    [(False, True), (True, True), (False, False), (True, False)],
    ids=["no cache", "dual cache", "no cache, one batch size", "dual cache, one batch size"],
)


@cases
def test_stage_1_is_as_good_as_any_layout(solver: Solver, caching: bool, time_sharing: bool) -> None:
    infeasible = 0
    for problem, best in searched(caching, time_sharing):
        capacity = plan_capacity(problem, workload_of(problem).demands, solver, LIMIT_S)
        assert (capacity.status == "infeasible") == (best is None), problem
        if best is None:
            infeasible += 1
            continue
        assert capacity.status == "optimal"
        assert capacity.figures is not None
        assert capacity.figures.busiest <= problem.planning.max_utilisation * (1 + 1e-6)
        given_away = problem.planning.threshold_tolerance
        assert best.threshold - given_away - 1e-5 <= capacity.figures.mean_threshold <= best.threshold + 1e-5
        assert capacity.figures.mean_latency_s == pytest.approx(best.latency, rel=1e-4), problem
    assert 10 < infeasible < INSTANCES / 2, "both kinds are among them"


@cases
def test_the_layout_chosen_is_good_for_its_loads(caching: bool, time_sharing: bool) -> None:
    solver = solver_named("highs")
    for problem, best in searched(caching, time_sharing)[:60]:
        if best is None:
            continue
        demands = workload_of(problem).demands
        figures = plan_capacity(problem, demands, solver, LIMIT_S).figures
        assert figures is not None
        loads = [next((d.load for d in figures.degrees if d.tp_degree == e), 0.0) for e in problem.usable_degrees]
        busiest = [
            max(load / count if count else 1e9 * (load > 0) for load, count in zip(loads, counts, strict=True))
            for counts in brute_force.layouts(problem)
        ]
        assert figures.busiest == pytest.approx(min(busiest), rel=1e-5), problem
        layout = {d.tp_degree: d.instances for d in figures.degrees}
        again = assess(problem, demands, layout, solver, LIMIT_S)
        assert again.figures is not None
        assert again.figures.mean_latency_s <= figures.mean_latency_s * (1 + 1e-4), "it can do what is said of it"


def test_with_time_sharing_a_threshold_is_never_lower() -> None:
    solver = solver_named("highs")
    for problem, best in searched(True, False)[:60]:
        sharing = replace(problem, planning=replace(problem.planning, time_sharing=True))
        capacity = plan_capacity(sharing, workload_of(sharing).demands, solver, LIMIT_S)
        if best is not None:
            assert capacity.figures is not None
            floor = best.threshold - problem.planning.threshold_tolerance
            assert capacity.figures.mean_threshold >= floor - 1e-5


def test_stage_2_keeps_as_much_as_can_be_kept(solver: Solver) -> None:
    moved = 0
    for seed in range(INSTANCES):
        problem = random_problem(seed, caching=False)
        rng = random.Random(seed)
        wanted = rng.choice(sorted(brute_force.layouts(problem)))
        layout = {d: count for d, count in zip(problem.usable_degrees, wanted, strict=True) if count}
        placed = place(problem, layout, solver, LIMIT_S)
        assert placed is not None
        assert Counter(one.tp_degree for one in placed) == layout
        taken = [(one.node_id, device) for one in placed for device in one.devices]
        assert len(set(taken)) == len(taken), "no device twice"
        devices = {(node.node_id, device) for node in problem.nodes for device in node.devices}
        assert set(taken) <= devices
        today = {instance.instance_id: instance for instance in problem.today}
        kept = [today[one.instance_id] for one in placed if one.instance_id]
        for one in placed:
            if one.instance_id:
                assert (one.node_id, one.devices) == (today[one.instance_id].node_id, today[one.instance_id].devices)
        moved += len(kept) < len(today)
        assert (len(kept), sum(k.tp_degree for k in kept)) == brute_force.most_kept(problem, layout), (problem, layout)
    assert moved > INSTANCES / 4
