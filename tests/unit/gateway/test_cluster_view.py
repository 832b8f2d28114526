import msgspec

from contracts import messages as m
from services.gateway.cluster_view import BIN_S, MAX_INSTANCES, NUM_BINS, SILENT_S, ClusterView
from tests.wire.builders import RECORD


def status(instance_id: str, *, canvases: tuple[int, ...] = ()) -> m.InstanceStatus:
    held = [
        m.Held(request_id=f"r{i}", attempt=1, canvas_tokens=tokens, block_size=32, cache="dual", blocks_done=0)
        for i, tokens in enumerate(canvases)
    ]
    return m.InstanceStatus(
        instance_id=instance_id,
        node_id="n",
        model="m",
        tp_degree=2,
        sent_at=1.0,
        epoch=1,
        draining=False,
        max_requests=8,
        kv_tokens=1000,
        held=held,
        latency_ratio=2.0,
    )


def ended(
    at: float, *, deadline_at: float | None, state: m.State = "finished", reason: m.Reason = ""
) -> m.ProgressRecord:
    return msgspec.structs.replace(RECORD, state=state, reason=reason, written_at=at, deadline_at=deadline_at)


def test_instances_are_shown_by_id_until_they_fall_silent() -> None:
    view = ClusterView()
    view.note(status("b", canvases=(100, 250)), 10.0)
    view.note(status("a"), 12.0)
    shown = view.describe(10.0 + SILENT_S)["instances"]
    assert [instance["instance_id"] for instance in shown] == ["a", "b"]
    assert shown[1] == {
        "instance_id": "b",
        "node_id": "n",
        "tp_degree": 2,
        "requests": 2,
        "max_requests": 8,
        "held_tokens": 350,
        "kv_tokens": 1000,
        "latency_ratio": 2.0,
        "draining": False,
    }
    assert [i["instance_id"] for i in view.describe(10.1 + SILENT_S)["instances"]] == ["a"]


def test_no_more_instances_are_kept_than_may_be_and_silent_ones_make_room() -> None:
    view = ClusterView()
    for number in range(MAX_INSTANCES + 5):
        view.note(status(f"i{number}"), 1.0)
    assert len(view.describe(1.0)["instances"]) == MAX_INSTANCES
    view.note(status("new"), 2.0 + SILENT_S)
    assert [i["instance_id"] for i in view.describe(2.0 + SILENT_S)["instances"]] == ["new"]


def test_attainment_counts_requests_with_a_deadline_by_the_time_of_their_end() -> None:
    view = ClusterView()
    now = 1000 * BIN_S
    view.note_end(ended(now - 3 * BIN_S, deadline_at=now))
    view.note_end(ended(now - 3 * BIN_S + 1, deadline_at=now - 3 * BIN_S))  # too late
    view.note_end(ended(now, deadline_at=None))
    view.note_end(ended(now, deadline_at=now + 1, state="cancelled", reason="client_gone"))
    view.note_end(ended(now, deadline_at=now + 1, state="cancelled", reason="stop_string"))  # an answer
    view.note_end(ended(now, deadline_at=now + 1, state="failed"))
    bins = view.describe(now)["attainment"]
    assert len(bins) == NUM_BINS
    assert bins[-4] == {"with_slo": 2, "met": 1}
    assert bins[-1] == {"with_slo": 2, "met": 1}
    assert sum(bin["with_slo"] for bin in bins) == 4
    later = view.describe(now + NUM_BINS * BIN_S)["attainment"]
    assert sum(bin["with_slo"] for bin in later) == 0


def test_load_is_unknown_once_nobody_tells_and_the_plan_stays() -> None:
    view = ClusterView()
    assert (view.describe(0.0)["load"], view.describe(0.0)["plan"]) == (None, None)
    load = m.LoadState(
        sent_at=1.0,
        horizon_s=2.0,
        demand_s=3.0,
        capacity_s=4.0,
        caps=[m.PriorityCap(priority=0, threshold=0.7)],
        num_open=5,
        num_hopeless=1,
    )
    view.note(load, 10.0)
    view.note(m.ClusterPlan(revision=3, written_at=9.0, nodes=[], reason="load fell"), 10.0)
    shown = view.describe(11.0)
    assert shown["load"]["caps"] == [{"type": "PriorityCap", "priority": 0, "threshold": 0.7}]
    assert shown["load"]["demand_s"] == 3.0
    assert shown["plan"] == {"revision": 3, "reason": "load fell", "nodes": [], "in_rollout": False}
    later = view.describe(11.0 + SILENT_S)
    assert later["load"] is None
    assert later["plan"] == shown["plan"]
