"""The threshold-controller's I/O: what is heard becomes events, what the policy says is carried out.

1. Statuses, reports and forecasts are heard before the streams are read, and REQUESTS is read before PROGRESS: a final
   record that is seen has its request seen before, or purged.
2. Events are handled one after the other, where they arrive. Nothing that is said is answered, so nothing waits.
3. After a cut everybody's silence counts anew; what was decided meanwhile is said with the next repetition.
"""

import asyncio
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
from services.profile import check_retention, load_profile
from services.progress import subject_of
from services.runtime import Runtime
from services.threshold_controller import events as e
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.policy import ThresholdController

logger = logging.getLogger(__name__)

SENT = Counter("tediserve_controller_thresholds_sent", "Messages to instances, by why they were sent", ["reason"])
DECIDED = Counter("tediserve_controller_decisions", "Thresholds that were told because one changed", ["reason"])
HELD = Gauge(
    "tediserve_controller_requests", "Requests that instances hold, by why they have their threshold", ["reason"]
)
OPEN = Gauge("tediserve_controller_open_requests", "Open requests")
HOPELESS = Gauge("tediserve_controller_hopeless_requests", "Requests whose deadline will pass whatever is done")
DEMAND_S = Gauge("tediserve_controller_demand_seconds", "Work of all requests at their caps, in instance-seconds")
CAPACITY_S = Gauge("tediserve_controller_capacity_seconds", "What all instances can do until the horizon")
CAP = Gauge("tediserve_controller_cap", "The highest threshold that the load allows, by priority", ["priority"])
OTHER_SET = Counter("tediserve_controller_unusable_forecasts", "Forecasts for another threshold set than the profile's")
EVENT_S = Histogram(
    "tediserve_controller_decision_seconds",
    "Time that the policy took over one event",
    ["event"],
    buckets=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
)
REACTION_S = Histogram(
    "tediserve_controller_reaction_seconds",
    "From a forecast's or a report's arrival to the thresholds that came of it",
    buckets=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
)

_CATCH_UP_LIMIT_S = 60.0


def make_serve(config: ThresholdControllerConfig) -> Callable[[Runtime], Awaitable[None]]:
    """The service with its profile read. Raises ConfigError."""
    profile = load_profile(Path(config.profile))
    latency = load_latency(profile.latency_file)

    async def serve(runtime: Runtime) -> None:
        check_retention(profile, runtime.bus.result_retention_s)
        service = ThresholdControllerService(runtime, ThresholdController(config, profile, latency))
        await service.start()
        try:
            await runtime.until_stopped()
        finally:
            service.stop()

    return serve


class ThresholdControllerService:
    """Feeds one policy object. `start` returns when it hears everything; `stop` makes it deaf."""

    def __init__(self, runtime: Runtime, controller: ThresholdController) -> None:
        self._runtime = runtime
        self._bus: Bus = runtime.bus
        self._controller = controller
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
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
        started = time.perf_counter()
        commands = self._controller.handle(event, self._loop.time())
        EVENT_S.labels(type(event).__name__).observe(time.perf_counter() - started)
        for command in commands:
            self._carry_out(command, started)

    # --- what is done ---------------------------------------------------------------------------------------------

    def _carry_out(self, command: e.Command, started: float) -> None:
        match command:
            case e.SendThresholds():
                self._runtime.spawn(self._send_thresholds(command, started), name="thresholds")
            case e.SendLoadState():
                self._note_load(command.state)
                state = replace(command.state, sent_at=time.time())
                self._runtime.spawn(self._bus.publish(subjects.LOAD_STATE, state), name="load state")
            case e.AskStatus():
                self._runtime.spawn(self._bus.publish(subjects.STATUS_ASK, m.StatusAsk()), name="ask")
            case e.Settled():
                logger.info("ready: %d requests open", self._controller.num_open)
            case e.WakeAt():
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(command.at, self._handle, e.Tick())

    async def _send_thresholds(self, command: e.SendThresholds, started: float) -> None:
        entries = [
            m.ThresholdEntry(request_id=d.request_id, attempt=d.attempt, threshold=d.threshold)
            for d in command.decisions
        ]
        await self._bus.publish(subjects.thresholds(command.instance_id), m.Thresholds(entries=entries))
        SENT.labels(command.reason).inc()
        if command.reason == "changed":
            REACTION_S.observe(time.perf_counter() - started)
            for decision in command.decisions:
                DECIDED.labels(decision.reason).inc()
        logger.debug("%s: %s", command.instance_id, _Brief(command))

    def _note_load(self, state: m.LoadState) -> None:
        HOPELESS.set(state.num_hopeless)
        DEMAND_S.set(state.demand_s)
        CAPACITY_S.set(state.capacity_s)
        for cap in state.caps:
            CAP.labels(str(cap.priority)).set(cap.threshold)


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
