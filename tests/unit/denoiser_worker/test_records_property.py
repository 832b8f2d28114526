"""Whatever the order of commits, acknowledgements, releases and losses: the records of a request never contradict each
other, and the last one is the answer.

The engine is replaced by a draw of which positions each step commits, the stream by a compare-and-set cell whose
acknowledgements may get lost or come late.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import messages as m
from services.denoiser.worker_events import (
    Admit,
    Drop,
    Stepped,
    Stored,
    WorkerCommand,
    Write,
    WriteOverdue,
    WriteRefused,
)
from services.denoiser.worker_policy import WorkerPolicy
from tests.unit.denoiser_worker.builders import EOS, make_assigned, make_instance, make_release, make_request

Outcome = str


class Cell:
    """A request's subject in PROGRESS."""

    def __init__(self) -> None:
        self.seq = 0
        self.records: list[m.ProgressRecord] = []

    def write(self, record: m.ProgressRecord, after_seq: int) -> bool:
        if after_seq != self.seq:
            return False
        self.seq += 1
        self.records.append(record)
        return True


class Worker:
    """A policy whose writes are answered when and how the draw says."""

    def __init__(self, instance_id: str, cell: Cell, data: st.DataObject) -> None:
        self.policy = WorkerPolicy(make_instance(instance_id=instance_id, max_canvas_tokens=100))
        self.cell, self.data = cell, data
        self.writes: list[Write] = []
        self.admitted: list[Admit] = []
        self.dropped = False
        self.news: list[m.BlockCost] = []  # of the records that are known to be stored

    def feed(self, commands: list[WorkerCommand]) -> None:
        for command in commands:
            match command:
                case Write():
                    self.writes.append(command)
                case Admit():
                    self.admitted.append(command)
                case Drop():
                    self.dropped = True
        self.policy.check_invariants()

    def answer_one_write(self, outcome: str) -> None:
        """As `write_record` would: an equal record that stands already counts as stored."""
        write = self.writes.pop(0)
        if outcome == "unsent":
            self.feed(self.policy.handle(WriteOverdue(run_id=write.run_id), 1.0))
            return
        stored = self.cell.write(write.record, write.after_seq)
        if outcome == "unanswered":
            self.feed(self.policy.handle(WriteOverdue(run_id=write.run_id), 1.0))
        elif stored or self.cell.records[-1:] == [write.record]:
            self.news += write.record.blocks[write.blocks_before :]
            event = Stored(run_id=write.run_id, record=write.record, seq=self.cell.seq)
            self.feed(self.policy.handle(event, 1.0))
        else:
            found = self.cell.records[-1] if self.cell.records else None
            self.feed(self.policy.handle(WriteRefused(run_id=write.run_id, found=found, seq=self.cell.seq), 1.0))

    def answer_writes(self) -> None:
        """All of them, however often it takes."""
        while self.writes:
            self.answer_one_write("stored")

    def maybe_answer(self) -> None:
        if self.writes and self.data.draw(st.booleans(), "answered now"):
            self.answer_one_write(self.data.draw(st.sampled_from(["stored", "unanswered", "unsent"]), "outcome"))


def expected_answer(truth: list[int], max_tokens: int) -> list[int]:
    return truth[: truth.index(EOS)] if EOS in truth[:max_tokens] else truth[:max_tokens]


def run_block(worker: Worker, request: m.GenerateRequest, truth: list[int], index: int, *, left: bool) -> str:
    """Commits a block in drawn portions, by the engine's rules; returns how it ended."""
    run_id = worker.admitted[-1].run_id
    start = index * request.block_size
    eligible = list(range(start, min(start + request.block_size, request.max_tokens)))
    first = True
    while True:
        chosen = worker.data.draw(
            st.lists(st.sampled_from(eligible), min_size=1, max_size=len(eligible), unique=True), "commits"
        )
        eos = [p for p in range(start, start + request.block_size) if p not in eligible or p in chosen]
        first_eos = min((p for p in eos if p < request.max_tokens and truth[p] == EOS), default=None)
        eligible = [p for p in eligible if p not in chosen and (first_eos is None or p < first_eos)]
        done = not eligible
        last = done and (first_eos is not None or index + 1 == request.num_blocks)
        finish = ("eos" if first_eos is not None else "length") if last else ""
        worker.feed(
            worker.policy.handle(
                Stepped(
                    run_id=run_id,
                    kind="recompute" if first else "cache",
                    block_index=index,
                    threshold=0.9,
                    positions=chosen,
                    token_ids=[truth[p] for p in chosen],
                    confidences=[truth[p] / 100 for p in chosen],
                    block_done=done,
                    finish=finish,  # type: ignore[arg-type]
                    left=left and done and not last,
                    started=1.0,
                    ended=1.1,
                ),
                1.1,
            )
        )
        first = False
        worker.maybe_answer()
        if done:
            return finish


@settings(max_examples=200, deadline=None)
@given(
    st.data(),
    st.lists(st.integers(10, 40) | st.just(EOS), min_size=16, max_size=16),
    st.integers(1, 16),
    st.integers(1, 6),
)
def test_records_add_up_to_the_answer(data: st.DataObject, truth: list[int], max_tokens: int, block_size: int) -> None:
    truth = [t if i < max_tokens else 10 for i, t in enumerate(truth)]
    request = make_request(max_tokens=max_tokens, block_size=block_size)
    cell = Cell()
    worker = Worker("node-0-0", cell, data)
    worker.feed(worker.policy.handle(make_assigned(request), 0.0))
    moves = losses = 0
    for index in range(request.num_blocks):
        fate = data.draw(st.sampled_from(["stay", "stay", "move", "lose"]), "fate")
        if fate == "move":
            worker.feed(worker.policy.handle(make_release(attempt=losses + 1), 0.0))
        finish = run_block(worker, request, truth, index, left=fate == "move")
        if finish:
            break
        if fate == "stay":
            continue
        if fate == "lose":  # as the scheduler does: shut the old holder out, place what is stored elsewhere
            base = cell.records[-1] if cell.records else None
            losses += 1
            lost = m.ProgressRecord(
                request_id="r1",
                gateway_id="gw",
                attempt=losses + 1,
                state="released",
                reason="worker_lost",
                blocks_done=base.blocks_done if base else 0,
                token_ids=base.token_ids if base else [],
                confidences=base.confidences if base else [],
                blocks=base.blocks if base else [],
                moves=base.moves if base else 0,
            )
            moves = lost.moves  # one that the lost instance had not written down yet is not known of
            old = worker
            assert cell.write(lost, cell.seq)
        else:
            worker.answer_writes()
            assert worker.policy.num_held == 0, "a released request is forgotten once that is stored"
            moves += 1
            old = None
        worker = Worker(f"node-{index + 1}-0", cell, data)
        resume = cell.records[-1]
        assigned = make_assigned(request, attempt=losses + 1, resume=resume, from_seq=cell.seq)
        worker.feed(worker.policy.handle(assigned, 0.0))
        for redone in range(resume.blocks_done, index + 1):  # what was lost is done again
            assert not run_block(worker, request, truth, redone, left=False)
        if old is not None and old.writes:  # it continues, and finds itself shut out
            old.answer_writes()
            assert old.dropped
    worker.answer_writes()

    assert worker.policy.num_held == 0
    own_blocks = [block for block in cell.records[-1].blocks if block.instance_id == worker.policy.instance.instance_id]
    assert worker.news == own_blocks, "each block is news once, lost acknowledgements or not"
    final = cell.records[-1]
    assert (final.state, final.finish) == ("finished", "eos" if EOS in truth else "length")
    assert final.token_ids == expected_answer(truth, max_tokens)
    assert final.confidences == [t / 100 for t in final.token_ids]
    assert (final.attempt, final.moves) == (losses + 1, moves)
    assert len(final.blocks) == final.blocks_done
    assert all(cost.recompute_steps == 1 for cost in final.blocks)
    for earlier, later in zip(cell.records, cell.records[1:], strict=False):
        assert not earlier.is_final
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert later.blocks_done >= earlier.blocks_done
        assert later.blocks[: len(earlier.blocks)] == earlier.blocks
    for record in cell.records[:-1]:
        assert len(record.token_ids) == record.blocks_done * block_size
