"""The scheduler's rules, one by one: events with times in, the whole command list out."""

import pytest
from msgspec.structs import replace

from services.profile import EngineSection
from services.scheduler import events as e
from tests.unit.scheduler.build import (
    EPOCH,
    FLAT,
    PROFILE,
    Make,
    answered,
    assigned,
    but_wakes,
    held,
    make_record,
    make_request,
    placements,
    run,
    running,
    seen,
    status,
    stored,
    written,
)

# --- rule 1: the record is the truth ------------------------------------------------------------------------------


def test_a_request_is_placed_and_purged_once_it_has_finished(make: Make) -> None:
    scheduler = make()
    assert scheduler.handle(status("a"), 0.0) == [e.WakeAt(3.0)]
    assert scheduler.handle(seen("r1"), 0.0) == [assigned("a", "r1")]
    assert scheduler.handle(answered("accepted"), 0.01) == []
    assert scheduler.handle(e.RecordSeen(make_record(blocks_done=1), 5), 1.0) == []
    assert scheduler.handle(e.RecordSeen(make_record(state="finished"), 6), 2.0) == [e.Purge("r1", "finished")]
    assert scheduler.num_open == 0


def test_a_pinned_threshold_is_what_the_instance_is_told(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"))
    request = make_request(threshold=0.55)
    assert run(scheduler, 0.0, seen(request)) == [assigned("a", request)]
    assert assigned("a", request).assign.threshold == 0.55


def test_a_record_by_another_tells_the_holder_to_drop_it(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    cancelled = make_record(state="cancelled", holder="", reason="client_gone")
    assert run(scheduler, 1.0, e.RecordSeen(cancelled, 5)) == [
        e.SendCancel("r1", "ended_elsewhere"),
        e.Purge("r1", "cancelled"),
    ]


def test_a_request_that_ended_while_it_waited_is_purged(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, seen("r1"))
    cancelled = make_record(state="cancelled", holder="")
    assert run(scheduler, 1.0, e.RecordSeen(cancelled, 5)) == [e.Purge("r1", "cancelled")]
    assert placements(run(scheduler, 1.0, status("a"))) == []


def test_a_final_record_that_comes_before_its_request_ends_it(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), e.RecordSeen(make_record(state="cancelled", holder=""), 5))
    assert run(scheduler, 0.1, seen("r1")) == [e.Purge("r1", "cancelled")]


def test_a_request_sent_again_after_it_was_purged_is_not_run_again(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 1.0, e.RecordSeen(make_record(state="finished"), 5))
    assert run(scheduler, 2.0, seen("r1", seq=9)) == [e.Purge("r1", "finished")]


def test_a_record_of_another_gateways_request_of_that_id_counts_for_nothing(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    assert run(scheduler, 1.0, e.RecordSeen(make_record(state="finished", gateway_id="other"), 5)) == []
    assert scheduler.num_open == 1


def test_a_record_older_than_the_known_one_counts_for_nothing(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 1.0, e.RecordSeen(make_record(blocks_done=2), 6))
    assert run(scheduler, 1.0, e.RecordSeen(make_record(state="released"), 5)) == []


def test_a_record_by_an_instance_that_is_not_thought_to_hold_it_moves_it_there(make: Make) -> None:
    scheduler = make()
    running(scheduler, "r1", "a")
    run(scheduler, 0.5, status("b"), e.RecordSeen(make_record(holder="b", blocks_done=1), 5))
    lost = run(scheduler, 1.0, e.InstanceExited("b"))
    assert lost == [written("released", "worker_lost", attempt=2, after_seq=5, blocks_done=1)]


def test_an_unreadable_record_is_a_loss_and_is_written_over(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 0.5, e.RecordSeen(make_record(blocks_done=1), 5))
    (write,) = run(scheduler, 1.0, e.RecordUnreadable("gw", "r1", 6))
    assert isinstance(write, e.WriteRecord)
    assert (write.after_seq, write.record.attempt, write.record.blocks_done) == (6, 2, 1)
    (assign,) = run(scheduler, 1.1, stored(write, 7))
    assert assign == assigned("a", reason="worker_lost", attempt=2, resume=write.record, from_seq=7)


def test_an_unreadable_record_of_a_waiting_request_is_continued_from(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, seen("r1"), e.RecordUnreadable("gw", "r1", 6))
    assert run(scheduler, 1.0, status("a")) == [assigned("a", from_seq=6)]


def test_an_unreadable_record_on_another_gateways_subject_changes_nothing(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    assert run(scheduler, 1.0, e.RecordUnreadable("other", "r1", 6)) == []


# --- rule 2: a fresh scheduler ------------------------------------------------------------------------------------


def test_on_an_empty_cluster_it_starts_at_once(make: Make) -> None:
    scheduler = make(fresh=True)
    assert scheduler.handle(e.CaughtUp(), 0.0) == [e.AskStatus()]
    assert placements(run(scheduler, 0.0, status("a"), seen("r1"))) == [("r1", "a")]


def test_nothing_is_placed_before_it_has_caught_up(make: Make) -> None:
    scheduler = make(fresh=True)
    assert run(scheduler, 0.0, status("a"), seen("r1"), e.Tick()) == []


def test_a_request_without_a_record_waits_for_the_grace_then_is_placed(make: Make) -> None:
    scheduler = make(fresh=True)
    run(scheduler, 0.0, seen("r1"))
    assert scheduler.handle(e.CaughtUp(), 0.0) == [e.AskStatus(), e.WakeAt(1.5)]
    assert run(scheduler, 1.4, status("a"), e.Tick()) == []
    assert run(scheduler, 1.5, e.Tick()) == [assigned("a")]


def test_a_request_that_an_instance_reports_is_adopted(make: Make) -> None:
    scheduler = make(fresh=True)
    run(scheduler, 0.0, seen("r1"), e.CaughtUp())
    assert run(scheduler, 0.1, status("a", held("r1"))) == []
    assert run(scheduler, 0.2, e.RecordSeen(make_record(state="finished"), 5)) == [e.Purge("r1", "finished")]


def test_once_all_holders_have_reported_it_does_not_wait_for_the_grace(make: Make) -> None:
    scheduler = make(fresh=True)
    run(scheduler, 0.0, seen("r1"), e.RecordSeen(make_record(holder="a"), 5), e.CaughtUp())
    assert placements(run(scheduler, 0.1, seen("r2", seq=2))) == []
    run(scheduler, 0.2, status("a", held("r1"), held("r2")))
    assert placements(run(scheduler, 0.3, seen("r3", seq=3))) == [("r3", "a")]


def test_a_final_record_found_at_the_start_is_purged_not_run(make: Make) -> None:
    scheduler = make(fresh=True)
    assert run(scheduler, 0.0, seen("r1"), e.RecordSeen(make_record(state="finished"), 5)) == [
        e.Purge("r1", "finished")
    ]


def test_a_holder_that_stays_silent_after_the_start_is_lost(make: Make) -> None:
    scheduler = make(fresh=True)
    run(scheduler, 0.0, seen("r1"), e.RecordSeen(make_record(holder="a"), 5))
    run(scheduler, 10.0, e.CaughtUp())  # however long that took: silence counts from here
    assert run(scheduler, 11.5, e.Tick()) == []
    (write,) = run(scheduler, 13.0, e.Tick())
    assert isinstance(write, e.WriteRecord)
    assert (write.reason, write.record.attempt, write.after_seq) == ("worker_lost", 2, 5)


def test_what_the_predecessor_re_placed_is_adopted_at_its_attempt(make: Make) -> None:
    scheduler = make(fresh=True)
    again = make_record(state="released", holder="", attempt=2, reason="worker_lost")
    run(scheduler, 0.0, seen("r1"), e.RecordSeen(again, 5), e.CaughtUp())
    run(scheduler, 0.1, status("a", held("r1", attempt=1)), status("b", held("r1", attempt=2)))
    assert run(scheduler, 1.5, e.Tick()) == []
    run(scheduler, 1.6, e.InstanceExited("a"))
    assert [c.record.attempt for c in run(scheduler, 1.6, e.InstanceExited("b")) if isinstance(c, e.WriteRecord)] == [3]


def test_what_an_instance_has_just_released_is_not_adopted_back(make: Make) -> None:
    scheduler = make(fresh=True)
    released = make_record(state="released", holder="a")
    run(scheduler, 0.0, seen("r1"), e.RecordSeen(released, 5), e.CaughtUp(), status("a", held("r1")))
    assert run(scheduler, 1.5, e.Tick()) == [assigned("a", reason="released", resume=released, from_seq=5)]


def test_a_late_report_still_adopts_what_waits(make: Make) -> None:
    scheduler = make(fresh=True)
    run(scheduler, 0.0, seen("r1"), e.CaughtUp())
    run(scheduler, 1.5, e.Tick())
    assert run(scheduler, 2.0, status("a", held("r1"))) == []


# --- rule 3: losses -----------------------------------------------------------------------------------------------


def test_a_silent_instance_is_lost_and_its_request_placed_elsewhere(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 1.0, e.RecordSeen(make_record(blocks_done=1, token_ids=[4, 5]), 5), status("b"))
    assert run(scheduler, 3.9, status("b"), e.Tick()) == []
    (write,) = run(scheduler, 4.0, e.Tick())
    assert write == written(
        "released",
        "worker_lost",
        attempt=2,
        after_seq=5,
        blocks_done=1,
        token_ids=[4, 5],
    )
    run(scheduler, 4.1, stored(write, 6))
    assert run(scheduler, 4.2, status("b")) == [
        assigned("b", reason="worker_lost", attempt=2, resume=write.record, from_seq=6)
    ]


@pytest.mark.parametrize(
    "sign",
    [status("a", held("r1")), e.RecordSeen(make_record(), 5)],
    ids=["status", "record"],
)
def test_any_sign_of_life_counts(make: Make, sign: e.Event) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 2.0, sign)
    assert run(scheduler, 4.9, e.Tick()) == []
    assert len(run(scheduler, 5.1, e.Tick())) == 1


def test_ticks_are_asked_for_where_silence_would_be_too_long(make: Make) -> None:
    scheduler = make()
    assert scheduler.handle(status("a"), 1.0) == [e.WakeAt(4.0)]
    assert scheduler.handle(status("a"), 2.0) == []
    assert scheduler.handle(e.Tick(), 4.0) == [e.WakeAt(5.0)]
    assert scheduler.handle(e.Tick(), 5.0) == []
    assert scheduler.num_instances() == 0


def test_instances_that_die_together_cost_a_request_one_attempt(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 0.4, status("b"), status("c"))
    lost = scheduler.handle(e.InstanceExited("a"), 0.5)
    (write,) = but_wakes(lost)
    assert e.AskStatus() in lost
    assert run(scheduler, 0.501, stored(write, 5)) == [e.Wait("r1", "no_room")]  # b and c may be dead as well
    assert run(scheduler, 0.502, e.InstanceExited("b")) == []
    (assign,) = run(scheduler, 0.51, status("c"))
    assert isinstance(assign, e.SendAssign)
    assert (assign.instance_id, assign.assign.attempt) == ("c", 2)


def test_an_exited_instance_is_lost_at_once_and_for_ever(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    (write,) = run(scheduler, 0.5, e.InstanceExited("a"))
    assert write == written("released", "worker_lost", attempt=2)
    assert run(scheduler, 0.6, stored(write, 5), status("a")) == [e.Wait("r1", "no_instance")]


def test_a_record_of_an_exited_instance_that_came_late_is_built_upon(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 0.5, e.InstanceExited("a"))
    late = e.RecordSeen(make_record(blocks_done=1), 5)
    (write,) = run(scheduler, 0.6, e.WriteOvertaken("r1", 0, late))
    assert isinstance(write, e.WriteRecord)
    assert (write.after_seq, write.record.attempt, write.record.blocks_done) == (5, 2, 1)


def test_a_request_that_finished_just_before_its_instance_exited_is_done(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 0.5, e.InstanceExited("a"))
    finished = e.RecordSeen(make_record(state="finished"), 5)
    assert run(scheduler, 0.6, e.WriteOvertaken("r1", 0, finished)) == [e.Purge("r1", "finished")]
    assert run(scheduler, 0.6, finished) == []


def test_a_holder_that_wrote_while_it_was_thought_silent_keeps_the_request(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    assert len(run(scheduler, 3.0, e.Tick())) == 1
    run(scheduler, 3.1, e.WriteOvertaken("r1", 0, e.RecordSeen(make_record(blocks_done=1), 5)))
    run(scheduler, 3.2, status("a", held("r1")), e.Tick())
    assert run(scheduler, 4.0, e.RecordSeen(make_record(state="finished"), 6)) == [e.Purge("r1", "finished")]


def test_a_request_that_its_instance_no_longer_lists_is_lost(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    assert run(scheduler, 1.0, status("a")) == []  # it may have been sent before
    assert run(scheduler, 2.9, status("a")) == []
    assert run(scheduler, 3.1, status("a")) == [written("released", "worker_lost", attempt=2)]


def test_a_request_that_is_listed_or_written_about_is_not_lost(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 2.0, status("a", held("r1")))
    assert run(scheduler, 4.0, status("a"), e.RecordSeen(make_record(), 5)) == []
    assert run(scheduler, 6.9, status("a")) == []
    assert len(run(scheduler, 7.1, status("a"))) == 1


def test_after_a_cut_silence_counts_anew(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 2.9, e.Reconnected())
    assert run(scheduler, 5.8, e.Tick()) == []
    assert len(run(scheduler, 6.0, e.Tick())) == 1


# --- rule 4: attempts ---------------------------------------------------------------------------------------------


def test_the_third_loss_is_the_last(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    record = make_record(attempt=3, blocks_done=1)
    run(scheduler, 1.0, e.RecordSeen(record, 5))
    assert run(scheduler, 2.0, e.InstanceExited("a")) == [
        written("failed", "worker_lost", attempt=3, after_seq=5, blocks_done=1)
    ]


def test_a_write_without_an_answer_is_repeated(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    (write,) = run(scheduler, 1.0, e.InstanceExited("a"))
    assert run(scheduler, 3.0, e.WriteUnanswered("r1", 0)) == [write]
    run(scheduler, 3.1, stored(write, 5))
    assert run(scheduler, 3.2, e.WriteUnanswered("r1", 0)) == []


def test_where_what_stands_cannot_be_read_the_write_waits_for_the_stream_to_tell(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    (write,) = run(scheduler, 1.0, e.InstanceExited("a"))
    assert scheduler.handle(e.WriteOvertaken("r1", 0, None), 1.1) == [e.WakeAt(1.35)]
    (again,) = run(scheduler, 1.2, e.RecordUnreadable("gw", "r1", 6))
    assert again == replace_after(write, 6)
    assert run(scheduler, 1.3, stored(again, 7)) == [e.Wait("r1", "no_instance")]


def test_where_the_record_has_gone_the_write_begins_anew(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 0.5, e.RecordSeen(make_record(), 5))
    (write,) = run(scheduler, 1.0, e.InstanceExited("a"))
    run(scheduler, 1.1, e.WriteOvertaken("r1", 5, None))
    assert run(scheduler, 1.4, e.Tick()) == [replace_after(write, 0)]


def replace_after(command: e.Command, seq: int) -> e.WriteRecord:
    assert isinstance(command, e.WriteRecord)
    return e.WriteRecord(command.record, seq, command.reason)


# --- rule 5: time limits and gateways -----------------------------------------------------------------------------


def test_an_expired_request_fails_a_margin_later(make: Make) -> None:
    scheduler = make()
    assert scheduler.handle(seen("r1", expires_at=2.0), 0.0) == [e.Wait("r1", "no_instance"), e.WakeAt(3.0)]
    assert run(scheduler, 2.9, e.Tick()) == []
    (write,) = run(scheduler, 3.0, e.Tick())
    assert write == written("failed", "expired")
    assert run(scheduler, 3.1, stored(write, 5)) == [e.Purge("r1", "failed")]


def test_a_request_past_its_time_limit_is_not_placed(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, seen("r1", expires_at=2.0))
    assert run(scheduler, 2.0, status("a")) == []


def test_the_holder_of_an_expired_request_is_told(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1", expires_at=1.0), answered("accepted"))
    (write,) = run(scheduler, 2.0, e.Tick())
    assert run(scheduler, 2.1, stored(write, 5)) == [e.SendCancel("r1", "ended_elsewhere"), e.Purge("r1", "failed")]


def test_a_record_that_got_in_before_the_expiry_is_built_upon(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1", expires_at=1.0), answered("accepted"))
    run(scheduler, 2.0, e.Tick())
    found = e.RecordSeen(make_record(blocks_done=1, token_ids=[3]), 5)
    (write,) = run(scheduler, 2.1, e.WriteOvertaken("r1", 0, found))
    assert isinstance(write, e.WriteRecord)
    assert (write.record.state, write.record.token_ids, write.after_seq) == ("failed", [3], 5)


def test_a_final_record_that_got_in_before_the_expiry_stands(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1", expires_at=1.0), answered("accepted"))
    run(scheduler, 2.0, e.Tick())
    found = e.RecordSeen(make_record(state="finished"), 5)
    assert run(scheduler, 2.1, e.WriteOvertaken("r1", 0, found)) == [e.Purge("r1", "finished")]


def test_requests_of_a_silent_gateway_are_cancelled_but_not_the_detached(make: Make) -> None:
    scheduler = make()
    detached = make_request("r2", detached=True)
    run(scheduler, 0.0, seen("r1"), seen(detached, seq=2), seen(make_request("r3", gateway_id="other"), seq=3))
    run(scheduler, 5.0, e.GatewaySeen("other"))
    assert run(scheduler, 9.9, e.Tick()) == []
    assert run(scheduler, 10.0, e.Tick()) == [written("cancelled", "gateway_lost")]
    assert run(scheduler, 15.0, e.Tick()) == [
        written("cancelled", "gateway_lost", make_request("r3", gateway_id="other"))
    ]


def test_a_gateway_that_speaks_keeps_its_requests(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, seen("r1"))
    for second in range(1, 20):
        assert run(scheduler, float(second), e.GatewaySeen("gw"), e.Tick()) == []


def test_a_gateways_silence_counts_from_the_start(make: Make) -> None:
    scheduler = make(fresh=True)
    run(scheduler, 0.0, seen("r1"))
    run(scheduler, 20.0, e.CaughtUp())
    run(scheduler, 21.5, e.Tick())
    assert run(scheduler, 29.9, e.Tick()) == []
    assert run(scheduler, 30.0, e.Tick()) == [written("cancelled", "gateway_lost")]


# --- rule 6: what is hopeless -------------------------------------------------------------------------------------


def test_another_model_than_the_profiles_is_unknown(make: Make) -> None:
    scheduler = make()
    request = make_request(model="other-model")
    assert run(scheduler, 0.0, seen(request)) == [written("failed", "unknown_model", request)]


def test_a_request_that_no_instance_could_ever_hold_fails(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a", kv_tokens=256))
    big = make_request(tokens=256)
    assert run(scheduler, 0.0, seen(big)) == [written("failed", "too_long", big)]


def test_without_an_instance_it_waits_and_fails_once_there_is_one(make: Make) -> None:
    scheduler = make()
    big = make_request(tokens=256)
    assert run(scheduler, 0.0, seen(big)) == [e.Wait("r1", "no_instance")]
    assert run(scheduler, 1.0, status("a", kv_tokens=256)) == [written("failed", "too_long", big)]


def test_where_the_profile_promises_more_room_a_small_instance_is_no_reason_to_fail(make: Make) -> None:
    scheduler = make(profile=replace(PROFILE, engine=EngineSection(kv_tokens=2048)))
    run(scheduler, 0.0, status("a", kv_tokens=256))
    assert run(scheduler, 0.0, seen(make_request(tokens=256))) == [e.Wait("r1", "no_room")]


def test_a_request_that_every_instance_refuses_as_too_long_fails(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), status("b"), seen("r1"))
    assert placements(run(scheduler, 0.1, answered("too_long"))) == [("r1", "b")]
    assert run(scheduler, 0.2, answered("too_long", instance_id="b")) == [written("failed", "too_long")]


def test_a_request_that_an_instance_cannot_understand_fails(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1"))
    assert run(scheduler, 0.1, answered("bad_request")) == [written("failed", "engine_error")]


# --- rule 7: where and in what order ------------------------------------------------------------------------------


def test_the_instance_with_the_lowest_step_latency_gets_it(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), status("b"))
    commands = [run(scheduler, 0.0, seen(f"r{i}", seq=i)) for i in (1, 2, 3, 4)]
    assert [placements(c) for c in commands] == [[("r1", "a")], [("r2", "b")], [("r3", "a")], [("r4", "b")]]


def test_a_long_canvas_weighs_more_than_a_short_one(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), status("b"))
    long, short = make_request("long", tokens=256), make_request("short", tokens=32)
    assert placements(run(scheduler, 0.0, seen(long, seq=1))) == [("long", "a")]
    assert placements(run(scheduler, 0.0, seen(short, seq=2))) == [("short", "b")]
    assert placements(run(scheduler, 0.0, seen("next", seq=3))) == [("next", "b")]


def test_a_slow_machine_gets_less(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a", latency_ratio=3.0), status("b"))
    commands = [run(scheduler, 0.0, seen(f"r{i}", seq=i)) for i in (1, 2)]
    assert [placements(c) for c in commands] == [[("r1", "b")], [("r2", "b")]]
    run(scheduler, 0.1, status("a", latency_ratio=0.5))
    assert placements(run(scheduler, 0.2, seen("r3", seq=3))) == [("r3", "a")]


def test_a_flat_latency_profile_spreads_all_the_same(make: Make) -> None:
    scheduler = make(cost=FLAT)
    run(scheduler, 0.0, status("a"), status("b"))
    commands = [run(scheduler, 0.0, seen(f"r{i}", seq=i)) for i in (1, 2)]
    assert [placements(c) for c in commands] == [[("r1", "a")], [("r2", "b")]]


def test_a_tensor_parallel_degree_that_was_not_profiled_costs_what_the_next_lower_does(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a", tp_degree=4))
    assert placements(run(scheduler, 0.0, seen("r1"))) == [("r1", "a")]


@pytest.mark.parametrize("limit", [{"max_requests": 1}, {"kv_tokens": 96 + 95}], ids=["requests", "tokens"])
def test_an_instance_never_gets_more_than_it_can_hold(make: Make, limit: dict[str, int]) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a", **limit))
    assert placements(run(scheduler, 0.0, seen("r1"))) == [("r1", "a")]
    assert run(scheduler, 0.0, seen("r2", seq=2)) == [e.Wait("r2", "no_room")]
    run(scheduler, 0.1, answered("accepted"))
    assert placements(run(scheduler, 1.0, e.RecordSeen(make_record(state="finished"), 5))) == [("r2", "a")]


def test_a_draining_instance_gets_nothing(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a", draining=True), status("b"), e.DrainAsked("b"))
    assert run(scheduler, 0.0, seen("r1")) == [e.Wait("r1", "no_room")]
    run(scheduler, 0.1, status("b"))  # sent before it knew that it drains
    assert placements(run(scheduler, 0.2, status("c"))) == [("r1", "c")]


def test_what_a_draining_instance_releases_goes_elsewhere_at_the_same_attempt(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 1.0, status("b"), e.DrainAsked("a"))
    released = make_record(state="released", blocks_done=1)
    assert run(scheduler, 1.0, e.RecordSeen(released, 5)) == [
        assigned("b", reason="released", resume=released, from_seq=5)
    ]


def test_an_instance_of_another_model_gets_nothing(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a", model="other-model"))
    assert run(scheduler, 0.0, seen("r1")) == [e.Wait("r1", "no_instance")]


def test_priority_then_deadline_then_arrival(make: Make) -> None:
    scheduler = make()
    waiting = [
        seen(make_request("late"), seq=4),
        seen(make_request("soon"), seq=3, deadline=5.0),
        seen(make_request("urgent", priority=1), seq=5),
        seen(make_request("early"), seq=2),
        seen(make_request("flex", priority=-1), seq=1),
    ]
    run(scheduler, 0.0, *waiting)
    commands = run(scheduler, 0.1, status("a", max_requests=9, kv_tokens=99999))
    assert [request_id for request_id, _ in placements(commands)] == ["urgent", "soon", "early", "late", "flex"]


def test_a_long_wait_is_worth_a_level_of_priority(make: Make) -> None:
    scheduler = make(ageing_s=10.0)
    old = seen(make_request("old"), seq=1, arrived_at=1.0)
    run(scheduler, 11.0, old, seen(make_request("peer", priority=1), seq=2, arrived_at=11.0, deadline=30.0))
    run(scheduler, 25.0, seen(make_request("new", priority=1), seq=3, arrived_at=25.0))
    commands = run(scheduler, 25.0, status("a", max_requests=9, kv_tokens=99999))
    assert [request_id for request_id, _ in placements(commands)] == ["peer", "old", "new"]


# --- rule 8: overtaking -------------------------------------------------------------------------------------------


def test_a_small_request_passes_a_big_one_that_does_not_fit(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a", kv_tokens=512), seen(make_request("r1", tokens=256)))
    assert run(scheduler, 0.0, seen(make_request("big", tokens=256), seq=2)) == [e.Wait("big", "no_room")]
    assert placements(run(scheduler, 0.0, seen("small", seq=3))) == [("small", "a")]


def test_a_big_one_that_has_been_overtaken_often_gets_an_instance_kept_for_it(make: Make) -> None:
    scheduler = make(max_overtakes=2)
    run(scheduler, 0.0, status("a", kv_tokens=512))
    run(scheduler, 0.0, seen(make_request("first", tokens=256)), answered("accepted", "first"))
    run(scheduler, 0.0, seen(make_request("big", tokens=256), seq=2))
    for name in ("s1", "s2"):
        assert placements(run(scheduler, 0.0, seen(name, seq=3))) == [(name, "a")]
        run(scheduler, 0.0, answered("accepted", name))
    assert run(scheduler, 0.0, seen("s3", seq=5)) == [e.Wait("s3", "no_room")]
    assert placements(run(scheduler, 0.1, e.RecordSeen(make_record("s1", "finished"), 9))) == []
    assert placements(run(scheduler, 0.1, e.RecordSeen(make_record("s2", "finished"), 10))) == []
    done = e.RecordSeen(make_record("first", "finished"), 11)
    assert placements(run(scheduler, 0.1, done)) == [("big", "a"), ("s3", "a")]


def test_what_is_kept_is_given_back_when_the_request_ends(make: Make) -> None:
    scheduler = make(max_overtakes=1)
    run(scheduler, 0.0, status("a", kv_tokens=512))
    run(scheduler, 0.0, seen(make_request("first", tokens=256)), seen(make_request("big", tokens=256), seq=2))
    assert placements(run(scheduler, 0.0, seen("s1", seq=3))) == [("s1", "a")]
    assert run(scheduler, 0.0, seen("s2", seq=4)) == [e.Wait("s2", "no_room")]
    gone = e.RecordSeen(make_record("big", "cancelled", holder=""), 9)
    assert placements(run(scheduler, 0.1, gone)) == [("s2", "a")]


def test_other_instances_stay_open_while_one_is_kept(make: Make) -> None:
    scheduler = make(max_overtakes=1)
    run(scheduler, 0.0, status("a", kv_tokens=512), status("b", kv_tokens=256))
    run(scheduler, 0.0, seen(make_request("first", tokens=256)), seen(make_request("big", tokens=256), seq=2))
    assert placements(run(scheduler, 0.0, seen("s1", seq=3))) == [("s1", "b")]  # and now a is kept for big
    assert placements(run(scheduler, 0.0, seen("s2", seq=4))) == [("s2", "b")]
    assert run(scheduler, 0.0, seen("s3", seq=5)) == [e.Wait("s3", "no_room")]


# --- rule 9: answers ----------------------------------------------------------------------------------------------


def test_an_unanswered_assignment_is_repeated_to_the_same_instance(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), status("b"), seen("r1"))
    assert run(scheduler, 0.25, answered("unanswered")) == [assigned("a", reason="unanswered")]
    assert run(scheduler, 0.3, answered("accepted")) == []


def test_an_assignment_that_stays_unanswered_is_a_loss(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1"))
    run(scheduler, 2.9, status("a"), answered("unanswered"))
    assert run(scheduler, 3.1, answered("unanswered")) == [written("released", "worker_lost", attempt=2)]


def test_certainly_not_delivered_it_may_go_elsewhere_at_the_same_attempt(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), status("b"), seen("r1"))
    assert run(scheduler, 0.1, answered("undelivered")) == [assigned("b")]


def test_once_it_may_have_been_accepted_no_listener_is_no_proof(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), status("b"), seen("r1"), answered("unanswered"))
    assert run(scheduler, 0.1, answered("undelivered")) == []
    assert run(scheduler, 0.34, e.Tick()) == []
    assert run(scheduler, 0.36, e.Tick()) == [assigned("a", reason="unanswered")]


def test_refused_for_lack_of_room_it_goes_elsewhere(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), status("b"), seen("r1"))
    assert run(scheduler, 0.1, answered("kv_full")) == [assigned("b")]
    assert placements(run(scheduler, 0.1, seen("r2", seq=2))) == [("r2", "b")]  # a is left alone for now


def test_refused_by_the_only_one_it_tries_again_soon(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1"))
    assert scheduler.handle(answered("kv_full"), 0.125) == [e.Wait("r1", "no_room"), e.WakeAt(0.225)]
    assert run(scheduler, 0.2, e.Tick()) == []
    assert run(scheduler, 0.225, e.Tick()) == [assigned("a")]


def test_refused_it_tries_again_at_the_next_status(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1"), answered("kv_full"))
    assert run(scheduler, 0.05, status("a")) == [assigned("a")]


def test_refused_since_it_drains_the_instance_gets_nothing_more(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1"))
    assert run(scheduler, 0.1, answered("draining")) == [e.Wait("r1", "no_room")]
    assert run(scheduler, 0.3, e.Tick(), status("a")) == []


def test_refused_as_stale_it_stands_down(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1"))
    assert run(scheduler, 0.1, answered("stale_epoch")) == [e.StandDown()]


def test_a_status_that_has_seen_a_later_epoch_makes_it_stand_down(make: Make) -> None:
    scheduler = make()
    assert run(scheduler, 0.1, status("a", held("unknown"), epoch=EPOCH + 1)) == [e.StandDown()]


def test_accepted_after_its_end_the_holder_is_told(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1"))
    run(scheduler, 0.1, e.RecordSeen(make_record(state="cancelled", holder=""), 5))
    assert run(scheduler, 0.2, answered("accepted")) == [e.SendCancel("r1", "accepted_too_late")]


def test_a_holder_of_what_has_ended_is_told(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    run(scheduler, 0.1, e.RecordSeen(make_record(state="cancelled", holder=""), 5))
    assert run(scheduler, 1.0, status("a", held("r1"))) == [e.SendCancel("r1", "still_listed")]


def test_an_old_holder_is_left_to_its_next_write_but_its_room_counts(make: Make) -> None:
    scheduler = make()
    running(scheduler, "r1", "a")
    (write,) = run(scheduler, 3.0, e.Tick())
    assert run(scheduler, 3.1, status("b", max_requests=1), stored(write, 5)) == [
        assigned("b", reason="worker_lost", attempt=2, resume=write.record, from_seq=5)  # type: ignore[union-attr]
    ]
    assert run(scheduler, 4.0, status("a", held("r1", attempt=1), max_requests=1)) == []
    assert run(scheduler, 4.0, seen("r2", seq=2)) == [e.Wait("r2", "no_room")]
    assert placements(run(scheduler, 5.0, status("a", max_requests=1))) == [("r2", "a")]


def test_an_answer_that_comes_after_the_loss_changes_nothing(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1"))
    run(scheduler, 0.1, e.InstanceExited("a"))
    assert run(scheduler, 0.2, answered("accepted"), answered("unanswered"), answered("kv_full")) == []


def test_a_status_that_lists_it_counts_as_an_answer(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), seen("r1"), answered("unanswered"), status("a", held("r1")))
    assert run(scheduler, 0.3, answered("unanswered")) == []


def test_what_waits_is_counted_by_its_reason(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, seen("r1"))
    assert scheduler.num_waiting() == {"starting": 0, "no_instance": 1, "no_room": 0}
    fresh = make(fresh=True)
    run(fresh, 0.0, seen("r1"))
    assert fresh.num_waiting()["starting"] == 1
