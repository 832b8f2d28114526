"""Spans on their way to a collector, as OTLP over HTTP. Imported only where traces are on, by `services/telemetry.py`.

1. A span is put into OTLP's bytes (protobuf, trace.proto) when it ends. A batch is these bytes, one behind the other.
   Attributes repeat from span to span: their bytes are kept. OpenTelemetry's own packages take eight times as long, and
   on a node's few cores that is throughput.
2. A thread sends what waits, every `send_every_s` or when a batch is full, over one connection that stays open.
3. What a collector cannot take now stays at hand and is sent again. What it refuses is lost, and what finds the queue
   full pushes the oldest out; both count as failed.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from importlib import metadata
from struct import Struct
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from services.runtime import new_id
from services.telemetry import ERROR_TYPE, SPANS, TRACE_PARENT, Attributes, Kind, TelemetrySettings

logger = logging.getLogger(__name__)

Value: TypeAlias = str | bool | int | float | tuple[str, ...]

_SCALARS = (str, bool, int, float)
_TRACES_PATH = "/v1/traces"
_TRY_LATER = (429, 502, 503, 504)  # as OTLP has it
_MADE, _SENT, _FAILED = (SPANS.labels(outcome) for outcome in ("made", "sent", "failed"))

# --- OTLP's bytes -------------------------------------------------------------------------------------------------

_KINDS: dict[Kind, bytes] = {
    "internal": bytes((6 << 3, 1)),
    "server": bytes((6 << 3, 2)),
    "client": bytes((6 << 3, 3)),
    "producer": bytes((6 << 3, 4)),
    "consumer": bytes((6 << 3, 5)),
}
_TIMES = Struct("<BQBQ")
_BEGAN_AT, _ENDED_AT = 7 << 3 | 1, 8 << 3 | 1  # fixed64
_ERROR_STATUS = bytes((15 << 3 | 2, 2, 3 << 3, 2))


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _field(number: int, content: bytes) -> bytes:
    """A field whose length stands before it: bytes, text, or a message. `number`: below 16."""
    return bytes((number << 3 | 2,)) + _varint(len(content)) + content


@lru_cache(maxsize=4096, typed=True)  # True, 1 and 1.0 are the same key otherwise
def _attribute(number: int, name: str, value: Value) -> bytes:
    """The message KeyValue as the field `number`."""
    return _field(number, _field(1, name.encode()) + _field(2, _any_value(value)))


def _any_value(value: Value) -> bytes:
    match value:
        case str():
            return _field(1, value.encode(errors="replace"))
        case bool():
            return bytes((2 << 3, value))
        case int():
            return bytes((3 << 3,)) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
        case float():
            return Struct("<Bd").pack(4 << 3 | 1, value)
        case tuple():
            return _field(5, b"".join(_field(1, _any_value(part)) for part in value))


def _attributes(number: int, attributes: Attributes) -> bytes:
    return b"".join(
        [
            _attribute(number, name, value if isinstance(value, _SCALARS) else tuple(value))
            for name, value in attributes.items()
        ]
    )


# --- spans --------------------------------------------------------------------------------------------------------


class _Parent(NamedTuple):
    trace_id: bytes
    span_id: bytes  # empty: none, the trace begins here
    is_kept: bool


@lru_cache(maxsize=4096)
def _read(traceparent: str) -> _Parent | None:
    """All spans below a call have the same one. None: it is none."""
    if not TRACE_PARENT.fullmatch(traceparent):
        return None
    trace_id, span_id, flags = map(bytes.fromhex, traceparent.split("-")[1:])
    return _Parent(trace_id, span_id, bool(flags[0] & 1))


@lru_cache(maxsize=4096)
def _head(parent: _Parent, name: str, kind: Kind) -> bytes:
    """What the spans of that name below that parent have in common."""
    above = _field(4, parent.span_id) if parent.span_id else b""
    return _field(1, parent.trace_id) + above + _field(5, name.encode(errors="replace")) + _KINDS[kind]


class LiveSpan:
    """A span that goes on."""

    __slots__ = ("_attributes", "_began_at", "_head", "_tracing")

    def __init__(self, tracing: "Tracing", head: bytes, attributes: Attributes | None, began_at: float | None) -> None:
        self._tracing, self._head = tracing, head
        self._attributes = dict(attributes or ())
        self._began_at = time.time() if began_at is None else began_at

    def set(self, attributes: Attributes) -> None:
        self._attributes.update(attributes)

    def end(self, error: str, ended_at: float | None) -> None:
        ended_at = time.time() if ended_at is None else ended_at
        self._tracing.add(self._head, self._began_at, ended_at, self._attributes, error)


class Tracing:
    """The spans of one process, on their way to the collector."""

    def __init__(self, service: str, settings: TelemetrySettings) -> None:
        self._settings = settings
        self._kept_below = int(settings.sample_ratio * 2**64)
        self._queue: deque[bytes] = deque(maxlen=settings.queue_spans)
        self._collector = _Collector(service, settings)
        self._due, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._send, name="telemetry", daemon=True)
        self._thread.start()

    def begin(
        self, name: str, parent: str, kind: Kind, attributes: Attributes | None, began_at: float | None
    ) -> tuple[str, LiveSpan | None]:
        """Its traceparent, and the span, if its trace is kept."""
        above = _read(parent) or self._new_trace()
        span_id = os.urandom(8)
        traceparent = f"00-{above.trace_id.hex()}-{span_id.hex()}-{above.is_kept:02x}"
        if not above.is_kept:
            return traceparent, None
        return traceparent, LiveSpan(self, _head(above, name, kind) + _field(2, span_id), attributes, began_at)

    def record(
        self, name: str, parent: str, attributes: Attributes | None, began_at: float, ended_at: float, error: str
    ) -> None:
        """One that is over, if it is part of something that is kept."""
        above = _read(parent)
        if above and above.is_kept:
            head = _head(above, name, "internal") + _field(2, os.urandom(8))
            self.add(head, began_at, ended_at, attributes or {}, error)

    def _new_trace(self) -> _Parent:
        trace_id = os.urandom(16)
        return _Parent(trace_id, b"", int.from_bytes(trace_id[8:], "big") < self._kept_below)

    def add(self, head: bytes, began_at: float, ended_at: float, attributes: Attributes, error: str) -> None:
        """What has ended waits to be sent. Times are wall-clock seconds."""
        parts = [head, _TIMES.pack(_BEGAN_AT, int(began_at * 1e9), _ENDED_AT, int(ended_at * 1e9))]
        parts.append(_attributes(9, attributes))
        if error:
            parts += _attribute(9, ERROR_TYPE, error), _ERROR_STATUS
        _MADE.inc()
        if len(self._queue) == self._settings.queue_spans:
            _FAILED.inc()
        self._queue.append(_field(2, b"".join(parts)))
        if len(self._queue) >= self._settings.batch_spans:
            self._due.set()

    def close(self, limit_s: float) -> None:
        """Sends what is queued, within `limit_s` seconds."""
        self._closing.set()
        self._due.set()
        self._thread.join(limit_s)

    def _send(self) -> None:
        batch: list[bytes] = []  # at hand: not taken by the collector so far
        is_last = False
        while not is_last:
            self._due.wait(self._settings.send_every_s)
            self._due.clear()
            is_last = self._closing.is_set()  # before the queue is emptied: nothing comes behind it
            while self._queue or batch:
                batch = batch or [
                    self._queue.popleft() for _ in range(min(len(self._queue), self._settings.batch_spans))
                ]
                if not self._collector.take(batch):
                    self._closing.wait(self._settings.send_every_s)  # however many spans are due
                    break
                batch = []
        _FAILED.inc(len(batch) + len(self._queue))
        self._collector.close()


class _Collector:
    """What takes spans at the other end. That it is lost, and found again, is told once."""

    def __init__(self, service: str, settings: TelemetrySettings) -> None:
        self._url = settings.endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH
        url = urlsplit(self._url)
        connect = HTTPSConnection if url.scheme == "https" else HTTPConnection
        self._connection = connect(url.netloc, timeout=settings.send_limit_s)
        self._path = url.path
        self._headers = {"content-type": "application/x-protobuf", **_pairs("OTEL_EXPORTER_OTLP_HEADERS")}
        self._resource = _field(1, _attributes(1, _resource(service)))
        self._scope = _field(1, _field(1, b"tediserve") + _field(2, _version().encode()))
        self._is_lost = False

    def take(self, spans: Sequence[bytes]) -> bool:
        """Whether they are done with, and not to be sent again. Each is the field `spans` of the message ScopeSpans."""
        body = _field(1, self._resource + _field(2, self._scope + b"".join(spans)))
        try:
            status = self._post(body)
        except (OSError, HTTPException):
            status = 503
        is_taken = status < 300
        if is_taken:
            _SENT.inc(len(spans))
        elif status not in _TRY_LATER:
            _FAILED.inc(len(spans))
        if is_taken == self._is_lost:
            self._is_lost = not is_taken
            logger.warning("traces %s %s", "are taken again by" if is_taken else "cannot be sent to", self._url)
        return status not in _TRY_LATER

    def _post(self, body: bytes) -> int:
        """The answer's status. Raises OSError, HTTPException."""
        was_open = self._connection.sock is not None
        try:
            self._connection.request("POST", self._path, body, self._headers)
            with self._connection.getresponse() as response:
                response.read()
                return response.status
        except (OSError, HTTPException) as error:
            self._connection.close()
            if was_open and not isinstance(error, TimeoutError):  # it was idle, and the collector has closed it
                return self._post(body)
            raise

    def close(self) -> None:
        self._connection.close()


def _resource(process: str) -> dict[str, str | int]:
    """`process`: as it calls itself, "gateway" or "worker INSTANCE"."""
    service, _, instance_id = process.partition(" ")
    return {
        "service.name": f"tediserve-{service}",
        "service.namespace": "tediserve",
        "service.version": _version(),
        "service.instance.id": instance_id or new_id(service),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **_pairs("OTEL_RESOURCE_ATTRIBUTES"),
    }


def _pairs(variable: str) -> dict[str, str]:
    """OpenTelemetry's variables that hold `name=value,name=value`, values as in URLs."""
    found = (pair.partition("=") for pair in os.environ.get(variable, "").split(",") if "=" in pair)
    return {name.strip(): unquote(value.strip()) for name, _, value in found}


def _version() -> str:
    try:
        return metadata.version("tediserve")
    except metadata.PackageNotFoundError:
        return "0"
