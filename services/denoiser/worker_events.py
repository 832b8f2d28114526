"""What a worker hears and what it does about it: the events and commands of its policy."""

from typing import Literal, TypeAlias

import msgspec

from contracts import messages as m
from services.costs import PassLoad
from services.opening import NO_OPENING, Opening

StepKind: TypeAlias = Literal["recompute", "cache"]
DropReason: TypeAlias = Literal["cancelled", "overtaken", "replaced", "expired"]

# --- events -------------------------------------------------------------------------------------------------------
# Besides these, the contracts' Release, Thresholds and Cancel as they come.


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the events."""


class Assigned(Event, frozen=True, kw_only=True):
    """An assignment has come."""

    assign: m.Assign
    wall: float  # wall-clock time of its receipt: turns its deadlines into monotonic ones
    trace: str = ""  # handed through to the run's writes


class Stepped(Event, frozen=True, kw_only=True):
    """A pass has done one step of a run."""

    run_id: str
    kind: StepKind
    block_index: int
    threshold: float
    positions: list[int]  # committed in this step, in the output area; with token_ids and confidences parallel lists
    token_ids: list[int]
    confidences: list[float]
    block_done: bool
    finish: Literal["", "eos", "length"]
    left: bool  # the engine has let it go at this block's end, as it was told to
    started: float  # the pass
    ended: float


class PassTimed(Event, frozen=True, kw_only=True):
    """How long a pass took."""

    load: PassLoad
    seconds: float


class Left(Event, frozen=True, kw_only=True):
    """The engine has let a run go that was just between two blocks, as it was told to."""

    run_id: str


class Rejected(Event, frozen=True, kw_only=True):
    """The engine would not take a run in: a mistake that our own checks do not know."""

    run_id: str
    detail: str


class Stored(Event, frozen=True, kw_only=True):
    """A record was stored."""

    run_id: str
    record: m.ProgressRecord
    seq: int


class WriteRefused(Event, frozen=True, kw_only=True):
    """Another record than the expected one stands; None: none does."""

    run_id: str
    found: m.ProgressRecord | None
    seq: int


class WriteOverdue(Event, frozen=True, kw_only=True):
    """A record could not be stored in time; perhaps it was."""

    run_id: str


class Tick(Event, frozen=True, kw_only=True):
    """Time has passed: to be told a few times a second."""


class StopAsked(Event, frozen=True, kw_only=True):
    """The process shall end."""


class DrainAnswered(Event, frozen=True, kw_only=True):
    """The scheduler's answer to a drain notice; not agreed: there was none."""

    agreed: bool


WorkerEvent: TypeAlias = (
    Assigned
    | m.Release
    | m.Thresholds
    | m.Cancel
    | Stepped
    | PassTimed
    | Left
    | Rejected
    | Stored
    | WriteRefused
    | WriteOverdue
    | Tick
    | StopAsked
    | DrainAnswered
)


# --- commands -----------------------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the commands."""


class Answer(Command, frozen=True, kw_only=True):
    """Reply to the assignment or release."""

    reply: m.Accepted | m.Refused


class Admit(Command, frozen=True, kw_only=True):
    """Engine: take the run in."""

    run_id: str
    request: m.GenerateRequest
    threshold: float
    committed_ids: list[int]
    committed_confidences: list[float]
    opening: Opening = NO_OPENING


class Drop(Command, frozen=True, kw_only=True):
    """Engine: forget the run at once."""

    run_id: str
    reason: DropReason
    trace: str = ""


class Turn(Command, frozen=True, kw_only=True):
    """Engine: another threshold from the run's next step on."""

    run_id: str
    threshold: float


class LetGo(Command, frozen=True, kw_only=True):
    """Engine: give the run back at the end of its block, at once if it is between two."""

    run_id: str


class Write(Command, frozen=True, kw_only=True):
    """Store the record, continuing from `after_seq`; then tell what came of it."""

    run_id: str
    record: m.ProgressRecord
    after_seq: int
    blocks_before: int  # of its blocks, those that are not news: in an earlier record that was stored
    trace: str


class Show(Command, frozen=True, kw_only=True):
    """Tell who looks on."""

    step: m.CanvasStep


class AskToDrain(Command, frozen=True, kw_only=True):
    """Ask the scheduler to take the requests over."""


class GiveUp(Command, frozen=True, kw_only=True):
    """The run's last record was not stored in its time; it is forgotten."""

    request_id: str
    trace: str = ""


class Exit(Command, frozen=True, kw_only=True):
    """End the process."""

    reason: Literal["drained", "drain_limit"]
    held: int  # requests left behind


WorkerCommand: TypeAlias = Answer | Admit | Drop | Turn | LetGo | Write | Show | AskToDrain | GiveUp | Exit
