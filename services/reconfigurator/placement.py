"""Stage 2: on which devices the instances go, so that most of them run on undisturbed (the paper's section 3.3).

1. An instance is kept if its TP degree is planned and it stays on exactly its devices. Most kept instances win; of
   equally many, those on most devices.
2. Devices of a node are interchangeable, so a node that runs h instances of a degree and is given r keeps min(h, r) of
   them. Nodes of the same size that run the same are interchangeable too: what is decided is how many nodes of a kind
   get a pattern, at any size of the cluster.
3. Of nodes of a kind the first by id get the first patterns; of instances those on a node's first devices are kept. New
   instances take the devices that are left, the largest first, so that each takes from as few stopped ones as can be.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

from services.reconfigurator.capacity import patterns
from services.reconfigurator.milp import Model, Solver
from services.reconfigurator.plan import Layout, Placed
from services.reconfigurator.problem import Instance, Node, Problem

Pattern = tuple[int, ...]  # instances of each degree, ascending


class _Kind(NamedTuple):
    """What makes nodes interchangeable."""

    size: int
    running: Pattern


def place(problem: Problem, layout: Layout, solver: Solver, time_limit_s: float) -> tuple[Placed, ...] | None:
    """The layout's instances on devices, by node and devices. None: no placement was found in time.

    Raises SolverFault. The layout must fit.
    """
    degrees = tuple(sorted(problem.usable_degrees))
    kinds = _kinds(problem, degrees)
    chosen = _choose(kinds, degrees, layout, solver, time_limit_s)
    if chosen is None:
        return None
    running = defaultdict(list)
    for instance in problem.today:
        running[instance.node_id].append(instance)
    placed: list[Placed] = []
    for kind, nodes in kinds.items():
        given = [pattern for pattern, count in chosen[kind].items() for _ in range(count)]
        for node, pattern in zip(nodes, given, strict=True):
            placed += _on_node(node, running[node.node_id], dict(zip(degrees, pattern, strict=True)))
    assert Counter(one.tp_degree for one in placed) == Counter(layout), "a placement holds the layout"
    return tuple(sorted(placed))


def as_it_runs(instance: Instance) -> Placed:
    """An instance that is kept."""
    return Placed(node_id=instance.node_id, devices=instance.devices, instance_id=instance.instance_id)


def _kinds(problem: Problem, degrees: tuple[int, ...]) -> dict[_Kind, list[Node]]:
    running: dict[str, Counter[int]] = defaultdict(Counter)
    for instance in problem.today:
        running[instance.node_id][instance.tp_degree] += 1
    kinds: dict[_Kind, list[Node]] = defaultdict(list)
    for node in sorted(problem.nodes, key=lambda node: node.node_id):
        kind = _Kind(len(node.devices), tuple(running[node.node_id][degree] for degree in degrees))
        kinds[kind].append(node)
    return kinds


def _choose(
    kinds: dict[_Kind, list[Node]], degrees: tuple[int, ...], layout: Layout, solver: Solver, time_limit_s: float
) -> dict[_Kind, dict[Pattern, int]] | None:
    """How many nodes of each kind get which pattern."""
    model = Model()
    columns: dict[tuple[_Kind, Pattern], int] = {}
    for kind, nodes in kinds.items():
        ours = {pattern: model.column(0, len(nodes), integer=True) for pattern in patterns(kind.size, degrees)}
        model.equal(dict.fromkeys(ours.values(), 1.0), len(nodes))
        columns |= {(kind, pattern): column for pattern, column in ours.items()}
    for i, degree in enumerate(degrees):
        model.equal({column: float(pattern[i]) for (_, pattern), column in columns.items()}, layout.get(degree, 0))
    more_than_all = 1 + sum(kind.size * len(nodes) for kind, nodes in kinds.items())
    worth = {column: _worth(kind, pattern, degrees, more_than_all) for (kind, pattern), column in columns.items()}
    solution = solver.solve(model, worth, time_limit_s)
    if not solution.found:
        return None
    chosen: dict[_Kind, dict[Pattern, int]] = {kind: {} for kind in kinds}
    for (kind, pattern), column in columns.items():
        if count := round(solution.values[column]):
            chosen[kind][pattern] = count
    return chosen


def _worth(kind: _Kind, pattern: Pattern, degrees: tuple[int, ...], more_than_all: int) -> float:
    """Instances that a node keeps; then their devices (rule 1)."""
    kept = [min(has, gets) for has, gets in zip(kind.running, pattern, strict=True)]
    return float(sum(count * (more_than_all + degree) for count, degree in zip(kept, degrees, strict=True)))


def _on_node(node: Node, running: list[Instance], wanted: dict[int, int]) -> list[Placed]:
    """Rule 3."""
    wanted = dict(wanted)
    kept: list[Placed] = []
    stopped: list[Instance] = []
    for instance in sorted(running, key=lambda one: min(one.devices)):
        if wanted.get(instance.tp_degree, 0) > 0:
            wanted[instance.tp_degree] -= 1
            kept.append(as_it_runs(instance))
        else:
            stopped.append(instance)
    return kept + [Placed(node_id=node.node_id, devices=devices) for devices in _divide(node, kept, stopped, wanted)]


def _divide(node: Node, kept: list[Placed], stopped: list[Instance], wanted: dict[int, int]) -> list[tuple[int, ...]]:
    """Devices for new instances, the largest first, from the largest of the stopped ones on."""
    held = {device for one in kept for device in one.devices}
    by_size = sorted(stopped, key=lambda one: (-one.tp_degree, min(one.devices)))
    freed = [device for one in by_size for device in sorted(one.devices)]
    left = freed + [device for device in sorted(node.devices) if device not in held and device not in freed]
    divided: list[tuple[int, ...]] = []
    for degree, count in sorted(wanted.items(), reverse=True):
        for _ in range(count):
            divided.append(tuple(sorted(left[:degree])))
            del left[:degree]
    return divided
