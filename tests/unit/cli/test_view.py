"""What the command line tells, for clusters whose every word is known."""

from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType

from contracts import messages as m
from tests.builders import BLOCK, make_held, make_record, make_request, make_status
from tools.cli.tables import plan_view, requests_view, status_view
from tools.cli.view import SILENT_S, Cluster, InstanceRow, RequestRow, SlotRow, UnknownInstance

HELD = make_request("held", created_at=990.0, deadline_at=1005.0)
WAITS = make_request("waits", created_at=998.0, priority=2)


def node(*instances: m.InstanceState, node_id: str = "node") -> m.NodeStatus:
    return m.NodeStatus(node_id=node_id, sent_at=0.0, instances=list(instances))


def slot(slot_id: str, **changes: Any) -> m.PlannedInstance:
    return m.PlannedInstance(slot_id=slot_id, tp_degree=1, **changes)


def plan(*nodes: m.NodePlan, **changes: Any) -> m.ClusterPlan:
    return m.ClusterPlan(revision=7, written_at=0.0, nodes=list(nodes), **changes)


def shown(what: RenderableType) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


@pytest.fixture
def cluster() -> Cluster:
    """Instance b of node holds one request; c of the same node loads its model."""
    cluster = Cluster()
    status = make_status("b", [make_held(HELD, attempt=2, blocks_done=1)], epoch=5, latency_ratio=1.5, kv_tokens=960)
    cluster.note(status, 10.0)
    starting = m.InstanceState(instance_id="c", state="starting", detail="waits for [b]", tp_degree=2)
    cluster.note(node(m.InstanceState(instance_id="b", state="running"), starting), 10.0)
    cluster.note(m.GatewayStatus(gateway_id="gw", sent_at=0.0), 10.0)
    return cluster


def test_the_status_tells_instances_requests_leases_and_gateways(cluster: Cluster) -> None:
    leases = {"scheduler": "sched-1", "threshold-controller": "control-1"}
    status = cluster.status(leases=leases, open_ids=["held", "waits"], now=11.0, wall=1000.0)
    assert status.instances == [
        InstanceRow(
            instance_id="b",
            node_id="node",
            state="serving",
            model="test-model",
            tp_degree=1,
            requests=1,
            max_requests=4,
            tokens=3 * BLOCK,
            kv_tokens=960,
            kv_use=0.1,
            latency_ratio=1.5,
        ),
        InstanceRow(instance_id="c", node_id="node", state="starting", tp_degree=2, detail="waits for [b]"),
    ]
    assert (status.open_requests, status.waiting_requests) == (2, 1)
    assert (status.scheduler, status.reconfigurator, status.threshold_controller) == ("sched-1", "", "control-1")
    assert status.epoch == 5
    assert status.gateways == ["gw"]
    text = shown(status_view(status))
    assert "2 open, 1 waiting" in text
    assert "threshold-controller control-1" in " ".join(text.split())
    assert ["b", "node", "serving", "1", "1/4", "96/960", "10%", "x1.50"] in [
        line.split() for line in text.splitlines()
    ]
    assert "waits for [b]" in text, "what a cluster says is no markup"
    assert "no threshold-controller speaks" in text
    assert "does not answer" not in text
    assert "does not answer" in shown(status_view(status, connected=False))


def test_the_load_is_told_with_its_caps(cluster: Cluster) -> None:
    load = m.LoadState(
        sent_at=0.0,
        horizon_s=2.5,
        demand_s=4.75,
        capacity_s=5.0,
        caps=[m.PriorityCap(priority=1, threshold=0.7)],
        num_open=12,
        num_hopeless=3,
        floor_s=3.5,
    )
    cluster.note(load, 10.0)
    status = cluster.status(leases={}, open_ids=[], now=11.0, wall=1000.0)
    assert status.load == load
    text = shown(status_view(status))
    assert "4.75 of 5.00 instance-seconds in the next 2.5 s, 3.50 at the lowest thresholds" in text
    assert "caps 0.7 for priority 1   hopeless 3 of 12" in text


def test_who_is_silent_or_lost_is_not_there(cluster: Cluster) -> None:
    cluster.note(make_status("d", draining=True), 12.0)
    rows = cluster.status(leases={}, open_ids=["held"], now=10.0 + SILENT_S, wall=1000.0)
    assert [(row.instance_id, row.state) for row in rows.instances] == [("d", "draining")]
    assert (rows.gateways, rows.nodes, rows.waiting_requests) == ([], [], 1)
    cluster.note(m.InstanceLost(instance_id="d"), 12.5)
    assert cluster.instance("d", 12.6) is None


def test_requests_are_told_by_who_holds_them_and_how_far_they_are(cluster: Cluster) -> None:
    done = make_request("done")
    records = {
        "held": make_record(HELD, attempt=1, blocks_done=0, moves=1),  # older than what the status says
        "done": make_record(done, "failed", attempt=3),
    }
    rows = cluster.requests([HELD, WAITS, done], records, now=11.0, wall=1000.0)
    assert rows[0] == RequestRow(
        request_id="held",
        state="running",
        instance_id="b",
        attempt=2,
        moves=1,
        blocks_done=1,
        num_blocks=2,
        priority=0,
        age_s=10.0,
        slo_s=15.0,
        deadline_at=1005.0,
        slack_s=5.0,
    )
    waits = replace(rows[0], request_id="waits", state="waiting", instance_id="", attempt=1, moves=0, blocks_done=0)
    assert rows[1] == replace(waits, priority=2, age_s=2.0, slo_s=None, deadline_at=None, slack_s=None)
    assert (rows[2].state, rows[2].attempt) == ("failed", 3)
    lines = shown(requests_view(rows)).splitlines()
    assert lines[1].split() == ["held", "running", "b", "2", "1", "1/2", "0", "10.0", "15.0", "5.0"]
    assert lines[2].split() == ["waits", "waiting", "1", "0", "0/2", "2", "2.0"]


def test_a_request_held_by_a_silent_instance_waits(cluster: Cluster) -> None:
    (row,) = cluster.requests([HELD], {"held": make_record(HELD, holder="b")}, now=20.0, wall=1000.0)
    assert (row.state, row.instance_id) == ("waiting", "")


def test_the_plan_is_told_beside_what_runs(cluster: Cluster) -> None:
    runs = m.InstanceState(instance_id="s1-x", state="running", slot_id="s1", tp_degree=1, devices=[0])
    leaves = m.InstanceState(instance_id="s0-x", state="stopping", slot_id="s0", tp_degree=1, devices=[1])
    cluster.note(node(runs, leaves, node_id="n1"), 10.0)
    wanted = m.NodePlan(node_id="n1", instances=[slot("s1", devices=[0]), slot("s2", devices=[1])])
    rollout = m.Rollout(target=[wanted], reason="more load", began_at=0.0, launching="s2", stopped=[slot("s0")])
    view = cluster.plan(plan(wanted, reason="launches s2", rollout=rollout, failures=2), now=11.0)
    rows = [row for row in view.slots if row.node_id == "n1"]
    assert rows == [
        SlotRow(
            node_id="n1",
            slot_id="s0",
            wanted=False,
            tp_degree=1,
            devices=[1],
            profile="",
            state="stopping",
            instance_id="s0-x",
        ),
        SlotRow(
            node_id="n1",
            slot_id="s1",
            wanted=True,
            tp_degree=1,
            devices=[0],
            profile="",
            state="running",
            instance_id="s1-x",
        ),
        SlotRow(node_id="n1", slot_id="s2", wanted=True, tp_degree=1, devices=[1], profile="", state=""),
    ]
    assert {row.wanted for row in view.slots if row.node_id == "node"} == {True}, "a node that is not listed"
    text = shown(plan_view(view))
    assert "plan 7: launches s2" in text
    assert "rollout more load; launching s2, stopped s0" in text
    assert "2 rollouts in a row were given up" in text
    assert "not there" in text


def test_without_a_plan_what_runs_is_wanted(cluster: Cluster) -> None:
    view = cluster.plan(None, now=11.0)
    assert [(row.slot_id, row.wanted, row.state) for row in view.slots] == [
        ("b", True, "running"),
        ("c", True, "starting"),
    ]
    assert "There is no plan" in shown(plan_view(view))


@pytest.fixture
def three() -> Cluster:
    cluster = Cluster()
    for instance_id in ("node-1-cc", "node-0-bb", "node-0-aa"):
        cluster.note(make_status(instance_id), 1.0)
    return cluster


@pytest.mark.parametrize(("name", "instance_id"), [("node-0-aa", "node-0-aa"), ("node-1", "node-1-cc")])
def test_an_instance_is_named_by_its_id_or_its_beginning(three: Cluster, name: str, instance_id: str) -> None:
    assert three.find_instance(name, 1.0) == instance_id


@pytest.mark.parametrize(("name", "number"), [("node-0", "2"), ("x", "no")])
def test_a_name_of_several_or_none_is_refused_with_those_there_are(three: Cluster, name: str, number: str) -> None:
    there = "there are node-0-aa, node-0-bb, node-1-cc"
    with pytest.raises(UnknownInstance, match=f"^{number} instances are named {name}; {there}$"):
        three.find_instance(name, 1.0)
