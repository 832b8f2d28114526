"""OpenTelemetry behind `services/telemetry.py`: imported only where traces are on."""

import logging
import os
import socket
from functools import lru_cache
from importlib import metadata

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.runtime import new_id
from services.telemetry import ERROR_TYPE, SPANS, Attributes, Kind, TelemetrySettings

logger = logging.getLogger(__name__)

_TRACES_PATH = "/v1/traces"
_MADE = SPANS.labels("made")
_PROPAGATOR = TraceContextTextMapPropagator()
_KINDS: dict[Kind, SpanKind] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}


class LiveSpan:
    """A span of the SDK that goes on."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: str, ended_at: float | None) -> None:
        if error:
            self._span.set_attribute(ERROR_TYPE, error)
            self._span.set_status(StatusCode.ERROR)
        if self._span.is_recording():
            _MADE.inc()
        self._span.end(_nanoseconds(ended_at))


class Tracing:
    """The spans of one process, on their way to the collector."""

    def __init__(self, service: str, settings: TelemetrySettings) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `_Sender` tells what matters
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            resource=Resource.create(_resource(service)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _Sender(settings),
                max_queue_size=settings.queue_spans,
                max_export_batch_size=settings.batch_spans,
                schedule_delay_millis=1e3 * settings.send_every_s,
            )
        )
        self._tracer = self._provider.get_tracer("tediserve", _version())

    def begin(
        self, name: str, parent: str, kind: Kind, attributes: Attributes | None, began_at: float | None
    ) -> LiveSpan:
        return LiveSpan(
            self._tracer.start_span(
                name,
                _context_of(parent),
                _KINDS[kind],
                attributes,
                start_time=_nanoseconds(began_at),
                record_exception=False,
            )
        )

    def close(self) -> None:
        """Sends what is queued."""
        self._provider.shutdown()


@lru_cache(maxsize=4096)
def _context_of(parent: str) -> Context:
    """What a traceparent says: all spans below a call have the same one, and reading it takes as long as a span."""
    return _PROPAGATOR.extract({"traceparent": parent}, Context())


class _Sender(SpanExporter):
    """OTLP over HTTP. A collector that is lost, and found again, is told of once."""

    def __init__(self, settings: TelemetrySettings) -> None:
        self._endpoint = settings.endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH
        self._exporter = OTLPSpanExporter(self._endpoint, timeout=settings.send_limit_s)
        self._lost = False

    def export(self, spans: "list[ReadableSpan] | tuple[ReadableSpan, ...]") -> SpanExportResult:  # type: ignore[override]
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        SPANS.labels("failed" if failed else "sent").inc(len(spans))
        if failed != self._lost:
            self._lost = failed
            logger.warning("traces %s %s", "cannot be sent to" if failed else "are taken again by", self._endpoint)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


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
    }


def _version() -> str:
    try:
        return metadata.version("tediserve")
    except metadata.PackageNotFoundError:
        return "0"


def _nanoseconds(wall_s: float | None) -> int | None:
    return None if wall_s is None else int(wall_s * 1e9)
