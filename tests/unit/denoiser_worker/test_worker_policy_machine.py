"""The worker's books balance whatever it is told, in whatever order, and it answers every assignment and release."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from contracts import messages as m
from services.denoiser.worker_events import (
    Admit,
    Answer,
    Assigned,
    DrainAnswered,
    Drop,
    Exit,
    Left,
    LetGo,
    Rejected,
    Stepped,
    StopAsked,
    Stored,
    Tick,
    Turn,
    WorkerEvent,
    Write,
    WriteOverdue,
    WriteRefused,
)
from services.denoiser.worker_policy import WorkerPolicy
from tests.unit.denoiser_worker.builders import make_assigned, make_instance, make_record, make_release, make_request

KV_TOKENS, MAX_REQUESTS = 40, 3

requests = st.sampled_from(["a", "b", "c", "d", "e"])
attempts = st.integers(1, 3)
epochs = st.integers(1, 3)


class Books(RuleBasedStateMachine):
    """Keeps what an engine with the same room would hold, obeying each order as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = WorkerPolicy(make_instance(kv_tokens=KV_TOKENS, max_requests=MAX_REQUESTS))
        self.now = 0.0
        self.engine: dict[str, int] = {}  # run id -> canvas tokens
        self.blocks: dict[str, int] = {}  # run id -> the block it is at
        self.letting_go: set[str] = set()
        self.writes: list[Write] = []
        self.exited = False

    def feed(self, event: WorkerEvent) -> None:
        answers = 0
        for command in self.policy.handle(event, self.now):
            match command:
                case Admit():
                    self.engine[command.run_id] = command.request.canvas_tokens
                    self.blocks[command.run_id] = len(command.committed_ids) // 4
                    assert sum(self.engine.values()) <= KV_TOKENS, "the engine would have refused"
                    assert len(self.engine) <= MAX_REQUESTS
                case Drop():
                    self.engine.pop(command.run_id, None)
                case LetGo():
                    assert command.run_id in self.engine
                    self.letting_go.add(command.run_id)
                case Turn():
                    assert command.run_id in self.engine
                case Write():
                    assert all(w.run_id != command.run_id for w in self.writes), "one write at a time"
                    self.writes.append(command)
                case Answer():
                    answers += 1
                case Exit():
                    self.exited = True
        assert answers == isinstance(event, m.Release | Assigned)

    @rule(
        request_id=requests,
        attempt=attempts,
        epoch=st.integers(1, 3),
        from_seq=st.integers(0, 3),
        resumed=st.booleans(),
    )
    def assign(self, request_id: str, attempt: int, epoch: int, from_seq: int, resumed: bool) -> None:
        request = make_request(request_id, expires_at=1_000_000.0 + self.now + 5)
        resume = make_record(request, attempt=attempt) if resumed else None
        event = make_assigned(request, now=self.now, epoch=epoch, attempt=attempt, resume=resume, from_seq=from_seq)
        self.feed(event)

    @rule(request_id=requests, attempt=attempts, epoch=epochs)
    def release(self, request_id: str, attempt: int, epoch: int) -> None:
        self.feed(make_release(request_id, epoch=epoch, attempt=attempt))

    @rule(request_id=requests)
    def cancel(self, request_id: str) -> None:
        self.feed(m.Cancel(request_id=request_id))

    @rule(request_id=requests, attempt=attempts, value=st.sampled_from([0.5, 0.9]))
    def turn(self, request_id: str, attempt: int, value: float) -> None:
        entry = m.ThresholdEntry(request_id=request_id, attempt=attempt, threshold=value)
        self.feed(m.Thresholds(entries=[entry]))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        if not self.engine:
            return
        run_id = data.draw(st.sampled_from(sorted(self.engine)))
        index = self.blocks[run_id]
        finish = "length" if index == 1 else ""
        left = not finish and run_id in self.letting_go
        self.blocks[run_id] += 1
        if finish or left:
            del self.engine[run_id]
        self.feed(
            Stepped(
                run_id=run_id,
                kind="recompute",
                block_index=index,
                threshold=0.9,
                positions=[4 * index + i for i in range(4)],
                token_ids=[20, 21, 22, 23],
                confidences=[0.5] * 4,
                block_done=True,
                finish=finish,  # type: ignore[arg-type]
                left=left,
                started=self.now,
                ended=self.now + 0.1,
            )
        )

    @rule(data=st.data(), rejected=st.booleans())
    def leave_or_reject(self, data: st.DataObject, rejected: bool) -> None:
        candidates = sorted(self.engine if rejected else self.letting_go & self.engine.keys())
        if candidates:
            run_id = data.draw(st.sampled_from(candidates))
            del self.engine[run_id]
            self.feed(Rejected(run_id=run_id, detail="") if rejected else Left(run_id=run_id))

    @rule(data=st.data(), outcome=st.sampled_from(["stored", "overdue", "own", "foreign", "gone"]))
    def answer_a_write(self, data: st.DataObject, outcome: str) -> None:
        if not self.writes:
            return
        write = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        match outcome:
            case "stored":
                self.feed(Stored(run_id=write.run_id, record=write.record, seq=write.after_seq + 1))
            case "overdue":
                self.feed(WriteOverdue(run_id=write.run_id))
            case "own":
                found = make_record(holder=write.record.holder, attempt=write.record.attempt, state="running")
                self.feed(WriteRefused(run_id=write.run_id, found=found, seq=write.after_seq + 1))
            case "foreign":
                self.feed(WriteRefused(run_id=write.run_id, found=make_record(attempt=3), seq=write.after_seq + 1))
            case "gone":
                self.feed(WriteRefused(run_id=write.run_id, found=None, seq=0))

    @rule(seconds=st.sampled_from([0.3, 1.5, 9.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @rule(really=st.integers(0, 9))
    def stop(self, really: int) -> None:
        if really == 0:
            self.feed(StopAsked())

    @rule(agreed=st.booleans())
    def drain_answered(self, agreed: bool) -> None:
        if self.policy.draining:
            self.feed(DrainAnswered(agreed=agreed))

    @rule()
    def tell(self) -> None:
        running = {run_id.split(".")[0] for run_id in self.engine}
        being_written = {w.record.request_id for w in self.writes if w.record.state != "running"}
        held = {held.request_id for held in self.policy.status(1.0).held}
        assert running <= held <= running | being_written | self._ended_behind_a_write()
        self.policy.take_report(1.0)

    def _ended_behind_a_write(self) -> set[str]:
        """Requests that have ended while an earlier record of theirs is being written."""
        return {w.record.request_id for w in self.writes if w.record.state == "running"}

    @invariant()
    def the_engine_holds_what_the_books_say(self) -> None:
        self.policy.check_invariants()
        assert {run_id for run_id, run in self.policy._runs.items() if run.in_engine} == self.engine.keys()

    @invariant()
    def a_drained_worker_leaves(self) -> None:
        if self.policy.draining and self.policy.num_held == 0:
            assert self.exited


Books.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase
