"""What a worker does about what it hears: what it takes, lets go and writes down. Pure: no I/O, clock or torch.

An accepted assignment is a run, under an id of its own, so that nothing said about an earlier run of the same request
can be taken for it. Times are monotonic seconds unless they end in `_at` on the wire.

Assignments, in this order:
1. An epoch below the highest seen is refused (`stale_epoch`).
2. A request held at the same or a later attempt is accepted and nothing happens, unless the assignment continues from
   a later record of another holder, or of our own after which we had let it go: then it replaces the run.
3. A request that has just ended here, or was cancelled, is accepted and nothing happens: its record says how it ended.
4. Refused while draining; refused if it can never run here (`bad_request`, `too_long`), or not now (`kv_full`). What
   was accepted counts at once, what the engine has yet to take in included.
Records:
5. One at each block's end, cumulative over whole blocks; one write at a time, and the newest goes next. The record at
   the end is cut before EOS and at `max_tokens`.
6. A write refused for our own earlier record goes on from there; for any other, the run is dropped without a word.
7. A run is forgotten once its last record (final, or released) is stored; until then it is held. `GRACE_S` after
   `expires_at` an unfinished one is failed as expired, and one whose last record could not be stored is given up.
Thresholds:
8. A pin is never turned. Thresholds for what is not held are kept `EARLY_S`: they may overtake their assignment.
Draining:
9. Nothing new is taken. The scheduler is told each `ASK_AGAIN_S` until it agrees; then it sends a release for each run
   that has room elsewhere, and the others go on here. At half of the limit all that is left is released, room or not:
   better to wait than to be lost. With nothing held, or at the limit, the worker exits.
Latency ratio:
10. Measured over profiled step latency, the median of the passes of the last `RATIO_S`, or of the last few where passes
   are slow; all are forgotten after a pause of `RATIO_S`. 1 is said while they are too few and too short: a few cold
   passes would else keep all work away, and so the passes that correct them.
Watching:
11. Each step of a request that somebody looks at is told, commits and all; of the others only the reports.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Literal, NamedTuple

from contracts import messages as m
from services.costs import LatencyProfile
from services.denoiser.run import Instance, Run
from services.denoiser.worker_events import (
    Admit,
    Answer,
    AskToDrain,
    Assigned,
    DrainAnswered,
    Drop,
    DropReason,
    Exit,
    GiveUp,
    Left,
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
from services.opening import NO_OPENING

EARLY_S = 1.0
GRACE_S = 2.0
GIVE_UP_S = 10.0  # after expiry, for the record that says so
ENDED_S = 10.0  # how long an ended run answers for late repeats of its assignment
ASK_AGAIN_S = 1.0
_MAX_EARLY = 10_000  # thresholds kept; more are somebody's mistake
RATIO_S = 10.0
RATIO_MIN_PASSES = 32  # that say something, however short they are
RATIO_MIN_SLOW_PASSES = 8  # if together they took RATIO_MIN_TIME_S
RATIO_MIN_TIME_S = 1.0
_RATIO_PASSES = 64


_NO_LATER = 2**53  # attempt and sequence after which nothing follows: the request is over


class _Ended(NamedTuple):
    """An assignment up to this attempt, continuing from a record before this one, is answered for."""

    attempt: int
    seq: int
    forget: float


class _TimedPass(NamedTuple):
    ended: float
    seconds: float
    ratio: float  # measured over profiled


class WorkerPolicy:
    """The worker's decisions. One caller: `handle` an event, carry the commands out in order."""

    def __init__(self, instance: Instance, latency: LatencyProfile | None = None) -> None:
        self.instance = instance
        self.epoch = 0  # the highest seen
        self.draining = False
        self._latency = latency
        self._timed: deque[_TimedPass] = deque(maxlen=_RATIO_PASSES)
        self._runs: dict[str, Run] = {}  # by run id
        self._run_of: dict[str, str] = {}  # request id -> run id: one run a request
        self._runs_begun = 0
        self._ended: dict[str, _Ended] = {}  # by request id
        self._early: dict[tuple[str, int], tuple[float, float]] = {}  # (request, attempt) -> threshold, kept until
        self._news: dict[str, Run] = {}  # what has stepped since the last report, by run id
        self._drain_until = self._ask_again = 0.0
        self._drain_agreed = False
        self._hand_back_at = 0.0

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerCommand]:
        """What to do about the event."""
        match event:
            case Stepped():
                return self._note_step(event, now)
            case PassTimed():
                return self._note_pass(event, now)
            case Assigned():
                return self._answer_assignment(event, now)
            case m.Release():
                return self._answer_release(event)
            case m.Thresholds():
                return self._turn(event, now)
            case m.Cancel():
                return self._cancel(event, now)
            case Left():
                return self._note_left(event.run_id, now)
            case Rejected():
                return self._fail(event.run_id, "engine_error", now)
            case Stored():
                return self._note_stored(event, now)
            case WriteRefused():
                return self._note_refused(event, now)
            case WriteOverdue():
                return self._write_again(event.run_id)
            case Tick():
                return self._look_at_clock(now)
            case StopAsked():
                return self._begin_drain(now)
            case DrainAnswered():
                return self._note_drain_answer(event.agreed, now)

    # --- what is asked about it ---

    @property
    def num_held(self) -> int:
        """Requests held: those that run, and those whose last record is not stored yet."""
        return len(self._runs)

    @property
    def num_running(self) -> int:
        """Requests that the engine holds."""
        return sum(run.in_engine for run in self._runs.values())

    @property
    def kv_usage(self) -> float:
        """Share of the K/V pool that the engine's requests have taken, 0 to 1."""
        return sum(run.request.canvas_tokens for run in self._runs.values() if run.in_engine) / self.instance.kv_tokens

    @property
    def latency_ratio(self) -> float:
        """Measured over profiled step latency, kept between 0.5 and 4; 1 while too few passes are known (rule 10)."""
        if len(self._timed) < RATIO_MIN_PASSES and (
            len(self._timed) < RATIO_MIN_SLOW_PASSES or sum(timed.seconds for timed in self._timed) < RATIO_MIN_TIME_S
        ):
            return 1.0
        return min(4.0, max(0.5, median(timed.ratio for timed in self._timed)))

    def trace_of(self, run_id: str) -> str:
        """The traceparent of a run; "": it is not held, or has none."""
        run = self._runs.get(run_id)
        return "" if run is None else run.trace

    def status(self, wall: float) -> m.InstanceStatus:
        """How the instance is; `wall`: its own clock."""
        instance = self.instance
        return m.InstanceStatus(
            instance_id=instance.instance_id,
            node_id=instance.node_id,
            model=instance.model,
            tp_degree=instance.tp_degree,
            sent_at=wall,
            epoch=self.epoch,
            draining=self.draining,
            max_requests=instance.max_requests,
            kv_tokens=instance.kv_tokens,
            held=[run.held() for run in self._runs.values()],
            latency_ratio=self.latency_ratio,
        )

    def take_report(self, wall: float) -> m.Report | None:
        """What was done since the last report; None: nothing."""
        if not self._news:
            return None
        entries = [run.report() for run in self._news.values()]
        self._news.clear()
        return m.Report(
            instance_id=self.instance.instance_id, sent_at=wall, entries=entries, latency_ratio=self.latency_ratio
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance (for tests)."""
        running = [run for run in self._runs.values() if run.in_engine]
        assert sum(run.request.canvas_tokens for run in running) <= self.instance.kv_tokens
        assert len(running) <= self.instance.max_requests
        assert {run_id: run.request.request_id for run_id, run in self._runs.items()} == {
            run_id: request_id for request_id, run_id in self._run_of.items()
        }
        for run in self._runs.values():
            assert run.over != run.in_engine, "a run is in the engine until its last record is made"
            assert run.writing == (run.unstored is not None), "the newest record is stored, or a write is under way"
            assert not run.over or run.writing

    # --- assignments ---

    def _answer_assignment(self, event: Assigned, now: float) -> list[WorkerCommand]:
        assign = event.assign
        if assign.epoch < self.epoch:
            return [self._refuse("stale_epoch", f"epoch {assign.epoch}, seen {self.epoch}")]
        self.epoch = assign.epoch
        commands: list[WorkerCommand] = []
        run = self._run_for(assign.request.request_id)
        if run is not None:
            if not self._replaces(assign, run):
                run.epoch = max(run.epoch, assign.epoch) if run.attempt == assign.attempt else run.epoch
                return [Answer(reply=m.Accepted())]
            commands += self._drop(run, "replaced")
        elif self._answered_for(assign, now):
            return [Answer(reply=m.Accepted())]
        if refusal := self._why_not(assign):
            return [*commands, refusal, *self._exit_if_empty()]  # what it replaced may have been the last
        return [*commands, *self._begin(event, now), Answer(reply=m.Accepted())]

    def _replaces(self, assign: m.Assign, run: Run) -> bool:
        """Whether an assignment of a held request is another one than that which we follow."""
        if assign.attempt != run.attempt:
            return assign.attempt > run.attempt
        if assign.from_seq <= run.seq or assign.resume is None:
            return False
        # A record after the last one that we know of: if it is ours, only its acknowledgement is missing.
        return run.over or assign.resume.holder != self.instance.instance_id

    def _answered_for(self, assign: m.Assign, now: float) -> bool:
        ended = self._ended.get(assign.request.request_id)
        return (
            ended is not None and now < ended.forget and assign.attempt <= ended.attempt and assign.from_seq < ended.seq
        )

    def _why_not(self, assign: m.Assign) -> Answer | None:
        if self.draining:
            return self._refuse("draining")
        if mistake := self._mistake(assign):
            return self._refuse("bad_request", mistake)
        needed, instance = assign.request.canvas_tokens, self.instance
        if needed > (longest := min(instance.max_canvas_tokens, instance.kv_tokens)):
            return self._refuse("too_long", f"a canvas of {needed} tokens; at most {longest} fit")
        running = [run for run in self._runs.values() if run.in_engine]
        if len(running) >= instance.max_requests:
            return self._refuse("kv_full", f"{len(running)} requests are held, as many as may be")
        free = instance.kv_tokens - sum(run.request.canvas_tokens for run in running)
        if needed > free:
            return self._refuse("kv_full", f"{needed} tokens needed, {free} free")
        return None

    def _mistake(self, assign: m.Assign) -> str:
        request, resume = assign.request, assign.resume
        if request.model != self.instance.model:
            return f"model {request.model!r} is not served here"
        if mistake := self._ids_mistake("prompt_ids", request.prompt_ids):
            return mistake
        if resume is None:
            return ""
        if (resume.request_id, resume.gateway_id) != (request.request_id, request.gateway_id):
            return "the record to resume from is of another request"
        if resume.is_final:
            return f"the record to resume from is final: {resume.state}"
        done = len(resume.token_ids)
        if done != resume.blocks_done * request.block_size or done >= request.max_tokens:
            return f"{done} tokens to resume from are not {resume.blocks_done} blocks of an unfinished request"
        if not request.ignore_eos and not self.instance.eos_ids.isdisjoint(resume.token_ids):
            return "the record to resume from holds an end of text"
        return self._ids_mistake("token_ids", resume.token_ids)

    def _ids_mistake(self, name: str, ids: list[int]) -> str:
        if ids and max(ids) >= self.instance.vocab_size:
            return f"{name} holds {max(ids)}, the vocabulary ends at {self.instance.vocab_size - 1}"
        if self.instance.mask_id in ids:
            return f"{name} holds the mask token"
        return ""

    def _begin(self, event: Assigned, now: float) -> list[WorkerCommand]:
        request, attempt = event.assign.request, event.assign.attempt
        early = self._early.pop((request.request_id, attempt), None)
        if request.threshold is not None:
            threshold = request.threshold
        else:
            threshold = early[0] if early and now < early[1] else event.assign.threshold
        self._runs_begun += 1
        run = Run(f"{request.request_id}.{self._runs_begun}", event, threshold, self.instance, now)
        self._runs[run.run_id] = run
        self._run_of[request.request_id] = run.run_id
        self._ended.pop(request.request_id, None)
        return [
            Admit(
                run_id=run.run_id,
                request=request,
                threshold=threshold,
                committed_ids=list(run.token_ids),
                committed_confidences=list(run.confidences),
                opening=self.instance.opening if request.threshold is None else NO_OPENING,  # a pin is what it says
            )
        ]

    def _refuse(
        self,
        reason: Literal["stale_epoch", "kv_full", "too_long", "draining", "not_held", "bad_request"],
        detail: str = "",
    ) -> Answer:
        return Answer(reply=m.Refused(reason=reason, detail=detail, epoch=self.epoch))

    # --- letting go ---

    def _answer_release(self, release: m.Release) -> list[WorkerCommand]:
        if release.epoch < self.epoch:
            return [self._refuse("stale_epoch", f"epoch {release.epoch}, seen {self.epoch}")]
        self.epoch = release.epoch
        run = self._run_for(release.request_id)
        if run is None or run.attempt != release.attempt:
            return [self._refuse("not_held")]
        run.epoch = release.epoch
        return [Answer(reply=m.Accepted()), *self._let_go(run)]

    def _let_go(self, run: Run) -> list[WorkerCommand]:
        if run.over or run.letting_go:
            return []
        run.letting_go = True
        return [LetGo(run_id=run.run_id)]

    def _note_left(self, run_id: str, now: float) -> list[WorkerCommand]:
        run = self._runs.get(run_id)
        return [] if run is None or run.over else self._end(run, run.record("released", now))

    def _cancel(self, cancel: m.Cancel, now: float) -> list[WorkerCommand]:
        self._ended[cancel.request_id] = _Ended(_NO_LATER, _NO_LATER, now + ENDED_S)
        run = self._run_for(cancel.request_id)
        return [] if run is None else [*self._drop(run, "cancelled"), *self._exit_if_empty()]

    def _drop(self, run: Run, reason: DropReason) -> list[WorkerCommand]:
        """Forgets a run that is no longer ours; nobody wants to hear of it."""
        self._forget(run)
        self._news.pop(run.run_id, None)
        return [Drop(run_id=run.run_id, reason=reason, trace=run.trace)]

    def _forget(self, run: Run) -> None:
        del self._runs[run.run_id]
        del self._run_of[run.request.request_id]

    def _run_for(self, request_id: str) -> Run | None:
        run_id = self._run_of.get(request_id)
        return None if run_id is None else self._runs[run_id]

    # --- thresholds ---

    def _turn(self, thresholds: m.Thresholds, now: float) -> list[WorkerCommand]:
        commands: list[WorkerCommand] = []
        for entry in thresholds.entries:
            run = self._run_for(entry.request_id)
            if run is None or run.attempt < entry.attempt:
                if len(self._early) < _MAX_EARLY:
                    self._early[entry.request_id, entry.attempt] = (entry.threshold, now + EARLY_S)
            elif (
                run.attempt == entry.attempt
                and run.request.threshold is None
                and run.threshold != entry.threshold
                and run.in_engine
            ):
                run.threshold = entry.threshold
                commands.append(Turn(run_id=run.run_id, threshold=entry.threshold))
        return commands

    # --- what the engine did ---

    def _note_step(self, step: Stepped, now: float) -> list[WorkerCommand]:
        run = self._runs.get(step.run_id)
        if run is None or run.over:  # dropped while the pass ran
            return []
        shown: list[WorkerCommand] = [Show(step=run.canvas_step(step))] if run.request.watch else []
        run.note(step)
        self._news[run.run_id] = run
        return [*shown, *self._record_step(run, step, now)]

    def _record_step(self, run: Run, step: Stepped, now: float) -> list[WorkerCommand]:
        if step.finish:
            return self._end(run, run.record("finished", now, finish=step.finish))
        if step.left:
            return self._end(run, run.record("released", now))
        if step.block_done:
            return self._write(run, run.record("running", now))
        return []

    def _note_pass(self, timed: PassTimed, now: float) -> list[WorkerCommand]:
        self._forget_passes(now - timed.seconds)
        if self._latency is not None:
            profiled = self._latency.step_ms(self.instance.tp_degree, timed.load)
            if profiled > 0:
                self._timed.append(_TimedPass(now, timed.seconds, 1e3 * timed.seconds / profiled))
        return []

    def _forget_passes(self, idle_until: float) -> None:
        """All before a pause, and else those that are too old, as long as a few are left (rule 10)."""
        if self._timed and idle_until - self._timed[-1].ended >= RATIO_S:
            self._timed.clear()
        while len(self._timed) > RATIO_MIN_SLOW_PASSES and idle_until - self._timed[0].ended >= RATIO_S:
            self._timed.popleft()

    def _fail(self, run_id: str, reason: m.Reason, now: float) -> list[WorkerCommand]:
        run = self._runs.get(run_id)
        return [] if run is None or run.over else self._end(run, run.record("failed", now, reason=reason))

    # --- records ---

    def _end(self, run: Run, record: m.ProgressRecord) -> list[WorkerCommand]:
        """Writes a run's last record; the engine has let go of it."""
        run.over, run.in_engine, run.finished = True, False, record.is_final
        return self._write(run, record)

    def _write(self, run: Run, record: m.ProgressRecord) -> list[WorkerCommand]:
        run.unstored = record
        return [] if run.writing else self._write_newest(run)

    def _write_newest(self, run: Run) -> list[WorkerCommand]:
        run.writing = run.unstored is not None
        if run.unstored is None:
            return []
        return [
            Write(
                run_id=run.run_id,
                record=run.unstored,
                after_seq=run.seq,
                blocks_before=run.blocks_stored,
                trace=run.trace,
            )
        ]

    def _write_again(self, run_id: str) -> list[WorkerCommand]:
        run = self._runs.get(run_id)
        return [] if run is None else self._write_newest(run)

    def _note_stored(self, stored: Stored, now: float) -> list[WorkerCommand]:
        run = self._runs.get(stored.run_id)
        if run is None:
            return []
        run.seq = stored.seq
        run.blocks_stored = len(stored.record.blocks)
        if run.unstored is stored.record:
            run.unstored = None
        if run.over and run.unstored is None:
            attempt, seq = (_NO_LATER, _NO_LATER) if stored.record.is_final else (run.attempt, stored.seq)
            self._ended[run.request.request_id] = _Ended(attempt, seq, now + ENDED_S)
            self._forget(run)
            return self._exit_if_empty()
        return self._write_newest(run)

    def _note_refused(self, refused: WriteRefused, now: float) -> list[WorkerCommand]:
        run, found = self._runs.get(refused.run_id), refused.found
        if run is None:
            return []
        if found is not None and self._is_own(found, run) and refused.seq > run.seq:
            run.seq = refused.seq
            return self._write_newest(run)
        if found is not None:
            attempt, seq = (_NO_LATER, _NO_LATER) if found.is_final else (found.attempt, refused.seq)
            self._ended[run.request.request_id] = _Ended(attempt, seq, now + ENDED_S)
        return [*self._drop(run, "overtaken"), *self._exit_if_empty()]

    def _is_own(self, found: m.ProgressRecord, run: Run) -> bool:
        """Whether it is an earlier record of this run, whose acknowledgement was lost."""
        return (found.holder, found.attempt, found.state) == (self.instance.instance_id, run.attempt, "running")

    # --- time ---

    def _look_at_clock(self, now: float) -> list[WorkerCommand]:
        commands: list[WorkerCommand] = []
        if self.num_running == 0:  # else a pass is under way, however long it takes
            self._forget_passes(now)
        for run in list(self._runs.values()):
            commands += self._look_at_expiry(run, now)
        self._ended = {key: ended for key, ended in self._ended.items() if now < ended.forget}
        self._early = {key: early for key, early in self._early.items() if now < early[1]}
        return commands + self._look_at_drain(now)

    def _look_at_expiry(self, run: Run, now: float) -> list[WorkerCommand]:
        if now < run.expires + GRACE_S:
            return []
        if not run.over:
            drop = Drop(run_id=run.run_id, reason="expired", trace=run.trace)
            return [drop, *self._end(run, run.record("failed", now, reason="expired"))]
        if run.unstored is not None and run.unstored.reason == "expired" and now < run.expires + GIVE_UP_S:
            return []
        self._forget(run)
        return [GiveUp(request_id=run.request.request_id, trace=run.trace), *self._exit_if_empty()]

    # --- draining ---

    def _begin_drain(self, now: float) -> list[WorkerCommand]:
        if self.draining:
            return []
        self.draining = True
        self._drain_until = now + self.instance.drain_limit_s
        self._hand_back_at = now + self.instance.drain_limit_s / 2
        self._ask_again = now + ASK_AGAIN_S
        return self._exit_if_empty() or [AskToDrain()]

    def _note_drain_answer(self, agreed: bool, now: float) -> list[WorkerCommand]:
        self._drain_agreed = self._drain_agreed or agreed
        self._ask_again = now + ASK_AGAIN_S
        return []

    def _look_at_drain(self, now: float) -> list[WorkerCommand]:
        if not self.draining:
            return []
        if now >= self._drain_until:
            return [Exit(reason="drain_limit", held=self.num_held)]
        if self._drain_agreed:
            return _chain(self._let_go(run) for run in self._runs.values()) if now >= self._hand_back_at else []
        if now < self._ask_again:
            return []
        self._ask_again = now + ASK_AGAIN_S
        return [AskToDrain()]

    def _exit_if_empty(self) -> list[WorkerCommand]:
        return [Exit(reason="drained", held=0)] if self.draining and not self._runs else []


def _chain(parts: Iterable[list[WorkerCommand]]) -> list[WorkerCommand]:
    return [command for part in parts for command in part]
