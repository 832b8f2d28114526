"""The gateway's side of the bus: requests go in, their records come back, what nobody wants is cancelled.

1. One follower hears the records of all requests of this gateway. A record wakes its call at once; a call that is
   slow to take them sees only the newest.
2. A request is in when REQUESTS has stored it. Until then a client hears nothing; if it cannot be stored in time,
   503, and the request is cancelled in case it was.
3. A call with an Idempotency-Key has an id made of that key, so a repeat finds it: it looks for the records and the
   requests of that id, adds what is missing, and follows what is there, whichever gateway took it.
4. Steps of watched requests are heard by all gateways and taken by the one that answers; they may be lost.
5. Cancelling writes the final record first and tells the worker after; another final record is as good.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge, Histogram

from contracts import subjects
from contracts.codec import MalformedMessage
from contracts.messages import (
    Cancel,
    CanvasStep,
    ClusterPlan,
    GatewayStatus,
    GenerateRequest,
    InstanceStatus,
    LoadState,
    ProgressRecord,
    Reason,
    StatusAsk,
)
from services.bus import Bus, BusTimeout, Follower, SequenceConflict, Stored, StreamFull
from services.gateway import ended
from services.gateway.access import Access
from services.gateway.cluster_view import ClusterView
from services.gateway.config import GatewayConfig
from services.gateway.keys import ApiKey
from services.gateway.openai_api import ApiError, Call, Facts, choice_id
from services.gateway.policy import (
    CallState,
    ClientGone,
    Command,
    Event,
    RecordSeen,
    ShuttingDown,
    StepSeen,
    TimeIsUp,
    WriteCancelled,
    cancelled_record,
)
from services.gateway.text import TextCodec
from services.profile import Profile
from services.progress import Overtaken, subject_of, write_record
from services.runtime import every

logger = logging.getLogger(__name__)

T = TypeVar("T")

INSTANCE_SILENT_S = 3.0  # an instance that says nothing for so long does not count as alive
CANCEL_LIMIT_S = 30.0  # for a cancelled record to be stored; then the scheduler sees to it
ATTACH_SCAN = 128  # choices that a call can have at most

OPEN_CALLS = Gauge("tediserve_gateway_open_calls", "Calls being answered")
CANCELS = Counter("tediserve_gateway_cancels", "Cancelled records written", ["reason"])
REQUESTS_IN = Counter("tediserve_gateway_requests", "Requests put on the bus (choices, not calls)")
ADMISSION_S = Histogram(
    "tediserve_gateway_admission_seconds",
    "From a valid call to its requests being stored",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)


class LiveCall:
    """A call that this process answers: its state, and what has happened that it has not taken in yet."""

    def __init__(self, state: CallState, bases: list[ProgressRecord], key: ApiKey) -> None:
        self.state = state
        self.key = key  # whose call it is
        self.bases = bases  # of each choice: what stands if no record is known
        self.followers: list[Follower] = []
        self.timer: asyncio.TimerHandle | None = None
        self._steps: list[StepSeen] = []
        self._newest: dict[int, RecordSeen] = {}
        self._others: list[Event] = []
        self._wake = asyncio.Event()

    def note(self, event: Event) -> None:
        """Something happened. Of a choice's records only the newest is kept; its steps come before them."""
        if isinstance(event, RecordSeen):
            self._newest[event.choice] = event
        elif isinstance(event, StepSeen):
            self._steps.append(event)
        else:
            self._others.append(event)
        self._wake.set()

    async def events(self, limit_s: float) -> list[Event] | None:
        """What has happened since the last time; None if nothing did within `limit_s` seconds."""
        if not self._wake.is_set():
            try:
                async with asyncio.timeout(limit_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        self._wake.clear()
        events: list[Event] = [*self._steps, *sorted(self._newest.values()), *self._others]
        self._steps, self._newest, self._others = [], {}, []
        return events


class GatewayService:
    """Made once a process; `start` it before the first call, `close` it after the last."""

    def __init__(
        self, bus: Bus, config: GatewayConfig, profile: Profile, codec: TextCodec, gateway_id: str, access: Access
    ) -> None:
        self._bus = bus
        self._access = access
        self._config = config
        self._profile = profile
        self._codec = codec
        self.gateway_id = gateway_id
        self.draining = False
        self._watched: dict[str, tuple[LiveCall, int]] = {}
        self._open: set[LiveCall] = set()
        self._instances_seen: dict[str, float] = {}  # monotonic time of the last status of those that take requests
        self._instance_seen_at = time.monotonic()  # of any; a gateway's start counts
        self.cluster = ClusterView()
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Hears records and statuses from now on. Raises BusTimeout."""
        await self._bus.subscribe("status.instance.*", InstanceStatus, self._on_instance)
        await self._bus.subscribe(subjects.LOAD_STATE, LoadState, lambda load: self.cluster.note(load, time.time()))
        await self._bus.subscribe("canvas.*", CanvasStep, self._on_step)
        await self._bus.subscribe(subjects.STATUS_ASK, StatusAsk, lambda _: self._spawn(self.tell_status()))
        await self._bus.follow(
            subjects.PROGRESS,
            subjects.progress_of_gateway(self.gateway_id),
            ProgressRecord,
            self._on_record,
            subject_of=subject_of,
        )
        await self._bus.follow(
            subjects.CLUSTER_STREAM, subjects.PLAN, ClusterPlan, lambda plan, _: self.cluster.note(plan, time.time())
        )
        await self._bus.publish(subjects.STATUS_ASK, StatusAsk())

    async def beat(self) -> None:
        """Tells every second that this gateway lives; without end."""
        await every(1.0, self.tell_status)

    async def tell_status(self) -> None:
        status = GatewayStatus(gateway_id=self.gateway_id, sent_at=time.time())
        await self._bus.publish(subjects.gateway_status(self.gateway_id), status)

    def fail_open_calls(self) -> None:
        """The gateway cannot wait for them any longer."""
        for live in self._open:
            live.note(ShuttingDown())

    async def close(self, limit_s: float = 5.0) -> None:
        """Waits until what was cancelled is stored, `limit_s` seconds at most."""
        tasks = [task for task in self._tasks if not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)
        for task in tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what is alive ---------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._bus.connected

    @property
    def live_instances(self) -> int:
        """Instances of our model that take requests."""
        oldest = time.monotonic() - INSTANCE_SILENT_S
        return sum(seen_at >= oldest for seen_at in self._instances_seen.values())

    def _on_instance(self, status: InstanceStatus) -> None:
        if status.model != self._profile.model:
            return
        self.cluster.note(status, time.time())
        if status.draining:
            self._instances_seen.pop(status.instance_id, None)
            return
        now = self._instance_seen_at = time.monotonic()
        self._instances_seen[status.instance_id] = now
        if len(self._instances_seen) > 1000:
            self._instances_seen = {i: t for i, t in self._instances_seen.items() if t > now - INSTANCE_SILENT_S}

    def check_open(self) -> None:
        """Raises ApiError where no call can be taken now."""
        if self.draining:
            raise ApiError(503, "This gateway is shutting down.", type="server_error", code="draining", retry_after_s=1)
        if len(self._open) >= self._config.max_open_calls:
            raise ApiError(
                429,
                f"This gateway answers {self._config.max_open_calls} calls already.",
                type="rate_limit_error",
                code="too_many_calls",
                retry_after_s=1,
            )
        silent_s = time.monotonic() - self._instance_seen_at
        if silent_s > self._config.no_instance_limit_s and self._bus.connected:
            raise ApiError(
                503,
                f"No instance of {self._profile.model} has been alive for {silent_s:.0f} s.",
                type="server_error",
                code="no_instance",
                retry_after_s=5,
            )

    # --- a call's life ---------------------------------------------------------------------------------------------

    async def open(self, call: Call) -> LiveCall:
        """Puts the call's requests on the bus. Raises ApiError: then none of them runs on."""
        live = self._enter(call)
        started_at = time.monotonic()
        perhaps_stored: list[ProgressRecord] = []
        try:
            for index, request in enumerate(call.requests):
                self._watched[request.request_id] = (live, index)
            for base, request in zip(live.bases, call.requests, strict=True):
                perhaps_stored.append(base)
                await self._admit(request, started_at + self._config.admit_limit_s)
        except BaseException as error:
            if isinstance(error, ApiError) and error.status == 429:
                perhaps_stored.pop()  # certainly not: a full server is not asked for more work
            for base in perhaps_stored:
                self._spawn(self._cancel(base, "client_gone", 0))
            self._leave(live)
            raise
        ADMISSION_S.observe(time.monotonic() - started_at)
        return live

    async def attach(self, call: Call) -> LiveCall:
        """As `open`, but joins what runs or has run under the call's id. Raises ApiError, also for another body."""
        live = self._enter(call)
        give_up_at = time.monotonic() + self._config.admit_limit_s
        try:
            for index, request in enumerate(call.requests):
                base = await self._insist(lambda r=request: self._find_or_admit(r), give_up_at)  # type: ignore[misc]
                _check_same_call(base.fingerprint, call.facts)
                live.bases[index] = base
            for index, request in enumerate(call.requests):
                await self._insist(lambda i=index, r=request: self._follow(live, i, r.request_id), give_up_at)  # type: ignore[misc]
        except BaseException:
            self._leave(live)
            raise
        self._set_timer(live, live.bases[0].created_at + self._profile.limits.time_limit_s)
        return live

    def _enter(self, call: Call) -> LiveCall:
        self.check_open()
        self._access.enter(call.key, len(call.requests))
        state = CallState(call.facts, self._codec, detached=call.requests[0].detached)
        live = LiveCall(state, [r.first_record for r in call.requests], call.key)
        self._open.add(live)
        OPEN_CALLS.set(len(self._open))
        self._set_timer(live, call.requests[0].expires_at)
        return live

    def _set_timer(self, live: LiveCall, expires_at: float) -> None:
        if live.timer is not None:
            live.timer.cancel()
        left_s = max(expires_at - time.time(), 0.0)
        live.timer = asyncio.get_running_loop().call_later(left_s, live.note, TimeIsUp())

    def _leave(self, live: LiveCall) -> None:
        if live in self._open:
            self._open.remove(live)
            self._access.leave(live.key, len(live.bases))
        OPEN_CALLS.set(len(self._open))
        if live.timer is not None:
            live.timer.cancel()
        for base in live.bases:
            if self._watched.get(base.request_id, (None, 0))[0] is live:
                del self._watched[base.request_id]
        for follower in live.followers:
            self._spawn(follower.stop())
        live.followers = []

    async def next_commands(self, live: LiveCall, limit_s: float) -> list[Command] | None:
        """What the call's client is to be told next, carrying out the rest; None: nothing for `limit_s` seconds."""
        events = await live.events(limit_s)
        return None if events is None else self._handle(live, events)

    def _handle(self, live: LiveCall, events: list[Event]) -> list[Command]:
        told: list[Command] = []
        for event in events:
            for command in live.state.handle(event, time.time()):
                if isinstance(command, WriteCancelled):
                    base = command.record or live.bases[command.choice]
                    self._spawn(self._cancel(base, command.reason, command.seq))
                else:
                    told.append(command)
        if live.state.ended:
            self._leave(live)
        return told

    def client_left(self, live: LiveCall) -> None:
        """The answer can no longer be delivered: cancels the call, or sees a detached one to its end unseen."""
        if live.state.ended:
            self._leave(live)
            return
        self._handle(live, [ShuttingDown() if self.draining else ClientGone()])
        if not live.state.ended:
            self._spawn(self._see_to_its_end(live))

    async def _see_to_its_end(self, live: LiveCall) -> None:
        while not live.state.ended:  # ends at its time limit at the latest
            await self.next_commands(live, 60.0)

    def _on_record(self, record: ProgressRecord, seq: int) -> None:
        if record.is_final:
            self.cluster.note_end(record)
            ended.count(record)
        watched = self._watched.get(record.request_id)
        if watched is not None:
            live, index = watched
            live.note(RecordSeen(index, record, seq))

    def _on_step(self, step: CanvasStep) -> None:
        watched = self._watched.get(step.request_id)
        if watched is not None:
            live, index = watched
            live.note(StepSeen(index, step))

    # --- putting requests in ---------------------------------------------------------------------------------------

    async def _admit(self, request: GenerateRequest, give_up_at: float) -> None:
        """Stores the request. Raises ApiError."""

        async def store() -> None:
            limit_s = min(2.0, max(give_up_at - time.monotonic(), 0.1))
            try:
                await self._bus.append(subjects.request(request.request_id), request, after_seq=0, limit_s=limit_s)
            except SequenceConflict:
                return  # stored by an earlier try, whose answer was lost
            REQUESTS_IN.inc()

        await self._insist(store, give_up_at)

    async def _insist(self, action: Callable[[], Awaitable[T]], give_up_at: float) -> T:
        """The action, again until NATS answers. Raises ApiError: 503 when time is up, 429 when the queue is full."""
        while True:
            try:
                return await action()
            except StreamFull:
                raise ApiError(
                    429,
                    "The server has as many open requests as it takes. Try again later.",
                    type="rate_limit_error",
                    code="too_many_requests",
                    retry_after_s=2,
                ) from None
            except BusTimeout as error:
                if time.monotonic() >= give_up_at:
                    logger.warning("a call is answered 503: NATS does not answer")
                    logger.debug("NATS does not answer: %s", error)
                    raise ApiError(
                        503,
                        "The server cannot reach its message bus. Try again later.",
                        type="server_error",
                        code="bus_unavailable",
                        retry_after_s=2,
                    ) from None
            await asyncio.sleep(0.05)

    async def _find_or_admit(self, request: GenerateRequest) -> ProgressRecord:
        """Where the request stands; a new one is stored. Raises StreamFull, BusTimeout."""
        found = await self.find(request.request_id)
        if found is not None:
            return found.message
        try:
            await self._bus.append(subjects.request(request.request_id), request, after_seq=0)
        except SequenceConflict:
            found = await self.find(request.request_id)
            return found.message if found is not None else request.first_record
        REQUESTS_IN.inc()
        return request.first_record

    async def find(self, request_id: str) -> Stored[ProgressRecord] | None:
        """Where a request of any gateway stands; sequence 0: no record yet. None: there is none. Raises BusTimeout."""
        try:
            record = await self._bus.last(subjects.PROGRESS, subjects.progress_of_request(request_id), ProgressRecord)
            if record is not None:
                return record
            request = await self._bus.last(subjects.REQUESTS, subjects.request(request_id), GenerateRequest)
        except MalformedMessage:
            return None
        return None if request is None else Stored(request.message.first_record, 0)

    async def _follow(self, live: LiveCall, index: int, request_id: str) -> None:
        follower = await self._bus.follow(
            subjects.PROGRESS,
            subjects.progress_of_request(request_id),
            ProgressRecord,
            lambda record, seq: live.note(RecordSeen(index, record, seq)),
            subject_of=subject_of,
        )
        live.followers.append(follower)

    # --- results ---------------------------------------------------------------------------------------------------

    async def result(self, call_id: str) -> list[Stored[ProgressRecord]]:
        """Where the choices of a call stand, by index; empty: unknown. Raises ApiError."""
        give_up_at = time.monotonic() + self._config.admit_limit_s
        found: list[Stored[ProgressRecord]] = []
        for index in range(ATTACH_SCAN):
            stored = await self._insist(lambda i=index: self.find(choice_id(call_id, i)), give_up_at)  # type: ignore[misc]
            if stored is None:
                break
            found.append(stored)
            facts = Facts.decode(stored.message.fingerprint)
            if facts is not None and len(found) >= facts.n:
                break
        return found

    async def cancel(self, call_id: str, found: list[Stored[ProgressRecord]]) -> list[Stored[ProgressRecord]]:
        """Cancels what still runs of the call; `found`: its `result`. Returns the new one. Raises ApiError."""
        for stored in found:
            if not stored.message.is_final:
                await self._cancel(stored.message, "client_deleted", stored.seq, self._config.admit_limit_s)
        return await self.result(call_id)

    # --- cancelling ------------------------------------------------------------------------------------------------

    async def _cancel(self, base: ProgressRecord, reason: Reason, seq: int, limit_s: float = CANCEL_LIMIT_S) -> None:
        """Writes the final record after `base`, or after what has come meanwhile; then tells the worker."""
        give_up_at = time.monotonic() + limit_s
        while True:
            final = cancelled_record(base, reason, time.time())
            try:
                await write_record(self._bus, final, after_seq=seq, limit_s=max(give_up_at - time.monotonic(), 0.0))
                CANCELS.labels(reason).inc()
                break
            except Overtaken as overtaken:
                if overtaken.found is None or overtaken.found.message.is_final:
                    break
                base, seq = overtaken.found
            except BusTimeout:
                logger.warning("request %s: not cancelled (%s): no NATS", base.request_id, reason)
                return
        await self._bus.publish(subjects.cancel(base.request_id), Cancel(request_id=base.request_id))


def call_id_for_key(secret: str, caller: str, idempotency_key: str) -> str:
    """The id of the caller's call with this key: nobody can guess it who does not know all three."""
    told = f"{len(caller)}:{caller}{idempotency_key}".encode()
    return hashlib.blake2b(told, key=secret.encode(), digest_size=16).hexdigest()


def _check_same_call(fingerprint: str, facts: Facts) -> None:
    found = Facts.decode(fingerprint)
    if found is None or found.body != facts.body:
        raise ApiError(
            422,
            "This Idempotency-Key was used for a call with another body. Use a new key for a new call.",
            code="idempotency_key_reused",
        )
