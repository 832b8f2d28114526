from typing import Any

import pytest

from contracts import messages as m
from services.scheduler import events as e
from tests.builders import make_record, make_request, make_status
from tools.simulate.baselines import Fixed, LeastLoaded, Proteus, Variant

CANVAS = 96  # of the request that the builders make
VARIANTS = [Variant(0.5, 0.66, 0.4), Variant(0.7, 0.77, 0.5), Variant(0.9, 0.79, 0.8)]


def seen(request_id: str, seq: int = 1, **fields: Any) -> e.RequestSeen:
    return e.RequestSeen(make_request(request_id, **fields), seq, 0.0, 100.0)


def status(instance_id: str) -> e.StatusSeen:
    return e.StatusSeen(make_status(instance_id, kv_tokens=2 * CANVAS))


def record(request_id: str, state: m.State, seq: int, holder: str = "a", blocks_done: int = 1) -> e.RecordSeen:
    return e.RecordSeen(make_record(request_id, state, holder=holder, blocks_done=blocks_done), seq)


def placed(commands: list[e.Command]) -> list[tuple[str, str]]:
    return [(c.assign.request.request_id, c.instance_id) for c in commands if isinstance(c, e.SendAssign)]


def accepted(scheduler: LeastLoaded, request_id: str, instance_id: str) -> None:
    scheduler.handle(e.AssignAnswered(instance_id, request_id, 1, m.Accepted()), 0.0)


def begin(*, binds: bool, migrate: bool = False) -> LeastLoaded:
    scheduler = LeastLoaded(Fixed(0.8), binds=binds, migrate=migrate)
    for instance_id in ("a", "b"):
        scheduler.handle(status(instance_id), 0.0)
    return scheduler


@pytest.mark.parametrize("binds", [True, False])
def test_a_request_goes_to_the_instance_with_the_fewest_tokens(binds: bool) -> None:
    scheduler = begin(binds=binds)
    assert placed(scheduler.handle(seen("long", prompt_ids=[1] * 100), 0.0)) == [("long", "a")]
    assert placed(scheduler.handle(seen("r1", 2), 0.0)) == [("r1", "b")]
    assert placed(scheduler.handle(seen("r2", 3, prompt_ids=[1] * 20), 0.0)) == [("r2", "b")]
    scheduler.check_invariants()


def test_infaas_binds_on_arrival_and_llumnix_waits_for_the_first_room() -> None:
    for binds, expected in ((True, [("r5", "a")]), (False, [("r4", "b")])):
        scheduler = begin(binds=binds)
        for number in range(4):  # a and b are full
            scheduler.handle(seen(f"r{number}", number + 1), 0.0)
        for number in (4, 5):
            assert placed(scheduler.handle(seen(f"r{number}", number + 1), 0.0)) == []
        assert len(scheduler._instances["a"].queue) == binds
        ended = scheduler.handle(record("r1", "finished", 9, "b"), 0.0)
        assert placed(ended) == ([("r5", "b")] if binds else [("r4", "b")])
        assert e.Purge("r1", "finished") in ended
        if binds:  # r4 waits for a, though b had room first
            assert placed(scheduler.handle(record("r0", "finished", 10), 0.0)) == [("r4", "a")]
        else:
            assert placed(scheduler.handle(record("r0", "finished", 10), 0.0)) == [("r5", "a")]
        assert expected
        scheduler.check_invariants()


def test_a_request_begins_at_the_chosen_threshold_or_at_its_pin() -> None:
    scheduler = begin(binds=True)
    found = [scheduler.handle(seen("r1"), 0.0), scheduler.handle(seen("r2", 2, threshold=0.3), 0.0)]
    assert [c.assign.threshold for commands in found for c in commands if isinstance(c, e.SendAssign)] == [0.8, 0.3]


def test_llumnix_moves_a_request_at_a_block_s_end_if_the_other_instance_stays_below() -> None:
    scheduler = begin(binds=False, migrate=True)
    for number in range(4):
        ((request_id, instance_id),) = placed(scheduler.handle(seen(f"r{number}", number + 1), 0.0))
        accepted(scheduler, request_id, instance_id)
    scheduler.handle(record("r1", "finished", 9, "b"), 0.0)
    # a holds two, b one: with one more b would have as much as a has now
    assert scheduler.handle(record("r0", "running", 10), 0.0) == []
    scheduler.handle(record("r3", "finished", 11, "b"), 0.0)
    release = m.Release(epoch=1, attempt=1, request_id="r0")
    assert scheduler.handle(record("r0", "running", 12), 0.0) == [e.SendRelease("a", release, "faster")]
    assert scheduler.handle(record("r2", "running", 13), 0.0) == []  # one at a time
    scheduler.check_invariants()
    moved = scheduler.handle(record("r0", "released", 14, blocks_done=2), 0.0)
    assert placed(moved) == [("r0", "b")]
    assert isinstance(moved[0], e.SendAssign)
    assert (moved[0].assign.from_seq, moved[0].assign.resume, moved[0].reason) == (
        14,
        record("r0", "released", 14, blocks_done=2).record,
        "moved",
    )
    scheduler.check_invariants()


def test_who_ends_before_it_moves_frees_the_place_that_was_kept() -> None:
    scheduler = begin(binds=False, migrate=True)
    for number in range(4):
        ((request_id, instance_id),) = placed(scheduler.handle(seen(f"r{number}", number + 1), 0.0))
        accepted(scheduler, request_id, instance_id)
    for seq, request_id in ((8, "r1"), (9, "r3")):
        scheduler.handle(record(request_id, "finished", seq, "b"), 0.0)
    scheduler.handle(record("r0", "running", 10), 0.0)
    assert scheduler._instances["b"].held_tokens == CANVAS
    scheduler.handle(record("r0", "finished", 11), 0.0)
    assert scheduler._instances["b"].held_tokens == 0
    scheduler.check_invariants()
    again = scheduler.handle(e.ReleaseAnswered("a", "r0", 1, m.Refused(reason="not_held")), 0.0)
    assert again == []


def test_proteus_mixes_the_thresholds_that_the_rate_allows() -> None:
    proteus = Proteus(VARIANTS, num_instances=2, headroom=1.0)
    assert proteus.mixture(2.0) == {0.9: 1.0}  # a second each, 0.8 suffice
    assert proteus.mixture(100.0) == {0.5: 1.0}  # nothing suffices
    # 0.65 s each: half at 0.9 and half at 0.7 take that, and no mixture with 0.5 is as accurate
    assert proteus.mixture(2 / 0.65) == pytest.approx({0.7: 0.5, 0.9: 0.5})
    assert proteus.mixture(2 / 0.45) == pytest.approx({0.5: 0.5, 0.7: 0.5})


def test_proteus_gives_each_threshold_its_share_of_the_requests_and_follows_the_rate() -> None:
    proteus = Proteus(VARIANTS, num_instances=2, headroom=1.0)
    slow = [proteus.choose(n / 1.0) for n in range(40)]
    assert slow[-20:] == [0.9] * 20
    fast = [proteus.choose(40 + n * 0.65 / 2) for n in range(200)]
    assert fast[-100:].count(0.9) == pytest.approx(50, abs=5)
    assert set(fast[-100:]) == {0.7, 0.9}


@pytest.mark.parametrize("binds", [True, False])
def test_who_waits_past_the_deadline_is_dropped_where_that_is_wanted(binds: bool) -> None:
    for drop_late in (False, True):
        scheduler = LeastLoaded(Fixed(0.8), binds=binds, migrate=False, drop_late=drop_late)
        scheduler.handle(status("a"), 0.0)
        for number in range(4):  # two run, two wait
            scheduler.handle(e.RequestSeen(make_request(f"r{number}"), number + 1, 0.0, 100.0, 5.0 + number), 0.0)
        commands = scheduler.handle(status("a"), 7.5)
        dropped = [c for c in commands if isinstance(c, e.WriteRecord)]
        assert [(c.record.request_id, c.record.state, c.record.reason, c.after_seq) for c in dropped] == (
            [("r2", "failed", "expired", 0)] if drop_late else []
        )
        if drop_late:
            ended = scheduler.handle(e.RecordSeen(dropped[0].record, 9), 7.6)
            assert ended == [e.Purge("r2", "failed")]
            assert placed(scheduler.handle(record("r0", "finished", 10), 7.7)) == [("r3", "a")]
        scheduler.check_invariants()
