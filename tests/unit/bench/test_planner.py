"""The planner's benchmark plans what it says."""

from services.reconfigurator.report import load_problem
from tools.bench import planner


def test_workloads_are_as_large_as_announced_and_not_alike() -> None:
    example = load_problem(planner.EXAMPLE)
    problems = [planner.random_workload(example, seed, time_sharing=True) for seed in range(3)]
    for problem in problems:
        assert (len(problem.nodes), len(problem.classes), problem.usable_degrees) == (128, 16, (1, 2, 4, 8))
        assert sum(len(instance.devices) for instance in problem.today) == 1024
        assert problem.planning.solver == "highs"
    assert len({problem.classes for problem in problems}) == 3
    assert problems[0] == planner.random_workload(example, 0, time_sharing=True)
