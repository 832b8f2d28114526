"""Moves and drains: who is asked to release what, and where it goes. Rules 11 to 13.

With `LINE` a batch of k requests of two blocks takes 1 + 4k ms a step.
"""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import messages as m
from services.costs import mean_pass
from services.scheduler import events as e
from services.scheduler.instances import resident_of
from services.scheduler.policy import Scheduler
from tests.unit.scheduler.build import (
    FLAT,
    LINE,
    Make,
    answered,
    assigned,
    held,
    make_acting,
    make_record,
    make_request,
    placements,
    release_answered,
    released,
    releases,
    run,
    seen,
    status,
    stored,
    written,
)
from tests.unit.scheduler.world import World


def holding(scheduler: Scheduler, instance_id: str, *requests: m.GenerateRequest | str, now: float = 0.0) -> None:
    """The instance runs these, as their records say."""
    for seq, request in enumerate(requests, start=1):
        event = seen(request, seq=seq)
        record = make_record(event.request.request_id, holder=instance_id)
        run(scheduler, now, e.RecordSeen(record, 10 + seq), event)
    run(scheduler, now, status(instance_id, *[held(request) for request in requests]))


def given_back(request_id: str = "r1", holder: str = "a", seq: int = 50, blocks_done: int = 1) -> e.RecordSeen:
    return e.RecordSeen(make_record(request_id, "released", holder, blocks_done=blocks_done), seq)


# --- rule 11: a move ----------------------------------------------------------------------------------------------


def test_a_request_moves_where_its_steps_are_shorter_and_keeps_its_attempt(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    assert run(scheduler, 1.0, status("b")) == [released("a", "r1")]
    assert run(scheduler, 1.1, release_answered("accepted")) == []
    record = given_back()
    assert run(scheduler, 1.2, record) == [assigned("b", reason="moved", resume=record.record, from_seq=50)]
    assert run(scheduler, 1.3, answered("accepted", instance_id="b")) == []
    final = make_record(state="finished", holder="b", moves=1)
    assert run(scheduler, 2.0, e.RecordSeen(final, 60)) == [e.Purge("r1", "finished")]


def test_room_is_kept_where_it_goes_and_where_it_is(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    run(scheduler, 1.0, status("a", held("r1"), held("r2"), max_requests=2))
    assert releases(run(scheduler, 1.5, status("b", max_requests=1))) == [("r1", "a")]
    assert run(scheduler, 1.6, seen("r3", seq=3)) == [e.Wait("r3", "no_room")]
    assert placements(run(scheduler, 1.7, given_back())) == [("r1", "b"), ("r3", "a")]


def test_where_it_was_to_go_has_died_it_goes_wherever_it_fits(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    run(scheduler, 1.0, status("b"), release_answered("accepted"))
    assert run(scheduler, 1.1, e.InstanceExited("b")) == []
    record = given_back()
    assert run(scheduler, 1.2, record) == [assigned("a", reason="released", resume=record.record, from_seq=50)]


@pytest.mark.parametrize("answer", ["kv_full", "draining", "undelivered"])
def test_where_it_was_to_go_cannot_take_it_it_goes_wherever_it_fits(make: Make, answer: str) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    record = given_back()
    run(scheduler, 1.0, status("b"), release_answered("accepted"), record)
    told = run(scheduler, 1.1, answered(answer, instance_id="b"))
    assert told == [assigned("a", reason="released", resume=record.record, from_seq=50)]


def test_where_it_was_to_go_drains_meanwhile_it_goes_elsewhere(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    run(scheduler, 1.0, status("b"), status("c"), e.DrainAsked("b"))
    assert placements(run(scheduler, 1.1, given_back())) == [("r1", "c")]


def test_a_holder_that_dies_while_it_releases_is_a_loss_as_any_other(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    run(scheduler, 1.0, status("b"))
    lost = run(scheduler, 1.1, e.InstanceExited("a"))
    assert lost[0] == written("released", "worker_lost", attempt=2, after_seq=11)
    told = run(scheduler, 1.2, stored(lost[0], 60), status("b", max_requests=1))
    assert placements(told) == [("r1", "b")], "no room is kept twice"


def test_a_request_that_ends_before_it_is_released_leaves_no_trace(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    run(scheduler, 1.0, status("b", max_requests=1))
    done = run(scheduler, 1.1, e.RecordSeen(make_record(state="finished"), 50), seen("r3", seq=3))
    assert done[0] == e.Purge("r1", "finished")
    assert placements(done) == [("r3", "b")]


@pytest.mark.parametrize("answer", ["not_held", "undelivered", "unanswered"])
def test_a_release_that_is_not_agreed_to_is_off_and_tried_again_later(make: Make, answer: str) -> None:
    scheduler = make(move_every_s=0.5)
    holding(scheduler, "a", "r1", "r2")
    assert releases(run(scheduler, 1.0, status("b", max_requests=1))) == [("r1", "a")]
    assert run(scheduler, 1.1, release_answered(answer)) == []
    assert run(scheduler, 1.4, e.Tick()) == []
    assert releases(run(scheduler, 1.5, e.Tick())) == [("r1", "a")]


def test_a_release_that_was_heard_though_its_answer_was_lost_hands_over_all_the_same(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    run(scheduler, 1.0, status("b"))
    run(scheduler, 1.05, release_answered("unanswered"))
    record = given_back()
    assert run(scheduler, 1.06, record) == [assigned("b", reason="released", resume=record.record, from_seq=50)]


def test_a_release_refused_as_stale_makes_it_stand_down(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    run(scheduler, 1.0, status("b"))
    assert run(scheduler, 1.1, release_answered("stale_epoch")) == [e.StandDown()]


def test_a_fresh_scheduler_places_what_its_predecessor_had_released(make: Make) -> None:
    scheduler = make(fresh=True)
    record = given_back()
    run(scheduler, 0.0, seen("r1"), record, e.CaughtUp(), status("a"), status("b", held("r2")))
    assert run(scheduler, 1.5, e.Tick()) == [assigned("a", reason="released", resume=record.record, from_seq=50)]


# --- rule 12: drains ----------------------------------------------------------------------------------------------


def test_all_that_has_room_elsewhere_moves_off_a_draining_instance_whatever_it_gains(make: Make) -> None:
    scheduler = make(cost=FLAT)
    holding(scheduler, "a", "r1", "r2", "r3", "r4")
    run(scheduler, 1.0, status("b", max_requests=3))
    told = run(scheduler, 2.0, e.DrainAsked("a"))
    assert told == [released("a", f"r{i}", "drain") for i in (1, 2, 3)], "and one goes on where it is"
    assert placements(run(scheduler, 2.1, given_back("r1"))) == [("r1", "b")]
    done = e.RecordSeen(make_record("r1", "finished", "b"), 60)
    assert releases(run(scheduler, 3.0, done)) == [("r4", "a")], "room has come"


def test_nothing_moves_off_a_draining_instance_without_room_elsewhere(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    assert run(scheduler, 1.0, e.DrainAsked("a")) == []
    assert run(scheduler, 2.0, status("b", kv_tokens=95)) == []
    assert run(scheduler, 3.0, e.RecordSeen(make_record(state="finished"), 50)) == [e.Purge("r1", "finished")]


def test_a_drain_that_a_status_tells_counts_too(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1")
    run(scheduler, 1.0, status("b"))
    assert run(scheduler, 2.0, status("a", held("r1"), draining=True)) == [released("a", "r1", "drain")]


# --- rule 13: the balance -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "moves"), [(0.4, True), (0.5, False), (1.0, False)])
def test_the_gain_must_be_worth_it(make: Make, share: float, moves: bool) -> None:
    scheduler = make(move_gain_share=share)  # 5 ms instead of 9 are 44 % less
    holding(scheduler, "a", "r1", "r2")
    assert bool(run(scheduler, 1.0, status("b"))) == moves


def test_where_all_are_alike_nothing_moves(make: Make) -> None:
    flat = make(cost=FLAT)
    holding(flat, "a", "r1", "r2", "r3")
    assert run(flat, 1.0, status("b")) == []
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    holding(scheduler, "b", "r3")
    assert run(scheduler, 1.0, status("b", held("r3"))) == []


def test_a_request_in_its_last_block_stays(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    run(scheduler, 0.5, e.RecordSeen(make_record("r1", blocks_done=1), 20))
    assert run(scheduler, 1.0, status("b")) == [released("a", "r2")]


def test_the_most_urgent_moves_first(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", make_request("r2", priority=1))
    assert run(scheduler, 1.0, status("b")) == [released("a", "r2")]


def test_only_so_many_move_at_once(make: Make) -> None:
    scheduler = make(max_moves=2)
    holding(scheduler, "a", *[f"r{i}" for i in range(1, 7)])
    both = run(scheduler, 1.0, status("b", max_requests=9))
    assert releases(both) == [("r1", "a"), ("r2", "a")]
    assert releases(run(scheduler, 2.0, status("c"))) == [], "a is letting go of two already"
    told = run(scheduler, 3.0, given_back("r1"))
    assert (placements(told), releases(told)) == ([("r1", "b")], [("r3", "a")])


def test_while_somebody_waits_nobody_takes_the_room(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2", make_request("r3", tokens=256))
    big = make_request("big", tokens=256)
    run(scheduler, 1.0, status("a", held("r1"), kv_tokens=500), seen(big, seq=9))
    assert run(scheduler, 2.0, status("b", kv_tokens=200)) == []
    gone = e.RecordSeen(make_record("big", "cancelled", ""), 70)
    assert releases(run(scheduler, 3.0, gone)) == [("r1", "a"), ("r2", "a")]


def test_it_is_looked_for_moves_only_so_often(make: Make) -> None:
    scheduler = make(move_every_s=0.5)
    holding(scheduler, "a", "r1", "r2", "r3")
    run(scheduler, 1.0, status("b"))
    told = scheduler.handle(status("b", latency_ratio=0.5), 1.2)
    assert told == [e.WakeAt(1.5)]
    assert releases(run(scheduler, 1.5, e.Tick())) == [("r2", "a")]


def test_a_slow_machine_is_relieved(make: Make) -> None:
    scheduler = make()
    holding(scheduler, "a", "r1", "r2")
    holding(scheduler, "b", "r3")
    assert run(scheduler, 1.0, status("a", held("r1"), held("r2"), latency_ratio=2.0)) == [released("a", "r1")]


Where = dict[str, str]  # request -> instance


def settle(scheduler: Scheduler, now: float, told: list[e.Command], where: Where, visited: set[Any]) -> int:
    """Hands over what was released, as workers do at once. Returns how many moved."""
    count = 0
    for command in told:
        if not isinstance(command, e.SendRelease):
            continue
        request_id = command.release.request_id
        where[request_id] = scheduler._open[request_id].moving_to
        assert tuple(sorted(where.items())) not in visited, "it has been so before"
        visited.add(tuple(sorted(where.items())))
        count += 1
    for command in told:
        if isinstance(command, e.SendRelease):
            request_id = command.release.request_id
            seq = scheduler._open[request_id].record_seq
            back = given_back(request_id, command.instance_id, seq + 1, blocks_done=0)
            assert placements(run(scheduler, now, back)) == [(request_id, where[request_id])]
            running = make_record(request_id, "running", where[request_id])
            run(scheduler, now, e.RecordSeen(running, seq + 2))
    return count


def step_ms(batch: list[m.GenerateRequest], ratio: float) -> float:
    return ratio * LINE.ms(mean_pass([resident_of(r, 0, r.num_blocks) for r in batch], 8.0))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(2, 6), st.integers(1, 200)), min_size=1, max_size=9),
    ratios=st.lists(st.floats(0.6, 3.0), min_size=2, max_size=4),
    noise=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**32),
)
def test_requests_never_move_in_circles_and_end_where_none_would_gain(
    lengths: list[tuple[int, int]], ratios: list[float], noise: float, seed: int
) -> None:
    """Whatever they weigh, wherever they begin, and though the measured latencies tremble."""
    rng = random.Random(seed)
    scheduler = make_acting(instance_silent_s=1e6, gateway_silent_s=1e6)
    speeds = {f"i{n}": ratio for n, ratio in enumerate(ratios)}
    requests = {
        f"r{n}": make_request(f"r{n}", tokens=32 * blocks, prompt=prompt) for n, (blocks, prompt) in enumerate(lengths)
    }
    where = {request_id: rng.choice(list(speeds)) for request_id in requests}
    for instance_id, speed in speeds.items():
        scheduler.handle(status(instance_id, max_requests=99, kv_tokens=10**6, latency_ratio=speed), 0.0)
    for seq, (request_id, request) in enumerate(requests.items(), start=1):
        scheduler.handle(e.RecordSeen(make_record(request_id, "running", where[request_id]), 10 * seq), 0.0)
        scheduler.handle(seen(request, seq=seq, expires_at=1e6), 0.0)
    visited: set[Any] = {tuple(sorted(where.items()))}
    quiet = 0
    for look in range(1, 200):
        moved = 0
        for instance_id, speed in speeds.items():
            ratio = speed * rng.uniform(1 - noise, 1 + noise)
            listed = [held(requests[request_id]) for request_id, at in where.items() if at == instance_id]
            sign = status(instance_id, *listed, max_requests=99, kv_tokens=10**6, latency_ratio=ratio)
            told = run(scheduler, float(look), sign)
            moved += settle(scheduler, look + 0.01, told, where, visited)
        quiet = 0 if moved else quiet + 1
        if quiet == 5:
            break
    assert quiet == 5, "they never come to rest"
    scheduler.check_invariants()
    if noise:
        return
    batches = {i: [requests[r] for r, at in where.items() if at == i] for i in speeds}
    for request_id, at in where.items():
        here = step_ms(batches[at], speeds[at])
        for other in speeds.keys() - {at}:
            there = step_ms([*batches[other], requests[request_id]], speeds[other])
            assert there >= 0.8 * here * (1 - 1e-9)


# --- in the world -------------------------------------------------------------------------------------------------


def test_a_drained_worker_is_empty_after_a_block_and_nothing_costs_an_attempt() -> None:
    world = World()
    first, second = world.add_worker(kv_tokens=4096), world.add_worker(kv_tokens=4096)
    for _ in range(2):
        world.submit(blocks=8)
    world.step_in_peace()
    world.step_in_peace()
    assert (len(first.runs), len(second.runs)) == (1, 1)
    first.draining = True
    world.tell(e.DrainAsked(first.id))
    world.settle_messages()
    world.step_in_peace()
    assert (len(first.runs), len(second.runs)) == (0, 2)
    world.end_in_peace()
    records = [event.record for event in world.progress.values()]
    assert {record.request_id: record.moves > 0 for record in records}["r0"]
    assert {record.attempt for record in records} == {1}


def test_when_an_instance_comes_half_of_the_others_requests_move_there() -> None:
    world = World()
    world.add_worker(max_requests=6, kv_tokens=4096)
    for _ in range(6):
        world.submit(blocks=8)
    world.step_in_peace()
    fresh = world.add_worker(max_requests=6, kv_tokens=4096)
    for _ in range(4):
        world.step_in_peace()
    assert len(fresh.runs) == 3
    assert sum(event.record.moves for event in world.progress.values()) == 3
    world.end_in_peace()
    assert {event.record.blocks_done for event in world.progress.values()} == {8}
    assert world.losses_written == 0
