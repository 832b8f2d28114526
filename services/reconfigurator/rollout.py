"""How one layout of the cluster becomes another, a launch at a time. Pure: the plan that is stored is the whole state.

1. `begin` names a target. `advance` looks at the stored plan and at what the nodes say, and returns the plan to be
   stored next, if anything is to change. Whoever stores it does so by compare-and-set, so a crash before or after that
   loses nothing, and of two that advance one plan only one succeeds.
2. At most one launch is under way. It is over when its node says that it runs.
3. The next launch is the one that takes the fewest devices from instances that run; ties: lowest node, lowest devices.
   The same write takes out of the plan what holds these devices, and nothing else: agents drain what they stop, and
   start nothing before its devices are free.
4. A launch that its agent has given up for a while, whose node is silent, or that does not run `launch_limit_s` after
   its begin ends the rollout: it is taken out, and what was stopped for it is wanted again. What earlier launches have
   changed stays.
5. When nothing is left to launch, what the target does not want is taken out, and the rollout is over.
6. Instances are known by their slot ids. A slot id stands for one place and one degree, and for no other ever after.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from contracts import messages as m

Change: TypeAlias = Literal["begun", "finished", "given_up"]


class Place(NamedTuple):
    """Where an instance is wanted."""

    node_id: str
    devices: tuple[int, ...]


class _Launch(NamedTuple):
    node_id: str
    wanted: m.PlannedInstance
    stopped: list[m.PlannedInstance]  # what holds its devices

    @property
    def num_taken(self) -> int:
        return sum(len(instance.devices) for instance in self.stopped)


def adopt(nodes: Iterable[m.NodeStatus], now: float, plan: m.ClusterPlan | None = None) -> m.ClusterPlan | None:
    """The plan in which planned nodes that it does not list yet run what they do run. None: it lists all of them.

    Between rollouts only: a target is for the nodes that there were.
    """
    assert plan is None or plan.rollout is None
    listed = {node.node_id for node in plan.nodes} if plan else set()
    new = sorted((n for n in nodes if n.planned and n.node_id not in listed), key=lambda n: n.node_id)
    if not new and plan is not None:
        return None
    joined = [m.NodePlan(node_id=node.node_id, instances=_wanted_there(node)) for node in new]
    base = plan or m.ClusterPlan(revision=1, written_at=now, nodes=[])
    return replace(
        base,
        revision=base.revision + 1 if plan else 1,
        written_at=now,
        nodes=[*base.nodes, *joined],
        reason=f"adopts {', '.join(node.node_id for node in new) or 'nothing: no node follows a plan'}",
        next_slot=max([base.next_slot, *(_number(i.slot_id) + 1 for node in joined for i in node.instances)]),
    )


def _wanted_there(node: m.NodeStatus) -> list[m.PlannedInstance]:
    """What its agent keeps running, and has devices for: by a plan that is no more it may still wait for others'."""
    free, found = set(node.devices), []
    for state in node.instances:
        if state.state != "stopping" and state.devices and free.issuperset(state.devices):
            free -= set(state.devices)
            planned = m.PlannedInstance(
                slot_id=state.slot_id, tp_degree=state.tp_degree, devices=state.devices, profile=state.profile
            )
            found.append(planned)
    return found


def _number(slot_id: str) -> int:
    last = slot_id.rpartition("-")[2]
    return int(last) if last.isdecimal() and last.isascii() else 0


def begin(plan: m.ClusterPlan, places: Iterable[Place], reason: str, now: float) -> m.ClusterPlan:
    """The plan with these places as its target; nodes that have none of them become empty. What is there stays itself.

    Raises ValueError where a node is not in the plan, or a device is wanted twice.
    """
    assert plan.rollout is None, "one rollout after the other"
    wanted: dict[str, list[tuple[int, ...]]] = {node.node_id: [] for node in plan.nodes}
    for place in sorted(places):
        if place.node_id not in wanted:
            raise ValueError(f"node {place.node_id} is not in the plan")
        wanted[place.node_id].append(tuple(sorted(place.devices)))
    next_slot, target = plan.next_slot, []
    for node in plan.nodes:
        _check_devices(node.node_id, wanted[node.node_id])
        there = {tuple(sorted(instance.devices)): instance for instance in node.instances}
        instances = []
        for devices in wanted[node.node_id]:
            if devices not in there:
                slot_id, next_slot = f"{node.node_id}-{next_slot}", next_slot + 1
                there[devices] = m.PlannedInstance(slot_id=slot_id, tp_degree=len(devices), devices=list(devices))
            instances.append(there[devices])
        target.append(m.NodePlan(node_id=node.node_id, instances=instances))
    rollout = m.Rollout(target=target, reason=reason, began_at=now)
    return replace(
        plan, revision=plan.revision + 1, written_at=now, reason=reason, next_slot=next_slot, rollout=rollout
    )


def _check_devices(node_id: str, wanted: Sequence[tuple[int, ...]]) -> None:
    devices = [device for instance in wanted for device in instance]
    if len(set(devices)) != len(devices) or not all(wanted):
        raise ValueError(f"node {node_id}: each instance needs devices, each device once; wanted are {list(wanted)}")


def advance(
    plan: m.ClusterPlan, nodes: Mapping[str, m.NodeStatus], now: float, *, launch_limit_s: float, settled: bool = True
) -> m.ClusterPlan | None:
    """The plan to be stored next; None: there is nothing to do but wait.

    `nodes`: those that have spoken lately; `settled`: by now every live node must have.
    """
    rollout = plan.rollout
    if rollout is None:
        return None
    if rollout.launching:
        node_id = _node_of(plan, rollout.launching)
        if node_id not in nodes and not settled:
            return None
        if failure := _failure(rollout, node_id, nodes, now, launch_limit_s):
            return _give_up(plan, rollout, failure, now)
        if not _runs(rollout.launching, nodes):
            return None
    launch = _next_launch(plan, rollout)
    return _launch(plan, rollout, launch, now) if launch else _finish(plan, rollout, now)


def change(before: m.ClusterPlan | None, after: m.ClusterPlan) -> Change | None:
    """What the newer plan says of a rollout that the one before did not; None: nothing, or there was none before."""
    if before is None or after.revision <= before.revision:
        return None
    if after.rollout is not None:
        return None if before.rollout is not None else "begun"
    if before.rollout is None:
        return None
    return "given_up" if after.failures > before.failures else "finished"


def _runs(slot_id: str, nodes: Mapping[str, m.NodeStatus]) -> bool:
    return any(i.slot_id == slot_id and i.state == "running" for node in nodes.values() for i in node.instances)


def _failure(rollout: m.Rollout, node_id: str, nodes: Mapping[str, m.NodeStatus], now: float, limit_s: float) -> str:
    """Why the launch under way has failed; "": it has not (rule 4)."""
    if node_id not in nodes:
        return f"node {node_id} is silent"
    for instance in nodes[node_id].instances:
        if instance.slot_id == rollout.launching:
            if instance.state == "running":
                return ""
            if instance.state == "backing_off":
                return instance.detail or "its agent tries it no more for now"
    if now - rollout.launch_began_at > limit_s:
        return f"it does not run after {limit_s:g} s"
    return ""


def _next_launch(plan: m.ClusterPlan, rollout: m.Rollout) -> _Launch | None:
    launches = []
    for now, then in zip(plan.nodes, rollout.target, strict=True):
        there = {instance.slot_id for instance in now.instances}
        for wanted in then.instances:
            if wanted.slot_id not in there:
                stopped = [i for i in now.instances if not set(i.devices).isdisjoint(wanted.devices)]
                launches.append(_Launch(now.node_id, wanted, stopped))
    return min(launches, key=lambda one: (one.num_taken, one.node_id, one.wanted.devices), default=None)


def _launch(plan: m.ClusterPlan, rollout: m.Rollout, launch: _Launch, now: float) -> m.ClusterPlan:
    instead = f" instead of {', '.join(i.slot_id for i in launch.stopped)}" if launch.stopped else ""
    devices = ", ".join(map(str, launch.wanted.devices))
    return replace(
        plan,
        revision=plan.revision + 1,
        written_at=now,
        nodes=_changed(plan.nodes, launch.node_id, less=launch.stopped, more=[launch.wanted]),
        reason=f"launches {launch.wanted.slot_id} on {launch.node_id}, devices {devices}{instead}",
        rollout=replace(rollout, launching=launch.wanted.slot_id, launch_began_at=now, stopped=launch.stopped),
    )


def _give_up(plan: m.ClusterPlan, rollout: m.Rollout, why: str, now: float) -> m.ClusterPlan:
    node_id = _node_of(plan, rollout.launching)
    launched = [i for node in plan.nodes for i in node.instances if i.slot_id == rollout.launching]
    return replace(
        plan,
        revision=plan.revision + 1,
        written_at=now,
        nodes=_changed(plan.nodes, node_id, less=launched, more=rollout.stopped),
        reason=f"gives up: launch of {rollout.launching} on {node_id} has failed: {why}",
        rollout=None,
        failures=plan.failures + 1,
        failed_at=now,
    )


def _finish(plan: m.ClusterPlan, rollout: m.Rollout, now: float) -> m.ClusterPlan:
    return replace(
        plan,
        revision=plan.revision + 1,
        written_at=now,
        nodes=rollout.target,
        reason=f"done: {rollout.reason}",
        rollout=None,
        failures=0,
    )


def _node_of(plan: m.ClusterPlan, slot_id: str) -> str:
    return next(node.node_id for node in plan.nodes if any(i.slot_id == slot_id for i in node.instances))


def _changed(
    nodes: Iterable[m.NodePlan], node_id: str, *, less: Sequence[m.PlannedInstance], more: Sequence[m.PlannedInstance]
) -> list[m.NodePlan]:
    gone = {instance.slot_id for instance in less}
    return [
        replace(node, instances=[*(i for i in node.instances if i.slot_id not in gone), *more])
        if node.node_id == node_id
        else node
        for node in nodes
    ]
