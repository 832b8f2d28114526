"""What the threshold-controller's policy hears and says. All times are seconds of the clock whose reading is `now`."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from contracts import messages as m
from contracts.messages import GenerateRequest, InstanceStatus, ProgressRecord

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """A request lies in REQUESTS at that sequence."""

    request: GenerateRequest
    seq: int
    expires_at: float
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class RecordSeen:
    """A record lies in PROGRESS."""

    record: ProgressRecord
    seq: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that was stored when this controller began has been handled."""


@dataclass(frozen=True, slots=True)
class StatusSeen:
    status: InstanceStatus


@dataclass(frozen=True, slots=True)
class ReportSeen:
    report: m.Report


@dataclass(frozen=True, slots=True)
class ForecastSeen:
    forecast: m.Forecast


@dataclass(frozen=True, slots=True)
class InstanceExited:
    """Its agent saw the process exit. No other will ever have its id."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    """This controller could hear nobody for a while: all silence counts from now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A time that a WakeAt asked for has come; harmless at any other."""


Event: TypeAlias = (
    RequestSeen | RecordSeen | CaughtUp | StatusSeen | ReportSeen | ForecastSeen | InstanceExited | Reconnected | Tick
)

# --- commands -----------------------------------------------------------------------------------------------------

Reason: TypeAlias = Literal[
    "pin",  # the client's
    "slack",  # the highest: time and load allow it
    "cap",  # as high as the load allows
    "deadline",  # lower, or its deadline would pass
    "hopeless",  # the lowest: its deadline will pass whatever is done
]


@dataclass(frozen=True, slots=True)
class Decision:
    """The threshold of a request that an instance holds."""

    request_id: str
    attempt: int
    threshold: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class SendThresholds:
    """Tell the instance the thresholds of all that it holds."""

    instance_id: str
    decisions: tuple[Decision, ...]  # by request id
    reason: Literal["changed", "repeated"]


@dataclass(frozen=True, slots=True)
class SendLoadState:
    """Publish the state of the load; its `sent_at` is to be filled."""

    state: m.LoadState


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Ask everybody how they are."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Nothing to do but to know: from here on thresholds are decided."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at that time. A later WakeAt names an earlier time, or follows the Tick."""

    at: float


Command: TypeAlias = SendThresholds | SendLoadState | AskStatus | Settled | WakeAt
