"""Which wait an accepted assignment ends, as a span and as metrics."""

import re
import time

import pytest
from prometheus_client import generate_latest

from contracts import messages as m
from services import telemetry as t
from services.bus import new_trace_parent, trace_parent
from services.scheduler import events as e
from services.scheduler.service import note_wait
from tests.builders import make_record, make_request
from tests.otlp_receiver import receiver

CREATED_AT = 1000.0
REQUEST = make_request("r1", created_at=CREATED_AT)
RELEASED = make_record(REQUEST, "released", holder="a", written_at=1001.5)
BACK = make_record(REQUEST, "released", holder="b", written_at=1001.5)
LOST = make_record(REQUEST, "released", holder="", reason="worker_lost", attempt=2, written_at=1002.5)


def observed() -> tuple[float, float]:
    """How many waits were counted: of newcomers, and of moves."""
    told = generate_latest().decode()
    names = "tediserve_request_queue_time_seconds_count", "tediserve_scheduler_move_seconds_count"
    queued, moved = (sum(map(float, re.findall(rf"^{name}\S* (\S+)$", told, re.MULTILINE))) for name in names)
    return queued, moved


@pytest.mark.parametrize(
    ("resume", "reason", "name", "since"),
    [
        (None, "new", t.QUEUE, CREATED_AT),
        (None, "unanswered", t.QUEUE, CREATED_AT),
        (RELEASED, "moved", t.MOVE, 1001.5),
        (RELEASED, "unanswered", t.MOVE, 1001.5),
        (BACK, "released", t.MOVE, 1001.5),
        (LOST, "worker_lost", t.QUEUE, 1002.5),
    ],
)
def test_a_wait_is_a_queue_or_a_move_since_the_last_record(
    resume: m.ProgressRecord | None, reason: e.AssignReason, name: str, since: float
) -> None:
    attempt = 1 if resume is None else resume.attempt
    assign = m.Assign(epoch=1, attempt=attempt, request=REQUEST, threshold=0.9, resume=resume)
    with receiver() as collector:
        before = observed()
        t.set_up("test", t.TelemetrySettings(endpoint=collector.url))
        token = trace_parent.set(new_trace_parent())
        note_wait(e.SendAssign("b", assign, reason))
        trace_parent.reset(token)
        t.shut_down()
    queued, moved = (now - was for was, now in zip(before, observed(), strict=True))
    assert (queued, moved) == (resume is None, name == t.MOVE and resume is not BACK), "a loss's wait is neither"
    (span,) = collector.spans
    assert (span.name, span.began_at) == (name, since)
    assert abs(span.ended_at - time.time()) < 60
    assert span.attributes == {
        t.REQUEST_ID: "r1",
        t.ATTEMPT: attempt,
        t.INSTANCE_ID: "b",
        t.PRIORITY: REQUEST.priority,
        t.REASON: reason,
    }
