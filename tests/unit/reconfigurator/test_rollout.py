"""From one layout to another, one launch at a time, whatever crashes in between."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from contracts import codec
from contracts import messages as m
from services.reconfigurator.rollout import Place, adopt, advance, begin, change

LIMIT_S = 100.0


def instance(slot_id: str, *devices: int) -> m.PlannedInstance:
    return m.PlannedInstance(slot_id=slot_id, tp_degree=len(devices), devices=list(devices))


def plan_of(*instances: m.PlannedInstance, next_slot: int = 5) -> m.ClusterPlan:
    nodes = [m.NodePlan(node_id="n", instances=list(instances))]
    return m.ClusterPlan(revision=1, written_at=0.0, nodes=nodes, next_slot=next_slot)


def status(states: dict[str, str], node_id: str = "n", **changes: object) -> dict[str, m.NodeStatus]:
    """What the node says of its slots."""
    instances = [
        m.InstanceState(instance_id=slot, slot_id=slot, state=state, detail="because")  # type: ignore[arg-type]
        for slot, state in states.items()
    ]
    return {node_id: m.NodeStatus(node_id=node_id, sent_at=0.0, instances=instances, planned=True)}


def slots(plan: m.ClusterPlan) -> dict[str, list[int]]:
    return {i.slot_id: i.devices for node in plan.nodes for i in node.instances}


def step(plan: m.ClusterPlan, nodes: dict[str, m.NodeStatus], now: float = 1.0, settled: bool = True) -> m.ClusterPlan:
    """It must have something to do."""
    after = advance(plan, nodes, now, launch_limit_s=LIMIT_S, settled=settled)
    assert after is not None
    assert after.revision == plan.revision + 1
    return after


def waits(plan: m.ClusterPlan, nodes: dict[str, m.NodeStatus], now: float = 1.0, settled: bool = True) -> bool:
    return advance(plan, nodes, now, launch_limit_s=LIMIT_S, settled=settled) is None


def split() -> m.ClusterPlan:
    """TP-2 on devices 0 and 1 becomes two of TP-1; one on device 2 stays. The first launch is under way."""
    plan = begin(plan_of(instance("n-0", 0, 1), instance("n-1", 2)), places("n", (0,), (1,), (2,)), "why", 0.0)
    assert slots(plan) == {"n-0": [0, 1], "n-1": [2]}, "nothing moves before the first step"
    return step(plan, {})


def places(node_id: str, *devices: tuple[int, ...]) -> list[Place]:
    return [Place(node_id, one) for one in devices]


def test_a_launch_takes_the_place_of_what_is_on_its_devices_and_of_nothing_else() -> None:
    plan = split()
    assert slots(plan) == {"n-1": [2], "n-5": [0]}
    assert plan.reason == "launches n-5 on n, devices 0 instead of n-0"
    assert plan.rollout is not None
    assert plan.rollout.launching == "n-5"


def test_the_next_launch_waits_until_the_last_one_runs_and_then_it_is_done() -> None:
    plan = split()
    assert waits(plan, status({"n-0": "stopping", "n-5": "starting"}))
    plan = step(plan, status({"n-5": "running"}))
    assert slots(plan) == {"n-1": [2], "n-5": [0], "n-6": [1]}
    assert waits(plan, status({"n-5": "running", "n-6": "starting"}))
    plan = step(plan, status({"n-5": "running", "n-6": "running"}))
    assert plan.rollout is None
    assert plan.reason == "done: why"
    assert slots(plan) == {"n-1": [2], "n-5": [0], "n-6": [1]}
    assert waits(plan, {})


@pytest.mark.parametrize(
    ("nodes", "now", "why"),
    [
        (status({"n-5": "backing_off"}), 2.0, "because"),
        (status({"n-5": "starting"}), 1.0 + LIMIT_S + 0.1, "it does not run after 100 s"),
        ({}, 2.0, "node n is silent"),
    ],
)
def test_a_launch_that_fails_is_taken_back_and_what_ran_is_wanted_again(
    nodes: dict[str, m.NodeStatus], now: float, why: str
) -> None:
    plan = step(split(), nodes, now)
    assert slots(plan) == {"n-1": [2], "n-0": [0, 1]}
    assert plan.rollout is None
    assert (plan.failures, plan.failed_at) == (1, now)
    assert plan.reason == f"gives up: launch of n-5 on n has failed: {why}"


def test_a_change_of_the_layout_is_begun_and_finished_or_given_up() -> None:
    before = plan_of(instance("n-0", 0, 1))
    plans = [None, before, begin(before, places("n", (0,), (1,)), "why", 0.0)]
    for running in ({}, {"n-5": "running"}, {"n-5": "running", "n-6": "running"}):
        plans.append(step(plans[-1], status(running)))  # type: ignore[arg-type]
    told = [change(was, now) for was, now in pairwise(plans) if now is not None]
    assert told == [None, "begun", None, None, "finished"]
    launched = plans[3]
    assert launched is not None
    assert change(launched, step(launched, status({"n-5": "backing_off"}))) == "given_up"
    assert change(launched, launched) is None, "the same plan again, read and written"


def test_a_launch_that_runs_just_after_its_limit_has_not_failed() -> None:
    assert "n-6" in slots(step(split(), status({"n-5": "running"}), 500.0))


def test_a_node_that_may_not_have_spoken_yet_is_waited_for() -> None:
    assert waits(split(), {}, 500.0, settled=False)


def test_what_earlier_launches_have_changed_stays() -> None:
    plan = step(split(), status({"n-5": "running"}))
    plan = step(plan, status({"n-5": "running", "n-6": "backing_off"}))
    assert slots(plan) == {"n-1": [2], "n-5": [0]}


def test_idle_devices_are_used_first_and_what_is_not_wanted_stops_at_the_end() -> None:
    before = plan_of(instance("n-0", 0), instance("n-1", 1), instance("n-2", 2))
    plan = step(begin(before, places("n", (0, 1), (3,)), "why", 0.0), {})
    assert slots(plan) == {"n-0": [0], "n-1": [1], "n-2": [2], "n-6": [3]}
    plan = step(plan, status({"n-6": "running"}))
    assert slots(plan) == {"n-2": [2], "n-6": [3], "n-5": [0, 1]}
    plan = step(plan, status({"n-5": "running", "n-6": "running"}))
    assert slots(plan) == {"n-5": [0, 1], "n-6": [3]}
    assert plan.rollout is None


def test_a_success_makes_failures_forgotten_and_no_slot_id_is_used_twice() -> None:
    plan = step(split(), status({"n-5": "backing_off"}))
    assert plan.next_slot == 7
    plan = begin(plan, places("n", (0, 1), (2,)), "again", 1.0)
    plan = step(plan, {})
    assert (plan.failures, plan.next_slot) == (0, 7)


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (places("x", (0,)), "node x is not in the plan"),
        (places("n", (0, 1), (1,)), "each device once"),
        (places("n", (0, 0)), "each device once"),
        (places("n", ()), "needs devices"),
    ],
)
def test_a_target_that_cannot_be_is_refused(wanted: list[Place], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        begin(plan_of(), wanted, "why", 0.0)


def test_planned_nodes_are_adopted_as_they_are_and_others_are_let_alone() -> None:
    runs = m.InstanceState(instance_id="a-3-ff", slot_id="a-3", state="running", tp_degree=2, devices=[0, 1])
    node = m.NodeStatus(node_id="a", sent_at=0.0, instances=[runs], devices=[0, 1], planned=True)
    other = m.NodeStatus(node_id="b", sent_at=0.0, instances=[], planned=False)
    plan = adopt([node, other], 7.0)
    assert plan is not None
    assert plan == m.ClusterPlan(
        revision=1,
        written_at=7.0,
        nodes=[m.NodePlan(node_id="a", instances=[instance("a-3", 0, 1)])],
        reason="adopts a",
        next_slot=4,
    )
    assert adopt([node, other], 8.0, plan) is None
    later = adopt([node, replace(other, planned=True)], 9.0, plan)
    assert later is not None
    assert [n.node_id for n in later.nodes] == ["a", "b"]
    assert (later.revision, later.next_slot) == (2, 4)


def test_of_a_node_that_is_adopted_only_what_it_keeps_running_and_has_devices_for_is_wanted() -> None:
    def state(slot_id: str, state: str, *devices: int) -> m.InstanceState:
        return replace(
            m.InstanceState(instance_id=slot_id, slot_id=slot_id, state="running"),
            state=state,  # type: ignore[arg-type]
            tp_degree=len(devices),
            devices=list(devices),
        )

    instances = [
        state("a-0", "stopping", 0, 1),
        state("a-1", "starting", 0),
        state("a-2", "backing_off", 1),
        state("a-3", "backing_off", 1, 2),  # 1 is the one's before
        state("a-4", "backing_off", 7),  # which the node does not have
    ]
    plan = adopt([m.NodeStatus(node_id="a", sent_at=0.0, instances=instances, devices=[0, 1, 2], planned=True)], 0.0)
    assert plan is not None
    assert slots(plan) == {"a-1": [0], "a-2": [1]}


# --- a cluster in which anything may happen -----------------------------------------------------------------------


Layout = dict[str, list[tuple[int, ...]]]


def buddies(rng: random.Random, first: int, size: int) -> Iterable[tuple[int, ...]]:
    """Divides aligned devices into instances of powers of two; some stay idle."""
    if rng.random() < 0.1:
        return []
    if size == 1 or rng.random() < 0.4:
        return [tuple(range(first, first + size))]
    half = size // 2
    return [*buddies(rng, first, half), *buddies(rng, first + half, half)]


def random_layout(rng: random.Random, nodes: int, size: int) -> Layout:
    return {f"n{number}": list(buddies(rng, 0, size)) for number in range(nodes)}


@dataclass
class World:
    """Agents that converge, slowly; a store that compares and sets; reconfigurators that forget everything at will."""

    rng: random.Random
    plan: m.ClusterPlan
    may_fail: bool
    now: float = 0.0
    runs: dict[str, m.InstanceState] = field(default_factory=dict)  # by slot id, processes and failed starts
    doomed: dict[str, bool] = field(default_factory=dict)  # launches, and whether they fail
    writes: int = 0

    def __post_init__(self) -> None:
        for slot_id, devices in slots(self.plan).items():
            self.runs[slot_id] = self._state(slot_id, devices, "running")
            self.doomed[slot_id] = False

    def _state(self, slot_id: str, devices: list[int], state: str) -> m.InstanceState:
        return m.InstanceState(instance_id=slot_id, slot_id=slot_id, devices=devices, state=state)  # type: ignore[arg-type]

    def node_of(self, slot_id: str) -> str:
        return slot_id.rpartition("-")[0]

    def statuses(self) -> dict[str, m.NodeStatus]:
        return {
            node.node_id: m.NodeStatus(
                node_id=node.node_id,
                sent_at=self.now,
                instances=[s for slot_id, s in self.runs.items() if self.node_of(slot_id) == node.node_id],
                planned=True,
            )
            for node in self.plan.nodes
        }

    def agents_move(self) -> None:
        """Some of what the plan asks of them happens."""
        wanted = slots(self.plan)
        for slot_id, state in list(self.runs.items()):
            if slot_id not in wanted:
                if state.state == "stopping" or state.state == "backing_off":
                    if self.rng.random() < 0.6:
                        del self.runs[slot_id]
                else:
                    self.runs[slot_id] = replace(state, state="stopping")
            elif state.state == "stopping" and self.rng.random() < 0.5:
                del self.runs[slot_id]  # wanted again: it starts anew
            elif state.state == "starting" and self.rng.random() < 0.5:
                failed = self.doomed[slot_id]
                self.runs[slot_id] = replace(state, state="backing_off" if failed else "running")
        used = {(self.node_of(s), d) for s, state in self.runs.items() for d in state.devices}
        for slot_id, devices in wanted.items():
            mine = {(self.node_of(slot_id), device) for device in devices}
            if slot_id not in self.runs and used.isdisjoint(mine):
                self.doomed.setdefault(slot_id, self.may_fail and self.rng.random() < 0.3)
                self.runs[slot_id] = self._state(slot_id, devices, "starting")
                used |= mine

    def reconfigurator_moves(self) -> None:
        """One advances; it may crash before or after it has stored the plan, and another may do the same at once."""
        seen = codec.decode(codec.encode(self.plan), m.ClusterPlan)
        for _ in range(self.rng.choice((1, 1, 2))):
            after = advance(seen, self.statuses(), self.now, launch_limit_s=1e9)
            if after is not None and self.rng.random() < 0.7 and self.plan.revision == seen.revision:
                self.check_write(self.plan, after)
                self.plan = after
                self.writes += 1

    def check_write(self, before: m.ClusterPlan, after: m.ClusterPlan) -> None:
        gone, new = slots(before).keys() - slots(after).keys(), slots(after).keys() - slots(before).keys()
        if after.rollout is None:
            return
        assert len(new) == 1, "one launch at a time"
        (launch,) = new
        needs = {(self.node_of(launch), device) for device in slots(after)[launch]}
        for slot_id in gone:
            on = {(self.node_of(slot_id), device) for device in slots(before)[slot_id]}
            assert not on.isdisjoint(needs), "only what is on its devices stops"
        if before.rollout is not None and before.rollout.launching:
            assert self.runs[before.rollout.launching].state == "running"

    def out_of_service(self, served: set[tuple[str, int]]) -> set[tuple[str, int]]:
        """Devices that have had a running instance before and have none now; the target may want it so."""
        now = {(self.node_of(s), d) for s, i in self.runs.items() if i.state == "running" for d in i.devices}
        served |= now
        return served - now


@settings(max_examples=40)
@given(seed=st.integers(0, 10**9), may_fail=st.booleans())
def test_it_arrives_or_takes_back_one_launch_and_never_has_more_out_of_service_than_that_needs(
    seed: int, may_fail: bool
) -> None:
    rng = random.Random(seed)
    nodes, size = rng.randint(1, 3), rng.choice((2, 4, 8))
    before, target = random_layout(rng, nodes, size), random_layout(rng, nodes, size)
    start = m.ClusterPlan(revision=1, written_at=0.0, nodes=[m.NodePlan(node_id=n, instances=[]) for n in before])
    wanted = [Place(n, devices) for n, instances in before.items() for devices in instances]
    start = begin(start, wanted, "", 0.0)
    assert start.rollout is not None
    start = replace(start, nodes=start.rollout.target, rollout=None)
    wanted = [Place(n, devices) for n, instances in target.items() for devices in instances]
    world = World(rng, begin(start, wanted, "why", 0.0), may_fail)
    served: set[tuple[str, int]] = set()
    world.out_of_service(served)
    blocks = [set(one.devices) for plan in (start, world.plan) for node in plan.nodes for one in node.instances]
    largest = max([*map(len, blocks), *(len(p.devices) for p in wanted)], default=0)

    for _ in range(3000):
        world.now += 1.0
        world.agents_move()
        out = world.out_of_service(served) & {(place.node_id, device) for place in wanted for device in place.devices}
        if world.plan.rollout is not None:
            assert len({node for node, _ in out}) <= 1, "on one node at a time"
            assert len(out) <= largest, "a launch, or what it has split"
        world.reconfigurator_moves()
        settled = world.plan.rollout is None and {s for s, i in world.runs.items() if i.state == "running"} == set(
            slots(world.plan)
        )
        if settled:
            break
    else:
        pytest.fail("it does not end")

    launches = sum(len(set(target[n]) - set(before[n])) for n in target)
    assert world.writes <= launches + 1
    if not world.plan.failures:
        assert {n.node_id: {tuple(i.devices) for i in n.instances} for n in world.plan.nodes} == {
            n: set(instances) for n, instances in target.items()
        }
        kept = sum(len(set(target[n]) & set(before[n])) for n in target)
        assert len(slots(world.plan).keys() & slots(start).keys()) == kept, "what could stay has"
    else:
        assert may_fail
