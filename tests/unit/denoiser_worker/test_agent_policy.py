"""When an agent starts, restarts, announces and stops its workers."""

import pytest

from contracts import messages as m
from services.denoiser.agent_policy import (
    AgentPolicy,
    AnnounceLost,
    Began,
    Exited,
    Finish,
    Kill,
    Plan,
    Ready,
    Start,
    Started,
    StartFailed,
    StopAsked,
    Terminate,
    Tick,
    WakeAt,
)

PLAN = Plan(workers=2, backoff_first_s=0.5, backoff_limit_s=4.0, healthy_after_s=30.0, stop_limit_s=35.0)


@pytest.fixture
def policy() -> AgentPolicy:
    """Both workers run."""
    policy = AgentPolicy(PLAN)
    assert policy.handle(Began(), 0.0) == [Start(slot=0), Start(slot=1)]
    for slot in range(2):
        assert policy.handle(Started(slot=slot, instance_id=f"n-{slot}-a"), 0.1) == []
        assert policy.handle(Ready(instance_id=f"n-{slot}-a"), 1.0) == []
    return policy


def lose(policy: AgentPolicy, now: float, instance_id: str = "n-0-a", slot: int = 0) -> list[object]:
    """What follows on the announcement."""
    announced, *then = policy.handle(Exited(slot=slot, instance_id=instance_id, detail="killed by SIGKILL"), now)
    assert announced == AnnounceLost(instance_id=instance_id, detail="killed by SIGKILL")
    return list(then)


def states(policy: AgentPolicy) -> list[tuple[str, str, int]]:
    return [(i.instance_id, i.state, i.restarts) for i in policy.status("n", 0.0).instances]


def test_a_lost_worker_is_announced_and_started_anew_at_once(policy: AgentPolicy) -> None:
    assert lose(policy, 5.0) == [Start(slot=0)]
    assert states(policy) == [("n-0", "starting", 1), ("n-1-a", "running", 0)]
    assert policy.status("n", 0.0).instances[0].detail == "killed by SIGKILL"


def test_further_losses_wait_longer_and_longer_up_to_a_limit(policy: AgentPolicy) -> None:
    assert lose(policy, 5.0) == [Start(slot=0)]
    now, instance = 5.0, "n-0-b"
    for pause in (0.5, 1.0, 2.0, 4.0, 4.0, 4.0):
        policy.handle(Started(slot=0, instance_id=instance), now)
        assert lose(policy, now, instance) == [WakeAt(at=now + pause)]
        assert states(policy)[0][1] == "backing_off"
        assert policy.handle(Tick(), now + pause - 0.01) == []
        now += pause
        assert policy.handle(Tick(), now) == [Start(slot=0)]
        assert policy.handle(Tick(), now) == [], "it is being started"


def test_a_worker_that_was_ready_for_long_starts_with_a_clean_record(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    policy.handle(Started(slot=0, instance_id="n-0-b"), 5.0)
    policy.handle(Ready(instance_id="n-0-b"), 60.0)
    assert lose(policy, 90.0, "n-0-b") == [Start(slot=0)]
    policy.handle(Started(slot=0, instance_id="n-0-c"), 90.0)
    policy.handle(Ready(instance_id="n-0-c"), 91.0)
    assert lose(policy, 120.9, "n-0-c") == [WakeAt(at=121.4)], "29.9 s are not enough"


def test_loading_for_long_is_no_health(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    policy.handle(Started(slot=0, instance_id="n-0-b"), 5.0)
    assert lose(policy, 305.0, "n-0-b") == [WakeAt(at=305.5)]


def test_slots_back_off_apart(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    assert lose(policy, 5.0, "n-1-a", slot=1) == [Start(slot=1)]


def test_a_worker_that_cannot_even_be_started_is_tried_again(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    assert policy.handle(StartFailed(slot=0, detail="no memory"), 5.0) == [WakeAt(at=5.5)]
    assert policy.handle(Tick(), 5.5) == [Start(slot=0)]


def test_another_nodes_instance_changes_nothing(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    policy.handle(Started(slot=0, instance_id="n-0-b"), 5.0)
    policy.handle(Ready(instance_id="elsewhere-0-a"), 6.0)
    assert states(policy)[0] == ("n-0-b", "starting", 1)


def test_status_tells_what_runs(policy: AgentPolicy) -> None:
    assert policy.status("n", 7.0) == m.NodeStatus(
        node_id="n",
        sent_at=7.0,
        instances=[
            m.InstanceState(instance_id="n-0-a", state="running"),
            m.InstanceState(instance_id="n-1-a", state="running"),
        ],
    )


def test_asked_to_stop_it_lets_the_workers_drain_and_leaves_with_the_last(policy: AgentPolicy) -> None:
    assert policy.handle(StopAsked(), 10.0) == [Terminate(slot=0), Terminate(slot=1), WakeAt(at=45.0)]
    assert policy.handle(StopAsked(), 10.0) == []
    assert lose(policy, 11.0) == []
    assert states(policy) == [("n-1-a", "stopping", 0)]
    assert lose(policy, 12.0, "n-1-a", slot=1) == [Finish()]


def test_who_has_not_stopped_in_time_is_killed(policy: AgentPolicy) -> None:
    policy.handle(StopAsked(), 10.0)
    lose(policy, 11.0)
    assert policy.handle(Tick(), 44.9) == []
    assert policy.handle(Tick(), 45.0) == [Kill(slot=1)]
    assert lose(policy, 45.1, "n-1-a", slot=1) == [Finish()]


def test_a_worker_that_was_just_being_started_is_stopped_too(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    assert policy.handle(StopAsked(), 5.0) == [Terminate(slot=1), WakeAt(at=40.0)]
    assert lose(policy, 6.0, "n-1-a", slot=1) == []
    assert policy.handle(Started(slot=0, instance_id="n-0-b"), 6.0) == [Terminate(slot=0)]
    assert lose(policy, 7.0, "n-0-b") == [Finish()]


def test_who_backs_off_when_asked_to_stop_is_not_started(policy: AgentPolicy) -> None:
    lose(policy, 5.0)
    policy.handle(Started(slot=0, instance_id="n-0-b"), 5.0)
    lose(policy, 5.0, "n-0-b")
    policy.handle(StopAsked(), 5.1)
    assert policy.handle(Tick(), 5.5) == []
    assert lose(policy, 6.0, "n-1-a", slot=1) == [Finish()]


def test_an_agent_without_workers_finishes_at_once() -> None:
    policy = AgentPolicy(Plan(workers=0))
    assert policy.handle(Began(), 0.0) == []
    assert policy.handle(StopAsked(), 1.0) == [Finish()]
