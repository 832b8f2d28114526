"""A collector of traces that keeps what came."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tools.bench.collector import collector


class ReceivedSpan(NamedTuple):
    """As it came over the wire; times are wall-clock seconds, ids are hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "": it is a root
    kind: int
    began_at: float
    ended_at: float
    failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Batch(NamedTuple):
    """What came at once, whatever the answer."""

    path: str
    num_spans: int
    headers: dict[str, str]  # names in lower case
    client_port: int


class Receiver:
    """What has come so far. `status` is its answer, after which it hangs up without a word if `hangs_up` is set.

    While `open` is not set nothing is answered, for 10 s at most.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.batches: list[Batch] = []
        self.status = 200
        self.hangs_up = False
        self.open = threading.Event()
        self.open.set()
        self.url = ""

    def take(self, request: BaseHTTPRequestHandler, message: ExportTraceServiceRequest) -> int:
        found = list(_spans(message))
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.batches.append(Batch(request.path, len(found), headers, request.client_address[1]))
        self.open.wait(10)
        request.close_connection = self.hangs_up
        if self.status == 200:
            self.spans += found
        return self.status

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def only(self, name: str) -> ReceivedSpan:
        (span,) = self.named(name)
        return span


@contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    received = Receiver()
    server = collector(received.take)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    received.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def _spans(message: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource_spans in message.resource_spans:
        resource = {pair.key: value_of(pair.value) for pair in resource_spans.resource.attributes}
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=span.kind,
                    began_at=span.start_time_unix_nano / 1e9,
                    ended_at=span.end_time_unix_nano / 1e9,
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    attributes={pair.key: value_of(pair.value) for pair in span.attributes},
                    resource=resource,
                )


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(element) for element in value.array_value.values]
    return getattr(value, kind) if kind else None
