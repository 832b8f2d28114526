"""When the layout changes."""

from typing import Any

import pytest
from msgspec.structs import replace

from services.reconfigurator.plan import Figures, Placed, Plan
from services.reconfigurator.policy import (
    Adopt,
    Command,
    Keep,
    MakePlan,
    PlanFailed,
    PlanMade,
    ProblemSeen,
    Reconfigurator,
    RolloutSeen,
    Tick,
    WakeAt,
    judge,
)
from services.reconfigurator.problem import Planning
from tests.unit.reconfigurator.build import make_instances, make_node, paper_example

TODAY = make_instances((0, 1, 2, 3), (4, 5, 6, 7))
PROBLEM = paper_example(1.0, today=TODAY)


def make_figures(mean_threshold: float = 0.9, mean_latency_s: float = 2.0) -> Figures:
    return Figures(mean_threshold=mean_threshold, mean_latency_s=mean_latency_s, busiest=0.5, classes=(), degrees=())


def make_plan(**changes: Any) -> Plan:
    defaults: dict[str, Any] = {
        "outcome": "planned",
        "layout": {1: 8},
        "because": "best",
        "instances": tuple(Placed(node_id="n0", devices=(device,)) for device in range(8)),
        "figures": make_figures(),
        "today": make_figures(),
    }
    return Plan(**(defaults | changes))


@pytest.mark.parametrize(
    ("changes", "change", "reason"),
    [
        ({"outcome": "no_requests"}, False, "no_requests"),
        ({"outcome": "out_of_time"}, False, "out_of_time"),
        ({"layout": {4: 2}}, False, "same_layout"),
        ({"today": None, "today_is_known": False}, False, "out_of_time"),
        ({"today": None}, True, "today_infeasible"),
        ({"today": None, "outcome": "overload", "figures": None}, True, "today_infeasible"),
        ({"outcome": "overload", "figures": None}, False, "overload"),
        ({"today": make_figures(0.8)}, True, "threshold_gain"),
        ({"today": make_figures(0.82)}, False, "no_clear_gain"),  # 0.9 is not 1.1 times as high
        ({"today": make_figures(0.9, 2.0 / 0.89)}, True, "latency_gain"),
        ({"today": make_figures(0.9, 2.0 / 0.91)}, False, "no_clear_gain"),
        ({"today": make_figures(0.909, 4.0)}, True, "latency_gain"),  # lower by what may be given away
        ({"today": make_figures(0.92, 4.0)}, False, "no_clear_gain"),
    ],
)
def test_only_a_clear_gain_changes_the_layout(changes: dict[str, Any], change: bool, reason: str) -> None:
    verdict = judge(PROBLEM, make_plan(**changes))
    assert (verdict.change, verdict.reason) == (change, reason)


def test_the_gain_is_a_setting() -> None:
    plan = make_plan(today=make_figures(0.9, 2.0 / 0.89))
    for gain, change in ((0.0, True), (0.1, True), (0.2, False)):
        assert judge(replace(PROBLEM, planning=Planning(min_gain=gain)), plan).change is change


def test_the_first_layout_needs_no_gain() -> None:
    assert judge(replace(PROBLEM, today=()), make_plan(today=None)).reason == "nothing_runs"


def test_idle_devices_are_used_where_nothing_has_to_stop() -> None:
    problem = replace(PROBLEM, today=TODAY[:1])
    kept = Placed(node_id="n0", devices=(0, 1, 2, 3), instance_id="n0-0")
    grown = make_plan(layout={4: 2}, instances=(kept, Placed(node_id="n0", devices=(4, 5, 6, 7))))
    assert judge(problem, grown).reason == "idle_devices"
    assert judge(problem, make_plan()).reason == "no_clear_gain", "the instance would have to stop"


# --- over time ----------------------------------------------------------------------------------------------------


@pytest.fixture
def policy() -> Reconfigurator:
    return Reconfigurator(period_s=300.0, soon_s=5.0)


def test_a_plan_is_made_every_period(policy: Reconfigurator) -> None:
    assert policy.handle(Tick(), now=0.0) == []
    assert policy.handle(ProblemSeen(PROBLEM), now=10.0) == [WakeAt(310.0)]
    assert policy.handle(Tick(), now=309.0) == []
    assert policy.handle(Tick(), now=310.0) == [MakePlan(PROBLEM), WakeAt(610.0)]
    made = make_plan(layout={4: 2})
    assert policy.handle(PlanMade(PROBLEM, made), now=312.0) == [Keep(judge(PROBLEM, made))]
    assert policy.handle(Tick(), now=610.0) == [MakePlan(PROBLEM), WakeAt(910.0)]


def test_the_latest_workload_is_planned_for(policy: Reconfigurator) -> None:
    busier = paper_example(2.0, today=TODAY)
    policy.handle(ProblemSeen(PROBLEM), now=0.0)
    assert policy.handle(ProblemSeen(busier), now=100.0) == []
    assert policy.handle(Tick(), now=300.0)[0] == MakePlan(busier)


def test_a_gain_is_adopted(policy: Reconfigurator) -> None:
    made = make_plan(today=None)
    assert planned(policy, made) == [Adopt(made, judge(PROBLEM, made))]


def planned(policy: Reconfigurator, made: Plan) -> list[Command]:
    policy.handle(ProblemSeen(PROBLEM), now=0.0)
    policy.handle(Tick(), now=300.0)
    return policy.handle(PlanMade(PROBLEM, made), now=301.0)


def test_one_plan_at_a_time_and_none_in_a_rollout(policy: Reconfigurator) -> None:
    policy.handle(ProblemSeen(PROBLEM), now=0.0)
    policy.handle(Tick(), now=300.0)
    assert policy.handle(Tick(), now=700.0) == [], "the solver is still at it"
    made = make_plan(layout={4: 2})
    assert policy.handle(PlanMade(PROBLEM, made), now=701.0)[1:] == [MakePlan(PROBLEM), WakeAt(1001.0)]
    policy.handle(RolloutSeen(True), now=702.0)
    policy.handle(PlanMade(PROBLEM, made), now=703.0)
    assert policy.handle(Tick(), now=2000.0) == []
    assert policy.handle(RolloutSeen(False), now=2001.0) == [MakePlan(PROBLEM), WakeAt(2301.0)]


def test_a_plan_for_a_cluster_that_has_changed_is_dropped(policy: Reconfigurator) -> None:
    policy.handle(ProblemSeen(PROBLEM), now=0.0)
    policy.handle(Tick(), now=300.0)
    lost = replace(PROBLEM, today=TODAY[:1])
    policy.handle(ProblemSeen(lost), now=301.0)
    kept, wake = policy.handle(PlanMade(PROBLEM, make_plan(today=None)), now=302.0)
    assert isinstance(kept, Keep)
    assert kept.verdict.reason == "outdated"
    assert wake == WakeAt(307.0)
    assert policy.handle(Tick(), now=307.0)[0] == MakePlan(lost)


def test_a_plan_comes_soon_after_a_node(policy: Reconfigurator) -> None:
    policy.handle(ProblemSeen(PROBLEM), now=0.0)
    grown = replace(PROBLEM, nodes=(make_node("n0"), make_node("n1")))
    assert policy.handle(ProblemSeen(grown), now=100.0) == [WakeAt(105.0)]
    assert policy.handle(Tick(), now=105.0) == [MakePlan(grown), WakeAt(405.0)]


def test_a_failed_plan_is_told_and_the_next_one_comes(policy: Reconfigurator) -> None:
    policy.handle(ProblemSeen(PROBLEM), now=0.0)
    policy.handle(Tick(), now=300.0)
    kept, wake = policy.handle(PlanFailed("highs reports an objective of 1, its point has 2"), now=301.0)
    assert isinstance(kept, Keep)
    assert (kept.verdict.reason, wake) == ("failed", WakeAt(600.0))
    assert policy.handle(Tick(), now=600.0)[0] == MakePlan(PROBLEM)


def test_a_new_layout_is_not_left_at_once_for_lower_latency() -> None:
    policy = Reconfigurator(period_s=300.0, stay_periods=2)
    faster, needed = make_plan(today=make_figures(0.9, 4.0)), make_plan(today=None)
    policy.handle(ProblemSeen(PROBLEM), now=0.0)
    told = []
    for at, made in ((300.0, needed), (600.0, faster), (800.0, needed), (1100.0, faster), (1400.0, faster)):
        policy.handle(Tick(), now=at)
        decided = policy.handle(PlanMade(PROBLEM, made), now=at)[0]
        assert isinstance(decided, Adopt | Keep)
        told.append((type(decided), decided.verdict.reason))
    assert told == [
        (Adopt, "today_infeasible"),
        (Keep, "too_soon"),
        (Adopt, "today_infeasible"),
        (Keep, "too_soon"),
        (Adopt, "latency_gain"),
    ]
