"""Traces: free when off; when on, a tree whose times, parents and names are what was said. The collector is real."""

import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes

from services import otlp, telemetry
from services.bus import new_trace_parent, trace_parent
from services.settings import ConfigError, load_section
from services.telemetry import TelemetrySettings
from tests.certificates import write_certificate
from tests.otlp_receiver import Receiver, receiver, value_of
from tests.processes import ROOT, plain_environment
from tests.waiting import wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"

values = st.one_of(
    st.text(),
    st.booleans(),
    st.integers(min_value=-(2**63), max_value=2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(st.text()),
)


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with receiver() as collector:
        yield collector


@pytest.fixture
def turn_on(collector: Receiver) -> Iterator[Callable[..., None]]:
    """Traces of this process go to the collector; within the test alone."""

    def turn_on(**settings: Any) -> None:
        values = {"endpoint": collector.url, "send_every_s": 0.05, "send_limit_s": 0.5, **settings}
        telemetry.set_up("test", TelemetrySettings(**values))

    yield turn_on
    telemetry.shut_down()
    trace_parent.set("")


def outcome(name: str) -> float:
    return float(telemetry.SPANS.labels(name)._value.get())


def is_sampled(traceparent: str) -> bool:
    """The flags have more bits than that one."""
    return bool(int(traceparent[-2:], 16) & 1)


# --- off ---


def test_off_nothing_of_it_is_imported() -> None:
    program = """
import sys
from services import runtime, telemetry
telemetry.set_up("test", telemetry.TelemetrySettings())
span = telemetry.begin("call", kind="server")
telemetry.record("block", began_at=1.0, ended_at=2.0, parent=span.traceparent)
span.end()
telemetry.shut_down()
print([name for name in sys.modules if name == "services.otlp"])
"""
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=60
    )
    assert (found.stdout.strip(), found.stderr) == ("[]", "")


def test_off_a_traceparent_is_passed_on_as_it_came() -> None:
    made = outcome("made")
    assert telemetry.begin("call", parent=PARENT).traceparent == PARENT
    telemetry.record("block", parent=PARENT, began_at=1.0, ended_at=2.0)
    assert telemetry.begin("call").traceparent.startswith("00-")
    assert not telemetry.is_on()
    assert outcome("made") == made


# --- on ---


def test_spans_of_a_trace_arrive_as_a_tree(collector: Receiver, turn_on: Callable[..., None]) -> None:
    turn_on()
    assert telemetry.is_on()
    call = telemetry.begin("chat m", parent=PARENT, kind="server", attributes={telemetry.GEN_AI_REQUEST_MODEL: "m"})
    trace_parent.set(call.traceparent)
    telemetry.begin("admission").end()
    telemetry.record("block", began_at=100.25, ended_at=100.75, attributes={"steps": 3, "who": ["a", "b"]})
    call.set({"tokens": 7, "share": 0.5, "kept": True})
    call.end()
    telemetry.shut_down()

    root, admission, block = collector.only("chat m"), collector.only("admission"), collector.only("block")
    assert (root.trace_id, root.parent_id) == tuple(PARENT.split("-")[1:3])
    assert call.traceparent == f"00-{root.trace_id}-{root.span_id}-01"
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert admission.parent_id == block.parent_id == root.span_id
    assert (block.began_at, block.ended_at) == (100.25, 100.75)
    assert root.began_at <= admission.began_at <= admission.ended_at <= root.ended_at <= time.time()
    assert root.attributes == {"gen_ai.request.model": "m", "tokens": 7, "share": 0.5, "kept": True}
    assert block.attributes == {"steps": 3, "who": ["a", "b"]}
    assert (root.kind, block.kind) == (2, 1)  # server, internal
    assert not root.failed
    assert {batch.path for batch in collector.batches} == {"/v1/traces"}


def test_a_resource_says_which_process_it_was(collector: Receiver, turn_on: Callable[..., None]) -> None:
    turn_on()
    telemetry.begin("call").end()
    telemetry.shut_down()
    resource = collector.only("call").resource
    assert resource["service.name"] == "tediserve-test"
    assert resource["service.namespace"] == "tediserve"
    assert resource["service.instance.id"].startswith("test-")
    assert resource.keys() >= {"service.version", "host.name", "process.pid"}


def test_what_goes_wrong_is_said_in_a_word(collector: Receiver, turn_on: Callable[..., None]) -> None:
    turn_on()
    telemetry.begin("call", parent=PARENT).end(error="overloaded")
    telemetry.record("block", parent=PARENT, began_at=2.0, ended_at=1.0, error="worker_lost")
    telemetry.shut_down()
    call, block = collector.only("call"), collector.only("block")
    assert call.failed
    assert call.attributes == {"error.type": "overloaded"}
    assert block.failed
    assert block.attributes == {"error.type": "worker_lost"}
    assert block.ended_at == block.began_at == 2.0, "clocks differ: no span ends before it began"


@pytest.mark.parametrize("parent", ["", "00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ü" * 600])
def test_without_a_good_parent_a_call_begins_a_trace(
    collector: Receiver, turn_on: Callable[..., None], parent: str
) -> None:
    turn_on()
    telemetry.begin("call", parent=parent).end()
    telemetry.record("block", parent="", began_at=1.0, ended_at=2.0)
    telemetry.shut_down()
    assert [span.name for span in collector.spans] == ["call"], "and a part of nothing is not recorded"
    assert collector.only("call").parent_id == ""


def test_a_caller_decides_whether_its_trace_is_kept(collector: Receiver, turn_on: Callable[..., None]) -> None:
    turn_on(sample_ratio=0.0)
    for parent in (UNSAMPLED, PARENT, ""):
        call = telemetry.begin("call", parent=parent)
        telemetry.record("block", parent=call.traceparent, began_at=1.0, ended_at=2.0)
        assert is_sampled(call.traceparent) == (parent == PARENT)
        call.end()
    telemetry.shut_down()
    assert sorted(span.name for span in collector.spans) == ["block", "call"]
    assert {span.trace_id for span in collector.spans} == {PARENT.split("-")[1]}


def test_a_share_of_the_traces_is_kept_whole(collector: Receiver, turn_on: Callable[..., None]) -> None:
    turn_on(sample_ratio=0.25)
    for _ in range(400):
        call = telemetry.begin("call")
        telemetry.record("block", parent=call.traceparent, began_at=1.0, ended_at=2.0)
        call.end()
    telemetry.shut_down()
    calls, blocks = collector.named("call"), collector.named("block")
    assert 50 < len(calls) < 150  # 100 on average; six standard deviations to either side
    assert {span.trace_id for span in calls} == {span.trace_id for span in blocks}


@given(st.dictionaries(st.text(), values))
@example({"same": 1, "other": True, "third": 1.0})
@settings(max_examples=200, deadline=None)
def test_attributes_arrive_as_they_were(attributes: dict[str, Any]) -> None:
    message = Span.FromString(otlp._attributes(9, attributes))
    found = {pair.key: value_of(pair.value) for pair in message.attributes}
    assert [(name, type(value)) for name, value in found.items()] == [(n, type(v)) for n, v in attributes.items()]
    assert found == attributes


def test_a_process_says_what_opentelemetrys_variables_say(
    collector: Receiver, turn_on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "X-Key=a%20secret, x-tenant=t=1")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=gateway-0,broken")
    turn_on(endpoint=collector.url + "/otlp/")
    telemetry.begin("call").end()
    telemetry.shut_down()
    (batch,) = collector.batches
    assert batch.path == "/otlp/v1/traces"
    assert (
        batch.headers.items()
        >= {
            "x-key": "a secret",
            "x-tenant": "t=1",
            "content-type": "application/x-protobuf",
        }.items()
    )
    assert collector.only("call").resource["k8s.pod.name"] == "gateway-0"


def test_over_https_spans_go_only_to_a_collector_that_is_trusted(
    turn_on: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    settings = write_certificate(tmp_path, authority)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(settings["tls_certificate"], settings["tls_key"])
    with receiver(tls) as collector:
        failed = outcome("failed")
        turn_on(endpoint=collector.url)
        telemetry.begin("of an authority that nobody knows").end()
        telemetry.shut_down()
        assert (collector.batches, outcome("failed") - failed) == ([], 1)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        turn_on(endpoint=collector.url)
        telemetry.begin("call").end()
        telemetry.shut_down()
        assert [span.name for span in collector.spans] == ["call"]


# --- a collector that fails ---


def test_batches_share_a_connection_that_may_break_between_them(
    collector: Receiver, turn_on: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    turn_on()
    for number in range(4):
        collector.hangs_up = number >= 2
        telemetry.begin("call").end()
        wait_until(lambda n=number: len(collector.spans) > n, "it has come")  # type: ignore[misc]
    telemetry.shut_down()
    ports = [batch.client_port for batch in collector.batches]
    assert ports[0] == ports[1] == ports[2] != ports[3]
    assert not caplog.records, "nothing was lost: nobody is told"


def test_a_collector_that_was_away_gets_what_waited(
    collector: Receiver, turn_on: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    turn_on()
    collector.status = 503
    failed, sent = outcome("failed"), outcome("sent")
    telemetry.begin("first").end()
    wait_until(lambda: len(collector.batches) > 1, "it was tried again")
    telemetry.begin("then").end()
    collector.status = 200
    telemetry.shut_down()
    assert [span.name for span in collector.spans] == ["first", "then"]
    assert (outcome("failed") - failed, outcome("sent") - sent) == (0, 2)
    assert [record.message.partition(" http")[0] for record in caplog.records] == [
        "traces cannot be sent to",
        "traces are taken again by",
    ]


def test_what_waits_is_bounded_and_the_oldest_are_lost(collector: Receiver, turn_on: Callable[..., None]) -> None:
    turn_on(queue_spans=8, batch_spans=8, send_every_s=600, send_limit_s=20)
    collector.open.clear()
    made, sent, failed = outcome("made"), outcome("sent"), outcome("failed")
    for number in range(8):
        telemetry.begin(f"first {number}").end()
    wait_until(lambda: collector.batches, "a batch is under way")
    for number in range(20):
        telemetry.begin(f"then {number}").end()
    collector.open.set()
    telemetry.shut_down()
    assert [span.name for span in collector.spans] == [
        *(f"first {number}" for number in range(8)),
        *(f"then {number}" for number in range(12, 20)),
    ]
    assert (outcome("made") - made, outcome("sent") - sent, outcome("failed") - failed) == (28, 16, 12)


def test_what_a_collector_refuses_is_counted_and_told_of_once(
    collector: Receiver, turn_on: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    turn_on(queue_spans=4, batch_spans=1, send_every_s=600)
    failed, sent = outcome("failed"), outcome("sent")
    for status, counter, expected in [(400, "failed", failed + 3), (200, "sent", sent + 2)]:
        collector.status = status
        while outcome(counter) < expected:
            before = outcome(counter)
            telemetry.begin("call").end()
            wait_until(lambda c=counter, b=before: outcome(c) > b, "it was answered")  # type: ignore[misc]
    assert [record.message for record in caplog.records if record.name == "services.otlp"] == [
        f"traces cannot be sent to {collector.url}/v1/traces",
        f"traces are taken again by {collector.url}/v1/traces",
    ]


def test_a_collector_that_is_away_is_not_tried_for_every_span(
    collector: Receiver, turn_on: Callable[..., None]
) -> None:
    turn_on(batch_spans=1, queue_spans=4, send_every_s=600)
    collector.status = 503
    telemetry.begin("call").end()
    wait_until(lambda: collector.batches, "it was tried")
    for _ in range(5000):  # long enough for the thread to take its turn
        telemetry.begin("call").end()
    telemetry.shut_down()
    assert len(collector.batches) == 2, "and at the end"


def test_nobody_waits_for_a_collector_that_is_not_there(turn_on: Callable[..., None]) -> None:
    turn_on(endpoint="http://127.0.0.1:9", queue_spans=64, batch_spans=64)
    failed = outcome("failed")
    began = time.monotonic()
    for _ in range(1000):
        telemetry.begin("call").end()
    assert time.monotonic() - began < 2.0  # 1,000 tries to connect one after the other, with retries, take minutes
    wait_until(lambda: outcome("failed") > failed, "it is counted")
    began = time.monotonic()
    telemetry.shut_down(limit_s=1.0)
    assert time.monotonic() - began < 3.0
    assert not telemetry.is_on()


# --- settings and names ---


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("endpoint", "127.0.0.1:4318", r"endpoint: '127.0.0.1:4318' is no URL of OTLP over HTTP"),
        ("endpoint", "http://host:otlp", r"endpoint: 'http://host:otlp' is no URL of OTLP over HTTP"),
        ("endpoint", "https://me:secret@host", r"endpoint: .* is no URL of OTLP over HTTP"),
        ("sample_ratio", "1.5", "sample_ratio: 1.5 is not between 0 and 1"),
        ("batch_spans", "5000", "batch_spans: 5000 is not between 1 and queue_spans, 4096"),
        ("send_limit_s", "0", "send_limit_s: 0.0 is not positive"),
    ],
)
def test_a_wrong_setting_is_named(key: str, value: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_section(TelemetrySettings, "telemetry", {f"TEDISERVE_TELEMETRY_{key.upper()}": value})


def test_the_conventions_names_are_the_conventions() -> None:
    known = {
        value
        for module in (gen_ai_attributes, error_attributes, http_attributes)
        for name, value in vars(module).items()
        if name.isupper()
    }
    ours = {name: value for name, value in vars(telemetry).items() if name.isupper() and isinstance(value, str)}
    borrowed = {value for name, value in ours.items() if value.startswith(("gen_ai.", "error.", "http."))}
    assert len(borrowed) >= 14
    assert borrowed <= known
    assert len(set(ours.values()) - {"tediserve"}) == len(ours) - 1, "a name is used twice"


def test_a_traceparent_of_the_bus_is_a_good_one(collector: Receiver, turn_on: Callable[..., None]) -> None:
    turn_on()
    parent = new_trace_parent()
    telemetry.begin("call", parent=parent).end()
    telemetry.shut_down()
    span = collector.only("call")
    assert parent == f"00-{span.trace_id}-{span.parent_id}-01"


def test_opentelemetrys_own_packages_are_for_tests() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("contracts", "services", "tools")
        for path in Path(ROOT / folder).rglob("*.py")
        if "opentelemetry" in path.read_text(encoding="utf-8")
    }
    assert found == {"tools/bench/collector.py"}
