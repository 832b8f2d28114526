"""When an agent starts, restarts, announces and stops its workers."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contracts import messages as m
from services.denoiser.agent_policy import (
    AgentPolicy,
    AnnounceLost,
    Began,
    Exited,
    Finish,
    Found,
    Kill,
    Patience,
    PlanSeen,
    Ready,
    Start,
    Started,
    StartFailed,
    StopAsked,
    Terminate,
    Tick,
    WakeAt,
    divide,
    share,
)

PATIENCE = Patience(backoff_first_s=0.5, backoff_limit_s=4.0, healthy_after_s=30.0, stop_limit_s=35.0)
FIXED = share("n", 2)


@pytest.fixture
def policy() -> Iterator[AgentPolicy]:
    """Both workers run."""
    policy = AgentPolicy(PATIENCE, FIXED, node_id="n")
    assert policy.handle(Began(), 0.0) == [Start(wanted=FIXED[0]), Start(wanted=FIXED[1])]
    for slot in range(2):
        assert policy.handle(Started(slot_id=f"n-{slot}", instance_id=f"n-{slot}-a"), 0.1) == []
        assert policy.handle(Ready(instance_id=f"n-{slot}-a"), 1.0) == []
    yield policy
    policy.check_invariants()


def lose(policy: AgentPolicy, now: float, instance_id: str = "n-0-a", slot: int = 0, **more: bool) -> list[object]:
    """What follows on the announcement."""
    exited = Exited(slot_id=f"n-{slot}", instance_id=instance_id, detail="killed by SIGKILL", **more)
    announced, *then = policy.handle(exited, now)
    assert announced == AnnounceLost(instance_id=instance_id, detail="killed by SIGKILL")
    return list(then)


def states(policy: AgentPolicy) -> list[tuple[str, str, int]]:
    return [(i.instance_id, i.state, i.restarts) for i in policy.status(0.0).instances]


def test_a_lost_worker_is_announced_and_started_anew_at_once(policy: AgentPolicy) -> None:
    assert lose(policy, 5.0) == [Start(wanted=FIXED[0])]
    assert states(policy) == [("n-0", "starting", 1), ("n-1-a", "running", 0)]
    assert policy.status(0.0).instances[0].detail == "killed by SIGKILL"


def test_further_losses_wait_longer_and_longer_up_to_a_limit(policy: AgentPolicy) -> None:
    assert lose(policy, 5.0) == [Start(wanted=FIXED[0])]
    now, instance = 5.0, "n-0-b"
    for pause in (0.5, 1.0, 2.0, 4.0, 4.0, 4.0):
        policy.handle(Started(slot_id="n-0", instance_id=instance), now)
        assert lose(policy, now, instance) == [WakeAt(at=now + pause)]
        assert states(policy)[0][1] == "backing_off"
        assert policy.handle(Tick(), now + pause - 0.01) == []
        now += pause
        assert policy.handle(Tick(), now) == [Start(wanted=FIXED[0])]
        assert policy.handle(Tick(), now) == [], "it is being started"


def test_a_worker_that_was_ready_for_long_starts_with_a_clean_record(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    policy.handle(Started(slot_id="n-0", instance_id="n-0-b"), 5.0)
    policy.handle(Ready(instance_id="n-0-b"), 60.0)
    assert lose(policy, 90.0, "n-0-b") == [Start(wanted=FIXED[0])]
    policy.handle(Started(slot_id="n-0", instance_id="n-0-c"), 90.0)
    policy.handle(Ready(instance_id="n-0-c"), 91.0)
    assert lose(policy, 120.9, "n-0-c") == [WakeAt(at=121.4)], "29.9 s are not enough"


def test_loading_for_long_is_no_health(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    policy.handle(Started(slot_id="n-0", instance_id="n-0-b"), 5.0)
    assert lose(policy, 305.0, "n-0-b") == [WakeAt(at=305.5)]


def test_slots_back_off_apart(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    assert lose(policy, 5.0, "n-1-a", slot=1) == [Start(wanted=FIXED[1])]


def test_a_worker_that_cannot_even_be_started_is_tried_again(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    assert policy.handle(StartFailed(slot_id="n-0", detail="no memory"), 5.0) == [WakeAt(at=5.5)]
    assert policy.handle(Tick(), 5.5) == [Start(wanted=FIXED[0])]


def test_another_nodes_instance_changes_nothing(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    policy.handle(Started(slot_id="n-0", instance_id="n-0-b"), 5.0)
    policy.handle(Ready(instance_id="elsewhere-0-a"), 6.0)
    assert states(policy)[0] == ("n-0-b", "starting", 1)


def test_status_tells_what_runs(policy: AgentPolicy) -> None:
    assert policy.status(7.0) == m.NodeStatus(
        node_id="n",
        sent_at=7.0,
        instances=[
            m.InstanceState(instance_id="n-0-a", state="running", slot_id="n-0"),
            m.InstanceState(instance_id="n-1-a", state="running", slot_id="n-1"),
        ],
    )


def test_asked_to_stop_it_lets_the_workers_drain_and_leaves_with_the_last(policy: AgentPolicy) -> None:
    assert policy.handle(StopAsked(), 10.0) == [Terminate(slot_id="n-0"), Terminate(slot_id="n-1"), WakeAt(at=45.0)]
    assert policy.handle(StopAsked(), 10.0) == []
    assert lose(policy, 11.0) == []
    assert states(policy) == [("n-1-a", "stopping", 0)]
    assert lose(policy, 12.0, "n-1-a", slot=1) == [Finish()]


def test_who_has_not_stopped_in_time_is_killed(policy: AgentPolicy) -> None:
    policy.handle(StopAsked(), 10.0)
    lose(policy, 11.0)
    assert policy.handle(Tick(), 44.9) == []
    assert policy.handle(Tick(), 45.0) == [Kill(slot_id="n-1")]
    assert lose(policy, 45.1, "n-1-a", slot=1) == [Finish()]


def test_a_worker_that_was_just_being_started_is_stopped_too(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    assert policy.handle(StopAsked(), 5.0) == [Terminate(slot_id="n-1"), WakeAt(at=40.0)]
    assert lose(policy, 6.0, "n-1-a", slot=1) == []
    started = Started(slot_id="n-0", instance_id="n-0-b")
    assert policy.handle(started, 6.0) == [Terminate(slot_id="n-0"), WakeAt(at=41.0)]
    assert lose(policy, 7.0, "n-0-b") == [Finish()]


def test_who_backs_off_when_asked_to_stop_is_not_started(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    policy.handle(Started(slot_id="n-0", instance_id="n-0-b"), 5.0)
    lose(policy, 5.0, "n-0-b")
    policy.handle(StopAsked(), 5.1)
    assert policy.handle(Tick(), 5.5) == []
    assert lose(policy, 6.0, "n-1-a", slot=1) == [Finish()]


def test_an_agent_without_workers_finishes_at_once() -> None:
    policy = AgentPolicy(PATIENCE, [])
    assert policy.handle(Began(), 0.0) == []
    assert policy.handle(StopAsked(), 1.0) == [Finish()]


def test_a_wrong_configuration_waits_as_long_as_the_limit_at_once_and_says_why(policy: AgentPolicy) -> None:
    assert lose(policy, 5.0, wrong_config=True) == [WakeAt(at=9.0)]
    (instance, _) = policy.status(0.0).instances
    assert instance.state == "backing_off"
    assert instance.detail == "killed by SIGKILL: its log says what is wrong; it is tried again every 4 s"
    assert policy.handle(Ready(instance_id="elsewhere"), 8.9) == []
    assert policy.handle(Tick(), 9.0) == [Start(wanted=FIXED[0])]


# --- plans --------------------------------------------------------------------------------------------------------


def planned(slot_id: str, *devices: int, **changes: Any) -> m.PlannedInstance:
    return m.PlannedInstance(**({"slot_id": slot_id, "tp_degree": len(devices), "devices": list(devices)} | changes))


def plan_seen(*instances: m.PlannedInstance, node_id: str = "n", revision: int = 1) -> PlanSeen:
    nodes = [m.NodePlan(node_id=node_id, instances=list(instances))]
    return PlanSeen(plan=m.ClusterPlan(revision=revision, written_at=0.0, nodes=nodes))


def follower(*instances: m.PlannedInstance, devices: int = 4, planned: bool = True) -> AgentPolicy:
    """An agent that follows plans, with these ready."""
    policy = AgentPolicy(PATIENCE, [], node_id="n", devices=range(devices), device_kind="cpu", planned=planned)
    assert policy.handle(plan_seen(*instances), 0.0) == [], "nothing is started before all is read"
    assert policy.handle(Began(), 0.0) == [Start(wanted=instance) for instance in instances]
    for instance in instances:
        policy.handle(Started(slot_id=instance.slot_id, instance_id=f"{instance.slot_id}-a"), 0.0)
        policy.handle(Ready(instance_id=f"{instance.slot_id}-a"), 0.0)
    return policy


def exited(slot_id: str, suffix: str = "a") -> Exited:
    return Exited(slot_id=slot_id, instance_id=f"{slot_id}-{suffix}", detail="exit code 0 (stopped)")


def lost(slot_id: str) -> AnnounceLost:
    return AnnounceLost(instance_id=f"{slot_id}-a", detail="exit code 0 (stopped)")


def test_what_the_plan_does_not_want_drains_and_what_needs_its_devices_waits() -> None:
    wide, narrow = planned("n-0", 0, 1), planned("n-1", 0)
    policy = follower(wide)
    assert policy.handle(plan_seen(narrow, revision=2), 10.0) == [Terminate(slot_id="n-0"), WakeAt(at=45.0)]
    assert [(i.slot_id, i.state, i.detail) for i in policy.status(0.0).instances] == [
        ("n-0", "stopping", ""),
        ("n-1", "starting", "waits for the devices of n-0"),
    ]
    assert policy.status(0.0).plan_revision == 2
    assert policy.handle(exited("n-0"), 12.0) == [lost("n-0"), Start(wanted=narrow)]
    assert [(i.slot_id, i.state, i.detail, i.restarts) for i in policy.status(0.0).instances] == [
        ("n-1", "starting", "", 0)
    ]


def found_by(policy: AgentPolicy, *instances: m.PlannedInstance, **more: bool) -> None:
    """A last agent has left these running."""
    for instance in instances:
        found = Found(wanted=instance, instance_id=f"{instance.slot_id}-a", **more)
        assert policy.handle(found, 0.0) == [], "nothing is done before all is read"


def successor() -> AgentPolicy:
    return AgentPolicy(PATIENCE, [], node_id="n", devices=range(4), device_kind="cpu", planned=True)


def test_what_a_last_agent_has_left_runs_on_where_it_is_wanted_and_else_drains() -> None:
    policy = successor()
    found_by(policy, planned("n-0", 0), planned("n-1", 1, 2))
    policy.handle(plan_seen(planned("n-0", 0), planned("n-2", 2), planned("n-3", 3)), 0.0)
    assert policy.handle(Began(), 0.0) == [
        Terminate(slot_id="n-1"),
        Start(wanted=planned("n-3", 3)),
        WakeAt(at=35.0),
    ]
    policy.handle(Ready(instance_id="n-0-a"), 1.0)
    policy.handle(Ready(instance_id="n-1-a"), 1.0)
    assert [(i.instance_id, i.state) for i in policy.status(0.0).instances] == [
        ("n-0-a", "running"),
        ("n-1-a", "stopping"),
        ("n-2", "starting"),
        ("n-3", "starting"),
    ]
    assert policy.handle(exited("n-1"), 2.0) == [lost("n-1"), Start(wanted=planned("n-2", 2))]
    assert policy.handle(exited("n-0"), 2.0) == [lost("n-0"), Start(wanted=planned("n-0", 0))]


def test_what_was_started_with_other_settings_drains_and_starts_anew() -> None:
    policy = successor()
    found_by(policy, planned("n-0", 0), outdated=True)
    policy.handle(plan_seen(planned("n-0", 0)), 0.0)
    assert policy.handle(Began(), 0.0) == [Terminate(slot_id="n-0"), WakeAt(at=35.0)]
    assert policy.handle(exited("n-0"), 1.0) == [lost("n-0"), Start(wanted=planned("n-0", 0))]
    policy.handle(Started(slot_id="n-0", instance_id="n-0-b"), 1.0)
    assert policy.handle(Tick(), 2.0) == []


def test_what_was_left_running_and_ends_before_the_plan_is_read_is_announced_at_once() -> None:
    policy = successor()
    found_by(policy, planned("n-0", 0))
    assert policy.handle(exited("n-0"), 0.5) == [lost("n-0")]
    policy.handle(plan_seen(planned("n-0", 0)), 0.6)
    assert policy.handle(Began(), 1.0) == [Start(wanted=planned("n-0", 0))]


def test_who_does_not_drain_in_time_is_killed_once() -> None:
    policy = follower(planned("n-0", 0))
    policy.handle(plan_seen(), 10.0)
    assert policy.handle(Tick(), 44.9) == []
    assert policy.handle(Tick(), 45.0) == [Kill(slot_id="n-0")]
    assert policy.handle(Tick(), 46.0) == []
    assert policy.handle(exited("n-0"), 46.0) == [lost("n-0")]
    assert policy.status(0.0).instances == []


def test_what_the_plan_keeps_is_not_touched() -> None:
    kept = planned("n-0", 0)
    policy = follower(kept, planned("n-1", 1))
    assert policy.handle(plan_seen(kept, planned("n-2", 2)), 1.0) == [
        Terminate(slot_id="n-1"),
        Start(wanted=planned("n-2", 2)),
        WakeAt(at=36.0),
    ]
    assert policy.handle(plan_seen(kept, planned("n-2", 2), revision=2), 1.0) == []


def test_what_is_wanted_again_while_it_stops_starts_anew_when_it_has() -> None:
    instance = planned("n-0", 0)
    policy = follower(instance)
    policy.handle(plan_seen(), 1.0)
    assert policy.handle(plan_seen(instance), 2.0) == []
    assert policy.handle(exited("n-0"), 3.0) == [lost("n-0"), Start(wanted=instance)]


def test_the_same_slot_on_other_devices_is_another_instance() -> None:
    policy = follower(planned("n-0", 0))
    assert policy.handle(plan_seen(planned("n-0", 1)), 1.0) == [Terminate(slot_id="n-0"), WakeAt(at=36.0)]
    assert policy.handle(exited("n-0"), 2.0) == [lost("n-0"), Start(wanted=planned("n-0", 1))]


def test_one_that_the_plan_drops_while_it_is_being_started_is_stopped_as_soon_as_it_runs() -> None:
    policy = follower()
    policy.handle(plan_seen(planned("n-0", 0)), 1.0)
    assert policy.handle(plan_seen(), 1.0) == []
    assert policy.handle(Started(slot_id="n-0", instance_id="n-0-a"), 1.1) == [
        Terminate(slot_id="n-0"),
        WakeAt(at=36.1),
    ]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (planned("n-1", 4), "the plan gives it device 4, the node has [0, 1, 2, 3]"),
        (planned("n-1", 1, 0), "the plan gives it device 0, which is n-0's"),
        (planned("n-1", 1, 2, tp_degree=4), "the plan gives it devices [1, 2] for TP degree 4"),
        (planned("n-1", 1, 1), "the plan gives it devices [1, 1] for TP degree 2"),
    ],
)
def test_what_a_plan_cannot_have_is_not_started_and_it_says_why(wrong: m.PlannedInstance, complaint: str) -> None:
    policy = follower(planned("n-0", 0))
    assert policy.handle(plan_seen(planned("n-0", 0), wrong), 1.0) == []
    refused = policy.status(0.0).instances[1]
    assert (refused.state, refused.detail, refused.restarts) == ("backing_off", complaint, 0)
    right = planned("n-1", 1)
    assert policy.handle(plan_seen(planned("n-0", 0), right), 2.0) == [Start(wanted=right)]


def test_a_plan_that_does_not_list_the_node_changes_nothing() -> None:
    policy = follower(planned("n-0", 0))
    assert policy.handle(plan_seen(node_id="another", revision=7), 1.0) == []
    assert policy.status(0.0).plan_revision == 1


def test_who_follows_no_plan_runs_what_it_was_configured_to() -> None:
    policy = AgentPolicy(PATIENCE, FIXED, node_id="n")
    policy.handle(plan_seen(planned("n-9", 0)), 0.0)
    assert policy.handle(Began(), 0.0) == [Start(wanted=instance) for instance in FIXED]
    assert policy.handle(plan_seen(), 1.0) == []


def test_an_agent_that_is_asked_to_stop_starts_nothing_that_a_plan_wants() -> None:
    policy = follower(planned("n-0", 0))
    policy.handle(StopAsked(), 1.0)
    assert policy.handle(plan_seen(planned("n-1", 1)), 2.0) == []
    assert policy.handle(exited("n-0"), 3.0) == [lost("n-0"), Finish()]


def test_devices_are_divided_and_what_is_left_over_is_not_used() -> None:
    assert divide("n", 4, 2, (0, 2, 5, 6, 7)) == [planned("n-0", 0, 2), planned("n-1", 5, 6)]
    assert divide("n", 1, 2, (0, 1, 2, 3)) == [planned("n-0", 0, 1)]
    assert divide("n", 2, 4, (0, 1)) == []


class AnyPlans(RuleBasedStateMachine):
    """Whatever plans come and whatever becomes of processes: no device has two, and what is wanted runs in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = AgentPolicy(PATIENCE, [], node_id="n", devices=range(4), planned=True)
        self.now = 0.0
        self.alive: dict[str, tuple[m.PlannedInstance, str]] = {}  # by slot: what a process was started as, its id
        self.asked: set[str] = set()
        self.wanted: list[m.PlannedInstance] = []
        self.outdated: set[str] = set()  # instance ids
        self.num_started = 0

    @initialize(left=st.dictionaries(st.integers(0, 3), st.booleans(), max_size=3))
    def begins(self, left: dict[int, bool]) -> None:
        """What a last agent has left running: by device, whether it is outdated."""
        for device, outdated in left.items():
            wanted = planned(f"n-{device}", device)
            self.alive[wanted.slot_id] = wanted, f"left-{device}"
            self.outdated |= {f"left-{device}"} if outdated else set()
            self.handle(Found(wanted=wanted, instance_id=f"left-{device}", outdated=outdated))
        self.handle(Began())

    def handle(self, event: Any) -> None:
        for command in self.policy.handle(event, self.now):
            match command:
                case Start(wanted=wanted):
                    assert wanted.slot_id not in self.alive
                    self.num_started += 1
                    self.alive[wanted.slot_id] = wanted, f"i-{self.num_started}"
                    used = [device for started, _ in self.alive.values() for device in started.devices]
                    assert len(used) == len(set(used))
                    self.handle(Started(slot_id=wanted.slot_id, instance_id=f"i-{self.num_started}"))
                case Terminate(slot_id=slot_id) | Kill(slot_id=slot_id):
                    assert slot_id in self.alive
                    self.asked.add(slot_id)
                case _:
                    pass

    def exit(self, slot_id: str) -> None:
        _, instance_id = self.alive.pop(slot_id)
        self.asked.discard(slot_id)
        self.handle(Exited(slot_id=slot_id, instance_id=instance_id, detail="gone"))

    @rule(places=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4), first=st.integers(0, 3))
    def plan(self, places: list[list[int]], first: int) -> None:
        self.wanted = [planned(f"n-{first + number}", *devices) for number, devices in enumerate(places)]
        self.handle(plan_seen(*self.wanted))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def process_exits(self, data: st.DataObject) -> None:
        self.exit(data.draw(st.sampled_from(sorted(self.alive))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def process_is_ready(self, data: st.DataObject) -> None:
        self.handle(Ready(instance_id=data.draw(st.sampled_from([i for _, i in self.alive.values()]))))

    @rule(seconds=st.floats(0, 60))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.handle(Tick())

    @invariant()
    def books_balance(self) -> None:
        self.policy.check_invariants()
        assert len(self.policy.status(0.0).instances) <= len(self.wanted) + len(self.alive)

    def teardown(self) -> None:
        """All that was asked to stop does, pauses pass: then exactly what can run of the plan does."""
        for slot_id in sorted(self.asked):
            self.exit(slot_id)
        self.now += PATIENCE.backoff_limit_s
        self.handle(Tick())
        taken: set[int] = set()
        expected = []
        for wanted in self.wanted:
            devices = set(wanted.devices)
            if devices <= set(range(4)) and len(devices) == len(wanted.devices) and devices.isdisjoint(taken):
                expected.append(wanted)
            taken |= devices
        assert sorted(started.slot_id for started, _ in self.alive.values()) == sorted(w.slot_id for w in expected)
        assert all(wanted in expected for wanted, _ in self.alive.values())
        assert self.outdated.isdisjoint(instance_id for _, instance_id in self.alive.values())


TestAnyPlans = AnyPlans.TestCase
TestAnyPlans.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
