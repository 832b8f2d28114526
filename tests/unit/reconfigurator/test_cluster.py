"""What the reconfigurator plans from, and where it lets instances be."""

import pytest
from msgspec.structs import replace

from contracts import messages as m
from services.costs import DegreeProfile, PassCost
from services.profile import Decoding, Limits, Profile
from services.reconfigurator.cluster import is_busy, places_of, problem_of
from services.reconfigurator.config import ReconfiguratorConfig
from services.reconfigurator.plan import Placed, Plan
from services.reconfigurator.problem import Instance, Node, Planning, Problem, RequestClass, Threshold
from services.reconfigurator.rollout import Place
from services.settings import ConfigError, load_section

PROFILE = Profile(
    model="m",
    decoding=Decoding(block_size=32, cache="dual", thresholds=(0.5, 0.9), steps_by_threshold=(4.0, 16.0)),
    limits=Limits(max_context_tokens=1024, max_output_tokens=512),
)
DEGREES = (DegreeProfile(tp_degree=1, cost=PassCost(curve=((16, 6.0),))),)
SNAPSHOT = m.WorkloadSnapshot(
    sent_at=0.0,
    model="m",
    window_s=300.0,
    covered_s=100.0,
    classes=[
        m.WorkloadClass(priority=1, prompt_tokens=300, output_tokens=64, rate_rps=2.5, requests=9, slo_s=1.5),
        m.WorkloadClass(priority=0, prompt_tokens=300, output_tokens=64, rate_rps=0.5, requests=3),
    ],
)


def planned(slot_id: str, *devices: int) -> m.PlannedInstance:
    return m.PlannedInstance(slot_id=slot_id, tp_degree=len(devices), devices=list(devices))


PLAN = m.ClusterPlan(
    revision=3,
    written_at=0.0,
    nodes=[
        m.NodePlan(node_id="b", instances=[planned("b-0", 0, 1), planned("b-1", 7)]),
        m.NodePlan(node_id="a", instances=[]),
        m.NodePlan(node_id="silent", instances=[planned("silent-0", 4)]),
    ],
)


def node(node_id: str, *devices: int, planned: bool = True) -> m.NodeStatus:
    return m.NodeStatus(node_id=node_id, sent_at=0.0, instances=[], devices=list(devices), planned=planned)


NODES = {n.node_id: n for n in (node("a", 0), node("b", 0, 1, 2), node("new", 0), node("fixed", 0, planned=False))}


def problem() -> Problem | None:
    return problem_of(PROFILE, DEGREES, Planning(), snapshot=SNAPSHOT, plan=PLAN, nodes=NODES)


def test_planned_for_are_the_plans_live_nodes_and_what_they_have_devices_for() -> None:
    found = problem()
    assert found is not None
    assert found.nodes == (Node(node_id="a", devices=(0,)), Node(node_id="b", devices=(0, 1, 2)))
    assert found.today == (Instance(instance_id="b-0", node_id="b", devices=(0, 1)),)


def test_classes_and_thresholds_are_those_of_the_snapshot_and_the_profile() -> None:
    found = problem()
    assert found is not None
    assert found.classes == (
        RequestClass(
            name="300+64, priority 1", rate_per_s=2.5, prompt_tokens=300, output_tokens=64, slo_s=1.5, priority=1
        ),
        RequestClass(name="300+64, priority 0", rate_per_s=0.5, prompt_tokens=300, output_tokens=64),
    )
    assert found.thresholds == (
        Threshold(threshold=0.5, tokens_per_step=8.0),
        Threshold(threshold=0.9, tokens_per_step=2.0),
    )
    assert (found.block_size, found.cache, found.degrees) == (32, "dual", DEGREES)


def test_without_nodes_there_is_nothing_to_plan() -> None:
    assert problem_of(PROFILE, DEGREES, Planning(), snapshot=SNAPSHOT, plan=PLAN, nodes={}) is None


def test_nodes_that_were_not_planned_for_keep_what_they_run() -> None:
    found = problem()
    assert found is not None
    made = Plan(outcome="planned", layout={1: 1}, because="", instances=(Placed(node_id="a", devices=(0,)),))
    assert places_of(made, found, PLAN) == [Place("a", (0,)), Place("silent", (4,))]


@pytest.mark.parametrize(("failures", "pause_s"), [(1, 600.0), (2, 1200.0), (3, 2400.0), (99, 86_400.0)])
def test_after_failed_launches_the_layout_stays_for_longer_and_longer(failures: int, pause_s: float) -> None:
    plan = replace(PLAN, failures=failures, failed_at=1000.0)
    assert is_busy(plan, 999.9 + pause_s, 600.0)
    assert not is_busy(plan, 1000.0 + pause_s, 600.0)
    assert not is_busy(PLAN, 0.0, 600.0)


@pytest.mark.parametrize(
    ("key", "value"), [("PERIOD_S", "0"), ("MIN_COVERED_S", "-1"), ("METRICS_PORT", "70000"), ("LAUNCH_LIMIT_S", "nan")]
)
def test_a_wrong_setting_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key.lower()):
        load_section(ReconfiguratorConfig, "reconfigurator", {f"TEDISERVE_RECONFIGURATOR_{key}": value})
