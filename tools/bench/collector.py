"""A collector of traces in a process of its own: takes what comes over OTLP, decodes it, and forgets it."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 10.0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as a real one keeps them

    def do_POST(self) -> None:
        ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        body = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def running_collector() -> Iterator[str]:
    """Yields its URL. Raises RuntimeError if it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), name="collector", daemon=True)
    process.start()
    try:
        if not ours.poll(_START_LIMIT_S):
            raise RuntimeError(f"the collector has not started within {_START_LIMIT_S:g} s")
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join(_STOP_LIMIT_S)


def _serve(told: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    told.send(server.server_address[1])
    server.serve_forever()
