"""What is counted of a request that has ended."""

from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from contracts import messages as m
from services.gateway import ended
from services.gateway.openai_api import Facts
from tests.builders import make_cost, make_record

FLEX = Facts(body="hash", tier="flex").encode()


def final(state: m.State = "finished", **changes: Any) -> m.ProgressRecord:
    values: dict[str, Any] = {
        "created_at": 100.0,
        "written_at": 103.0,
        "prompt_tokens": 7,
        "token_ids": [1, 2, 3],
        "blocks": [make_cost(recompute_steps=1, cache_steps=3), make_cost(recompute_steps=2, cache_steps=0)],
        "finish": "length" if state == "finished" else "",
        "fingerprint": FLEX,
    }
    return replace(make_record("r1", state), **(values | changes))


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tediserve_{name}", labels) or 0.0


NAMES: list[tuple[str, dict[str, str]]] = [
    ("e2e_request_latency_seconds_sum", {"tier": "flex"}),
    ("e2e_request_latency_seconds_count", {"tier": "flex"}),
    ("request_steps_sum", {}),
    ("request_steps_count", {}),
    ("prompt_tokens_total", {}),
    ("generation_tokens_total", {}),
]


def test_an_answer_has_a_latency_steps_and_tokens() -> None:
    before = [value(name, **labels) for name, labels in NAMES]
    was = value("requests_ended_total", state="finished", reason="length")
    ended.count(final())
    assert [value(name, **labels) - b for (name, labels), b in zip(NAMES, before, strict=True)] == [3, 1, 6, 1, 7, 3]
    assert value("requests_ended_total", state="finished", reason="length") - was == 1


@pytest.mark.parametrize(("state", "reason"), [("failed", "expired"), ("cancelled", "client_gone")])
def test_what_was_not_answered_is_counted_by_its_reason_alone(state: m.State, reason: m.Reason) -> None:
    before = [value(name, **labels) for name, labels in NAMES]
    was = value("requests_ended_total", state=state, reason=reason)
    ended.count(final(state, reason=reason))
    assert [value(name, **labels) for name, labels in NAMES] == before
    assert value("requests_ended_total", state=state, reason=reason) - was == 1


@pytest.mark.parametrize(
    ("record", "met", "missed"),
    [
        (final(deadline_at=103.0), 1, 0),
        (final(deadline_at=102.9), 0, 1),
        (final(deadline_at=None), 0, 0),
        (final("failed", reason="overloaded", deadline_at=200.0), 0, 1),
        (final("cancelled", reason="client_gone", deadline_at=200.0), 0, 0),
        (final("cancelled", reason="stop_string", deadline_at=200.0), 1, 0),
    ],
)
def test_deadlines_are_kept_or_missed_by_tier(record: m.ProgressRecord, met: int, missed: int) -> None:
    def counted(tier: str) -> tuple[float, ...]:
        return tuple(value("request_slo_total", tier=tier, outcome=outcome) for outcome in ("met", "missed"))

    before = counted("flex")
    ended.count(record)
    assert tuple(now - was for now, was in zip(counted("flex"), before, strict=True)) == (met, missed)


def test_a_record_of_nobodys_has_an_unknown_tier() -> None:
    was = value("e2e_request_latency_seconds_count", tier="unknown")
    ended.count(final(fingerprint="no JSON"))
    assert value("e2e_request_latency_seconds_count", tier="unknown") - was == 1
