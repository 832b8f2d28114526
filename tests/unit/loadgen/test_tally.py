from typing import Any

import pytest

from tools.loadgen.asks import Ask
from tools.loadgen.schedule import Send
from tools.loadgen.tally import NOT_SENT, Outcome, Percentiles, Sample, Tally, describe

ASK = Ask("/v1/completions", {"prompt": "a"}, None)


def outcome(
    due_s: float, latency_s: float, *, slo_ms: float | None = 100, tier: str | None = None, **more: object
) -> Outcome:
    return Outcome(Send(0, due_s, ASK, slo_ms, tier), **({"lag_s": 0.001, "latency_s": latency_s} | more))  # type: ignore[arg-type]


def tally_of(*outcomes: Outcome, warmup_s: float = 2.0, window_s: float = 10.0) -> Tally:
    tally = Tally(warmup_s, window_s, max_in_flight=7, max_lag_ms=50)
    for one in outcomes:
        tally.add(one)
    return tally


def test_what_came_of_a_run() -> None:
    told: dict[str, Any] = {"tokens": 30, "steps": 8, "mean_threshold": 0.9, "moves": 1, "is_correct": True}
    also: dict[str, Any] = {
        "tokens": 10,
        "steps": 4,
        "mean_threshold": 0.5,
        "moves": 2,
        "is_correct": False,
        "first_text_s": 0.05,
    }
    report = tally_of(
        outcome(1.9, 0.05, tokens=999),  # in the warm-up
        outcome(2.0, 0.08, **told),
        outcome(11.9, 8.1, **also),  # ends 6 s after the window
        outcome(5.0, 0.02, error="429 too_many"),
        outcome(5.0, 0.02, error="429 too_many"),
    ).report()
    assert (report.due, report.finished, report.due_per_s) == (4, 2, 0.4)
    assert (report.slo_attainment, report.goodput_per_s) == (0.25, 0.1)
    assert (report.finished_per_s, report.tokens_per_s) == (2 / 18, 40 / 18)
    assert report.latency_ms == Percentiles(80, 8100, 8100)
    assert report.first_text_ms == Percentiles(50, 50, 50)
    assert (report.mean_steps, report.mean_threshold, report.moves) == (6, 0.7, 3)
    assert (report.correct, report.checked) == (0.5, 2)
    assert report.errors == {"429 too_many": 2}
    assert report.counts


def test_what_the_endpoint_does_not_tell_is_not_made_up() -> None:
    report = tally_of(outcome(3, 0.1, slo_ms=None)).report()
    missing = (report.slo_attainment, report.goodput_per_s, report.first_text_ms, report.mean_steps)
    assert (*missing, report.mean_threshold, report.moves, report.correct) == (None,) * 7
    assert "| SLO attainment                 | - |" in describe(report)


def test_an_slo_is_met_at_its_very_limit_and_by_answers_alone() -> None:
    assert outcome(3, 0.1).met
    assert not outcome(3, 0.1001).met
    assert not outcome(3, 0.01, error="timeout").met
    assert outcome(3, 0.01, slo_ms=None).met is None


def test_each_slo_and_tier_has_a_row() -> None:
    report = tally_of(
        outcome(3, 0.05, slo_ms=100, tier="flex"), outcome(3, 0.3, slo_ms=100, tier="flex"), outcome(3, 0.3, slo_ms=500)
    ).report()
    assert {(c.slo_ms, c.tier): (c.met, c.due) for c in report.classes} == {(100, "flex"): (1, 2), (500, None): (1, 1)}
    assert "| met, SLO 100 ms, tier flex     | 1 of 2 (50.0%) |" in describe(report)


def test_a_client_that_was_late_says_that_the_run_does_not_count() -> None:
    punctual = tally_of(*(outcome(3, 0.1, lag_s=0.049) for _ in range(100)))
    assert punctual.report().counts
    assert "this run counts" in describe(punctual.report())
    for _ in range(2):  # 2 of 102: more than one in a hundred
        punctual.add(outcome(3, 0.1, lag_s=0.08))
    report = punctual.report()
    assert not report.counts
    assert "DOES NOT COUNT: the client was late: p99 80.0 ms from due to sent, 50 ms are allowed" in describe(report)


@pytest.mark.parametrize(
    ("outcomes", "interrupted", "reason"),
    [
        ([outcome(3, 0.1), outcome(3, 0.0, error=NOT_SENT)], False, "1 requests were not sent, as 7 were in flight"),
        ([outcome(3, 0.1)], True, "interrupted"),
        ([outcome(1, 0.1)], False, "no request was due"),
    ],
)
def test_other_reasons_not_to_count(outcomes: list[Outcome], interrupted: bool, reason: str) -> None:
    tally = tally_of(*outcomes)
    tally.interrupted = interrupted
    (found,) = tally.report().why_it_does_not_count
    assert reason in found


def test_kinds_of_errors_are_bounded_and_none_is_lost() -> None:
    report = tally_of(*(outcome(3, 0.1, error=f"kind {number}") for number in range(100))).report()
    assert len(report.errors) <= 31
    assert sum(report.errors.values()) == 100


def test_a_sample_is_exact_until_it_is_full_and_fair_beyond() -> None:
    sample = Sample(1000)
    for value in range(1000):
        sample.add(float(value))
    assert sorted(sample.values) == list(range(1000))
    for value in range(1000, 20_000):
        sample.add(float(value))
    assert (len(sample.values), sample.count) == (1000, 20_000)
    found = sample.percentiles_ms()
    assert found is not None
    assert found.p50 == pytest.approx(1e3 * 10_000, rel=0.1)
    assert found.p95 == pytest.approx(1e3 * 19_000, rel=0.03)
