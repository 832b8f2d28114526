"""A small model of everything around the scheduler: both streams with compare-and-set, workers, gateways, the network.

It does nothing by itself: a test chooses what happens next, in any order that the real parts could show. What it
asserts at once: no final record is followed by another one, no attempt is above the limit, no instance is assigned or
promised more than it can hold (repeats aside), no more moves are under way than may be, and the same events give the
same commands again.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from contracts import messages as m
from services.scheduler import events as e
from tests.builders import BLOCK, make_held, make_record, make_status
from tests.unit.scheduler.build import make_request, make_scheduler

MAX_ATTEMPTS = 3
Delivery = Literal["answered", "answer_lost", "lost"]


@dataclass
class Run:
    """A request on a worker."""

    assign: m.Assign
    seq: int  # that its next write continues from
    blocks_done: int
    moves: int
    letting_go: bool = False


@dataclass
class Worker:
    id: str
    max_requests: int = 3
    kv_tokens: int = 512
    alive: bool = True
    stopped: bool = False  # SIGSTOP: it does nothing and answers nothing, but is there
    draining: bool = False
    hands_back: bool = False  # what it holds, at its block's end: when it drains for long
    epoch: int = 0
    runs: dict[str, Run] = field(default_factory=dict)
    ended: set[tuple[str, int]] = field(default_factory=set)  # (request, attempt) that it has run to an end

    @property
    def acts(self) -> bool:
        return self.alive and not self.stopped

    def on_assign(self, assign: m.Assign) -> m.Accepted | m.Refused:
        if assign.epoch < self.epoch:
            return m.Refused(reason="stale_epoch", epoch=self.epoch)
        self.epoch = assign.epoch
        request = assign.request
        run = self.runs.get(request.request_id)
        if run is not None:
            if (assign.attempt, assign.from_seq) <= (run.assign.attempt, run.seq):
                return m.Accepted()
            del self.runs[request.request_id]
        elif (request.request_id, assign.attempt) in self.ended:
            return m.Accepted()
        if self.draining:
            return m.Refused(reason="draining")
        used = sum(run.assign.request.canvas_tokens for run in self.runs.values())
        if len(self.runs) >= self.max_requests or used + request.canvas_tokens > self.kv_tokens:
            return m.Refused(reason="kv_full")
        resume = assign.resume or request.first_record
        moves = resume.moves + (resume.holder not in ("", self.id))
        self.runs[request.request_id] = Run(assign, assign.from_seq, resume.blocks_done, moves)
        return m.Accepted()

    def on_release(self, release: m.Release) -> m.Accepted | m.Refused:
        if release.epoch < self.epoch:
            return m.Refused(reason="stale_epoch", epoch=self.epoch)
        self.epoch = release.epoch
        run = self.runs.get(release.request_id)
        if run is None or run.assign.attempt != release.attempt:
            return m.Refused(reason="not_held")
        run.letting_go = True
        return m.Accepted()

    def status(self) -> m.InstanceStatus:
        held = [make_held(run.assign.request, run.assign.attempt, run.blocks_done) for run in self.runs.values()]
        return make_status(
            self.id,
            held,
            epoch=self.epoch,
            draining=self.draining,
            max_requests=self.max_requests,
            kv_tokens=self.kv_tokens,
        )


class World:
    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self._config = {"max_attempts": MAX_ATTEMPTS} | config
        self._epoch = 0
        self._seq = 0
        self.requests: dict[str, tuple[m.GenerateRequest, int, float]] = {}  # REQUESTS: request, sequence, arrival
        self.progress: dict[str, e.RecordSeen] = {}  # PROGRESS: the last record of each request
        self.submitted: list[str] = []
        self.workers: dict[str, Worker] = {}
        self.losses_written = 0
        # under way
        self.request_feed: deque[e.RequestSeen] = deque()  # to the scheduler, in order
        self.record_feed: deque[e.RecordSeen] = deque()
        self.core_feed: deque[e.Event] = deque()  # statuses and such: in order, may be lost
        self.assigns: list[e.SendAssign] = []
        self.releases: list[e.SendRelease] = []
        self.answers: list[
            tuple[int, e.AssignAnswered | e.ReleaseAnswered]
        ] = []  # epoch of the scheduler that is to hear it
        self.writes: list[tuple[int, e.WriteRecord]] = []
        self.write_results: list[tuple[int, e.Event]] = []
        self.purges: list[str] = []
        self.cancels: list[str] = []
        self.start_scheduler()

    # --- the scheduler --------------------------------------------------------------------------------------------

    def start_scheduler(self) -> None:
        """The first, or after a kill: what the old one had under way may still arrive, its answers reach nobody."""
        self._epoch += 1
        self.scheduler = make_scheduler(epoch=self._epoch, **self._config)
        self.wake_at: float | None = None
        self.heard: list[tuple[e.Event, float, list[e.Command]]] = []
        self.purges.clear()
        self.core_feed.clear()
        self.request_feed = deque(self._seen(request_id) for request_id in self.requests)
        self.record_feed = deque(sorted(self.progress.values(), key=lambda event: event.seq))
        for feed in (self.request_feed, self.record_feed):
            while feed:
                self.tell(feed.popleft())
        self.tell(e.CaughtUp())

    def _seen(self, request_id: str) -> e.RequestSeen:
        request, seq, arrived_at = self.requests[request_id]
        return e.RequestSeen(request, seq, arrived_at, expires_at=request.expires_at)

    def tell(self, event: e.Event) -> None:
        commands = self.scheduler.handle(event, self.now)
        self.heard.append((event, self.now, commands))
        for command in commands:
            self._carry_out(command)
        self.scheduler.check_invariants()

    def _carry_out(self, command: e.Command) -> None:
        match command:
            case e.SendAssign():
                assert command.assign.attempt <= MAX_ATTEMPTS
                if command.reason != "unanswered":  # a repeat may have been accepted, so it is no new placement
                    self._check_budget(command.instance_id)
                self.assigns.append(command)
            case e.SendRelease():
                self._check_move(command)
                self.releases.append(command)
            case e.WriteRecord():
                assert command.record.attempt <= MAX_ATTEMPTS
                if command.reason == "worker_lost":
                    self.losses_written += 1
                    self._check_loss(command)
                self.writes.append((self._epoch, command))
            case e.Purge():
                assert self.progress[command.request_id].record.is_final
                self.purges.append(command.request_id)
            case e.SendCancel():
                if command.request_id in self.progress:
                    assert self.progress[command.request_id].record.is_final
                self.cancels.append(command.request_id)
            case e.WakeAt():
                self.wake_at = command.at
            case e.StandDown():
                raise AssertionError("there is no other scheduler")

    def _check_loss(self, command: e.WriteRecord) -> None:
        """It shuts the old holder out, or is the last."""
        last = self.progress.get(command.record.request_id)
        if last is not None and last.seq == command.after_seq and command.record.state == "released":
            assert command.record.attempt == last.record.attempt + 1

    def _check_move(self, command: e.SendRelease) -> None:
        open_ = self.scheduler._open[command.release.request_id]
        source = self.scheduler._instances[command.instance_id]
        target = self.scheduler._instances[open_.moving_to]
        assert open_.instance_id == source.id != target.id
        assert not target.draining
        self._check_budget(target.id)
        most = self.scheduler.config.max_moves
        assert command.reason == "drain" or (len(source.leaving) <= most and len(target.coming) <= most)

    def _check_budget(self, instance_id: str) -> None:
        instance = self.scheduler._instances[instance_id]
        assert len(instance.residents) + len(instance.foreign) <= instance.max_requests
        assert instance.tokens <= instance.kv_tokens

    def check_same_commands_again(self) -> None:
        again = make_scheduler(epoch=self._epoch, **self._config)
        for event, now, commands in self.heard:
            assert again.handle(event, now) == commands

    # --- the streams ----------------------------------------------------------------------------------------------

    def submit(self, blocks: int = 2, **fields: Any) -> str:
        request_id = f"r{len(self.submitted)}"
        request = make_request(request_id, tokens=blocks * BLOCK, expires_at=fields.pop("expires_at", 1e6), **fields)
        self._seq += 1
        self.submitted.append(request_id)
        self.requests[request_id] = request, self._seq, self.now
        self.request_feed.append(self._seen(request_id))
        return request_id

    def append(self, record: m.ProgressRecord, after_seq: int) -> e.RecordSeen | None:
        """Compare and set. None: refused."""
        last = self.progress.get(record.request_id)
        if (last.seq if last else 0) != after_seq:
            return None
        assert last is None or not last.record.is_final, "a final record must be the last"
        self._seq += 1
        seen = self.progress[record.request_id] = e.RecordSeen(record, self._seq)
        self.record_feed.append(seen)
        return seen

    # --- what may happen ------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """To that time later, with the ticks that were asked for on the way."""
        until = self.now + seconds
        while self.wake_at is not None and self.wake_at <= until:
            self.now = max(self.now, self.wake_at)
            self.wake_at = None
            self.tell(e.Tick())
        self.now = until

    def deliver_assign(self, index: int, how: Delivery) -> None:
        command = self.assigns.pop(index)
        worker = self.workers[command.instance_id]
        answer: Any = "unanswered"
        if not worker.alive:
            answer = "undelivered"
        elif worker.acts and how != "lost":
            answer = worker.on_assign(command.assign)
            if how == "answer_lost":
                answer = "unanswered"
        assign = command.assign
        event = e.AssignAnswered(command.instance_id, assign.request.request_id, assign.attempt, answer)
        self.answers.append((assign.epoch, event))

    def deliver_release(self, index: int, how: Delivery) -> None:
        command = self.releases.pop(index)
        worker, release = self.workers[command.instance_id], command.release
        answer: Any = "unanswered"
        if not worker.alive:
            answer = "undelivered"
        elif worker.acts and how != "lost":
            answer = worker.on_release(release)
            if how == "answer_lost":
                answer = "unanswered"
        event = e.ReleaseAnswered(command.instance_id, release.request_id, release.attempt, answer)
        self.answers.append((release.epoch, event))

    def deliver_answer(self, index: int) -> None:
        epoch, event = self.answers.pop(index)
        if epoch == self._epoch:
            self.tell(event)

    def perform_write(self, index: int, how: Delivery) -> None:
        epoch, command = self.writes.pop(index)
        record = replace(command.record, written_at=self.now)
        event: e.Event = e.WriteUnanswered(record.request_id, command.after_seq)
        if how != "lost":
            stored = self.append(record, command.after_seq)
            if how == "answered":
                found = self.progress.get(record.request_id)
                event = stored or e.WriteOvertaken(record.request_id, command.after_seq, found)
        self.write_results.append((epoch, event))

    def deliver_write_result(self, index: int) -> None:
        epoch, event = self.write_results.pop(index)
        if epoch == self._epoch:
            self.tell(event)

    def deliver_cancel(self, index: int) -> None:
        request_id = self.cancels.pop(index)
        for worker in self.workers.values():
            if worker.acts and worker.runs.pop(request_id, None):
                worker.ended.add((request_id, MAX_ATTEMPTS))

    def perform_purge(self, index: int) -> None:
        self.requests.pop(self.purges.pop(index), None)

    def add_worker(self, **fields: Any) -> Worker:
        worker = Worker(f"w{len(self.workers)}", **fields)
        self.workers[worker.id] = worker
        return worker

    def exit_worker(self, worker: Worker, *, told: bool) -> None:
        worker.alive = False
        worker.runs.clear()
        if told:
            self.core_feed.append(e.InstanceExited(worker.id))

    def say_status(self, worker: Worker) -> None:
        if worker.acts:
            self.core_feed.append(e.StatusSeen(worker.status()))

    def finish_block(self, worker: Worker, request_id: str) -> None:
        """Writes the record of one block more: final after the last, `released` where it was asked to."""
        run = worker.runs[request_id]
        request = run.assign.request
        run.blocks_done += 1
        last = run.blocks_done >= request.num_blocks
        record = make_record(
            request,
            "finished" if last else "released" if run.letting_go or worker.hands_back else "running",
            attempt=run.assign.attempt,
            holder=worker.id,
            epoch=run.assign.epoch,
            blocks_done=run.blocks_done,
            moves=run.moves,
            written_at=self.now,
        )
        stored = self.append(record, run.seq)
        if stored is None or record.state != "running":
            del worker.runs[request_id]
        else:
            run.seq = stored.seq
        if stored is not None and record.is_final:
            worker.ended.add((request_id, run.assign.attempt))

    def cancel_by_gateway(self, request_id: str) -> None:
        """Writes after the record that stands, as a gateway ends up doing."""
        last = self.progress.get(request_id)
        if last is not None and last.record.is_final:
            return
        base = last.record if last else make_record(request_id)
        record = replace(base, state="cancelled", holder="", reason="client_gone", written_at=self.now)
        assert self.append(record, last.seq if last else 0)
        self.cancels.append(request_id)

    # --- peace ----------------------------------------------------------------------------------------------------

    def settle_messages(self) -> None:
        """Delivers all that is under way, and what follows from it."""
        for _ in range(1000):
            if self.assigns:
                self.deliver_assign(0, "answered")
            elif self.releases:
                self.deliver_release(0, "answered")
            elif self.answers:
                self.deliver_answer(0)
            elif self.writes:
                self.perform_write(0, "answered")
            elif self.write_results:
                self.deliver_write_result(0)
            elif self.request_feed:
                self.tell(self.request_feed.popleft())
            elif self.record_feed:
                self.tell(self.record_feed.popleft())
            elif self.core_feed:
                self.tell(self.core_feed.popleft())
            elif self.cancels:
                self.deliver_cancel(0)
            elif self.purges:
                self.perform_purge(0)
            else:
                return
            # an assignment that stays unanswered is repeated without end while no time passes
            if self.assigns and not self.workers[self.assigns[0].instance_id].acts:
                self.pass_time(0.25)
        raise AssertionError("messages do not settle")

    def step_in_peace(self) -> None:
        """A quarter of a second in which everybody does what is theirs."""
        self.settle_messages()
        for worker in self.workers.values():
            self.say_status(worker)
            if worker.acts:
                for request_id in list(worker.runs):
                    self.finish_block(worker, request_id)
        self.core_feed.append(e.GatewaySeen("gw"))
        self.settle_messages()
        self.pass_time(0.25)

    def end_in_peace(self, limit_s: float = 120.0) -> None:
        """With workers that live, every request ends and is purged."""
        for worker in self.workers.values():
            worker.stopped = False
        self.add_worker()
        give_up_at = self.now + limit_s
        while self.requests or self.scheduler.num_open:
            assert self.now < give_up_at, f"open: {sorted(self.requests)}"
            self.step_in_peace()
        self.step_in_peace()  # an old holder is told once its status lists what has ended elsewhere
        for request_id in self.submitted:
            record = self.progress[request_id].record
            assert record.is_final
            if record.reason == "worker_lost":
                assert record.attempt == MAX_ATTEMPTS
        assert not any(run for worker in self.workers.values() for run in worker.runs.values())
