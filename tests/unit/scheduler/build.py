"""Short ways to make what the scheduler's tests need. Times are small numbers on the policy's own clock."""

from collections.abc import Callable
from typing import Any, TypeAlias

from contracts import messages as m
from services.costs import LatencyProfile, PassCost
from services.profile import Decoding, EngineSection, Limits, Profile
from services.scheduler import events as e
from services.scheduler.config import SchedulerConfig
from services.scheduler.policy import Scheduler
from tests import builders
from tests.builders import BLOCK, MODEL

Make: TypeAlias = Callable[..., Scheduler]  # the fixture `make`
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
    """On a clock that is 1000 s behind the wall clock."""
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


def release_answered(
    answer: Any, request_id: str = "r1", instance_id: str = "a", attempt: int = 1
) -> e.ReleaseAnswered:
    """As `answered`, of a release."""
    assign = answered(answer, request_id, instance_id, attempt)
    return e.ReleaseAnswered(assign.instance_id, assign.request_id, assign.attempt, assign.answer)


def released(
    instance_id: str = "a", request_id: str = "r1", reason: e.ReleaseReason = "faster", attempt: int = 1
) -> e.SendRelease:
    """The command that is expected."""
    return e.SendRelease(instance_id, m.Release(epoch=EPOCH, attempt=attempt, request_id=request_id), reason)


def load_state(caps: dict[int, float] | None = None, **fields: Any) -> e.LoadStateSeen:
    """`caps`: by priority. One instance, ten open requests of a second each."""
    defaults: dict[str, Any] = {
        "sent_at": 0.0,
        "horizon_s": 10.0,
        "demand_s": 10.0,
        "capacity_s": 10.0,
        "num_open": 10,
        "num_hopeless": 0,
        "floor_s": 10.0,
    }
    listed = [m.PriorityCap(priority=p, threshold=t) for p, t in sorted((caps or {}).items(), reverse=True)]
    return e.LoadStateSeen(m.LoadState(caps=listed, **(defaults | fields)))


def assigned(
    instance_id: str = "a",
    request: m.GenerateRequest | str = "r1",
    reason: e.AssignReason = "new",
    *,
    attempt: int = 1,
    resume: m.ProgressRecord | None = None,
    from_seq: int = 0,
    epoch: int = EPOCH,
    threshold: float = PROFILE.decoding.threshold,
) -> e.SendAssign:
    """The command that is expected."""
    if isinstance(request, str):
        request = make_request(request)
    if request.threshold is not None:
        threshold = request.threshold
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


def releases(commands: list[e.Command]) -> list[tuple[str, str]]:
    """(request, its holder) of the releases among the commands."""
    return [(c.release.request_id, c.instance_id) for c in commands if isinstance(c, e.SendRelease)]


def placements(commands: list[e.Command]) -> list[tuple[str, str]]:
    """(request, instance) of the assignments among the commands."""
    return [(c.assign.request.request_id, c.instance_id) for c in commands if isinstance(c, e.SendAssign)]


def but_wakes(commands: list[e.Command]) -> list[e.Command]:
    """All but WakeAt and AskStatus, for tests that are not about time and silence."""
    return [command for command in commands if not isinstance(command, e.WakeAt | e.AskStatus)]


def run(scheduler: Scheduler, now: float, *events: e.Event) -> list[e.Command]:
    """The commands that these events give, without WakeAt and AskStatus."""
    return but_wakes([command for event in events for command in scheduler.handle(event, now)])


def running(scheduler: Scheduler, request_id: str = "r1", instance_id: str = "a", now: float = 0.0) -> None:
    """Sees the instance, places the request there (it must be where it goes) and has it accepted."""
    run(scheduler, now, status(instance_id))
    assert placements(run(scheduler, now, seen(request_id))) == [(request_id, instance_id)]
    run(scheduler, now, answered("accepted", request_id, instance_id))
