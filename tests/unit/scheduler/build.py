"""Short ways to make what the scheduler's tests need. Times are small numbers on the policy's own clock."""

from typing import Any

from contracts import messages as m
from services.costs import LatencyProfile, PassCost
from services.profile import Decoding, EngineSection, Limits, Profile
from services.scheduler import events as e
from services.scheduler.config import SchedulerConfig
from services.scheduler.policy import Scheduler
from tests import builders
from tests.builders import BLOCK, MODEL

EPOCH = 7
PROFILE = Profile(
    model=MODEL,
    decoding=Decoding(block_size=BLOCK, threshold=0.9, steps_per_block=8.0),
    limits=Limits(max_context_tokens=1024, max_output_tokens=256),
    engine=EngineSection(),
)
LINE = PassCost(curve=((0.0, 1.0), (1000.0, 101.0)))  # 1 ms and 0.1 ms a token
FLAT = PassCost(curve=((1.0, 5.0), (2.0, 5.0)))


def make_scheduler(cost: PassCost = LINE, profile: Profile = PROFILE, epoch: int = EPOCH, **config: Any) -> Scheduler:
    """Fresh: it has not caught up."""
    return Scheduler(SchedulerConfig(**config), profile, LatencyProfile({1: cost}), epoch)


def make_acting(cost: PassCost = LINE, profile: Profile = PROFILE, **config: Any) -> Scheduler:
    """One that has started on an empty cluster at time 0."""
    scheduler = make_scheduler(cost, profile, **config)
    scheduler.handle(e.CaughtUp(), 0.0)
    return scheduler


def make_request(
    request_id: str = "r1", *, tokens: int = 2 * BLOCK, prompt: int = 32, **fields: Any
) -> m.GenerateRequest:
    return builders.make_request(request_id, prompt_ids=[1] * prompt, max_tokens=tokens, **fields)


def seen(
    request: m.GenerateRequest | str = "r1",
    seq: int = 1,
    arrived_at: float = 0.0,
    expires_at: float = 100.0,
    deadline: float | None = None,
) -> e.RequestSeen:
    if isinstance(request, str):
        request = make_request(request)
    return e.RequestSeen(request, seq, arrived_at, expires_at, deadline)


def make_record(
    request_id: str = "r1", state: m.State = "running", holder: str = "a", **fields: Any
) -> m.ProgressRecord:
    return builders.make_record(request_id, state, holder=holder, epoch=EPOCH, **fields)


def held(request: m.GenerateRequest | str = "r1", attempt: int = 1) -> m.Held:
    if isinstance(request, str):
        request = make_request(request)
    return builders.make_held(request, attempt)


def status(instance_id: str = "a", *holds: m.Held, **fields: Any) -> e.StatusSeen:
    return e.StatusSeen(builders.make_status(instance_id, holds, **({"epoch": EPOCH} | fields)))


def answered(answer: Any, request_id: str = "r1", instance_id: str = "a", attempt: int = 1) -> e.AssignAnswered:
    """`answer`: "accepted", a reason to refuse, or how no answer came."""
    if answer == "accepted":
        answer = m.Accepted()
    elif answer not in ("undelivered", "unanswered"):
        answer = m.Refused(reason=answer)
    return e.AssignAnswered(instance_id, request_id, attempt, answer)


def assigned(
    instance_id: str = "a",
    request: m.GenerateRequest | str = "r1",
    reason: e.AssignReason = "new",
    *,
    attempt: int = 1,
    resume: m.ProgressRecord | None = None,
    from_seq: int = 0,
    epoch: int = EPOCH,
) -> e.SendAssign:
    """The command that is expected."""
    if isinstance(request, str):
        request = make_request(request)
    pin = request.threshold
    threshold = PROFILE.decoding.threshold if pin is None else pin
    assign = m.Assign(
        epoch=epoch, attempt=attempt, request=request, threshold=threshold, resume=resume, from_seq=from_seq
    )
    return e.SendAssign(instance_id, assign, reason)


def written(
    state: m.State,
    reason: e.WriteReason,
    request: m.GenerateRequest | str = "r1",
    *,
    attempt: int = 1,
    after_seq: int = 0,
    **fields: Any,
) -> e.WriteRecord:
    """The command that is expected: `fields` are what the last record held."""
    record = builders.make_record(request, state, attempt=attempt, epoch=EPOCH, reason=reason, **fields)
    return e.WriteRecord(record, after_seq, reason)


def stored(command: e.Command, seq: int) -> e.RecordSeen:
    """The expected write has succeeded."""
    assert isinstance(command, e.WriteRecord)
    return e.RecordSeen(command.record, seq)


def placements(commands: list[e.Command]) -> list[tuple[str, str]]:
    """(request, instance) of the assignments among the commands."""
    return [(c.assign.request.request_id, c.instance_id) for c in commands if isinstance(c, e.SendAssign)]


def but_wakes(commands: list[e.Command]) -> list[e.Command]:
    """All but WakeAt and AskStatus, for tests that are not about time and silence."""
    return [command for command in commands if not isinstance(command, e.WakeAt | e.AskStatus)]
