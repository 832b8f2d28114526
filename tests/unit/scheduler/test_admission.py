"""Who is refused, what a newcomer starts at, and that what happens at one moment has no order. Rules 7 and 10."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from contracts import messages as m
from services.costs import LatencyProfile, PassCost
from services.profile import Decoding
from services.scheduler import events as e
from services.scheduler.admission import cap_for, least_s, wait_s
from services.scheduler.instances import Instance
from services.scheduler.policy import Scheduler
from tests.builders import make_cost
from tests.unit.scheduler.build import (
    LINE,
    Make,
    answered,
    assigned,
    held,
    load_state,
    make_acting,
    make_record,
    make_request,
    placements,
    released,
    run,
    running,
    seen,
    status,
    written,
)

DECODING = Decoding(thresholds=(0.5, 0.9), steps_by_threshold=(4.0, 8.0), threshold=0.9)
CREATED_AT = 1000.0


def with_slo(name: str, slo_s: float, seq: int = 1, **fields: Any) -> e.RequestSeen:
    """Arrives at time 0, on a clock that is CREATED_AT behind the wall clock."""
    request = make_request(name, created_at=CREATED_AT, deadline_at=CREATED_AT + slo_s, **fields)
    return seen(request, seq=seq, deadline=slo_s)


def instance(ratio: float = 1.0, tp_degree: int = 1) -> Instance:
    made = Instance("a", 0.0, LatencyProfile({1: LINE}), DECODING.steps_per_block)
    made.latency_ratio, made.tp_degree = ratio, tp_degree
    return made


# --- bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected_ms"),
    [
        ({}, 10.6 + 2 * 4.2),  # a canvas of 96, then a block of 32; three steps are 0.75 of four
        ({"ignore_eos": True}, 2 * (10.6 + 2 * 4.2)),
        ({"threshold": 0.9}, 10.6 + 5 * 4.2),
        ({"threshold": 0.7}, 10.6 + 2 * 4.2),
        ({"threshold": 0.1}, 10.6 + 2 * 4.2),
        ({"cache": "none"}, 3 * 10.6),
    ],
)
def test_the_least_time_is_that_of_the_fewest_steps_alone(fields: dict[str, Any], expected_ms: float) -> None:
    latency = LatencyProfile({1: LINE})
    assert least_s(make_request(**fields), DECODING, latency, [instance()]) == pytest.approx(expected_ms / 1000)


def test_the_fastest_instance_counts_and_slowness_may_pass() -> None:
    twice_as_fast = PassCost(curve=((0.0, 0.5), (1000.0, 50.5)))
    latency = LatencyProfile({1: LINE, 2: twice_as_fast})
    alone = [
        least_s(make_request(), DECODING, latency, instances)
        for instances in ([instance()], [instance(3.0)], [instance(0.5)], [instance(), instance(1.0, 2)], [])
    ]
    assert alone == pytest.approx([0.019, 0.019, 0.0095, 0.0095, 0.0])


def test_the_wait_is_for_as_many_as_are_ahead_and_one_more() -> None:
    load = load_state(floor_s=40.0, num_open=20, capacity_s=20.0, horizon_s=10.0).load  # a second of an instance each
    assert [wait_s(load, ahead) for ahead in (0, 3)] == [1.0, 4.0]
    for nothing in ({"capacity_s": 0.0}, {"horizon_s": 0.0}, {"num_open": 0}):
        assert wait_s(replace(load, **nothing), 3) == 0.0


def test_a_newcomer_gets_the_cap_of_its_priority_or_of_the_next_below() -> None:
    load = load_state({2: 0.9, 0: 0.7, -1: 0.6}).load
    assert [cap_for(load, priority, 0.8) for priority in (3, 2, 1, 0, -1, -2)] == [0.9, 0.9, 0.7, 0.7, 0.6, 0.6]
    assert cap_for(load_state().load, 0, 0.8) == 0.8


# --- rule 10: refusals --------------------------------------------------------------------------------------------


def test_an_slo_that_no_idle_cluster_could_keep_is_refused_for_good(make: Make) -> None:
    scheduler = make(admission="reject")
    run(scheduler, 0.0, status("a"))
    event = with_slo("r1", 0.0179)  # it takes 17.94 ms at least
    assert run(scheduler, 0.0, event) == [written("failed", "slo_too_short", event.request)]
    assert placements(run(scheduler, 0.0, with_slo("r2", 0.018, seq=2))) == [("r2", "a")]


def test_best_effort_takes_everything(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), load_state())
    assert placements(run(scheduler, 0.0, with_slo("r1", 0.0001))) == [("r1", "a")]


def test_who_would_be_late_after_its_wait_is_told_when_to_come_again(make: Make) -> None:
    scheduler = make(admission="reject")
    run(scheduler, 0.0, status("a", max_requests=1), load_state())  # one ends each second
    run(scheduler, 0.0, seen("r0"), answered("accepted", "r0"))
    assert run(scheduler, 0.0, with_slo("r1", 1.5, seq=2)) == [e.Wait("r1", "no_room")]
    event = with_slo("r2", 1.5, seq=3)
    (write,) = run(scheduler, 0.0, event)
    assert isinstance(write, e.WriteRecord)
    assert write.record.retry_after_s == pytest.approx(2.0 + 0.01794 - 1.5, abs=1e-4)
    assert (write.record.state, write.reason, write.after_seq) == ("failed", "overloaded", 0)
    assert run(scheduler, 0.5, e.WriteUnanswered("r2", 0)) == [write], "the same again"


def test_who_finds_room_or_has_no_deadline_is_not_refused(make: Make) -> None:
    scheduler = make(admission="reject")
    run(scheduler, 0.0, status("a", max_requests=1), load_state(floor_s=1000.0))
    assert placements(run(scheduler, 0.0, with_slo("r1", 0.5))) == [("r1", "a")]
    assert run(scheduler, 0.0, seen("r2", seq=2)) == [e.Wait("r2", "no_room")]


def test_without_an_instance_or_a_fresh_load_state_nobody_is_overloaded(make: Make) -> None:
    scheduler = make(admission="reject", load_silent_s=3.0)
    run(scheduler, 0.0, load_state(floor_s=1000.0))
    assert run(scheduler, 0.0, with_slo("r1", 0.001)) == [e.Wait("r1", "no_instance")]
    run(scheduler, 3.1, status("a", max_requests=1), seen("full", seq=2), answered("accepted", "full"))
    late = seen(make_request("r3", created_at=CREATED_AT, deadline_at=CREATED_AT + 4.0), seq=3, deadline=4.0)
    assert run(scheduler, 3.1, late) == [e.Wait("r3", "no_room")]


def test_a_request_that_has_run_is_never_refused(make: Make) -> None:
    scheduler = make(admission="reject")
    event = with_slo("r1", 0.5)
    run(scheduler, 0.0, status("a"), event, answered("accepted"), load_state(floor_s=1000.0))
    back = make_record(event.request, "released", blocks_done=1)
    told = run(scheduler, 0.4, e.DrainAsked("a"), e.RecordSeen(back, 5))
    assert told == [e.Wait("r1", "no_room")]


# --- rule 7: the first threshold ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caps", "priority", "expected"),
    [({0: 0.7}, 0, 0.7), ({0: 0.7}, 1, 0.7), ({1: 0.8, 0: 0.5}, 1, 0.8), ({0: 0.99}, 0, 0.9), ({}, 0, 0.9)],
)
def test_a_newcomer_starts_at_its_cap(make: Make, caps: dict[int, float], priority: int, expected: float) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), load_state(caps))
    request = make_request(priority=priority)
    assert run(scheduler, 1.0, seen(request)) == [assigned("a", request, threshold=expected)]


def test_a_pin_is_not_capped(make: Make) -> None:
    scheduler = make()
    run(scheduler, 0.0, status("a"), load_state({0: 0.5}))
    request = make_request(threshold=0.85)
    assert run(scheduler, 0.0, seen(request)) == [assigned("a", request, threshold=0.85)]


def test_an_old_load_state_caps_nobody(make: Make) -> None:
    scheduler = make(load_silent_s=3.0)
    run(scheduler, 0.0, status("a"), load_state({0: 0.5}))
    run(scheduler, 3.0, status("a"))
    assert run(scheduler, 3.1, seen("r1")) == [assigned("a", threshold=0.9)]


def test_a_request_that_has_run_goes_on_no_higher_than_it_ran_last(make: Make) -> None:
    scheduler = make()
    running(scheduler)
    blocks = [make_cost(mean_threshold=0.9), make_cost(mean_threshold=0.6)]
    back = make_record(state="released", blocks_done=2, blocks=blocks)
    told = run(scheduler, 1.0, status("b"), e.DrainAsked("a"), e.RecordSeen(back, 5))
    assert told[-1] == assigned("b", reason="released", resume=back, from_seq=5, threshold=0.6)


# --- the queue ----------------------------------------------------------------------------------------------------


def test_a_deadline_that_has_passed_puts_nobody_behind(make: Make) -> None:
    scheduler = make(ageing_s=1000.0)
    run(scheduler, 0.0, seen("missed", seq=1, deadline=1.0), seen("plain", seq=0), seen("soon", seq=3, deadline=9.0))
    run(scheduler, 2.0, e.Tick())
    commands = run(scheduler, 2.0, status("a"))
    assert [request_id for request_id, _ in placements(commands)] == ["soon", "plain", "missed"]


def taught(make: Make, **config: Any) -> Scheduler:
    """Finished requests took 16 steps, which are 16 ms and 64 for each request on the instance a."""
    scheduler = make(**({"fill_share": 0.5} | config))
    blocks = [make_cost(recompute_steps=1, cache_steps=7)] * 2
    for number in range(8):
        run(scheduler, 0.0, e.RecordSeen(make_record(f"p{number}", "finished", blocks=blocks), number + 1))
    run(scheduler, 0.0, status("a"))
    return scheduler


@pytest.mark.parametrize(
    ("fill_share", "slo_s", "expected"),
    [
        (0.5, 0.5, ["r1", "r2", "r3"]),  # 208 ms for three, 272 for four
        (0.5, 0.41, ["r1", "r2"]),
        (0.5, 0.159, ["r1", "r2", "r3", "r4"]),  # 80 ms alone: it cannot be kept so
        (0.5, None, ["r1", "r2", "r3", "r4"]),
        (0.0, 0.5, ["r1", "r2", "r3", "r4"]),
    ],
)
def test_an_instance_is_filled_only_as_far_as_a_mean_request_is_in_time(
    make: Make, fill_share: float, slo_s: float | None, expected: list[str]
) -> None:
    scheduler = taught(make, fill_share=fill_share)
    commands = run(scheduler, 0.0, *(seen(f"r{n}", seq=n, deadline=slo_s) for n in range(1, 6)))
    assert [request_id for request_id, _ in placements(commands)] == expected


def test_a_tight_newcomer_does_not_join_those_beside_whom_it_would_be_late(make: Make) -> None:
    scheduler = taught(make)
    run(scheduler, 0.0, *(seen(f"r{n}", seq=n, deadline=9.0) for n in range(1, 4)))
    commands = run(
        scheduler, 0.1, seen("tight", seq=8, arrived_at=0.1, deadline=0.4), seen("loose", seq=9, deadline=9.0)
    )
    assert [request_id for request_id, _ in placements(commands)] == ["loose"]


def test_who_waits_until_it_is_late_lets_the_others_pass(make: Make) -> None:
    """A fourth one would take 272 ms, at 0.5 about 125."""
    scheduler = taught(make)
    run(scheduler, 0.0, *(seen(f"r{n}", seq=n, deadline=0.5) for n in range(1, 5)))
    run(scheduler, 0.3, e.Tick(), status("a"), seen("r5", seq=5, arrived_at=0.3, deadline=0.8))
    still_first = run(scheduler, 0.3, e.RecordSeen(make_record("r1", "finished"), 50))
    assert [request_id for request_id, _ in placements(still_first)] == ["r4"]
    run(scheduler, 0.31, seen("r6", seq=6, arrived_at=0.31, deadline=0.55), e.Tick())
    run(scheduler, 0.5, e.Tick(), seen("r7", seq=7, arrived_at=0.5, deadline=1.0))
    after_it = run(scheduler, 0.5, e.RecordSeen(make_record("r2", "finished"), 51))
    assert [request_id for request_id, _ in placements(after_it)] == ["r5"]
    last = run(scheduler, 0.5, e.RecordSeen(make_record("r3", "finished"), 52))
    assert [request_id for request_id, _ in placements(last)] == ["r7"], "r6, which came earlier, is late"


def test_a_drain_does_not_ask_whether_its_requests_would_be_in_time_elsewhere(make: Make) -> None:
    scheduler = taught(make, move_gain_share=1.0)
    for n in range(1, 4):
        run(scheduler, 0.0, e.RecordSeen(make_record(f"r{n}"), 20 + n), seen(f"r{n}", seq=n, deadline=0.5))
    run(scheduler, 0.0, e.RecordSeen(make_record("r9", holder="b"), 40), seen("r9", seq=9, deadline=0.5))
    run(scheduler, 0.0, status("b", held("r9")))
    run(scheduler, 0.2, status("a", *(held(f"r{n}") for n in range(1, 4))))
    drained = run(scheduler, 0.4, e.DrainAsked("b"))
    assert [c for c in drained if isinstance(c, e.SendRelease)] == [released("b", "r9", "drain")]


def test_a_late_one_that_runs_makes_way_at_its_block_s_end(make: Make) -> None:
    scheduler = taught(make)
    run(scheduler, 0.0, *(seen(f"r{n}", seq=n, deadline=0.5) for n in range(1, 4)))
    for n in range(1, 4):
        run(scheduler, 0.1, answered("accepted", f"r{n}"), e.RecordSeen(make_record(f"r{n}"), 20 + n))
    full = run(scheduler, 0.2, seen("new", seq=8, arrived_at=0.2, deadline=0.7))
    assert not [c for c in full if isinstance(c, e.SendRelease)], "they may all be in time"
    late = run(scheduler, 0.52, e.Tick(), seen("newer", seq=9, arrived_at=0.5, deadline=1.0))
    assert [c for c in late if isinstance(c, e.SendRelease)] == [
        released("a", "r3", "late"),
        released("a", "r2", "late"),
    ]
    back = make_record("r3", "released", blocks_done=1)
    after = run(scheduler, 0.55, e.RecordSeen(back, 30))
    assert [request_id for request_id, _ in placements(after)] == ["new", "newer"], "r2 is about to leave"


# --- one moment ---------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), order=st.randoms(use_true_random=False))
def test_the_order_of_what_happens_at_one_moment_does_not_matter(seed: int, order: random.Random) -> None:
    """Arrivals, ends, statuses, drains, losses and answers: a scheduler that is told in another order decides alike."""
    one, other = make_acting(admission="reject"), make_acting(admission="reject")
    for moment in range(1, 6):
        events = what_happens(random.Random(seed + moment), moment)
        shuffled = list(events)
        order.shuffle(shuffled)
        told = one.handle_all(events, float(moment))
        assert told == other.handle_all(shuffled, float(moment))
        one.check_invariants()


def what_happens(rng: random.Random, moment: int) -> list[e.Event]:
    """Each sender says one thing. Requests come in threes."""
    events: list[e.Event] = [load_state({0: rng.choice([0.5, 0.7, 0.9])}, floor_s=rng.uniform(0, 60)), e.Tick()]
    for n in range(3):
        name = f"r{3 * moment + n}"
        slo_s = rng.choice([0.001, 0.5, 5.0])
        request = make_request(name, deadline_at=CREATED_AT + slo_s, tokens=32 * rng.randint(1, 6))
        events.append(seen(request, seq=3 * moment + n, deadline=moment + slo_s))
        past = f"r{3 * (moment - 1) + n}"
        state: m.State = rng.choice(["running", "finished", "released"])
        events.append(e.RecordSeen(make_record(past, state, rng.choice("abc"), blocks_done=1), 100 * moment + n))
        older = rng.choice([past, f"r{3 * (moment - 2) + n}"])
        answer = rng.choice(["accepted", "kv_full", "undelivered", "unanswered"])
        events.append(answered(answer, older, rng.choice("abc")))
    for instance_id in "abc":
        kind = rng.randrange(6)
        if kind == 0:
            events.append(e.DrainAsked(instance_id))
        elif kind == 1 and moment > 3:
            events.append(e.InstanceExited(instance_id))
        else:
            lists = [held(f"r{rng.randrange(3 * moment + 3)}")] if rng.random() < 0.5 else []
            fields = {"max_requests": rng.randint(1, 3), "latency_ratio": rng.uniform(0.5, 3.0)}
            events.append(status(instance_id, *lists, **fields))
    return events
