"""A collector of traces: an HTTP server that hands on what comes over OTLP, decoded by OpenTelemetry's own schema.

The benchmark's stands in a process of its own and forgets what it decoded; the tests' is `tests/otlp_receiver.py`.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import TypeAlias

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tools.bench.stack import sigterm_as_ctrl_c

_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 10.0


Take: TypeAlias = Callable[[BaseHTTPRequestHandler, ExportTraceServiceRequest], int]
"""What to do with a batch: gives the status of the answer. The first argument is the HTTP request that it came with."""


def collector(take: Take) -> ThreadingHTTPServer:
    """Listens on a free port of this machine; `serve_forever` is the caller's to call."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open, as a real one keeps them

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            status = take(self, ExportTraceServiceRequest.FromString(self.rfile.read(length)))
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@contextlib.contextmanager
def running_collector() -> Iterator[tuple[str, int]]:
    """Yields its URL and the id of its process. Raises RuntimeError if it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), name="collector", daemon=True)
    with sigterm_as_ctrl_c():
        process.start()
        try:
            if not ours.poll(_START_LIMIT_S):
                raise RuntimeError(f"the collector has not started within {_START_LIMIT_S:g} s")
            assert process.pid is not None
            yield f"http://127.0.0.1:{ours.recv()}", process.pid
        finally:
            process.terminate()
            process.join(_STOP_LIMIT_S)


def _serve(told: Connection) -> None:
    server = collector(lambda _request, _batch: 200)
    told.send(server.server_address[1])
    server.serve_forever()
