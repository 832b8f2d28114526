"""The threshold-controller's I/O: what is heard becomes events, what the policy says is carried out.

1. The lease comes first: of several controllers one decides, and one that stands by hears nothing. One that has lost it
   ends with exit code 3. What it may still say before it notices is overwritten within `repeat_s` by its successor.
2. Statuses, reports and forecasts are heard before the streams are read, and REQUESTS is read before PROGRESS: a final
   record that is seen has its request seen before, or purged.
3. What has arrived when the event loop comes round is decided on at once, so that a crowd of reports costs one decision
   for each instance and not one for each report.
4. One task sends, of each subject only what is newest: under pressure nothing old overtakes, and no queue grows.
5. After a cut everybody's silence counts anew; what was decided meanwhile is said with the next repetition.
"""

import asyncio
import collections
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace
from prometheus_client import Counter, Gauge, Histogram

from contracts import messages as m
from contracts import subjects
from services.bus import Bus, BusTimeout, Follower
from services.costs import load_latency
from services.lease import Lease
from services.profile import check_retention, load_profile
from services.progress import subject_of
from services.runtime import Runtime, new_id
from services.threshold_controller import events as e
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.policy import ThresholdController

logger = logging.getLogger(__name__)

SENT = Counter("tediserve_controller_thresholds_sent", "Messages to instances, by why they were sent", ["reason"])
DECIDED = Counter(
    "tediserve_controller_decisions",
    "Decisions on a request that differ from the one before, by their reason",
    ["reason"],
)
HELD = Gauge(
    "tediserve_controller_requests", "Requests that instances hold, by why they have their threshold", ["reason"]
)
OPEN = Gauge("tediserve_controller_open_requests", "Open requests")
HOPELESS = Gauge("tediserve_controller_hopeless_requests", "Requests whose deadline will pass whatever is done")
DEMAND_S = Gauge("tediserve_controller_demand_seconds", "Work of all requests at their caps, in instance-seconds")
CAPACITY_S = Gauge("tediserve_controller_capacity_seconds", "What all instances can do until the horizon")
CAP = Gauge("tediserve_controller_cap", "The highest threshold that the load allows, by priority", ["priority"])
OTHER_SET = Counter("tediserve_controller_unusable_forecasts", "Forecasts for another threshold set than the profile's")
HEARD = Counter("tediserve_controller_events", "What was heard, by kind", ["event"])
DECISION_S = Histogram(
    "tediserve_controller_decision_seconds",
    "Time that the policy took over all that had arrived at once",
    buckets=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
)
REACTION_S = Histogram(
    "tediserve_controller_reaction_seconds",
    "From what was heard first to the thresholds that came of it, sent",
    buckets=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
)

_CATCH_UP_LIMIT_S = 60.0
_LEASE_TTL_S = (
    3  # longer than the scheduler's: two that decide for a while do no harm, and a busy machine must not stop it
)
_MOST_AT_ONCE = 256  # events; then they are decided on, though more may have arrived


def make_serve(config: ThresholdControllerConfig) -> Callable[[Runtime], Awaitable[None]]:
    """The service with its profile read. Raises ConfigError."""
    profile = load_profile(Path(config.profile))
    latency = load_latency(profile.latency_file)

    async def serve(runtime: Runtime) -> None:
        check_retention(profile, runtime.bus.result_retention_s)
        lease = Lease(runtime.bus, new_id("control"), subjects.CONTROLLER_LEASE_KEY, _LEASE_TTL_S)
        logger.info("waiting for the lease")
        if not await lease.acquire_unless(runtime.stopping):
            return
        runtime.spawn(lease.keep_or_stop(), name="lease")
        service = ThresholdControllerService(runtime, ThresholdController(config, profile, latency))
        runtime.spawn(service.start(), name="start")
        try:
            await runtime.until_stopped()
        finally:
            service.stop()
        await runtime.cancel_tasks()
        await lease.give_up()

    return serve


class ThresholdControllerService:
    """Feeds one policy object. `start` returns when it hears everything; `stop` makes it deaf."""

    def __init__(self, runtime: Runtime, controller: ThresholdController) -> None:
        self._runtime = runtime
        self._bus: Bus = runtime.bus
        self._controller = controller
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._heard: list[e.Event] = []
        self._heard_at = 0.0  # the first of them, by the performance counter
        self._unsent: dict[str, tuple[m.Message, float]] = {}  # by subject, with when its cause was heard
        self._sending = False
        self._stopped = False
        self._said_other_set = False

    async def start(self) -> None:
        """Raises BusTimeout."""
        bus = self._bus
        bus.on_reconnected(lambda: self._handle(e.Reconnected()))
        await bus.subscribe("status.instance.*", m.InstanceStatus, lambda status: self._handle(e.StatusSeen(status)))
        await bus.subscribe(
            "status.lost.*", m.InstanceLost, lambda lost: self._handle(e.InstanceExited(lost.instance_id))
        )
        await bus.subscribe("report.*", m.Report, lambda report: self._handle(e.ReportSeen(report)))
        await bus.subscribe("forecast.*", m.Forecast, self._on_forecast)
        requests = await bus.follow(
            subjects.REQUESTS,
            "req.*",
            m.GenerateRequest,
            self._on_request,
            subject_of=lambda request: subjects.request(request.request_id),
        )
        await _catch_up(requests, subjects.REQUESTS)
        progress = await bus.follow(
            subjects.PROGRESS,
            "prog.*.*",
            m.ProgressRecord,
            lambda record, seq: self._handle(e.RecordSeen(record, seq)),
            subject_of=subject_of,
        )
        await _catch_up(progress, subjects.PROGRESS)
        gc.freeze()  # what was loaded stays: a collection that walks it all holds decisions up for tens of milliseconds
        self._handle(e.CaughtUp())
        OPEN.set_function(lambda: self._controller.num_open)
        for reason in self._controller.num_decided():
            HELD.labels(reason).set_function(partial(self._num_decided, reason))

    def _num_decided(self, reason: e.Reason) -> int:
        return self._controller.num_decided()[reason]

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    # --- what is heard --------------------------------------------------------------------------------------------

    def _on_request(self, request: m.GenerateRequest, seq: int) -> None:
        offset = self._loop.time() - time.time()  # wall clock to ours
        deadline = None if request.deadline_at is None else request.deadline_at + offset
        self._handle(e.RequestSeen(request, seq, request.expires_at + offset, deadline))

    def _on_forecast(self, forecast: m.Forecast) -> None:
        if forecast.thresholds != self._controller.thresholds:
            OTHER_SET.inc()
            if not self._said_other_set:
                self._said_other_set = True
                logger.warning(
                    "forecasts are for the thresholds %s, the profile has %s: they are not used (logged once)",
                    forecast.thresholds,
                    self._controller.thresholds,
                )
        self._handle(e.ForecastSeen(forecast))

    def _handle(self, event: e.Event) -> None:
        if self._stopped:
            return
        if not self._heard:
            self._heard_at = time.perf_counter()
            self._loop.call_soon(self._decide)
        self._heard.append(event)
        if len(self._heard) >= _MOST_AT_ONCE:
            self._decide()

    def _decide(self) -> None:
        events, self._heard = self._heard, []
        if self._stopped or not events:
            return
        started = time.perf_counter()
        commands = self._controller.handle_all(events, self._loop.time())
        DECISION_S.observe(time.perf_counter() - started)
        for kind, count in collections.Counter(type(event).__name__ for event in events).items():
            HEARD.labels(kind).inc(count)
        for reason, count in self._controller.take_decided().items():
            DECIDED.labels(reason).inc(count)
        for command in commands:
            self._carry_out(command)

    # --- what is done ---------------------------------------------------------------------------------------------

    def _carry_out(self, command: e.Command) -> None:
        match command:
            case e.SendThresholds():
                SENT.labels(command.reason).inc()
                logger.debug("%s: %s", command.instance_id, _Brief(command))
                self._say(subjects.thresholds(command.instance_id), _thresholds_of(command))
            case e.SendLoadState():
                self._note_load(command.state)
                self._say(subjects.LOAD_STATE, replace(command.state, sent_at=time.time()))
            case e.AskStatus():
                self._say(subjects.STATUS_ASK, m.StatusAsk())
            case e.Settled():
                logger.info("ready: %d requests open", self._controller.num_open)
            case e.WakeAt():
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(command.at, self._handle, e.Tick())

    def _say(self, subject: str, message: m.Message) -> None:
        """In the place of what may still be unsent on that subject."""
        self._unsent[subject] = message, self._heard_at
        if not self._sending:
            self._sending = True
            self._runtime.spawn(self._send(), name="send")

    async def _send(self) -> None:
        while self._unsent:
            subject = next(iter(self._unsent))
            message, heard_at = self._unsent.pop(subject)
            await self._bus.publish(subject, message)
            if isinstance(message, m.Thresholds):
                REACTION_S.observe(time.perf_counter() - heard_at)
        self._sending = False

    def _note_load(self, state: m.LoadState) -> None:
        HOPELESS.set(state.num_hopeless)
        DEMAND_S.set(state.demand_s)
        CAPACITY_S.set(state.capacity_s)
        for cap in state.caps:
            CAP.labels(str(cap.priority)).set(cap.threshold)


def _thresholds_of(command: e.SendThresholds) -> m.Thresholds:
    entries = [
        m.ThresholdEntry(request_id=d.request_id, attempt=d.attempt, threshold=d.threshold) for d in command.decisions
    ]
    return m.Thresholds(entries=entries)


async def _catch_up(follower: Follower, stream: str) -> None:
    try:
        await follower.caught_up(_CATCH_UP_LIMIT_S)
    except TimeoutError:
        raise BusTimeout(f"{stream} not read within {_CATCH_UP_LIMIT_S:g} s") from None


class _Brief:
    """Thresholds as a log line, formatted only if it is wanted."""

    def __init__(self, command: e.SendThresholds) -> None:
        self._command = command

    def __str__(self) -> str:
        told = (f"{d.request_id} {d.threshold:g} ({d.reason})" for d in self._command.decisions)
        return f"{self._command.reason}: {', '.join(told)}"
