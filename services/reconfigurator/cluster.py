"""What the reconfigurator knows of the cluster, as its policies want it. Pure.

1. Planned for are nodes that follow a plan, are in it, have spoken lately, and have devices. The others stay as they
   are.
2. What runs today is what the plan wants on them: agents see to it. An instance whose devices a node has no longer does
   not run.
3. A class of requests is named after its sizes and its priority.
"""

from collections.abc import Iterable, Mapping

from contracts import messages as m
from services.costs import DegreeProfile
from services.profile import Profile
from services.reconfigurator.plan import Plan
from services.reconfigurator.problem import Instance, Node, Planning, Problem, RequestClass, Threshold
from services.reconfigurator.rollout import Place

_MAX_RETRY_PAUSE_S = 86_400.0
_LEAST_SLO_S = 1e-3


def problem_of(
    profile: Profile,
    degrees: Iterable[DegreeProfile],
    planning: Planning,
    *,
    snapshot: m.WorkloadSnapshot,
    plan: m.ClusterPlan,
    nodes: Mapping[str, m.NodeStatus],
) -> Problem | None:
    """What is to be planned; None where there are no nodes to plan for. Raises ValueError."""
    here = _planned_for(plan, nodes)
    if not here:
        return None
    decoding = profile.decoding
    return Problem(
        nodes=tuple(Node(node_id=one.node_id, devices=tuple(nodes[one.node_id].devices)) for one in here),
        degrees=tuple(degrees),
        thresholds=tuple(
            Threshold(threshold=threshold, tokens_per_step=max(1.0, decoding.block_size / steps))
            for threshold, steps in zip(decoding.thresholds, decoding.mean_steps, strict=True)
        ),
        classes=tuple(_class_of(one) for one in snapshot.classes),
        today=tuple(
            Instance(instance_id=instance.slot_id, node_id=one.node_id, devices=tuple(instance.devices))
            for one in here
            for instance in one.instances
            if instance.devices and set(instance.devices) <= set(nodes[one.node_id].devices)
        ),
        block_size=decoding.block_size,
        cache=decoding.cache,
        blocks_ahead=decoding.blocks_ahead,
        planning=planning,
    )


def _planned_for(plan: m.ClusterPlan, nodes: Mapping[str, m.NodeStatus]) -> list[m.NodePlan]:
    """Rule 1, by id."""
    live = {node_id for node_id, status in nodes.items() if status.planned and status.devices}
    return sorted((one for one in plan.nodes if one.node_id in live), key=lambda one: one.node_id)


def _class_of(one: m.WorkloadClass) -> RequestClass:
    return RequestClass(
        name=f"{one.prompt_tokens}+{one.output_tokens}, priority {one.priority}",
        rate_per_s=one.rate_rps,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        slo_s=None if one.slo_s is None else max(_LEAST_SLO_S, one.slo_s),
        priority=one.priority,
    )


def places_of(made: Plan, problem: Problem, plan: m.ClusterPlan) -> list[Place]:
    """Where instances are wanted: where the planner says, and what nodes run that it has not planned for."""
    planned_for = {node.node_id for node in problem.nodes}
    others = [
        Place(node.node_id, tuple(instance.devices))
        for node in plan.nodes
        if node.node_id not in planned_for
        for instance in node.instances
    ]
    return [Place(one.node_id, one.devices) for one in made.instances] + others


def is_busy(plan: m.ClusterPlan, now: float, retry_pause_s: float) -> bool:
    """Whether the layout may not change now: a rollout is under way, or the last one has failed not long ago."""
    if plan.rollout is not None:
        return True
    pause_s = min(_MAX_RETRY_PAUSE_S, retry_pause_s * 2.0 ** min(plan.failures - 1, 32))
    return plan.failures > 0 and now - plan.failed_at < pause_s
