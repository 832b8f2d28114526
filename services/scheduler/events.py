"""What the scheduler's policy hears and says. All times are seconds of the clock whose reading is `now`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from contracts import messages as m
from contracts.messages import GenerateRequest, InstanceStatus, ProgressRecord

# `undelivered`: nobody listened; `unanswered`: it may have been heard
Answer: TypeAlias = m.Accepted | m.Refused | Literal["undelivered", "unanswered"]

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """A request lies in REQUESTS at that sequence."""

    request: GenerateRequest
    seq: int
    arrived_at: float
    expires_at: float
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class RecordSeen:
    """A record lies in PROGRESS at that sequence: read there, or just written by this scheduler."""

    record: ProgressRecord
    seq: int


@dataclass(frozen=True, slots=True)
class RecordUnreadable:
    """Something that is no record lies in PROGRESS in a record's place."""

    gateway_id: str
    request_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class WriteOvertaken:
    """A WriteRecord was refused. `found`: the record that stands, or None if none could be read."""

    request_id: str
    after_seq: int
    found: RecordSeen | None


@dataclass(frozen=True, slots=True)
class WriteUnanswered:
    """A WriteRecord got no answer within its limit; it may have been stored."""

    request_id: str
    after_seq: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that was stored when this scheduler began has been handled."""


@dataclass(frozen=True, slots=True)
class StatusSeen:
    status: InstanceStatus


@dataclass(frozen=True, slots=True)
class InstanceExited:
    """Its agent saw the process exit. No other will ever have its id."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    instance_id: str


@dataclass(frozen=True, slots=True)
class GatewaySeen:
    gateway_id: str


@dataclass(frozen=True, slots=True)
class AssignAnswered:
    """What came of a SendAssign."""

    instance_id: str
    request_id: str
    attempt: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class ReleaseAnswered:
    """What came of a SendRelease."""

    instance_id: str
    request_id: str
    attempt: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class LoadStateSeen:
    load: m.LoadState


@dataclass(frozen=True, slots=True)
class Reconnected:
    """This scheduler could hear nobody for a while: all silence counts from now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A time that a WakeAt asked for has come; harmless at any other."""


Event: TypeAlias = (
    RequestSeen
    | RecordSeen
    | RecordUnreadable
    | WriteOvertaken
    | WriteUnanswered
    | CaughtUp
    | StatusSeen
    | InstanceExited
    | DrainAsked
    | GatewaySeen
    | AssignAnswered
    | ReleaseAnswered
    | LoadStateSeen
    | Reconnected
    | Tick
)

_IN_ORDER: tuple[type[Event], ...] = (
    Reconnected,
    LoadStateSeen,
    StatusSeen,
    RequestSeen,
    RecordSeen,
    RecordUnreadable,
    WriteOvertaken,
    WriteUnanswered,
    AssignAnswered,
    ReleaseAnswered,
    DrainAsked,
    InstanceExited,
    GatewaySeen,
    CaughtUp,
    Tick,
)
_ORDER = {kind: place for place, kind in enumerate(_IN_ORDER)}


def in_order(events: Iterable[Event]) -> list[Event]:
    """Events of one moment in an order of their own; those of one sender or stream stay in its order."""
    events = list(events)
    if len(events) == 1:
        return events
    return sorted(events, key=lambda event: (_ORDER[type(event)], _place(event)))


def _place(event: Event) -> tuple[float, str, str]:
    """Among the events of its type."""
    match event:
        case LoadStateSeen(load):
            return load.sent_at, "", ""
        case StatusSeen(status):
            return status.sent_at, status.instance_id, ""
        case DrainAsked(instance_id) | InstanceExited(instance_id):
            return 0.0, instance_id, ""
        case RequestSeen(_, seq) | RecordSeen(_, seq) | RecordUnreadable(_, _, seq):
            return seq, "", ""
        case WriteOvertaken(request_id, after_seq) | WriteUnanswered(request_id, after_seq):
            return after_seq, request_id, ""
        case AssignAnswered(instance_id, request_id, attempt) | ReleaseAnswered(instance_id, request_id, attempt):
            return attempt, request_id, instance_id
        case GatewaySeen(gateway_id):
            return 0.0, gateway_id, ""
        case _:
            return 0.0, "", ""


# --- commands -----------------------------------------------------------------------------------------------------

AssignReason: TypeAlias = Literal["new", "moved", "released", "worker_lost", "unanswered"]
ReleaseReason: TypeAlias = Literal["faster", "drain", "late"]  # late: for another one that can be in time
WriteReason: TypeAlias = Literal[
    "worker_lost",
    "expired",
    "gateway_lost",
    "too_long",
    "unknown_model",
    "engine_error",
    "overloaded",
    "slo_too_short",
]


@dataclass(frozen=True, slots=True)
class SendAssign:
    """Offer the assignment to the instance; AssignAnswered follows."""

    instance_id: str
    assign: m.Assign
    reason: AssignReason


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Ask the instance to give the request back at its block's end; ReleaseAnswered follows."""

    instance_id: str
    release: m.Release
    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Store the record (its `written_at` is to be filled); RecordSeen, WriteOvertaken or WriteUnanswered follows."""

    record: ProgressRecord
    after_seq: int
    reason: WriteReason


@dataclass(frozen=True, slots=True)
class Purge:
    """Remove the request from REQUESTS, however often it takes."""

    request_id: str
    reason: Literal["finished", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell whoever holds the request that its record is final."""

    request_id: str
    reason: Literal["ended_elsewhere", "accepted_too_late", "still_listed"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do but to know: the request has joined the queue."""

    request_id: str
    reason: Literal["no_instance", "no_room"]


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Ask everybody how they are."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at that time. A later WakeAt names an earlier time, or follows the Tick."""

    at: float


@dataclass(frozen=True, slots=True)
class StandDown:
    """Stop acting at once: a scheduler with a higher epoch acts."""

    reason: Literal["stale_epoch"] = "stale_epoch"


Command: TypeAlias = SendAssign | SendRelease | WriteRecord | Purge | SendCancel | Wait | AskStatus | WakeAt | StandDown
