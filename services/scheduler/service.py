"""The scheduler's I/O: what is heard becomes events, what the policy says is carried out.

1. The lease comes first: a scheduler that stands by reads nothing. One that has lost it ends with exit code 3.
2. Statuses are heard before the streams are read, and REQUESTS is read before PROGRESS: a final record that is seen has
   its request seen before, or purged.
3. Events that arrive at one moment are decided upon together. Commands that wait for an answer are tasks of their own.
4. What has ended leaves REQUESTS within moments, as much as possible in one call (`ended.py`).
5. After a cut, or after this process itself stood still, everybody's silence counts anew.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from prometheus_client import Counter, Gauge, Histogram

from contracts import messages as m
from contracts import subjects
from contracts.codec import MalformedMessage
from services import telemetry
from services.bus import Bus, BusTimeout, Follower, NoResponder, trace_parent
from services.costs import load_latency
from services.lease import Lease
from services.profile import check_retention, load_profile
from services.progress import Overtaken, subject_of, write_record
from services.runtime import Runtime, Stop, new_id
from services.scheduler import events as e
from services.scheduler.config import SchedulerConfig
from services.scheduler.ended import EndedRequests
from services.scheduler.policy import Scheduler

logger = logging.getLogger(__name__)

COMMANDS = Counter("tediserve_scheduler_commands", "Decisions, by their reason", ["command", "reason"])
ANSWERS = Counter("tediserve_scheduler_assign_answers", "What came of assignments", ["answer"])
RELEASES = Counter("tediserve_scheduler_release_answers", "What came of releases", ["answer"])
ATTEMPTS = Counter("tediserve_scheduler_placements", "Assignments accepted, by attempt", ["attempt"])
QUEUE_S = Histogram(
    "tediserve_request_queue_time_seconds",
    "From a request's arrival to its first accepted assignment",
    ["priority"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
MOVES = Counter("tediserve_scheduler_moves", "Requests that another instance took over without a loss", ["reason"])
MOVE_S = Histogram(
    "tediserve_scheduler_move_seconds",
    "From the record that ended a request's stay on an instance to its acceptance by the next, without a loss",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
OVERTAKEN = Counter("tediserve_scheduler_overtaken_writes", "Records that were refused since another one stood")
_DECISION_S = (1e-5, 3e-5, 1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2, 3e-2, 0.1)
DECISION_S = Histogram(
    "tediserve_scheduler_decision_seconds",
    "Time that the policy took over the events of one moment",
    buckets=_DECISION_S,
)
PLACEMENT_S = Histogram(
    "tediserve_scheduler_placement_seconds",
    "The same, of moments in which requests were placed",
    buckets=_DECISION_S,
)
OPEN = Gauge("tediserve_scheduler_open_requests", "Open requests")
WAITING = Gauge("tediserve_scheduler_waiting_requests", "Open requests that no instance holds", ["reason"])
INSTANCES = Gauge("tediserve_scheduler_instances", "Live instances of the profile's model")
SKEW_S = Histogram(
    "tediserve_scheduler_clock_skew_seconds",
    "How far the clocks of instances are from ours, or their statuses late",
    buckets=(0.001, 0.005, 0.02, 0.05, 0.2, 1.0, 5.0),
)

_WRITE_LIMIT_S = 2.0
_PURGE_PAUSE_S = 0.2  # before what has failed is tried again
_PURGE_EVERY_S = 0.1
_CATCH_UP_LIMIT_S = 60.0
_BEAT_S = 0.25  # of the check that this process has not stood still
_STOOD_STILL_S = 1.0
_SKEW_LIMIT_S = 0.05
_SKEW_STATUSES = 5  # of an instance, from which its clock is judged
_LOUD = (e.StandDown, e.WriteRecord)  # commands that an operator should see; the others are for debugging


def make_serve(config: SchedulerConfig) -> Callable[[Runtime], Awaitable[None]]:
    """The service with its profile read. Raises ConfigError."""
    profile = load_profile(Path(config.profile))
    latency = load_latency(profile.latency_file)

    async def serve(runtime: Runtime) -> None:
        check_retention(profile, runtime.bus.result_retention_s)
        lease = Lease(runtime.bus, new_id("sched"))
        logger.info("waiting for the lease")
        if not await lease.acquire_unless(runtime.stopping):
            return
        logger.info("acting, epoch %d", lease.epoch)
        runtime.spawn(lease.keep_or_stop(), name="lease")
        scheduler = Scheduler(config, profile, latency, lease.epoch)
        service = SchedulerService(runtime, scheduler, config)
        runtime.spawn(service.start(), name="start")
        try:
            await runtime.until_stopped()
        finally:
            service.stop()
        await runtime.cancel_tasks()
        await lease.give_up()

    return serve


class SchedulerService:
    """Feeds one policy object. `start` returns when it decides; `stop` makes it deaf."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler, config: SchedulerConfig) -> None:
        self._runtime = runtime
        self._bus: Bus = runtime.bus
        self._scheduler = scheduler
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._heard: list[e.Event] = []  # what is to be decided upon next
        self._beat_at = self._loop.time()  # this process ran
        self._skews: dict[str, deque[float]] = {}  # by instance id
        self._skewed: set[str] = set()  # instances whose clock has been warned about
        self._traces: dict[str, str] = {}  # trace parents of open requests
        self._ended = EndedRequests()
        self._has_ended = asyncio.Event()  # one of them

    async def start(self) -> None:
        """Raises BusTimeout."""
        bus = self._bus
        bus.on_reconnected(lambda: self._handle(e.Reconnected()))
        await bus.subscribe("status.instance.*", m.InstanceStatus, self._on_status)
        await bus.subscribe("status.lost.*", m.InstanceLost, self._on_lost)
        await bus.subscribe(subjects.LOAD_STATE, m.LoadState, lambda load: self._handle(e.LoadStateSeen(load)))
        await bus.subscribe("status.gateway.*", m.GatewayStatus, self._on_gateway)
        requests = await bus.follow(
            subjects.REQUESTS,
            "req.*",
            m.GenerateRequest,
            self._on_request,
            on_malformed=self._on_malformed_request,
            subject_of=lambda request: subjects.request(request.request_id),
        )
        await _catch_up(requests, subjects.REQUESTS)
        progress = await bus.follow(
            subjects.PROGRESS,
            "prog.*.*",
            m.ProgressRecord,
            lambda record, seq: self._handle(e.RecordSeen(record, seq)),
            on_malformed=self._on_malformed_record,
            subject_of=subject_of,
        )
        await _catch_up(progress, subjects.PROGRESS)
        self._runtime.spawn(self._watch_own_silence(), name="own silence")
        self._runtime.spawn(self._remove_ended(), name="ended")
        self._handle(e.CaughtUp())
        await bus.respond(subjects.DRAIN, m.DrainNotice, self._on_drain)
        OPEN.set_function(lambda: self._scheduler.num_open)
        INSTANCES.set_function(self._scheduler.num_instances)
        for reason in self._scheduler.num_waiting():
            WAITING.labels(reason).set_function(partial(self._num_waiting, reason))

    def _num_waiting(self, reason: str) -> int:
        return self._scheduler.num_waiting()[reason]

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    # --- what is heard --------------------------------------------------------------------------------------------

    def _on_request(self, request: m.GenerateRequest, seq: int) -> None:
        offset = self._loop.time() - time.time()  # wall clock to ours
        deadline = None if request.deadline_at is None else request.deadline_at + offset
        self._ended.note_request(request.request_id, seq)
        if parent := trace_parent.get():
            self._traces[request.request_id] = parent
        self._handle(e.RequestSeen(request, seq, request.created_at + offset, request.expires_at + offset, deadline))

    def _on_malformed_request(self, subject: str, seq: int) -> None:
        COMMANDS.labels("Purge", "malformed").inc()
        self._spawn(self._purge(subject), "purge")

    def _on_malformed_record(self, subject: str, seq: int) -> None:
        _, gateway_id, request_id = subject.split(".")
        self._handle(e.RecordUnreadable(gateway_id, request_id, seq))

    def _on_status(self, status: m.InstanceStatus) -> None:
        skew_s = status.sent_at - time.time()
        SKEW_S.observe(abs(skew_s))
        self._judge_clock(status.instance_id, skew_s)
        self._handle(e.StatusSeen(status))

    def _judge_clock(self, instance_id: str, skew_s: float) -> None:
        """A message that was long on its way looks like a clock that is slow: what counts is the least of the last."""
        last = self._skews.setdefault(instance_id, deque(maxlen=_SKEW_STATUSES))
        last.append(skew_s)
        least_s = min(last, key=abs)
        if len(last) == _SKEW_STATUSES and abs(least_s) > _SKEW_LIMIT_S and instance_id not in self._skewed:
            self._skewed.add(instance_id)
            logger.warning("clock of %s differs by %.0f ms (logged once)", instance_id, least_s * 1000)

    def _on_lost(self, lost: m.InstanceLost) -> None:
        logger.warning("instance %s exited: %s", lost.instance_id, lost.detail)
        self._skews.pop(lost.instance_id, None)
        self._skewed.discard(lost.instance_id)
        self._handle(e.InstanceExited(lost.instance_id))

    def _on_gateway(self, status: m.GatewayStatus) -> None:
        self._handle(e.GatewaySeen(status.gateway_id))

    async def _on_drain(self, notice: m.DrainNotice) -> m.Accepted:
        self._handle(e.DrainAsked(notice.instance_id))
        return m.Accepted()

    async def _watch_own_silence(self) -> None:
        while True:
            self._note_own_beat()
            await asyncio.sleep(_BEAT_S)

    def _note_own_beat(self) -> None:
        """Rule 5: what others said while this process stood still may lie unread."""
        stood_still_s = self._loop.time() - self._beat_at
        self._beat_at = self._loop.time()
        if stood_still_s > _STOOD_STILL_S:
            logger.warning("stood still for %.1f s", stood_still_s)
            self._handle(e.Reconnected())

    def _tick(self) -> None:
        self._note_own_beat()  # before silence is judged
        self._handle(e.Tick())

    def _handle(self, event: e.Event) -> None:
        self._heard.append(event)
        if len(self._heard) == 1:
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        """An error ends the process: its successor starts from what is stored."""
        events, self._heard = self._heard, []
        if self._stopped:
            return
        try:
            self._decide_on(events)
        except Exception as error:
            self._runtime.fail(error)

    def _decide_on(self, events: list[e.Event]) -> None:
        started = time.perf_counter()
        commands = self._scheduler.handle_all(events, self._loop.time())
        took_s = time.perf_counter() - started
        DECISION_S.observe(took_s)
        if any(isinstance(command, e.SendAssign) for command in commands):
            PLACEMENT_S.observe(took_s)
        for command in commands:
            self._carry_out(command)

    # --- what is done ---------------------------------------------------------------------------------------------

    def _carry_out(self, command: e.Command) -> None:
        reason = getattr(command, "reason", "")
        request_id = _request_id(command)
        trace_parent.set(self._traces.get(request_id, ""))  # the log line's, and of what is sent below
        COMMANDS.labels(type(command).__name__, reason).inc()
        if not isinstance(command, e.WakeAt):
            logger.log(logging.INFO if isinstance(command, _LOUD) else logging.DEBUG, "%s", _Brief(command))
        match command:
            case e.SendAssign():
                self._spawn(self._assign(command), "assign")
            case e.SendRelease():
                self._spawn(self._release(command), "release")
            case e.WriteRecord():
                self._spawn(self._write(command), "write")
            case e.Purge():
                self._ended.note_end(request_id)
                self._has_ended.set()
                self._traces.pop(request_id, None)
            case e.SendCancel():
                cancel = m.Cancel(request_id=request_id)
                self._spawn(self._bus.publish(subjects.cancel(request_id), cancel), "cancel")
            case e.AskStatus():
                self._spawn(self._bus.publish(subjects.STATUS_ASK, m.StatusAsk()), "ask")
            case e.WakeAt():
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(command.at, self._tick)
            case e.StandDown():
                self.stop()
                self._spawn(_stand_down(command.reason), "stand down")
            case e.Wait():
                pass

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """A task whose messages carry the trace of what is handled now."""
        self._runtime.spawn(work, name=name)

    async def _assign(self, command: e.SendAssign) -> None:
        assign = command.assign
        answer = await self._ask(subjects.assign(command.instance_id), assign, assign.request.request_id)
        ANSWERS.labels(_label(answer)).inc()
        if isinstance(answer, m.Accepted):
            ATTEMPTS.labels(str(assign.attempt)).inc()
            note_wait(command)
        self._handle(e.AssignAnswered(command.instance_id, assign.request.request_id, assign.attempt, answer))

    async def _release(self, command: e.SendRelease) -> None:
        release = command.release
        answer = await self._ask(subjects.release(command.instance_id), release, release.request_id)
        RELEASES.labels(_label(answer)).inc()
        self._handle(e.ReleaseAnswered(command.instance_id, release.request_id, release.attempt, answer))

    async def _ask(self, subject: str, message: m.Assign | m.Release, request_id: str) -> e.Answer:
        """What the worker answers. An answer that cannot be read takes as long as none."""
        limit_s = self._config.assign_limit_s
        earliest_repeat = self._loop.time() + limit_s
        answer: e.Answer
        try:
            answer = await self._bus.request(
                subject,
                message,
                m.Accepted | m.Refused,  # type: ignore[arg-type]  # a union is a type to msgspec
                limit_s=limit_s,
            )
        except NoResponder:
            return "undelivered"
        except (BusTimeout, MalformedMessage):
            await asyncio.sleep(earliest_repeat - self._loop.time())
            return "unanswered"
        if isinstance(answer, m.Refused):
            logger.debug("%s, %s is refused: %s", subject, request_id, answer)
        return answer

    async def _write(self, command: e.WriteRecord) -> None:
        record = replace(command.record, written_at=time.time())
        request_id, after_seq = record.request_id, command.after_seq
        event: e.Event
        try:
            seq = await write_record(self._bus, record, after_seq=after_seq, limit_s=_WRITE_LIMIT_S)
            event = e.RecordSeen(record, seq)
        except Overtaken as overtaken:
            OVERTAKEN.inc()
            found = overtaken.found
            seen = None if found is None else e.RecordSeen(found.message, found.seq)
            event = e.WriteOvertaken(request_id, after_seq, seen)
        except BusTimeout:
            event = e.WriteUnanswered(request_id, after_seq)
        self._handle(event)

    async def _remove_ended(self) -> None:
        """Rule 4."""
        while True:
            await self._has_ended.wait()
            below_seq, request_ids = self._ended.take()
            if below_seq:
                await _insist(partial(self._bus.purge_below, subjects.REQUESTS, below_seq))
            for request_id in request_ids:
                await self._purge(subjects.request(request_id))
            if not self._ended.are_left:
                self._has_ended.clear()
            await asyncio.sleep(_PURGE_EVERY_S)

    async def _purge(self, subject: str) -> None:
        await _insist(partial(self._bus.purge, subjects.REQUESTS, subject))


async def _insist(purge: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await purge()
            return
        except BusTimeout as error:
            logger.debug("purge: %s", error)
            await asyncio.sleep(_PURGE_PAUSE_S)


async def _catch_up(follower: Follower, stream: str) -> None:
    try:
        await follower.caught_up(_CATCH_UP_LIMIT_S)
    except TimeoutError:
        raise BusTimeout(f"{stream} not read within {_CATCH_UP_LIMIT_S:g} s") from None


async def _stand_down(reason: str) -> None:
    raise Stop(3, f"another scheduler acts ({reason})")


def note_wait(command: e.SendAssign) -> None:
    """The wait that the accepted assignment has ended: a move's since the other instance's last record."""
    request, resume = command.assign.request, command.assign.resume
    is_move = resume is not None and resume.holder != ""
    began_at, ended_at = request.created_at if resume is None else resume.written_at, time.time()
    waited_s = max(ended_at - began_at, 0.0)
    if resume is not None and resume.holder not in ("", command.instance_id):  # it may have come back
        MOVES.labels(command.reason).inc()
        MOVE_S.observe(waited_s)
    elif resume is None:
        QUEUE_S.labels(str(request.priority)).observe(waited_s)
    telemetry.record(
        telemetry.MOVE if is_move else telemetry.QUEUE,
        began_at=began_at,
        ended_at=ended_at,
        attributes={
            telemetry.REQUEST_ID: request.request_id,
            telemetry.ATTEMPT: command.assign.attempt,
            telemetry.INSTANCE_ID: command.instance_id,
            telemetry.PRIORITY: request.priority,
            telemetry.REASON: command.reason,
        },
    )


def _request_id(command: e.Command) -> str:
    """Of the request that the command is about; "": of none."""
    match command:
        case e.SendAssign():
            return command.assign.request.request_id
        case e.SendRelease():
            return command.release.request_id
        case e.WriteRecord():
            return command.record.request_id
        case e.Purge() | e.SendCancel() | e.Wait():
            return command.request_id
        case _:
            return ""


def _label(answer: e.Answer) -> str:
    match answer:
        case m.Accepted():
            return "accepted"
        case m.Refused():
            return answer.reason
        case _:
            return answer


class _Brief:
    """A command as a log line, formatted only if it is wanted: never prompts or tokens."""

    def __init__(self, command: e.Command) -> None:
        self._command = command

    def __str__(self) -> str:
        command = self._command
        match command:
            case e.SendAssign(instance_id=instance_id, assign=assign):
                what = f" to {instance_id}, attempt {assign.attempt}"
            case e.SendRelease(instance_id=instance_id, release=release):
                what = f" by {instance_id}, attempt {release.attempt}"
            case e.WriteRecord(record=record):
                what = f" {record.state}, attempt {record.attempt}"
            case _:
                what = ""
        return f"{type(command).__name__} {_request_id(command)}{what} ({getattr(command, 'reason', '')})"
