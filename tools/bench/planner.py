"""How long the planner takes over a large cluster: both stages, random workloads, HiGHS, one thread."""

import random
import statistics
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from services.costs import DegreeProfile, PassCost
from services.reconfigurator.demand import workload_of
from services.reconfigurator.planning import plan
from services.reconfigurator.problem import Instance, Node, Planning, Problem, RequestClass
from services.reconfigurator.report import load_problem

EXAMPLE = Path("docs/planning-example.json")  # LLaDA-8B's published latencies on H100, at TP 1, 2 and 4
NODES, DEVICES, CLASSES, WORKLOADS = 128, 8, 16, 24
_TP_8_BY_TP_4 = 0.72  # of the latency: no figures for TP-8 are published


class PlannerTimes(NamedTuple):
    """Of a variant, over all workloads."""

    variant: str
    seconds: list[float]  # of both stages
    proven: int  # plans known to be optimal
    largest_gap: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure_planner(workloads: int = WORKLOADS) -> list[PlannerTimes]:
    """One batch size a degree, and time sharing; with the dual cache."""
    example = load_problem(EXAMPLE)
    return [
        _measure("one batch size a degree", [random_workload(example, seed, False) for seed in range(workloads)]),
        _measure("time sharing", [random_workload(example, seed, True) for seed in range(workloads)]),
    ]


def _measure(variant: str, problems: list[Problem]) -> PlannerTimes:
    plans = [plan(problem) for problem in problems]
    return PlannerTimes(
        variant=variant,
        seconds=[made.seconds for made in plans],
        proven=sum(made.proven for made in plans),
        largest_gap=max(made.gap for made in plans),
    )


def random_workload(example: Problem, seed: int, time_sharing: bool) -> Problem:
    """Sizes, promises, a load from 5 to 100 % of what all TP-1 could carry, and a random layout today."""
    rng = random.Random(seed)
    tp_4 = example.degrees[-1].cost
    curve = tuple((tokens, _TP_8_BY_TP_4 * ms) for tokens, ms in tp_4.curve)
    problem = replace(
        example,
        nodes=tuple(Node(node_id=f"n{i:03}", devices=tuple(range(DEVICES))) for i in range(NODES)),
        degrees=(*example.degrees, DegreeProfile(tp_degree=8, cost=PassCost(curve=curve))),
        classes=tuple(_random_class(rng, f"class {k}") for k in range(CLASSES)),
        today=(),
        planning=Planning(solver="highs", time_sharing=time_sharing),
    )
    least = sum(d.rate_per_s * d.least(True, 1)[1] for d in workload_of(problem).demands)
    wanted = rng.uniform(0.05, 1.0) * problem.planning.max_utilisation * NODES * DEVICES
    classes = tuple(replace(one, rate_per_s=one.rate_per_s * wanted / least) for one in problem.classes)
    return replace(problem, classes=classes, today=_random_layout(rng, problem))


def _random_class(rng: random.Random, name: str) -> RequestClass:
    output_tokens = rng.choice([128, 256, 512, 1024])
    return RequestClass(
        name=name,
        rate_per_s=rng.uniform(0.1, 1.0),
        prompt_tokens=rng.choice([256, 512, 768, 1024, 1536, 2048, 3072]),
        output_tokens=output_tokens,
        slo_s=rng.uniform(1.5, 7.0) * output_tokens / 256,
    )


def _random_layout(rng: random.Random, problem: Problem) -> tuple[Instance, ...]:
    instances: list[Instance] = []
    for node in problem.nodes:
        free = list(node.devices)
        while free:
            degree = rng.choice([degree for degree in problem.usable_degrees if degree <= len(free)])
            name = f"{node.node_id}-{free[0]}"
            instances.append(Instance(instance_id=name, node_id=node.node_id, devices=tuple(free[:degree])))
            free = free[degree:]
    return tuple(instances)


def print_planner(workloads: int = WORKLOADS) -> None:
    """The rows for BENCHMARKS.md."""
    cluster = f"{NODES} nodes of {DEVICES} GPUs, {CLASSES} classes, TP 1 to 8"
    print(f"\nThe planner's two stages: {cluster}, HiGHS on one thread\n")
    print("| variant | workloads | median s | longest s | proven optimal | largest gap |")
    print("|---|---|---|---|---|---|")
    for t in measure_planner(workloads):
        print(
            f"| {t.variant} | {len(t.seconds)} | {t.median_s:.2f} | {max(t.seconds):.2f} | {t.proven} |"
            f" {t.largest_gap:.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    print_planner()
