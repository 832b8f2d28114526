"""An instance as the others see it: the worker's answers, records, reports and statuses, and passes that take as
long as the latency profile says.

Of the live worker's rules (services/denoiser/worker_policy.py, hot_loop.py) those that matter where messages arrive:
1. An assignment is refused while too many requests are held, or too many tokens. It counts from its acceptance on.
2. A turn: what was ordered applies; `choose_riders` chooses the pass, its cost is the profile's; at its end each rider
   has run a step at the threshold it had at the beginning; blocks that ended are written down; if one did, or
   `report_every_s` have passed since the last time, all that has stepped since is reported.
3. A request that is to be let go leaves at its block's end, at once if it is there: `released`.
4. Of each request one write at a time; the newest record goes next. After its last record is stored it is forgotten.
5. Thresholds of what is not held yet are kept: they may overtake their assignment.
6. Told to drain, it takes nothing more and asks the scheduler to move what it holds. At half of `drain_limit_s` all
   that is left is released at its block's end. It exits when it holds nothing, at the limit in any case.
"""

from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from contracts import messages as m
from contracts.messages import GenerateRequest, ProgressRecord
from services.costs import PassCost, PassLoad
from services.denoiser.batching import BatchLimits, StepKind, choose_riders, note_waits
from services.scheduler.instances import resident_of
from tools.simulate.clock import Clock
from tools.simulate.denoising import Course


class InstanceSettings(NamedTuple):
    """What an instance is."""

    instance_id: str
    model: str
    tp_degree: int
    max_requests: int
    kv_tokens: int
    limits: BatchLimits
    cost: PassCost
    step_overhead_s: float  # of a turn, outside the pass
    pass_noise: float  # standard deviation of a pass's time, relative
    latency_ratio: float = 1.0  # what passes take over what the profile says, as the instance itself has measured
    report_every_s: float = 0.05
    status_every_s: float = 1.0
    drain_limit_s: float = 30.0
    entries_are_read: bool = True  # of its reports: where nobody does, they are left out


class Outside(Protocol):
    """Where an instance's messages go."""

    def say_report(self, report: m.Report) -> None: ...

    def say_status(self, status: m.InstanceStatus) -> None: ...

    def write(self, instance: "Instance", record: ProgressRecord, after_seq: int) -> None:
        """`Instance.note_stored` or `note_refused` follows."""

    def course_of(self, request_id: str) -> Course: ...

    def ask_to_drain(self, instance_id: str) -> None: ...

    def note_exit(self, instance: "Instance", detail: str) -> None:
        """It runs no more, and said so itself."""


@dataclass(slots=True, eq=False)
class _Held:
    """A request that the instance holds."""

    id: str  # the request's
    request: GenerateRequest
    course: Course
    attempt: int
    epoch: int
    arrival_no: int
    threshold: float
    canvas_tokens: int
    seen_tokens: int  # of those, in its current block
    num_rows: int  # of its next step
    kind: StepKind  # of that
    seq: int  # of the record that the next write continues from
    moves: int
    started_at: float
    blocks: list[m.BlockCost]
    rides: bool = False  # in the pass under way
    applied: float = 0.0  # threshold there
    passes_waited: int = 0
    letting_go: bool = False
    unstored: ProgressRecord | None = None
    writing: bool = False
    over: bool = False  # its last record is made, or it was cancelled
    recompute_steps: int = 0  # of the block under way, as the next three
    cache_steps: int = 0
    threshold_sum: float = 0.0
    block_started: float = -1.0  # before its first step


class Instance:
    """One instance. `clock` runs its passes."""

    def __init__(self, settings: InstanceSettings, outside: Outside, clock: Clock, rng: Random) -> None:
        self.settings = settings
        self.busy_s = 0.0  # in passes
        self.passes = self.recompute_steps = self.cache_steps = 0
        self._outside, self._clock, self._rng = outside, clock, rng
        self._epoch = 0
        self._held: dict[str, _Held] = {}  # by request id, until its last record is stored
        self._running: list[_Held] = []  # by arrival
        self._tokens = 0  # of the running ones' canvases
        self._arrivals = 0
        self._early: dict[tuple[str, int], float] = {}  # thresholds, by request and attempt (rule 5)
        self._news: dict[str, _Held] = {}  # has stepped since the last report
        self._reported_at = 0.0
        self._pass_runs = False
        self.draining = self.gone = False

    @property
    def id(self) -> str:
        return self.settings.instance_id

    @property
    def num_held(self) -> int:
        return len(self._running)

    # --- what it is told ------------------------------------------------------------------------------------------

    def assign(self, assign: m.Assign) -> m.Accepted | m.Refused:
        """Rule 1."""
        request = assign.request
        self._epoch = max(self._epoch, assign.epoch)
        held = self._held.get(request.request_id)
        if held is not None and not held.over:
            return m.Accepted()
        if self.draining:
            return m.Refused(reason="draining", epoch=self._epoch)
        if len(self._running) >= self.settings.max_requests:
            return m.Refused(reason="kv_full", detail="requests", epoch=self._epoch)
        if self._tokens + request.canvas_tokens > self.settings.kv_tokens:
            return m.Refused(reason="kv_full", detail="tokens", epoch=self._epoch)
        self._take(assign)
        return m.Accepted()

    def _take(self, assign: m.Assign) -> None:
        request, resume = assign.request, assign.resume
        early = self._early.pop((request.request_id, assign.attempt), None)
        threshold = assign.threshold if early is None or request.threshold is not None else early
        self._arrivals += 1
        course = self._outside.course_of(request.request_id)
        blocks_done = 0 if resume is None else resume.blocks_done
        if course.block_index != blocks_done or course.steps_in_block:
            course.go_back(blocks_done)  # it was lost with its instance
        held = _Held(
            id=request.request_id,
            request=request,
            course=course,
            attempt=assign.attempt,
            epoch=assign.epoch,
            arrival_no=self._arrivals,
            threshold=threshold,
            canvas_tokens=request.canvas_tokens,
            seen_tokens=0,
            num_rows=0,
            kind="recompute",
            seq=assign.from_seq,
            moves=0 if resume is None else resume.moves + (resume.holder not in ("", self.id)),
            started_at=self._clock.now if resume is None or resume.started_at is None else resume.started_at,
            blocks=[] if resume is None else list(resume.blocks),
        )
        self._begin_block(held)
        self._held[held.id] = held
        self._running.append(held)
        self._tokens += held.canvas_tokens
        self._run()

    def release(self, release: m.Release) -> m.Accepted | m.Refused:
        """Rule 3."""
        held = self._held.get(release.request_id)
        if held is None or held.attempt != release.attempt:
            return m.Refused(reason="not_held", epoch=self._epoch)
        self._epoch = held.epoch = max(self._epoch, release.epoch)
        self._let_go(held)
        return m.Accepted()

    def _let_go(self, held: _Held) -> None:
        """Rule 3."""
        if not held.over:
            held.letting_go = True
            if held.course.steps_in_block == 0 and not held.rides:
                self._end(held, "released")

    def turn(self, thresholds: m.Thresholds) -> None:
        for entry in thresholds.entries:
            held = self._held.get(entry.request_id)
            if held is None or held.attempt < entry.attempt:
                self._early[entry.request_id, entry.attempt] = entry.threshold
            elif held.attempt == entry.attempt and held.request.threshold is None:
                held.threshold = entry.threshold

    def cancel(self, request_id: str) -> None:
        """Its record is final, or another's."""
        held = self._held.pop(request_id, None)
        if held is not None and not held.over:
            held.over = True
            self._leave(held)
            self._news.pop(request_id, None)
        self._exit_if_drained()

    # --- its end --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Rule 6."""
        if self.draining:
            return
        self.draining = True
        self._outside.ask_to_drain(self.id)
        limit_s = self.settings.drain_limit_s
        self._clock.at(self._clock.now + limit_s / 2, self._hand_back)
        self._clock.at(self._clock.now + limit_s, self._exit, "drain_limit")
        self._exit_if_drained()

    def _hand_back(self) -> None:
        for held in list(self._running):
            self._let_go(held)

    def _exit_if_drained(self) -> None:
        if self.draining and not self._held:
            self._exit("drained")

    def _exit(self, detail: str) -> None:
        if not self.gone:
            self.gone = True
            self._outside.note_exit(self, detail)

    # --- passes ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Rule 2, if there is anything to run and nothing runs."""
        if self._pass_runs or not self._running:
            return
        self._pass_runs = True
        riders = choose_riders(self._running, self.settings.limits)
        note_waits(self._running, riders)
        seconds = self._seconds(self._load(riders))
        self.passes += 1
        self.busy_s += seconds
        self._clock.at(
            self._clock.now + seconds + self.settings.step_overhead_s, self._end_pass, riders, self._clock.now
        )

    def _load(self, riders: list[_Held]) -> PassLoad:
        tokens = recompute_steps = keys = pairs = 0
        for held in riders:
            held.rides, held.applied = True, held.threshold
            tokens += held.num_rows
            recompute_steps += held.kind == "recompute"
            keys += held.seen_tokens
            pairs += held.num_rows * held.seen_tokens
        self.recompute_steps += recompute_steps
        self.cache_steps += len(riders) - recompute_steps
        return PassLoad(tokens, recompute_steps, len(riders) - recompute_steps, keys, pairs)

    def _seconds(self, load: PassLoad) -> float:
        seconds = self.settings.latency_ratio * self.settings.cost.ms(load) / 1e3
        if self.settings.pass_noise:
            seconds *= max(0.1, self._rng.gauss(1.0, self.settings.pass_noise))
        return seconds

    def _end_pass(self, riders: list[_Held], started: float) -> None:
        self._pass_runs = False
        if self.gone:
            return
        ended_block, news = False, self._news
        for held in riders:
            held.rides = False
            if held.over:
                continue  # cancelled meanwhile
            if held.kind == "recompute":
                held.recompute_steps += 1
            else:
                held.cache_steps += 1
            held.threshold_sum += held.applied
            if held.block_started < 0:
                held.block_started = started
            news[held.id] = held
            if held.course.step(held.applied):
                ended_block = True
                self._end_block(held)
            elif held.kind == "recompute":
                self._go_on(held)
        now = self._clock.now
        if ended_block or now - self._reported_at >= self.settings.report_every_s:
            self._report(now)
        self._run()

    def _go_on(self, held: _Held) -> None:
        """After the first step of a block, what the next one passes."""
        request = held.request
        if request.cache == "none":
            return
        held.kind = "cache"
        if request.cache == "dual":
            held.num_rows = request.block_size
        else:
            held.num_rows = held.seen_tokens - len(request.prompt_ids) - held.course.block_index * request.block_size

    def _begin_block(self, held: _Held) -> None:
        request = held.request
        resident = resident_of(request, held.course.block_index, request.num_blocks)
        held.kind, held.seen_tokens = "recompute", resident.seen_tokens
        held.num_rows = held.seen_tokens

    def _end_block(self, held: _Held) -> None:
        held.blocks.append(
            m.BlockCost(
                instance_id=self.id,
                tp_degree=self.settings.tp_degree,
                recompute_steps=held.recompute_steps,
                cache_steps=held.cache_steps,
                mean_threshold=min(1.0, held.threshold_sum / (held.recompute_steps + held.cache_steps)),
                seconds=self._clock.now - held.block_started,
            )
        )
        held.recompute_steps = held.cache_steps = 0
        held.threshold_sum, held.block_started = 0.0, -1.0
        self._begin_block(held)
        if held.course.finish:
            self._end(held, "finished")
        elif held.letting_go:
            self._end(held, "released")
        else:
            self._write(held, self._record(held, "running"))

    # --- records --------------------------------------------------------------------------------------------------

    def _end(self, held: _Held, state: m.State) -> None:
        held.over = True
        self._leave(held)
        self._write(held, self._record(held, state))

    def _leave(self, held: _Held) -> None:
        self._running.remove(held)
        self._tokens -= held.canvas_tokens

    def _record(self, held: _Held, state: m.State) -> ProgressRecord:
        request = held.request
        return ProgressRecord(
            request_id=request.request_id,
            gateway_id=request.gateway_id,
            attempt=held.attempt,
            state=state,
            holder=self.id,
            epoch=held.epoch,
            blocks_done=held.course.block_index,
            blocks=list(held.blocks),
            finish=held.course.finish,
            moves=held.moves,
            prompt_tokens=len(request.prompt_ids),
            created_at=request.created_at,
            deadline_at=request.deadline_at,
            started_at=held.started_at,
            written_at=self._clock.now,
        )

    def _write(self, held: _Held, record: ProgressRecord) -> None:
        held.unstored = record
        if not held.writing:
            held.writing = True
            self._outside.write(self, record, held.seq)

    def note_stored(self, record: ProgressRecord, seq: int) -> None:
        """Rule 4."""
        held = self._held.get(record.request_id)
        if held is None or not held.writing or self.gone:
            return
        held.seq = seq
        held.writing = False
        if held.unstored is not record:
            assert held.unstored is not None
            self._write(held, held.unstored)
        elif held.over:
            del self._held[record.request_id]
            self._exit_if_drained()

    def note_refused(self, record: ProgressRecord) -> None:
        """Another one's record stands: the request is not ours any more."""
        self.cancel(record.request_id)

    # --- reports and status ---------------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        self._reported_at = now
        if not self._news:
            return
        entries = [self._entry(held) for held in self._news.values()] if self.settings.entries_are_read else []
        self._news.clear()
        self._outside.say_report(m.Report(self.id, now, entries, self.settings.latency_ratio))

    def _entry(self, held: _Held) -> m.RequestReport:
        course, request = held.course, held.request
        signs = course.signs()
        return m.RequestReport(
            request.request_id,
            held.attempt,
            course.block_index,
            request.num_blocks,
            course.steps,
            course.steps_in_block,
            signs.tokens_committed,
            signs.tokens_committed_in_block,
            held.threshold,
            signs.confidence,
            held.kind == "recompute",
            bool(course.finish),
            len(request.prompt_ids),
            signs.tokens_left_in_block,
            signs.ends_in_block,
        )

    def begin_statuses(self, first_at: float) -> None:
        self._clock.at(first_at, self._repeat_status)

    def _repeat_status(self) -> None:
        if self.gone:
            return
        self.say_status()
        self._clock.at(self._clock.now + self.settings.status_every_s, self._repeat_status)

    def say_status(self) -> None:
        settings = self.settings
        self._outside.say_status(
            m.InstanceStatus(
                instance_id=self.id,
                node_id="simulated",
                model=settings.model,
                tp_degree=settings.tp_degree,
                sent_at=self._clock.now,
                epoch=self._epoch,
                draining=self.draining,
                max_requests=settings.max_requests,
                kv_tokens=settings.kv_tokens,
                held=[_listed(held) for held in self._held.values()],
                latency_ratio=settings.latency_ratio,
            )
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance (for tests)."""
        assert self._tokens == sum(held.canvas_tokens for held in self._running) <= self.settings.kv_tokens
        assert len(self._running) <= self.settings.max_requests
        assert {id(held) for held in self._running} == {id(held) for held in self._held.values() if not held.over}
        assert self._pass_runs or self.gone or not self._running


def _listed(held: _Held) -> m.Held:
    request = held.request
    return m.Held(
        request_id=request.request_id,
        attempt=held.attempt,
        canvas_tokens=held.canvas_tokens,
        block_size=request.block_size,
        cache=request.cache,
        blocks_ahead=request.blocks_ahead,
        blocks_done=held.course.block_index,
    )
