"""A worker: one instance of the model on the bus. Says what its policy decides and does what it commands.

Two threads: the hot loop with the engine (`hot_loop.py`), and this one with everything else. They meet in the loop's
two queues only, so neither NATS nor a slow reader ever delays a step.
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, assert_never

from prometheus_client import Counter, Gauge, Histogram

from contracts import messages as m
from contracts import subjects
from contracts.codec import MalformedMessage
from services import telemetry
from services.bus import BusTimeout, NoResponder, StreamFull, trace_parent
from services.costs import LatencyProfile, PassLoad, load_latency, step_load
from services.denoiser.config import WorkerConfig, default_node_id, fresh_instance_id
from services.denoiser.engine import Engine
from services.denoiser.hot_loop import HotLoop, News, Pass
from services.denoiser.instance import build_engine, describe
from services.denoiser.plan import RankFailed
from services.denoiser.ranks import OtherRanks
from services.denoiser.spawn import RankProcess
from services.denoiser.worker_events import (
    Admit,
    Answer,
    AskToDrain,
    Assigned,
    DrainAnswered,
    Drop,
    Exit,
    GiveUp,
    LetGo,
    PassTimed,
    Rejected,
    Show,
    Stepped,
    StopAsked,
    Stored,
    Tick,
    Turn,
    WorkerCommand,
    WorkerEvent,
    Write,
    WriteOverdue,
    WriteRefused,
)
from services.denoiser.worker_policy import WorkerPolicy
from services.profile import Profile
from services.progress import Overtaken, write_record
from services.runtime import Runtime, Stop, every

logger = logging.getLogger(__name__)

_MS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEP = Histogram("tediserve_worker_step_seconds", "One step of the engine, all of it", buckets=_MS)
OVERHEAD = Histogram(
    "tediserve_worker_step_overhead_seconds", "From step to step, outside forward pass and commit", buckets=_MS
)
PROFILED = Counter("tediserve_worker_profiled_seconds", "What the steps would take by the profile's latency")
BETWEEN = Counter(
    "tediserve_worker_between_steps_seconds", "From a step's end to the next one's start, pauses left out"
)
TOKENS = Counter("tediserve_worker_tokens_committed", "Tokens committed")
REFUSED = Counter("tediserve_worker_refused", "Assignments and releases refused", ["reason"])
DROPPED = Counter("tediserve_worker_dropped", "Requests dropped before their end", ["reason"])
GIVEN_UP = Counter("tediserve_worker_records_given_up", "Last records that could not be stored before their expiry")
THRESHOLD = Histogram(
    "tediserve_worker_step_threshold",
    "Threshold of each step of each request",
    buckets=(0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0),
)
RUNNING = Gauge("tediserve_worker_requests_running", "Requests in the engine")
KV_USAGE = Gauge("tediserve_kv_cache_usage_ratio", "Share of the K/V pool that running requests have taken, 0 to 1")
HELD = Gauge("tediserve_worker_requests_held", "Requests held, those with a last record to be stored included")

_WRITE_LIMIT_S = 5.0  # then the newest record takes the place of the one that could not be stored
_DRAIN_ASK_LIMIT_S = 1.0
_TICK_S = 0.2
_MAX_SHOWN = 1000  # steps of watched requests that wait for the socket; then the oldest are lost
_STOP_LIMIT_S = 5.0


async def serve(runtime: Runtime, config: WorkerConfig, profile: Profile, ranks: Sequence[RankProcess] = ()) -> None:
    """Loads the model, then works until asked to stop. `ranks`: the processes that share the model with this one.

    Raises ConfigError, and whatever the engine raises.
    """
    await Worker(runtime, config, profile, ranks).run()


class Worker:
    """The I/O around the policy."""

    hot_loop_type: type[HotLoop] = HotLoop  # tools/fleet has workers that sleep in place of passes

    def __init__(
        self, runtime: Runtime, config: WorkerConfig, profile: Profile, ranks: Sequence[RankProcess] = ()
    ) -> None:
        self._runtime, self._bus, self._config, self._profile = runtime, runtime.bus, config, profile
        self._loop = asyncio.get_running_loop()
        self._latency = _latency_profile(profile)
        self._engine: asyncio.Future[Engine] = self._loop.create_future()
        self._drain_asked: asyncio.Future[None] = self._loop.create_future()
        self._exit: asyncio.Future[None] = self._loop.create_future()  # done: leave; an exception: the engine failed
        self._news = asyncio.Event()
        self._reportable = asyncio.Event()
        self._step_ended = 0.0  # monotonic seconds
        self._shown: deque[m.CanvasStep] = deque(maxlen=_MAX_SHOWN)
        self._hot_loop = self.hot_loop_type(
            self._build_engine,
            on_ready=lambda engine: self._from_hot_loop(self._engine.set_result, engine),
            on_news=lambda: self._from_hot_loop(self._news.set),
            on_failure=self._on_engine_failure,
            threads=profile.engine.threads,
            hand_over_every_s=config.report_every_ms / 1e3,
        )
        self._ranks = ranks
        self._others: OtherRanks | None = None  # where several share the model
        self._policy: WorkerPolicy  # made once the engine says how large it is

    async def run(self) -> None:
        """Until drained after a stop was asked for. Raises what the engine raised."""
        stop_asked = asyncio.create_task(self._runtime.until_stopped())
        logger.info("loading %s", self._profile.weights_folder)
        self._watch_ranks()
        self._hot_loop.start()
        in_order = True
        try:
            await self._first_of(self._engine, stop_asked)
            if not stop_asked.done():
                gc.freeze()  # torch's objects stay: a collection that walks them all holds up the hot loop's thread too
                await self._begin(self._engine.result())
                await self._first_of(stop_asked, self._drain_asked)
                self._handle(StopAsked())
                await self._publish_status()
                await self._exit
        except RankFailed as failed:
            in_order = False  # a step may wait for the lost rank for ever
            raise Stop(1, str(failed), at_once=True) from None
        finally:
            stop_asked.cancel()
            self._end(in_order)

    def _end(self, in_order: bool) -> None:
        if in_order:
            self._hot_loop.stop(_STOP_LIMIT_S)
        if self._others is not None:
            self._others.close() if in_order else self._others.kill()

    # --- the other ranks ------------------------------------------------------------------------------------------

    def _watch_ranks(self) -> None:
        assert len(self._ranks) == self._profile.engine.tp_degree - 1
        if self._ranks:
            self._others = OtherRanks(
                self._ranks,
                limit_s=self._config.rank_limit_s,
                on_lost=lambda failed: self._from_hot_loop(self._fail, failed),
            )

    def _build_engine(self) -> Engine:
        return build_engine(self._profile) if self._others is None else build_engine(self._profile, self._others)

    def _on_engine_failure(self, error: BaseException) -> None:
        explained = error if self._others is None else self._others.explain(error)
        self._from_hot_loop(self._fail, explained)

    async def _first_of(self, *awaited: asyncio.Future[Any]) -> None:
        """Waits for one of them. Raises what made the worker fail."""
        await asyncio.wait({*awaited, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        for future in (self._exit, *awaited):
            if future.done():
                future.result()

    async def _begin(self, engine: Engine) -> None:
        instance_id = self._config.instance_id or fresh_instance_id(f"{self._config.node_id or default_node_id()}-0")
        instance = describe(
            engine,
            self._profile,
            instance_id=instance_id,
            node_id=self._config.node_id or default_node_id(),
            drain_limit_s=self._config.drain_limit_s,
        )
        self._policy = WorkerPolicy(instance, self._latency)
        bus = self._bus
        await bus.respond(subjects.assign(instance_id), m.Assign, self._on_assign)
        await bus.respond(subjects.release(instance_id), m.Release, self._on_release)
        await bus.respond(subjects.drain(instance_id), m.Drain, self._on_drain)
        await bus.subscribe(subjects.thresholds(instance_id), m.Thresholds, self._on_hint)
        await bus.subscribe("cancel.*", m.Cancel, self._on_hint)
        await bus.subscribe(subjects.STATUS_ASK, m.StatusAsk, self._on_status_ask)
        await bus.flush()  # whoever hears our first status can reach us
        self._runtime.spawn(self._hear_engine(), name="engine news")
        self._runtime.spawn(self._say_reports(), name="reports")
        self._runtime.spawn(every(self._config.status_every_s, self._publish_status), name="status")
        self._runtime.spawn(every(_TICK_S, self._tick), name="clock")
        logger.info(
            "ready: %s on %s, TP degree %d, %d K/V tokens, up to %d requests",
            instance.model,
            engine.model.device,
            instance.tp_degree,
            instance.kv_tokens,
            instance.max_requests,
        )

    # --- events ---------------------------------------------------------------------------------------------------

    def _handle(self, event: WorkerEvent) -> m.Accepted | m.Refused | None:
        """Carries out what the policy commands; the answer, if there is one."""
        reply = None
        try:
            for command in self._policy.handle(event, time.monotonic()):
                if isinstance(command, Answer):
                    reply = command.reply
                self._carry_out(command)
        except Exception as error:  # our books are wrong: a fresh process starts from what is stored
            self._fail(error)
            raise
        return reply

    async def _on_assign(self, assign: m.Assign) -> m.Accepted | m.Refused | None:
        return self._handle(Assigned(assign=assign, wall=time.time(), trace=trace_parent.get()))

    async def _on_release(self, release: m.Release) -> m.Accepted | m.Refused | None:
        return self._handle(release)

    async def _on_drain(self, _: m.Drain) -> m.Accepted:
        """As SIGTERM, which may still come: it changes nothing then."""
        if not self._drain_asked.done():
            logger.info("it is asked to drain")
            self._drain_asked.set_result(None)
        return m.Accepted()

    def _on_hint(self, hint: m.Thresholds | m.Cancel) -> None:
        self._handle(hint)

    def _on_status_ask(self, _: m.StatusAsk) -> None:
        self._runtime.spawn(self._publish_status(), name="status asked for")

    async def _tick(self) -> None:
        self._handle(Tick())
        RUNNING.set(self._policy.num_running)
        HELD.set(self._policy.num_held)
        KV_USAGE.set(self._policy.kv_usage)

    async def _hear_engine(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            for news in self._hot_loop.take():
                self._hear(news)
            self._reportable.set()

    def _hear(self, news: News) -> None:
        if isinstance(news, Rejected):
            with _within(self._policy.trace_of(news.run_id)):
                logger.error("the engine will not run %s: %s", news.run_id, news.detail)
        if not isinstance(news, Pass):
            self._handle(news)
            return
        result = news.result
        STEP.observe(result.total_s)
        if news.overhead_s is not None:
            OVERHEAD.observe(news.overhead_s)
            BETWEEN.inc(max(0.0, news.started - self._step_ended))
        self._step_ended = news.ended
        load, committed = PassLoad(), 0
        for step in result.requests:
            load = load.plus(step_load(step.kind, step.num_rows, step.num_keys))
            committed += len(step.commits.positions)
            assert step.threshold is not None, "we admit no job with another rule"
            THRESHOLD.observe(step.threshold)
            self._handle(
                Stepped(
                    run_id=step.request_id,
                    kind=step.kind,
                    block_index=step.block_index,
                    threshold=step.threshold,
                    positions=step.commits.positions,
                    token_ids=step.commits.token_ids,
                    confidences=step.commits.confidences,
                    block_done=step.block_done,
                    finish=step.finished or "",
                    left=step.request_id in news.left,
                    started=news.started,
                    ended=news.ended,
                )
            )
        if self._latency is not None:
            PROFILED.inc(self._latency.step_ms(self._policy.instance.tp_degree, load) / 1e3)
        TOKENS.inc(committed)
        self._handle(PassTimed(load=load, seconds=result.total_s))

    # --- commands -------------------------------------------------------------------------------------------------

    def _carry_out(self, command: WorkerCommand) -> None:
        match command:
            case Answer(reply=m.Refused() as refused):
                REFUSED.labels(refused.reason).inc()
                logger.info("refused: %s %s", refused.reason, refused.detail)
            case Answer():
                pass  # the caller replies
            case Admit() | Turn() | LetGo():
                self._hot_loop.tell(command)
            case Drop():
                DROPPED.labels(command.reason).inc()
                with _within(command.trace):
                    logger.info("dropped %s: %s", command.run_id, command.reason)
                self._hot_loop.tell(command)
            case Write():
                self._runtime.spawn(self._write(command), name=f"record of {command.run_id}")
            case Show():
                self._shown.append(command.step)  # goes out with the next report or record
            case AskToDrain():
                self._runtime.spawn(self._ask_to_drain(), name="drain notice")
            case GiveUp():
                GIVEN_UP.inc()
                with _within(command.trace):
                    logger.error("the last record of %s could not be stored before it expired", command.request_id)
            case Exit():
                logger.info("leaving: %s, %d requests left behind", command.reason, command.held)
                if not self._exit.done():
                    self._exit.set_result(None)
            case _:
                assert_never(command)

    async def _write(self, write: Write) -> None:
        trace_parent.set(write.trace)
        await self._show()  # before the record that ends what they show
        try:
            seq = await write_record(self._bus, write.record, after_seq=write.after_seq, limit_s=_WRITE_LIMIT_S)
        except Overtaken as overtaken:
            found = overtaken.found
            self._handle(
                WriteRefused(
                    run_id=write.run_id, found=found and found.message, seq=found.seq if found is not None else 0
                )
            )
        except (BusTimeout, StreamFull) as error:
            logger.warning("%s; trying again", error)  # it names the record
            await asyncio.sleep(_TICK_S)  # StreamFull is said at once
            self._handle(WriteOverdue(run_id=write.run_id))
        else:
            self._handle(Stored(run_id=write.run_id, record=write.record, seq=seq))
            if telemetry.is_on():
                record_spans(write, stored_at=time.time())

    async def _ask_to_drain(self) -> None:
        notice = m.DrainNotice(instance_id=self._policy.instance.instance_id)
        agreed = False
        with contextlib.suppress(BusTimeout, NoResponder, MalformedMessage):
            await self._bus.request(subjects.DRAIN, notice, m.Accepted, limit_s=_DRAIN_ASK_LIMIT_S)
            agreed = True
        self._handle(DrainAnswered(agreed=agreed))

    # --- what it says ---------------------------------------------------------------------------------------------

    async def _publish_status(self) -> None:
        status = self._policy.status(time.time())
        await self._bus.publish(subjects.instance_status(status.instance_id), status)

    async def _say_reports(self) -> None:
        """Apart from hearing the engine: a full socket delays reports, never records. Newer news joins the next one."""
        subject = subjects.report(self._policy.instance.instance_id)
        while True:
            await self._reportable.wait()
            self._reportable.clear()
            if report := self._policy.take_report(time.time()):
                await self._bus.publish(subject, report)
            await self._show()

    async def _show(self) -> None:
        while self._shown:
            step = self._shown.popleft()
            await self._bus.publish(subjects.canvas(step.request_id), step)

    # --- the hot loop's thread ------------------------------------------------------------------------------------

    def _from_hot_loop(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits for it any more
            self._loop.call_soon_threadsafe(call, *arguments)

    def _fail(self, error: BaseException) -> None:
        if not self._exit.done():
            self._exit.set_exception(error)


@contextlib.contextmanager
def _within(trace: str) -> Iterator[None]:
    """What is logged inside is of that trace."""
    token = trace_parent.set(trace)
    try:
        yield
    finally:
        trace_parent.reset(token)


def record_spans(write: Write, *, stored_at: float) -> None:
    """What the stored record tells that no earlier one did, under the trace of the request."""
    record = write.record
    ended_at = record.written_at
    for back, cost in enumerate(reversed(record.blocks[write.blocks_before :]), start=1):
        began_at = ended_at - cost.seconds
        telemetry.record(
            telemetry.BLOCK,
            began_at=began_at,
            ended_at=ended_at,
            attributes={
                telemetry.REQUEST_ID: record.request_id,
                telemetry.ATTEMPT: record.attempt,
                telemetry.INSTANCE_ID: cost.instance_id,
                telemetry.TP_DEGREE: cost.tp_degree,
                telemetry.BLOCK_INDEX: record.blocks_done - back,
                telemetry.RECOMPUTE_STEPS: cost.recompute_steps,
                telemetry.CACHE_STEPS: cost.cache_steps,
                telemetry.MEAN_THRESHOLD: cost.mean_threshold,
            },
        )
        ended_at = began_at  # an engine does the blocks of a request one after another
    if record.is_final:
        telemetry.record(
            telemetry.RESULT,
            began_at=record.written_at,
            ended_at=stored_at,
            attributes={
                telemetry.REQUEST_ID: record.request_id,
                telemetry.STATE: record.state,
                telemetry.REASON: record.reason,
                telemetry.BLOCKS_DONE: record.blocks_done,
                telemetry.MOVES: record.moves,
            },
            error=record.reason if record.state == "failed" else "",
        )


def _latency_profile(profile: Profile) -> LatencyProfile | None:
    """None where there is none. Raises ConfigError where it says nothing about such instances."""
    if not profile.latency_file.exists():
        logger.warning("no latency profile at %s: this instance's drift is not measured", profile.latency_file)
        return None
    latency = load_latency(profile.latency_file)
    latency.cost(profile.engine.tp_degree)
    return latency
