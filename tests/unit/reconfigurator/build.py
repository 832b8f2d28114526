"""Problems as tests need them, by hand and at random."""

import random
from typing import Any

from msgspec.structs import replace

from services.costs import DegreeProfile, PassCost
from services.reconfigurator.problem import Instance, Node, Planning, Problem, RequestClass, Threshold

THRESHOLDS = (Threshold(threshold=0.5, tokens_per_step=4.0), Threshold(threshold=0.9, tokens_per_step=2.0))


def make_node(node_id: str = "n0", devices: int = 8) -> Node:
    return Node(node_id=node_id, devices=tuple(range(devices)))


def make_degree(tp_degree: int, *points: tuple[float, float]) -> DegreeProfile:
    """Points: (tokens, ms)."""
    return DegreeProfile(tp_degree=tp_degree, cost=PassCost(curve=points))


def make_class(name: str = "chat", **changes: Any) -> RequestClass:
    defaults: dict[str, Any] = {"rate_per_s": 1.0, "prompt_tokens": 256, "output_tokens": 256, "slo_s": 10.0}
    return RequestClass(name=name, **(defaults | changes))


def make_instances(*devices: tuple[int, ...], node_id: str = "n0") -> tuple[Instance, ...]:
    return tuple(Instance(instance_id=f"{node_id}-{held[0]}", node_id=node_id, devices=held) for held in devices)


def paper_example(rate_per_s: float, **changes: Any) -> Problem:
    """8 GPUs; a request takes 50 steps: 3.6 s at TP-1, 2 s at TP-4."""
    defaults: dict[str, Any] = {
        "nodes": (make_node(),),
        "degrees": (make_degree(1, (512, 72.0)), make_degree(4, (512, 40.0))),
        "thresholds": (Threshold(threshold=0.9, tokens_per_step=5.12),),
        "classes": (make_class(rate_per_s=rate_per_s),),
        "cache": "none",
        "batch_tokens": (512,),
        "planning": Planning(solver="highs"),
    }
    return Problem(**(defaults | changes))


def random_problem(seed: int, caching: bool, time_sharing: bool = True) -> Problem:
    """Small enough to try everything: a node or two, two TP degrees (at times three, or such as do not divide)."""
    rng = random.Random(seed)
    degrees = rng.choice([(1, 2), (1, 2), (1, 4), (2, 4), (2, 3), (1, 3), (1,), (1, 2, 4)])
    nodes = tuple(make_node(f"n{i}", rng.randint(2, 3 if caching else 4)) for i in range(rng.randint(1, 2)))
    low_tokens = rng.uniform(1.0, 3.0)
    problem = Problem(
        nodes=nodes,
        degrees=tuple(_random_degree(rng, degree) for degree in degrees),
        thresholds=(
            Threshold(threshold=0.5, tokens_per_step=low_tokens * rng.uniform(1.2, 2.5)),
            Threshold(threshold=0.9, tokens_per_step=low_tokens),
        ),
        classes=tuple(_random_class(rng, f"k{i}", caching) for i in range(rng.randint(1, 2))),
        block_size=32,
        cache="dual" if caching else "none",
        batch_tokens=tuple(sorted(rng.sample([256, 512, 1024, 2048], 2))),
        cache_batch_tokens=tuple(sorted(rng.sample([32, 128, 256], 2))),
        planning=Planning(
            max_utilisation=rng.choice([0.85, 1.0]),
            threshold_tolerance=rng.choice([0.0, 0.01, 0.05]),
            time_sharing=time_sharing,
            solver="highs",
        ),
    )
    return replace(problem, today=random_layout(rng, problem))


def random_layout(rng: random.Random, problem: Problem) -> tuple[Instance, ...]:
    """Instances on some of each node's devices, which need not be neighbours."""
    instances: list[Instance] = []
    for node in problem.nodes:
        free = rng.sample(node.devices, len(node.devices))
        while fitting := [degree for degree in problem.usable_degrees if degree <= len(free)]:
            degree = rng.choice(fitting)
            held, free = free[:degree], free[degree:]
            if rng.random() < 0.8:
                name = f"{node.node_id}-{held[0]}"
                instances.append(Instance(instance_id=name, node_id=node.node_id, devices=tuple(held)))
    return tuple(instances)


def _random_degree(rng: random.Random, degree: int) -> DegreeProfile:
    speed = degree ** rng.uniform(0.3, 0.9)
    flat_ms, slope_ms = rng.uniform(5, 20) / speed, rng.uniform(0.01, 0.05) / speed
    return make_degree(degree, *((tokens, flat_ms + slope_ms * tokens) for tokens in (32, 256, 1024, 2048)))


def _random_class(rng: random.Random, name: str, caching: bool) -> RequestClass:
    lightness = 4.0 if caching else 1.0  # so that about as many are infeasible
    output_tokens = rng.choice([32, 50, 64, 128])
    return RequestClass(
        name=name,
        rate_per_s=rng.choice([0.1, 1.0, 4.0, 10.0]) * rng.uniform(0.5, 1.5) * lightness,
        prompt_tokens=rng.choice([50, 150, 400, 900]),
        output_tokens=output_tokens,
        slo_s=rng.choice([None, 0.02 * output_tokens * rng.uniform(0.5, 4.0) / lightness]),
        priority=rng.choice([-1, 0, 1]),
    )
