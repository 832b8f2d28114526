"""Classes and rates of requests: against a count of every single one, and within bounds whatever comes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import messages as m
from services.workload_monitor.config import WorkloadMonitorConfig
from services.workload_monitor.policy import RequestSeen, Say, SnapshotDue, WorkloadMonitor
from tests.builders import MODEL, make_request

CONFIG = WorkloadMonitorConfig(window_s=300, half_life_s=60, buckets=60, bin_tokens=256)


def monitor_of(began_at: float = 1000.0, **changes: Any) -> WorkloadMonitor:
    config = {name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__} | changes
    return WorkloadMonitor(WorkloadMonitorConfig(**config), MODEL, began_at)


class Arrival(NamedTuple):
    at: float
    prompt: int = 100
    output: int = 64
    priority: int = 0
    slo_s: float | None = None

    def seen(self) -> RequestSeen:
        request = make_request(
            prompt_ids=[1] * self.prompt,
            max_tokens=self.output,
            priority=self.priority,
            deadline_at=None if self.slo_s is None else 1000.0 + self.slo_s,
        )
        return RequestSeen(request, self.at)


def watch(monitor: WorkloadMonitor, arrivals: Iterable[Arrival]) -> None:
    for arrival in arrivals:
        assert monitor.handle(arrival.seen(), arrival.at) == []
        monitor.check_invariants()


def snapshot(monitor: WorkloadMonitor, now: float) -> m.WorkloadSnapshot:
    (say,) = monitor.handle(SnapshotDue(wall=5.0), now)
    assert isinstance(say, Say)
    return say.snapshot


def total_rate(monitor: WorkloadMonitor, now: float) -> float:
    return sum(one.rate_rps for one in snapshot(monitor, now).classes)


def test_classes_are_bins_of_lengths_and_priorities_with_means() -> None:
    monitor = monitor_of()
    watch(monitor, [Arrival(1001, 256, 64, slo_s=2.0), Arrival(1001, 100, 256, slo_s=4.0), Arrival(1001, 200)])
    watch(monitor, [Arrival(1002, 257), Arrival(1002, 100, 64, priority=1)])
    found = snapshot(monitor, 1005.0)
    assert (found.model, found.sent_at, found.window_s, found.covered_s) == (MODEL, 5.0, 300.0, 5.0)
    assert [(c.priority, c.prompt_tokens, c.output_tokens, c.requests, c.slo_s) for c in found.classes] == [
        (0, 185, 128, 3, 3.0),
        (0, 257, 64, 1, None),
        (1, 100, 64, 1, None),
    ]
    assert [c.rate_rps for c in found.classes] == pytest.approx([0.6, 0.2, 0.2])


def test_an_even_stream_is_measured_as_what_it_is_from_the_start() -> None:
    monitor = monitor_of()
    for second in range(600):
        watch(monitor, [Arrival(1000.25 + second), Arrival(1000.75 + second)])
        if second % 50 == 49:
            assert total_rate(monitor, 1001.0 + second) == pytest.approx(2.0, rel=0.01)


def test_the_end_of_a_burst_is_soon_seen_and_its_requests_are_forgotten() -> None:
    monitor = monitor_of(began_at=0.0)
    watch(monitor, [Arrival(1000 + 0.1 * number) for number in range(600)])  # 10 a second, for a minute
    during = total_rate(monitor, 1060.0)
    after = [total_rate(monitor, 1060.0 + seconds) for seconds in (60, 120, 240, 305)]
    assert during == pytest.approx(10 * 0.5 / (1 - 0.5**5), rel=0.02)  # the last of five half-lives
    assert after[0] == pytest.approx(during / 2, rel=0.02)
    assert after[1] == pytest.approx(during / 4, rel=0.02)
    assert after[3] == 0.0
    assert monitor.num_cells == 0


def test_what_was_open_when_it_began_counts_from_its_arrival_on() -> None:
    monitor = monitor_of(began_at=1000.0)
    for at in (980.0, 990.0):
        monitor.handle(Arrival(at).seen(), 1000.0)
    monitor.handle(Arrival(500.0).seen(), 1000.0)  # before the window
    found = snapshot(monitor, 1000.0)
    assert found.covered_s == 20.0
    assert [one.requests for one in found.classes] == [2]


def test_a_clock_that_is_ahead_does_no_harm_and_other_models_do_not_count() -> None:
    monitor = monitor_of()
    monitor.handle(Arrival(9999.0).seen(), 1001.0)
    monitor.handle(RequestSeen(make_request(model="another"), 1001.0), 1001.0)
    found = snapshot(monitor, 1002.0)
    assert [one.requests for one in found.classes] == [1]
    assert snapshot(monitor_of(), 1000.0).classes == []


def test_one_class_too_many_counts_with_the_nearest() -> None:
    monitor = monitor_of(max_classes=2)
    watch(monitor, [Arrival(1001, 100), Arrival(1001, 2000), Arrival(1001, 1500), Arrival(1001, 300, priority=7)])
    assert [(c.prompt_tokens, c.priority, c.requests) for c in snapshot(monitor, 1002.0).classes] == [
        (200, 0, 2),
        (1750, 0, 2),
    ]


arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.floats(1000, 2000),
        prompt=st.integers(1, 1200),
        output=st.integers(1, 900),
        priority=st.integers(-1, 1),
        slo_s=st.none() | st.floats(0.1, 60),
    ),
    max_size=60,
)


@settings(max_examples=25)
@given(arrivals=arrivals, later_s=st.floats(0, 400))
def test_rates_and_means_are_those_of_a_count_of_every_request(arrivals: list[Arrival], later_s: float) -> None:
    monitor = monitor_of(began_at=1000.0, max_classes=1000)
    arrivals = sorted(arrivals, key=lambda arrival: arrival.at)
    watch(monitor, arrivals)
    now = max([1001.0, *(a.at for a in arrivals)]) + later_s
    found = {(c.priority, c.prompt_tokens, c.output_tokens): c for c in snapshot(monitor, now).classes}

    # by brute force: every request by itself, every second of the window in small pieces
    width = 5.0
    start = max(1000.0, (now // width - 59) * width)

    def weight(at: float) -> float:
        begin, end = max(at // width * width, start), min(at // width * width + width, now)
        return float(0.5 ** ((now - (begin + end) / 2) / 60.0))

    pieces = 4_000
    step_s = (now - start) / pieces
    weighted_s = sum(weight(start + (number + 0.5) * step_s) * step_s for number in range(pieces))
    classes: dict[tuple[int, int, int], list[Arrival]] = {}
    for arrival in arrivals:
        if arrival.at >= (now // width - 59) * width:
            key = (arrival.priority, (arrival.prompt - 1) // 256, (arrival.output - 1) // 256)
            classes.setdefault(key, []).append(arrival)
    assert len(found) == len(classes)
    for (priority, _, _), members in classes.items():
        weights = [weight(arrival.at) for arrival in members]

        def mean(values: list[float], weights: list[float]) -> float:
            return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

        key = (
            priority,
            round(mean([a.prompt for a in members], weights)),
            round(mean([a.output for a in members], weights)),
        )
        one = found[key]
        assert one.rate_rps == pytest.approx(sum(weights) / weighted_s, rel=5e-3)
        assert one.requests == len(members)
        promised = [(a.slo_s, w) for a, w in zip(members, weights, strict=True) if a.slo_s is not None]
        if promised:
            assert one.slo_s == pytest.approx(mean([s for s, _ in promised], [w for _, w in promised]))
        else:
            assert one.slo_s is None


@settings(max_examples=30)
@given(
    requests=st.lists(
        st.tuples(st.floats(0, 50), st.integers(1, 100_000), st.integers(-(2**40), 2**40)), min_size=1, max_size=80
    ),
    max_classes=st.integers(1, 5),
)
def test_memory_is_bounded_whatever_comes(requests: list[tuple[float, int, int]], max_classes: int) -> None:
    monitor = monitor_of(began_at=0.0, window_s=100.0, buckets=10, max_classes=max_classes)
    now = 0.0
    for pause_s, output, priority in requests:
        now += pause_s
        for _ in range(3):
            monitor.handle(Arrival(now, output=output, priority=priority).seen(), now)
        monitor.check_invariants()
        assert monitor.num_cells <= 10 * max_classes
    found = snapshot(monitor, now + 0.001)
    assert found.classes
    assert len(found.classes) <= max_classes
