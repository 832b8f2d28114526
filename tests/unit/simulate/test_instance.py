from random import Random
from typing import Any

import pytest

from contracts import messages as m
from services.costs import PassCost
from services.denoiser.batching import BatchLimits
from tests.builders import make_request
from tests.unit.simulate.build import COUNTS
from tools.simulate.clock import Clock
from tools.simulate.denoising import Counted, Course
from tools.simulate.instance import Instance, InstanceSettings

LIMITS = BatchLimits(max_batch_tokens=1000, max_recompute_tokens=400)
CANVAS = 72 + 128


class Outside:
    """Keeps what the instance says; writes are stored when the test says so."""

    def __init__(self, limits: BatchLimits = LIMITS, **settings: Any) -> None:
        self.clock = Clock()
        self.reports: list[tuple[float, m.Report]] = []
        self.statuses: list[m.InstanceStatus] = []
        self.writes: list[tuple[m.ProgressRecord, int]] = []
        self.courses: dict[str, Course] = {}
        self.asked_to_drain = 0
        self.exits: list[tuple[float, str]] = []
        made: dict[str, Any] = {
            "instance_id": "a",
            "model": "made-up",
            "tp_degree": 1,
            "max_requests": 4,
            "kv_tokens": 3 * CANVAS,
            "limits": limits,
            "cost": PassCost(curve=((0.0, 1.0), (1000.0, 11.0))),
            "step_overhead_s": 0.0,
            "pass_noise": 0.0,
        }
        self.instance = Instance(InstanceSettings(**(made | settings)), self, self.clock, Random(0))

    def say_report(self, report: m.Report) -> None:
        self.reports.append((self.clock.now, report))

    def say_status(self, status: m.InstanceStatus) -> None:
        self.statuses.append(status)

    def write(self, instance: Instance, record: m.ProgressRecord, after_seq: int) -> None:
        self.writes.append((record, after_seq))

    def course_of(self, request_id: str) -> Course:
        return self.courses[request_id]

    def ask_to_drain(self, instance_id: str) -> None:
        self.asked_to_drain += 1

    def note_exit(self, instance: Instance, detail: str) -> None:
        self.exits.append((self.clock.now, detail))

    def assign(self, request_id: str = "r1", *, prompt: int = 0, threshold: float = 0.9, **fields: Any) -> Any:
        self.courses.setdefault(request_id, Counted(COUNTS).start(prompt))
        request = make_request(request_id, prompt_ids=[1] * 72, max_tokens=128, **fields)
        return self.instance.assign(m.Assign(epoch=1, attempt=1, request=request, threshold=threshold))

    def run(self, until: float = float("inf")) -> None:
        while self.clock.now < until and self.clock.step():
            self.instance.check_invariants()

    @property
    def states(self) -> list[tuple[str, str, int]]:
        return [(record.request_id, record.state, record.blocks_done) for record, _ in self.writes]


def test_passes_take_what_the_profile_says() -> None:
    outside = Outside()
    outside.assign()
    outside.run()
    # 40 steps, 10 a block: a recompute step over 200 tokens takes 3 ms, a cache step over 32 takes 1.32
    assert outside.clock.now == pytest.approx(4 * 0.003 + 36 * 0.00132)
    assert (outside.instance.recompute_steps, outside.instance.cache_steps) == (4, 36)
    assert outside.instance.busy_s == pytest.approx(outside.clock.now)


@pytest.mark.parametrize(("cache", "seconds"), [("none", 40 * 0.003), ("prefix", 4 * 0.003 + 36 * 0.0018)])
def test_the_cache_decides_which_rows_a_step_passes(cache: str, seconds: float) -> None:
    outside = Outside()
    outside.assign(cache=cache)
    outside.run()
    # prefix: from the block's start to the canvas's end, 128, 96, 64 and 32 tokens: 80 on average
    assert outside.clock.now == pytest.approx(seconds)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_a_step_passes_and_reads_what_the_model_sees(cache: str) -> None:
    loads = []
    outside = Outside()
    outside.instance._seconds = lambda load: loads.append(load) or 0.001  # type: ignore[method-assign, func-returns-value]
    outside.assign(cache=cache, blocks_ahead=1)
    outside.run()
    seen = [72 + 64, 72 + 96, 72 + 128, 72 + 128]
    later = {"none": seen, "prefix": [64, 64, 64, 32], "dual": [32] * 4}[cache]
    assert [load.keys for load in loads] == [keys for keys in seen for _ in range(10)]
    assert [load.tokens for load in loads] == [
        rows for keys, then in zip(seen, later, strict=True) for rows in [keys] + [then] * 9
    ]


def test_an_overhead_is_added_to_each_pass_and_noise_changes_its_time() -> None:
    outside = Outside(step_overhead_s=0.001)
    outside.assign()
    outside.run()
    assert outside.clock.now == pytest.approx(0.05952 + 40 * 0.001)
    noisy = Outside(pass_noise=0.1)
    noisy.assign()
    noisy.run()
    assert noisy.clock.now == pytest.approx(0.05952, rel=0.1)
    assert noisy.clock.now != pytest.approx(0.05952, rel=1e-6)


def test_requests_share_passes_from_the_next_one_on() -> None:
    outside = Outside()
    outside.assign("r1")
    outside.assign("r2")
    outside.run(until=0.0031)
    # the first pass has begun with r1 alone; then r1's 32 tokens and r2's 200 go together
    outside.run()
    assert outside.instance.passes == 41
    assert outside.clock.now < 2 * 0.05952


def test_what_does_not_fit_is_refused_and_fits_once_another_one_has_ended() -> None:
    outside = Outside()
    assert [outside.assign(f"r{n}") for n in range(3)] == [m.Accepted()] * 3
    assert outside.assign("r3").reason == "kv_full"
    assert outside.assign("r1") == m.Accepted()  # it is held
    outside.run()
    assert outside.assign("r3") == m.Accepted()
    few = Outside(max_requests=1)
    assert few.assign("r1") == m.Accepted()
    assert few.assign("r2").reason == "kv_full"


def test_a_record_at_each_block_s_end_one_write_at_a_time_the_newest_next() -> None:
    outside = Outside()
    outside.assign()
    outside.run()
    assert outside.states == [("r1", "running", 1)]
    outside.instance.note_stored(outside.writes[0][0], 7)
    assert outside.states[1:] == [("r1", "finished", 4)]
    final, after_seq = outside.writes[1]
    assert after_seq == 7
    assert [(b.recompute_steps, b.cache_steps, b.mean_threshold) for b in final.blocks] == [
        (1, 9, pytest.approx(0.9))
    ] * 4
    assert sum(block.seconds for block in final.blocks) == pytest.approx(0.05952)
    outside.instance.say_status()
    assert [held.request_id for held in outside.statuses[0].held] == ["r1"]
    outside.instance.note_stored(final, 8)
    outside.instance.say_status()
    assert outside.statuses[1].held == []


def test_reports_come_with_a_block_s_end_and_else_each_50_ms() -> None:
    outside = Outside(cost=PassCost(curve=((0.0, 20.0),)))
    outside.assign()
    outside.run()
    times = [round(at * 1000) for at, _ in outside.reports]
    assert times == [60, 120, 180, 200, 260, 320, 380, 400, 460, 520, 580, 600, 660, 720, 780, 800]
    entry = outside.reports[0][1].entries[0]
    assert (entry.steps, entry.steps_in_block, entry.block_index, entry.next_recompute) == (3, 3, 0, False)
    entry = outside.reports[3][1].entries[0]
    assert (entry.steps, entry.steps_in_block, entry.block_index, entry.next_recompute) == (10, 0, 1, True)
    assert [report.entries[0].finished for _, report in outside.reports] == [False] * 15 + [True]


def test_a_threshold_counts_from_the_next_pass_on() -> None:
    outside = Outside()
    outside.assign()
    outside.instance.turn(  # the first pass has begun
        m.Thresholds(entries=[m.ThresholdEntry(request_id="r1", attempt=1, threshold=0.5)])
    )
    outside.run()
    outside.instance.note_stored(outside.writes[0][0], 1)
    final = outside.writes[-1][0]
    # one step at 0.9 is a fortieth of the request; then each is a sixteenth
    assert sum(block.recompute_steps + block.cache_steps for block in final.blocks) == 17
    assert final.blocks[0].mean_threshold == pytest.approx((0.9 + 4 * 0.5) / 5)
    assert final.blocks[1].mean_threshold == pytest.approx(0.5)


def test_a_threshold_may_overtake_its_assignment_and_a_pin_is_never_turned() -> None:
    turned = m.Thresholds(
        entries=[m.ThresholdEntry(request_id=name, attempt=1, threshold=0.5) for name in ("r1", "pinned")]
    )
    outside = Outside()
    outside.instance.turn(turned)
    outside.assign("r1")
    outside.assign("pinned", threshold=0.7, **{"seed": 1})
    outside.instance.turn(turned)
    outside.run()
    assert outside.courses["r1"].steps == 16
    pinned = Outside()
    pinned.courses["pinned"] = Counted(COUNTS).start(0)
    request = make_request("pinned", prompt_ids=[1] * 72, max_tokens=128, threshold=0.7)
    pinned.instance.turn(turned)
    pinned.instance.assign(m.Assign(epoch=1, attempt=1, request=request, threshold=0.7))
    pinned.instance.turn(turned)
    pinned.run()
    assert pinned.courses["pinned"].steps == 24


def release(outside: Outside) -> m.Accepted | m.Refused:
    return outside.instance.release(m.Release(epoch=1, attempt=1, request_id="r1"))


def test_who_is_released_leaves_at_the_block_s_end_and_goes_on_elsewhere_without_a_step_more() -> None:
    here, there = Outside(), Outside(instance_id="b")
    here.assign()
    here.run(until=0.005)
    assert release(here) == m.Accepted()
    here.run()
    assert here.states == [("r1", "released", 1)]
    released = here.writes[0][0]
    there.courses = here.courses
    request = make_request("r1", prompt_ids=[1] * 72, max_tokens=128)
    assign = m.Assign(epoch=1, attempt=1, request=request, threshold=0.9, resume=released, from_seq=3)
    there.instance.assign(assign)
    there.run()
    there.instance.note_stored(there.writes[0][0], 4)
    final = there.writes[-1][0]
    assert sum(block.recompute_steps + block.cache_steps for block in final.blocks) == 40
    assert [block.instance_id for block in final.blocks] == ["a", "b", "b", "b"]
    assert (final.moves, final.state, there.writes[0][1]) == (1, "finished", 3)


def test_a_release_between_two_blocks_takes_effect_at_once_and_one_for_nobody_is_refused() -> None:
    outside = Outside(limits=BatchLimits(max_batch_tokens=1000, max_recompute_tokens=1))
    outside.assign("r0")
    outside.assign("r1")  # it waits for its first pass
    assert release(outside) == m.Accepted()
    assert outside.states == [("r1", "released", 0)]
    outside.run()
    assert outside.courses["r1"].steps == 0
    assert release(Outside()) == m.Refused(reason="not_held", epoch=0)


def test_a_cancelled_request_runs_no_further() -> None:
    outside = Outside()
    outside.assign()
    outside.run(until=0.005)
    outside.instance.cancel("r1")
    steps = outside.courses["r1"].steps
    outside.run()
    assert outside.courses["r1"].steps == steps
    assert outside.states == []


def test_who_drains_takes_nothing_more_and_exits_once_its_records_are_stored() -> None:
    outside = Outside()
    outside.assign("r1")
    outside.instance.drain()
    outside.instance.drain()
    assert outside.asked_to_drain == 1
    assert outside.assign("r2").reason == "draining"
    outside.run(until=0.1)
    outside.instance.say_status()
    assert outside.statuses[-1].draining
    assert outside.exits == []
    outside.instance.note_stored(outside.writes[0][0], 1)
    assert outside.states[-1] == ("r1", "finished", 4)
    outside.instance.note_stored(outside.writes[-1][0], 2)
    assert [detail for _, detail in outside.exits] == ["drained"]
    outside.run()
    assert len(outside.exits) == 1


def test_what_it_still_holds_at_half_of_the_limit_is_released_at_its_block_s_end() -> None:
    outside = Outside(drain_limit_s=0.02, cost=PassCost(curve=((0.0, 4.0),)))
    outside.assign("r1")
    outside.instance.drain()
    outside.run(until=0.039)
    assert outside.states == []
    assert outside.exits == [(0.02, "drain_limit")]
    patient = Outside(drain_limit_s=0.2, cost=PassCost(curve=((0.0, 4.0),)))
    patient.assign("r1")
    patient.instance.drain()
    patient.run(until=0.12)  # half of the limit lies in the third block, which ends then
    patient.instance.note_stored(patient.writes[0][0], 1)  # of the first block; the newest goes next
    assert patient.states == [("r1", "running", 1), ("r1", "released", 3)]
    patient.instance.note_stored(patient.writes[1][0], 2)
    assert patient.exits == [(pytest.approx(0.12), "drained")]


def test_who_was_lost_goes_on_from_its_last_record() -> None:
    lost, next_ = Outside(), Outside(instance_id="b")
    lost.assign()
    lost.run(until=0.0365)  # in its third block; the record of the second was never stored
    assert lost.courses["r1"].block_index == 2
    next_.courses = lost.courses
    record = lost.writes[0][0]
    request = make_request("r1", prompt_ids=[1] * 72, max_tokens=128)
    assign = m.Assign(epoch=1, attempt=2, request=request, threshold=0.9, resume=record, from_seq=3)
    next_.instance.assign(assign)
    assert (next_.courses["r1"].block_index, next_.courses["r1"].steps) == (1, 10)
    next_.run()
    next_.instance.note_stored(next_.writes[0][0], 4)
    final = next_.writes[-1][0]
    assert (final.state, final.attempt, len(final.blocks)) == ("finished", 2, 4)
    assert sum(block.recompute_steps + block.cache_steps for block in final.blocks) == 40
