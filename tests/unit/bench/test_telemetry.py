"""What traces cost, from pairs of equal work."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from tools.bench.collector import running_collector
from tools.bench.telemetry import Pair, Part, loss, loss_per_cpu, overhead_us, span_us, total, upper_bound


def part(seconds: float, overhead_us: float = 500.0, cpu_s: float = 1.0) -> Part:
    return Part(
        seconds=seconds,
        cpu_s=cpu_s,
        tokens=100,
        steps=50,
        request_steps=150,
        overhead_s=50e-6 * overhead_us,
        spans=10,
    )


def test_the_bound_is_the_textbooks() -> None:
    bound = upper_bound([1.0, 2.0, 3.0, 4.0, 5.0])
    assert bound.mean == 3.0
    assert bound.upper == pytest.approx(3.0 + 2.1318 * math.sqrt(2.5 / 5), abs=1e-3)  # t of 4 degrees, 0.95


def test_equal_times_lose_nothing_and_a_tenth_more_time_costs_an_eleventh() -> None:
    same = [Pair(off=part(2.0), on=part(2.0))] * 4
    assert loss(same) == (0.0, 0.0)
    slower = [Pair(off=part(s), on=part(1.1 * s)) for s in (1.0, 2.0, 4.0)]
    assert loss(slower) == pytest.approx((1 / 11, 1 / 11))


def test_processor_time_is_compared_as_time_is() -> None:
    pairs = [Pair(off=part(1.0, cpu_s=s), on=part(9.0, cpu_s=1.25 * s)) for s in (1.0, 3.0)]
    assert loss_per_cpu(pairs) == pytest.approx((0.2, 0.2))


def test_turns_are_added_up_and_the_overhead_is_a_steps() -> None:
    both = total([part(1.0, 400.0), part(2.0, 600.0)])
    assert (both.seconds, both.cpu_s, both.steps, both.spans) == (3.0, 2.0, 100, 20)
    assert both.overhead_us == pytest.approx(500.0)


def test_pairs_that_differ_leave_room_for_more() -> None:
    pairs = [Pair(off=part(1.0, 500.0), on=part(seconds, us)) for seconds, us in ((1.0, 510.0), (1.1, 530.0))]
    assert loss(pairs).upper > loss(pairs).mean > 0
    assert overhead_us(pairs).mean == pytest.approx(20.0)
    assert overhead_us(pairs).upper > 30.0


def test_one_pair_has_no_bound() -> None:
    with pytest.raises(ValueError, match="at least two pairs"):
        loss([Pair(off=part(1.0), on=part(1.0))])


def test_a_span_is_made_sent_and_has_its_price() -> None:
    with running_collector() as (url, _), ThreadPoolExecutor(1) as thread:
        assert thread.submit(span_us, url, 1).result(60) > 0  # a thread has a trace of its own
