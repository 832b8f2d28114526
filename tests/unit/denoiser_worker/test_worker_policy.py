"""The worker's decisions, one rule after the other."""

from collections.abc import Iterator

import pytest

from contracts import messages as m
from contracts.codec import decode, encode
from services.costs import LatencyProfile, PassCost, step_load
from services.denoiser.worker_events import (
    Admit,
    Answer,
    AskToDrain,
    DrainAnswered,
    Drop,
    Exit,
    GiveUp,
    Left,
    LetGo,
    PassTimed,
    Rejected,
    Show,
    StopAsked,
    Stored,
    Tick,
    Turn,
    WorkerCommand,
    Write,
    WriteOverdue,
    WriteRefused,
)
from services.denoiser.worker_policy import WorkerPolicy
from services.opening import NO_OPENING, Opening
from tests.unit.denoiser_worker.builders import (
    EOS,
    MASK,
    ME,
    OTHER,
    WALL,
    last_step,
    make_assigned,
    make_instance,
    make_record,
    make_release,
    make_request,
    make_step,
)

ACCEPTED = Answer(reply=m.Accepted())


@pytest.fixture
def policy() -> Iterator[WorkerPolicy]:
    policy = WorkerPolicy(make_instance())
    yield policy
    policy.check_invariants()


def only_write(commands: list[WorkerCommand]) -> Write:
    (command,) = commands
    assert isinstance(command, Write)
    return command


def refusal(commands: list[WorkerCommand]) -> m.Refused:
    (command,) = commands
    assert isinstance(command, Answer)
    assert isinstance(command.reply, m.Refused)
    return command.reply


def finish(policy: WorkerPolicy, run_id: str = "r1.1") -> Write:
    """Runs both blocks of a request to its final record, the first block's write unanswered as yet."""
    policy.handle(make_step(run_id), 1.0)
    assert policy.handle(last_step(run_id), 1.2) == []
    newest = policy.handle(WriteOverdue(run_id=run_id), 1.3)
    return only_write(newest)


def store(policy: WorkerPolicy, write: Write, seq: int, now: float = 2.0) -> list[WorkerCommand]:
    return policy.handle(Stored(run_id=write.run_id, record=write.record, seq=seq), now)


# --- assignments --------------------------------------------------------------------------------------------------


def test_a_fresh_request_goes_to_the_engine(policy: WorkerPolicy) -> None:
    request = make_request(blocks_ahead=1)
    admit = Admit(run_id="r1.1", request=request, threshold=0.9, committed_ids=[], committed_confidences=[])
    assert policy.handle(make_assigned(request), 0.0) == [admit, ACCEPTED]
    assert policy.status(WALL).held == [
        m.Held(request_id="r1", attempt=1, canvas_tokens=12, block_size=4, cache="dual", blocks_ahead=1, blocks_done=0)
    ]


def test_blocks_have_the_instance_s_opening_unless_the_client_has_pinned_the_threshold() -> None:
    opening = Opening(share=0.5, threshold=0.9)
    policy = WorkerPolicy(make_instance(opening=opening))
    (free, _), (pinned, _) = (
        policy.handle(make_assigned(make_request(name, threshold=pin)), 0.0) for name, pin in (("a", None), ("b", 0.6))
    )
    assert isinstance(free, Admit)
    assert isinstance(pinned, Admit)
    assert (free.opening, free.threshold) == (opening, 0.9)
    assert (pinned.opening, pinned.threshold) == (NO_OPENING, 0.6)


def test_a_resumed_request_continues_after_its_blocks(policy: WorkerPolicy) -> None:
    admit, answer = policy.handle(make_assigned(resume=make_record(), from_seq=17), 0.0)
    assert answer == ACCEPTED
    assert isinstance(admit, Admit)
    assert (admit.committed_ids, admit.committed_confidences) == ([20, 21, 22, 23], [0.5, 0.6, 0.7, 0.8])
    write = only_write(policy.handle(last_step(), 1.2))
    assert write.after_seq == 17
    assert write.record.token_ids == [20, 21, 22, 23, 24, 25, 26, 27]
    assert write.record.moves == 2, "another instance held it before"
    assert write.record.started_at == WALL - 0.5
    assert [block.instance_id for block in write.record.blocks] == [OTHER, ME]


@pytest.mark.parametrize(
    ("holder", "moves"), [(ME, 1), ("", 1), (OTHER, 2)], ids=["back here", "after a loss", "moved"]
)
def test_a_move_counts_when_another_instance_let_it_go(policy: WorkerPolicy, holder: str, moves: int) -> None:
    policy.handle(make_assigned(resume=make_record(holder=holder), from_seq=3), 0.0)
    assert only_write(policy.handle(last_step(), 1.2)).record.moves == moves


def test_a_repeated_assignment_is_accepted_and_nothing_else(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    assert policy.handle(make_assigned(), 0.3) == [ACCEPTED]


def test_a_lower_epoch_than_seen_is_refused_and_the_answer_says_which(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(epoch=5), 0.0)
    assert refusal(policy.handle(make_assigned(make_request("r2"), epoch=4), 0.1)) == m.Refused(
        reason="stale_epoch", detail="epoch 4, seen 5", epoch=5
    )
    assert refusal(policy.handle(make_release(epoch=4), 0.1)).reason == "stale_epoch"


def test_a_new_scheduler_that_assigns_what_runs_here_changes_only_the_epoch(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(epoch=5), 0.0)
    assert policy.handle(make_assigned(epoch=9), 0.5) == [ACCEPTED]
    assert only_write(policy.handle(make_step(), 1.0)).record.epoch == 9
    assert policy.status(WALL).epoch == 9


def test_a_higher_attempt_replaces_the_run(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    drop, admit, answer = policy.handle(make_assigned(attempt=2, from_seq=4), 3.0)
    assert drop == Drop(run_id="r1.1", reason="replaced", trace="trace")
    assert isinstance(admit, Admit)
    assert admit.run_id == "r1.2"
    assert answer == ACCEPTED
    assert policy.handle(make_step("r1.1"), 3.1) == [], "the old run is nobody's"
    write = only_write(policy.handle(make_step("r1.2"), 3.2))
    assert (write.record.attempt, write.after_seq) == (2, 4)


def test_a_lower_attempt_than_held_changes_nothing(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(attempt=2), 0.0)
    assert policy.handle(make_assigned(attempt=1), 0.1) == [ACCEPTED]
    assert only_write(policy.handle(make_step(), 1.0)).record.attempt == 2


def test_what_was_accepted_counts_before_the_engine_has_it(policy: WorkerPolicy) -> None:
    big = {"prompt_ids": [10] * 40, "max_tokens": 4}  # a canvas of 44
    policy.handle(make_assigned(make_request("a", **big)), 0.0)
    policy.handle(make_assigned(make_request("b", **big)), 0.0)
    answer = refusal(policy.handle(make_assigned(make_request("c", prompt_ids=[10] * 9, max_tokens=4)), 0.0))
    assert (answer.reason, answer.detail) == ("kv_full", "13 tokens needed, 12 free")
    assert policy.handle(make_assigned(make_request("d", prompt_ids=[10] * 8, max_tokens=4)), 0.0)[-1] == ACCEPTED


def test_no_more_requests_than_may_be_held(policy: WorkerPolicy) -> None:
    for number in range(4):
        policy.handle(make_assigned(make_request(f"r{number}")), 0.0)
    assert refusal(policy.handle(make_assigned(make_request("r9")), 0.0)).reason == "kv_full"


def test_a_request_that_ends_makes_room_before_its_record_is_stored(policy: WorkerPolicy) -> None:
    for number in range(4):
        policy.handle(make_assigned(make_request(f"r{number}")), 0.0)
    full = policy.kv_usage
    assert full == 4 * make_request().canvas_tokens / policy.instance.kv_tokens
    finish(policy, "r0.1")
    assert policy.kv_usage == pytest.approx(full * 3 / 4)
    assert policy.num_running == 3
    assert policy.num_held == 4
    assert policy.handle(make_assigned(make_request("r9")), 2.0)[-1] == ACCEPTED


def test_a_canvas_that_could_never_fit_is_too_long(policy: WorkerPolicy) -> None:
    answer = refusal(policy.handle(make_assigned(make_request(prompt_ids=[10] * 57, max_tokens=1)), 0.0))
    assert (answer.reason, answer.detail) == ("too_long", "a canvas of 61 tokens; at most 60 fit")


@pytest.mark.parametrize(
    ("request_changes", "resume_changes"),
    [
        ({"model": "huge"}, None),
        ({"prompt_ids": [10, 50]}, None),
        ({"prompt_ids": [10, MASK]}, None),
        ({}, {"request_id": "r2"}),
        ({}, {"gateway_id": "gw2"}),
        ({}, {"state": "cancelled"}),
        ({}, {"token_ids": [20, 21, 22]}),
        ({}, {"blocks_done": 2, "token_ids": [20] * 8}),
        ({}, {"token_ids": [20, 21, EOS, 23]}),
        ({}, {"token_ids": [20, 21, MASK, 23]}),
        ({}, {"token_ids": [20, 21, 50, 23]}),
    ],
)
def test_what_the_engine_could_not_run_is_a_bad_request(
    policy: WorkerPolicy, request_changes: dict[str, object], resume_changes: dict[str, object] | None
) -> None:
    resume = None if resume_changes is None else make_record(**resume_changes)
    answer = refusal(policy.handle(make_assigned(make_request(**request_changes), resume=resume, from_seq=1), 0.0))
    assert answer.reason == "bad_request"
    assert answer.detail


def test_an_end_of_text_may_be_resumed_from_where_it_is_ignored(policy: WorkerPolicy) -> None:
    resume = make_record(token_ids=[20, 21, EOS, 23])
    assert policy.handle(make_assigned(make_request(ignore_eos=True), resume=resume, from_seq=1), 0.0)[-1] == ACCEPTED


# --- records ------------------------------------------------------------------------------------------------------


def test_the_record_at_a_blocks_end_says_all(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(now=0.5), 0.5)
    first = make_step(positions=[3, 1], token_ids=[23, 21], confidences=[0.8, 0.6], block_done=False, threshold=0.9)
    second = make_step(
        positions=[0, 2],
        token_ids=[20, 22],
        confidences=[0.5, 0.7],
        kind="cache",
        threshold=0.5,
        started=1.0,
        ended=1.25,
    )
    assert policy.handle(first, 1.0) == []
    write = only_write(policy.handle(second, 1.5))
    assert (write.run_id, write.after_seq, write.trace) == ("r1.1", 0, "trace")
    assert write.record == m.ProgressRecord(
        request_id="r1",
        gateway_id="gw",
        attempt=1,
        state="running",
        holder=ME,
        epoch=5,
        blocks_done=1,
        token_ids=[20, 21, 22, 23],
        confidences=[0.5, 0.6, 0.7, 0.8],
        blocks=[
            m.BlockCost(
                instance_id=ME,
                tp_degree=1,
                recompute_steps=1,
                cache_steps=1,
                mean_threshold=pytest.approx(0.7),
                seconds=pytest.approx(0.35),
            )
        ],
        prompt_tokens=4,
        created_at=WALL - 1,
        started_at=WALL + 0.5,
        written_at=WALL + 1.5,
        fingerprint="print",
    )


def test_one_write_at_a_time_and_the_newest_next(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(make_request(max_tokens=16)), 0.0)
    first = only_write(policy.handle(make_step(), 1.0))
    for index in (1, 2):
        positions = list(range(4 * index, 4 * index + 4))
        assert policy.handle(make_step(block_index=index, positions=positions), 1.0) == []
    second = only_write(store(policy, first, 7))
    assert (second.after_seq, second.record.blocks_done) == (7, 3)
    assert store(policy, second, 8) == []


def test_a_finished_request_is_held_until_its_record_is_stored(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    write = finish(policy)
    assert (write.record.state, write.record.finish, write.record.blocks_done) == ("finished", "length", 2)
    assert write.record.token_ids == [20, 21, 22, 23, 24, 25, 26, 27]
    assert policy.num_held == 1
    assert store(policy, write, 3) == []
    assert policy.num_held == 0


def test_the_answer_is_cut_before_the_first_end_of_text(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    policy.handle(make_step(), 1.0)
    early = {"positions": [5, 7], "token_ids": [EOS, 27], "confidences": [0.9, 0.8]}
    assert policy.handle(last_step(**early, block_done=False, finish=""), 1.1) == []
    policy.handle(last_step(positions=[4], token_ids=[24], confidences=[0.4], finish="eos"), 1.2)
    record = only_write(policy.handle(WriteOverdue(run_id="r1.1"), 1.3)).record
    assert (record.finish, record.token_ids) == ("eos", [20, 21, 22, 23, 24])
    assert record.confidences == [0.5, 0.6, 0.7, 0.8, 0.4]
    assert record.blocks_done == 2


def test_an_answer_that_fills_no_whole_block_is_exactly_as_long_as_asked(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(make_request(max_tokens=3)), 0.0)
    step = make_step(positions=[0, 1, 2], token_ids=[20, 21, 22], confidences=[0.1] * 3, finish="length")
    assert only_write(policy.handle(step, 1.0)).record.token_ids == [20, 21, 22]


def test_a_lost_acknowledgement_of_our_own_record_is_made_good(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    first = only_write(policy.handle(make_step(), 1.0))
    policy.handle(last_step(), 1.2)
    policy.handle(WriteOverdue(run_id="r1.1"), 3.0)
    write = only_write(policy.handle(WriteRefused(run_id="r1.1", found=first.record, seq=9), 3.1))
    assert (write.after_seq, write.record.state) == (9, "finished")


@pytest.mark.parametrize(
    "found",
    [
        None,
        make_record(state="running", attempt=2),
        make_record(state="running", holder=ME, attempt=2),
        make_record(state="released", holder="", attempt=2, reason="worker_lost"),
        make_record(state="cancelled", holder="", reason="client_gone"),
        make_record(state="finished", holder=ME),
    ],
)
def test_a_request_that_is_anothers_by_now_is_dropped_without_a_word(
    policy: WorkerPolicy, found: m.ProgressRecord | None
) -> None:
    policy.handle(make_assigned(), 0.0)
    policy.handle(make_step(), 1.0)
    assert policy.handle(WriteRefused(run_id="r1.1", found=found, seq=9), 1.1) == [
        Drop(run_id="r1.1", reason="overtaken", trace="trace")
    ]
    assert policy.num_held == 0
    assert policy.take_report(WALL) is None


def test_our_own_record_that_we_knew_of_already_is_no_excuse(policy: WorkerPolicy) -> None:
    """Or a refusal that names it again and again would be retried for ever."""
    policy.handle(make_assigned(), 0.0)
    first = only_write(policy.handle(make_step(), 1.0))
    store(policy, first, 9)
    policy.handle(last_step(), 1.2)
    refused = WriteRefused(run_id="r1.1", found=first.record, seq=9)
    assert policy.handle(refused, 1.3) == [Drop(run_id="r1.1", reason="overtaken", trace="trace")]


def test_what_the_engine_rejects_fails(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    assert policy.trace_of("r1.1") == "trace"
    record = only_write(policy.handle(Rejected(run_id="r1.1", detail="why"), 0.1)).record
    assert (record.state, record.reason) == ("failed", "engine_error")


def test_a_confidence_that_is_no_number_does_not_make_the_record_unreadable(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    step = make_step(confidences=[float("nan"), -0.1, 1.0000001, float("inf")])
    record = only_write(policy.handle(step, 1.0)).record
    assert decode(encode(record), m.ProgressRecord).confidences == [0.0, 0.0, 1.0, 1.0]
    report = policy.take_report(WALL)
    assert decode(encode(report), m.Report) == report


# --- letting go ---------------------------------------------------------------------------------------------------


def test_a_released_request_is_written_at_its_blocks_end_and_then_forgotten(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    assert policy.handle(make_release(epoch=6), 0.5) == [ACCEPTED, LetGo(run_id="r1.1")]
    assert policy.handle(make_release(epoch=6), 0.6) == [ACCEPTED], "said once to the engine"
    write = only_write(policy.handle(make_step(left=True), 1.0))
    assert (write.record.state, write.record.holder, write.record.epoch) == ("released", ME, 6)
    assert write.record.token_ids == [20, 21, 22, 23]
    assert policy.num_held == 1
    store(policy, write, 4)
    assert policy.num_held == 0
    report = policy.take_report(WALL)
    assert report is not None
    assert not report.entries[0].finished


def test_a_request_between_two_blocks_is_released_at_once(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(resume=make_record(), from_seq=6), 0.0)
    policy.handle(make_release(), 0.1)
    write = only_write(policy.handle(Left(run_id="r1.1"), 0.2))
    assert (write.record.state, write.record.token_ids, write.after_seq) == ("released", [20, 21, 22, 23], 6)


def test_a_request_that_ends_before_it_can_be_released_is_finished(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(make_request(max_tokens=4)), 0.0)
    policy.handle(make_release(), 0.1)
    assert only_write(policy.handle(make_step(finish="length"), 1.0)).record.state == "finished"
    assert policy.handle(make_release(), 1.1) == [ACCEPTED]


def test_what_is_not_held_cannot_be_released(policy: WorkerPolicy) -> None:
    assert refusal(policy.handle(make_release(), 0.0)).reason == "not_held"
    policy.handle(make_assigned(attempt=2), 0.0)
    assert refusal(policy.handle(make_release(attempt=1), 0.0)).reason == "not_held"


def test_a_request_comes_back_before_we_know_that_its_release_was_stored(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    policy.handle(make_release(), 0.1)
    released = only_write(policy.handle(make_step(left=True), 1.0)).record
    assert policy.handle(make_assigned(), 1.1) == [ACCEPTED], "a late repeat of the first assignment"
    commands = policy.handle(make_assigned(resume=released, from_seq=5), 1.2)
    assert [type(command) for command in commands] == [Drop, Admit, Answer]
    assert policy.handle(Stored(run_id="r1.1", record=released, seq=5), 1.3) == []
    assert only_write(policy.handle(last_step("r1.2"), 1.5)).after_seq == 5


def test_a_new_scheduler_that_has_seen_our_record_before_we_have_its_acknowledgement(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    running = only_write(policy.handle(make_step(), 1.0)).record
    assert policy.handle(make_assigned(epoch=8, resume=running, from_seq=5), 1.1) == [ACCEPTED]


@pytest.mark.parametrize("end", ["finished", "released"])
def test_a_late_repeat_of_an_assignment_does_not_run_it_again(policy: WorkerPolicy, end: str) -> None:
    policy.handle(make_assigned(), 0.0)
    if end == "finished":
        write = finish(policy)
    else:
        policy.handle(make_release(), 0.1)
        write = only_write(policy.handle(make_step(left=True), 1.0))
    store(policy, write, 3, now=2.0)
    assert policy.handle(make_assigned(), 2.1) == [ACCEPTED]
    assert policy.num_held == 0
    comes_back = make_assigned(resume=make_record(holder=ME), from_seq=3)
    assert len(policy.handle(comes_back, 2.2)) == (1 if end == "finished" else 2)


def test_a_cancelled_request_is_dropped_at_once_and_does_not_come_back(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    policy.handle(make_step(), 1.0)
    assert policy.handle(m.Cancel(request_id="r1"), 1.1) == [Drop(run_id="r1.1", reason="cancelled", trace="trace")]
    assert policy.num_running == 0
    assert policy.take_report(WALL) is None
    assert policy.handle(make_assigned(), 1.2) == [ACCEPTED], "its cancelled record stands"
    assert policy.num_held == 0


def test_a_cancel_that_overtakes_the_assignment_holds(policy: WorkerPolicy) -> None:
    assert policy.handle(m.Cancel(request_id="r1"), 0.0) == []
    assert policy.handle(make_assigned(), 0.1) == [ACCEPTED]
    assert policy.num_held == 0


# --- thresholds ---------------------------------------------------------------------------------------------------


def thresholds(value: float, request_id: str = "r1", attempt: int = 1) -> m.Thresholds:
    return m.Thresholds(entries=[m.ThresholdEntry(request_id=request_id, attempt=attempt, threshold=value)])


def test_a_threshold_is_turned_once(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    assert policy.handle(thresholds(0.6), 0.1) == [Turn(run_id="r1.1", threshold=0.6)]
    assert policy.handle(thresholds(0.6), 1.1) == []
    assert policy.handle(thresholds(0.7, attempt=2), 1.2) == [], "another attempt's"


def test_a_pin_is_never_turned(policy: WorkerPolicy) -> None:
    policy.handle(thresholds(0.5), 0.0)
    admit, _ = policy.handle(make_assigned(make_request(threshold=0.8), threshold=0.9), 0.0)
    assert isinstance(admit, Admit)
    assert admit.threshold == 0.8
    assert policy.handle(thresholds(0.6), 0.1) == []


@pytest.mark.parametrize(("later_s", "threshold"), [(0.9, 0.6), (1.1, 0.9)])
def test_a_threshold_that_comes_before_its_assignment_is_kept_a_second(
    policy: WorkerPolicy, later_s: float, threshold: float
) -> None:
    policy.handle(thresholds(0.6), 0.0)
    admit, _ = policy.handle(make_assigned(threshold=0.9), later_s)
    assert isinstance(admit, Admit)
    assert admit.threshold == threshold


def test_an_early_threshold_is_for_its_own_attempt(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(attempt=1), 0.0)
    policy.handle(thresholds(0.6, attempt=2), 0.0)
    admit = policy.handle(make_assigned(attempt=2), 0.5)[1]
    assert isinstance(admit, Admit)
    assert admit.threshold == 0.6


# --- expiry -------------------------------------------------------------------------------------------------------


def test_a_request_past_its_time_fails_here_if_nobody_else_has_said_so(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    assert policy.handle(Tick(), 61.9) == []
    drop, write = policy.handle(Tick(), 62.1)
    assert drop == Drop(run_id="r1.1", reason="expired", trace="trace")
    assert isinstance(write, Write)
    assert (write.record.state, write.record.reason) == ("failed", "expired")
    assert policy.num_running == 0
    assert policy.handle(Tick(), 63.0) == []
    assert policy.handle(Tick(), 70.1) == [GiveUp(request_id="r1", trace="trace")]


def test_a_result_that_cannot_be_stored_is_given_up_after_its_time(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    finish(policy)
    assert policy.handle(Tick(), 61.9) == []
    assert policy.handle(Tick(), 62.1) == [GiveUp(request_id="r1", trace="trace")]
    assert policy.num_held == 0


def test_the_clock_of_the_sender_does_not_shift_the_time_limit(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(make_request(expires_at=WALL + 500 + 10), now=500), 500)
    assert policy.handle(Tick(), 511.9) == []
    assert policy.handle(Tick(), 512.1)[0] == Drop(run_id="r1.1", reason="expired", trace="trace")


# --- draining -----------------------------------------------------------------------------------------------------


def test_an_idle_worker_leaves_at_once(policy: WorkerPolicy) -> None:
    assert policy.handle(StopAsked(), 0.0) == [Exit(reason="drained", held=0)]


def test_a_draining_worker_gives_back_what_the_scheduler_wants_and_at_half_of_its_limit_the_rest(
    policy: WorkerPolicy,
) -> None:
    policy.handle(make_assigned(), 0.0)
    policy.handle(make_assigned(make_request("r2")), 0.0)
    assert policy.handle(StopAsked(), 1.0) == [AskToDrain()]
    assert policy.handle(StopAsked(), 1.0) == []
    assert policy.status(WALL).draining
    assert refusal(policy.handle(make_assigned(make_request("r3")), 1.0)).reason == "draining"
    assert policy.handle(make_assigned(make_request("r2")), 1.0) == [ACCEPTED], "it is held"
    assert policy.handle(DrainAnswered(agreed=True), 1.1) == []
    release = m.Release(epoch=5, attempt=1, request_id="r1")
    assert policy.handle(release, 1.2) == [ACCEPTED, LetGo(run_id="r1.1")]
    assert policy.handle(Tick(), 2.5) == []
    first = only_write(policy.handle(make_step("r1.1", left=True), 2.6))
    assert store(policy, first, 3) == []
    assert policy.handle(Tick(), 15.9) == []
    assert policy.handle(Tick(), 16.0) == [LetGo(run_id="r2.2")]
    assert policy.handle(Tick(), 16.2) == []
    second = only_write(policy.handle(make_step("r2.2", left=True), 16.3))
    assert store(policy, second, 4) == [Exit(reason="drained", held=0)]


def test_a_draining_worker_keeps_what_it_holds_while_no_scheduler_answers(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    policy.handle(StopAsked(), 1.0)
    assert policy.handle(DrainAnswered(agreed=False), 2.0) == []
    assert policy.handle(Tick(), 2.9) == []
    assert policy.handle(Tick(), 3.1) == [AskToDrain()]
    assert policy.handle(Tick(), 3.2) == []
    assert only_write(policy.handle(make_step(), 3.3)).record.state == "running"
    policy.handle(last_step(), 4.0)
    write = only_write(policy.handle(WriteOverdue(run_id="r1.1"), 4.1))
    assert store(policy, write, 3) == [Exit(reason="drained", held=0)]


def test_draining_has_a_limit(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    policy.handle(StopAsked(), 1.0)
    policy.handle(DrainAnswered(agreed=True), 1.1)
    assert policy.handle(Tick(), 30.9) == [LetGo(run_id="r1.1")]
    assert policy.handle(Tick(), 31.1) == [Exit(reason="drain_limit", held=1)]


@pytest.mark.parametrize("how", ["cancel", "overtaken", "assigned anew", "given up"])
def test_a_draining_worker_leaves_when_the_last_request_is_gone(policy: WorkerPolicy, how: str) -> None:
    policy.handle(make_assigned(), 55.0)
    policy.handle(make_step(), 55.0)
    policy.handle(StopAsked(), 56.0)
    match how:
        case "cancel":
            commands = policy.handle(m.Cancel(request_id="r1"), 56.1)
        case "overtaken":
            commands = policy.handle(WriteRefused(run_id="r1.1", found=None, seq=0), 56.1)
        case "assigned anew":
            commands = policy.handle(make_assigned(attempt=2), 56.1)
        case _:
            policy.handle(last_step(), 57.0)
            policy.handle(Tick(), 58.0)
            commands = policy.handle(Tick(), 200.0)
    assert Exit(reason="drained", held=0) in commands


# --- what it tells ------------------------------------------------------------------------------------------------


def test_a_report_says_how_far_each_request_is(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(resume=make_record(), from_seq=6), 0.0)
    step = last_step(positions=[5], token_ids=[25], confidences=[1.0], block_done=False, finish="")
    policy.handle(step, 1.0)
    assert policy.take_report(WALL + 1) == m.Report(
        instance_id=ME,
        sent_at=WALL + 1,
        entries=[
            m.RequestReport(
                request_id="r1",
                attempt=1,
                block_index=1,
                num_blocks=2,
                steps=4,
                steps_in_block=1,
                tokens_committed=5,
                tokens_committed_in_block=1,
                threshold=0.9,
                confidence=(0.5, 0.6, 0.7, 0.8, 1.0),
                next_recompute=False,
                finished=False,
                prompt_tokens=4,
                tokens_left_in_block=3,
                ends_in_block=False,
            )
        ],
    )
    assert policy.take_report(WALL + 2) is None, "no news since"


@pytest.mark.parametrize(
    ("max_tokens", "positions", "token_ids", "left", "ends"),
    [
        (8, [1], [21], 3, False),
        (3, [1], [21], 2, False),  # the last block's end lies behind what is wanted
        (8, [0, 2, 3], [20, EOS, 23], 1, True),  # what is committed behind the first EOS counts for nothing
        (8, [1, 3], [EOS, EOS], 1, True),
    ],
)
def test_a_report_says_what_is_left_of_the_block_and_whether_it_is_the_last(
    policy: WorkerPolicy, max_tokens: int, positions: list[int], token_ids: list[int], left: int, ends: bool
) -> None:
    policy.handle(make_assigned(make_request(max_tokens=max_tokens)), 0.0)
    confidences = [0.9] * len(positions)
    step = make_step(positions=positions, token_ids=token_ids, confidences=confidences, block_done=False)
    policy.handle(step, 1.0)
    report = policy.take_report(WALL)
    assert report is not None
    assert [(entry.tokens_left_in_block, entry.ends_in_block) for entry in report.entries] == [(left, ends)]


def test_the_last_report_says_that_it_is_finished_even_when_it_is_forgotten(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    store(policy, finish(policy), 3)
    report = policy.take_report(WALL)
    assert report is not None
    assert [(entry.finished, entry.steps, entry.block_index) for entry in report.entries] == [(True, 2, 2)]


def test_the_next_step_is_a_recompute_at_a_blocks_start_and_without_a_cache(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(), 0.0)
    policy.handle(make_assigned(make_request("r2", cache="none")), 0.0)
    policy.handle(make_step("r1.1"), 1.0)
    policy.handle(make_step("r2.2", positions=[1], token_ids=[21], confidences=[0.5], block_done=False), 1.0)
    report = policy.take_report(WALL)
    assert report is not None
    assert [entry.next_recompute for entry in report.entries] == [True, True]


def timed(policy: WorkerPolicy, num_passes: int, *, seconds: float, now: float = 1.0) -> None:
    """Cache passes that are profiled at 10 ms."""
    for _ in range(num_passes):
        policy.handle(PassTimed(load=step_load("cache", 32, 100), seconds=seconds), now)


def latency_of_cache_passes(ms: float) -> LatencyProfile:
    return LatencyProfile({1: PassCost(curve=((32.0, 0.6 * ms),), cache_step_ms=0.2 * ms, key_ms=0.002 * ms)})


@pytest.fixture
def measuring() -> WorkerPolicy:
    return WorkerPolicy(make_instance(), latency_of_cache_passes(10.0))


def test_the_latency_ratio_is_the_median_of_measured_over_profiled(measuring: WorkerPolicy) -> None:
    assert measuring.status(WALL).latency_ratio == 1.0
    timed(measuring, 15, seconds=0.012)
    timed(measuring, 15, seconds=0.5)
    timed(measuring, 3, seconds=0.013)
    assert measuring.latency_ratio == pytest.approx(1.3)
    for _ in range(64):
        measuring.handle(PassTimed(load=step_load("recompute", 100, 100), seconds=9.0), 1.0)
    assert measuring.latency_ratio == 4.0


def test_a_few_passes_say_nothing_of_the_latency_ratio(measuring: WorkerPolicy) -> None:
    timed(measuring, 31, seconds=0.03)
    assert measuring.latency_ratio == 1.0
    timed(measuring, 1, seconds=0.03)
    assert measuring.latency_ratio == pytest.approx(3.0)


@pytest.mark.parametrize("seconds", [0.13, 2.0, 20.0])
def test_a_few_slow_passes_tell_the_latency_ratio(seconds: float) -> None:
    policy = WorkerPolicy(make_instance(), latency_of_cache_passes(1e3 * seconds / 1.5))
    policy.handle(make_assigned(make_request(expires_at=WALL + 1e4)), 0.0)
    now = 0.0
    for number in range(1, 41):
        now += seconds
        policy.handle(Tick(), now - seconds / 2)  # a pass is under way
        timed(policy, 1, seconds=seconds, now=now)
        assert policy.latency_ratio == pytest.approx(1.0 if number < 8 else 1.5), number


def test_only_the_passes_of_the_last_seconds_count() -> None:
    policy = WorkerPolicy(make_instance(), latency_of_cache_passes(1000.0))
    for number in range(40):
        timed(policy, 1, seconds=0.9 if number < 29 else 0.8, now=number)
    assert policy.latency_ratio == pytest.approx(0.8)


def test_an_idle_worker_forgets_its_latency_ratio(measuring: WorkerPolicy) -> None:
    timed(measuring, 40, seconds=0.02, now=5.0)
    measuring.handle(Tick(), 14.9)
    assert measuring.status(WALL).latency_ratio == pytest.approx(2.0)
    measuring.handle(Tick(), 15.0)
    assert measuring.status(WALL).latency_ratio == 1.0


def test_passes_before_a_pause_do_not_count_after_it(measuring: WorkerPolicy) -> None:
    timed(measuring, 40, seconds=0.04, now=5.0)
    timed(measuring, 1, seconds=0.04, now=15.05)
    assert measuring.latency_ratio == 1.0
    timed(measuring, 31, seconds=0.01, now=15.1)
    assert measuring.latency_ratio == pytest.approx(1.0)


def test_the_steps_of_a_watched_request_are_shown_and_of_no_other(policy: WorkerPolicy) -> None:
    policy.handle(make_assigned(make_request("r1", watch=True)), 0.0)
    policy.handle(make_assigned(make_request("r2")), 0.0)
    assert [type(command) for command in policy.handle(make_step("r2.2"), 1.0)] == [Write]
    step = make_step("r1.1", confidences=[0.5, 0.6, 0.7, float("nan")])
    shown, write = policy.handle(step, 1.0)
    assert isinstance(write, Write)
    assert shown == Show(
        step=m.CanvasStep(
            request_id="r1",
            attempt=1,
            instance_id=policy.instance.instance_id,
            tp_degree=policy.instance.tp_degree,
            kind="recompute",
            block_index=0,
            step=1,
            threshold=0.9,
            positions=step.positions,
            token_ids=step.token_ids,
            confidences=[0.5, 0.6, 0.7, 0.0],
        )
    )
    last, *_ = policy.handle(last_step("r1.1"), 1.2)
    assert isinstance(last, Show)
    assert (last.step.step, last.step.block_index) == (2, 1)
