"""A collector of traces: an HTTP server that decodes what OTLP exporters send."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


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


class Receiver:
    """What has come so far. `batches`: the paths and sizes, in spans, of what came, whatever the answer, `status`.

    While `open` is not set nothing is answered, for 10 s at most.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.batches: list[tuple[str, int]] = []
        self.status = 200
        self.open = threading.Event()
        self.open.set()
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        found = list(_spans(ExportTraceServiceRequest.FromString(body)))
        self.batches.append((path, len(found)))
        self.open.wait(10)
        if self.status == 200:
            self.spans += found

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def only(self, name: str) -> ReceivedSpan:
        (span,) = self.named(name)
        return span


@contextmanager
def receiver() -> Iterator[Receiver]:
    received = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(received.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
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
        resource = {pair.key: _value(pair.value) for pair in resource_spans.resource.attributes}
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
                    attributes={pair.key: _value(pair.value) for pair in span.attributes},
                    resource=resource,
                )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(element) for element in value.array_value.values]
    return getattr(value, kind) if kind else None
