"""Traces of requests by OpenTelemetry's rules and names, if `[telemetry]` names a collector (`services/otlp.py`).

1. Off, which is the default, nothing for it is imported and no span is made: a traceparent is passed on as it came, so
   that logs of all services name the same trace.
2. What travels is a W3C traceparent: from the caller's HTTP header into `bus.trace_parent`, from there through the
   headers of NATS messages. Who begins a span puts its own traceparent in its place.
3. A span belongs to a whole (a call, a wait, a block), never to a step, and is made where the event loop runs, never in
   the hot loop. What has ended already is recorded with its times.
4. Whether a trace is kept is decided where it begins, by `sample_ratio`; a caller's traceparent has decided already.
5. Spans wait in a queue with a bound and are sent by a thread of their own. A collector that was away gets them later;
   when the queue is full the oldest are lost, that is counted, and nobody waits.
6. No prompt, answer or key is ever an attribute.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
from prometheus_client import Counter

from services.bus import new_trace_parent, trace_parent

if TYPE_CHECKING:
    from services.otlp import LiveSpan, Tracing

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]
Kind: TypeAlias = Literal["internal", "server", "client", "producer", "consumer"]

SPANS = Counter(
    "tediserve_telemetry_spans", "Spans that were made, that the collector took, or that were lost", ["outcome"]
)

TRACE_PARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")  # of W3C's version 0
_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^][/@:?#\s]+)(:\d{1,5})?(/[^?#\s]*)?")
SHUT_DOWN_LIMIT_S = 2.0  # for what is queued at the end of a process

# --- names --------------------------------------------------------------------------------------------------------

# OpenTelemetry's names for generative AI
GEN_AI_OPERATION = "gen_ai.operation.name"  # "chat" or "text_completion"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICES = "gen_ai.request.choice.count"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"
HTTP_STATUS = "http.response.status_code"

PROVIDER = "tediserve"

# ours
REQUEST_ID = "tediserve.request.id"
INSTANCE_ID = "tediserve.instance.id"
TP_DEGREE = "tediserve.instance.tp_degree"
ATTEMPT = "tediserve.attempt"
PRIORITY = "tediserve.priority"
SLO_S = "tediserve.slo_s"
DEADLINE_MET = "tediserve.deadline_met"
REASON = "tediserve.reason"
STATE = "tediserve.state"
BLOCK_INDEX = "tediserve.block.index"
BLOCKS_DONE = "tediserve.blocks_done"
RECOMPUTE_STEPS = "tediserve.steps.recompute"
CACHE_STEPS = "tediserve.steps.cache"
MEAN_THRESHOLD = "tediserve.threshold.mean"
MOVES = "tediserve.moves"

# spans of a request's trace, below the call's own, which is named `chat MODEL` or `text_completion MODEL`
ADMISSION = "admission"  # gateway: from a valid call to its requests being stored
QUEUE = "queue"  # scheduler: from arrival, or a loss, to an accepted assignment
MOVE = "move"  # scheduler: from the last record of the instance that let it go to an accepted assignment elsewhere
BLOCK = "block"  # worker: from a block's first pass to its last
RESULT = "result"  # worker: from the last block's end to its record being stored

# --- settings -----------------------------------------------------------------------------------------------------


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where traces go. Table `[telemetry]`. Of OpenTelemetry's own variables two are read, `OTEL_RESOURCE_ATTRIBUTES`
    and `OTEL_EXPORTER_OTLP_HEADERS`: what a collector wants in headers."""

    endpoint: str = ""  # OTLP over HTTP, e.g. "http://127.0.0.1:4318"; "": no traces
    sample_ratio: float = 1.0  # of the traces that begin here
    queue_spans: int = 4096  # that wait for the collector
    batch_spans: int = 512  # sent together at most
    send_every_s: float = 5.0  # or when a batch is full
    send_limit_s: float = 5.0  # for the collector to answer

    def __post_init__(self) -> None:
        if self.endpoint and not _URL.fullmatch(self.endpoint):
            raise ValueError(f'endpoint: {self.endpoint!r} is no URL of OTLP over HTTP, as "http://127.0.0.1:4318" is')
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ValueError(f"sample_ratio: {self.sample_ratio} is not between 0 and 1")
        if not 1 <= self.batch_spans <= self.queue_spans:
            raise ValueError(f"batch_spans: {self.batch_spans} is not between 1 and queue_spans, {self.queue_spans}")
        for key in ("send_every_s", "send_limit_s"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}: {getattr(self, key)} is not positive")


# --- on and off ---------------------------------------------------------------------------------------------------

_tracing: "Tracing | None" = None


def set_up(service: str, settings: TelemetrySettings) -> None:
    """Traces of this process go to the collector from now on, if one is named."""
    global _tracing
    if settings.endpoint:
        from services.otlp import Tracing

        _tracing = Tracing(service, settings)


def shut_down(limit_s: float = SHUT_DOWN_LIMIT_S) -> None:
    """Sends what is queued, within `limit_s` seconds; then traces are off."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.close(limit_s)


def is_on() -> bool:
    """Whether attributes are worth collecting."""
    return _tracing is not None


# --- spans --------------------------------------------------------------------------------------------------------


class Span:
    """Something that goes on until its `end`. What shall be part of it is sent with its `traceparent`."""

    __slots__ = ("_live", "traceparent")

    def __init__(self, traceparent: str, live: "LiveSpan | None") -> None:
        self.traceparent = traceparent
        self._live = live

    def set(self, attributes: Attributes) -> None:
        """Adds what has become known."""
        if self._live is not None:
            self._live.set(attributes)

    def end(self, *, error: str = "", ended_at: float | None = None) -> None:
        """It is over, at wall-clock time `ended_at` or now. `error`: a short word for what went wrong."""
        if self._live is not None:
            self._live.end(error, ended_at)
            self._live = None


def begin(
    name: str,
    *,
    parent: str | None = None,
    kind: Kind = "internal",
    attributes: Attributes | None = None,
    began_at: float | None = None,
) -> Span:
    """A span that goes on from now, or since wall-clock time `began_at`.

    `parent`: a traceparent; None: that of the message or call being handled. An empty or broken one begins a trace.
    """
    parent = trace_parent.get() if parent is None else parent
    if _tracing is None:
        return Span(parent or new_trace_parent(), None)
    return Span(*_tracing.begin(name, parent, kind, attributes, began_at))


def record(
    name: str,
    *,
    began_at: float,
    ended_at: float,
    parent: str | None = None,
    attributes: Attributes | None = None,
    error: str = "",
) -> None:
    """A span that is over, between two wall-clock times. Without a parent there is nothing that it is part of: none."""
    parent = trace_parent.get() if parent is None else parent
    if _tracing is not None and parent:
        _tracing.record(name, parent, attributes, began_at, max(began_at, ended_at), error)
