"""How right forecasts were."""

from typing import Any

import pytest

from contracts import messages as m
from services.step_predictor.hindsight import Hindsight, Judged
from tests.unit.step_predictor.builders import make_state

THRESHOLDS = (0.5, 0.7, 0.9)


def forecast(*steps_left: float, request_id: str = "r1", attempt: int = 1) -> m.RequestForecast:
    return m.RequestForecast(request_id, attempt, 0, steps_left, steps_left, steps_left)


@pytest.fixture
def hindsight() -> Hindsight:
    return Hindsight(THRESHOLDS, max_requests=2)


def say(hindsight: Hindsight, *steps_left: float, **state: Any) -> None:
    """A report, and the forecast that was made of it."""
    report = make_state(**state)
    assert hindsight.note_report(report) == []
    hindsight.note_forecast(report, forecast(*steps_left, request_id=report.request_id, attempt=report.attempt))


def end(hindsight: Hindsight, **state: Any) -> list[Judged]:
    return hindsight.note_report(make_state(finished=True, **state))


def test_each_forecast_is_held_against_the_steps_that_followed(hindsight: Hindsight) -> None:
    say(hindsight, 10, 20, 30, steps=1)
    say(hindsight, 5, 8, 12, steps=11)
    assert end(hindsight, steps=21) == [Judged(0.5, "0-25", "kept"), Judged(0.2, "50-75", "kept")]
    assert hindsight.num_followed == 0


@pytest.mark.parametrize(("threshold", "said"), [(0.3, 10), (0.5, 10), (0.6, 15), (0.7, 20), (0.8, 25), (0.95, 30)])
def test_it_is_what_was_said_for_the_threshold_in_use(hindsight: Hindsight, threshold: float, said: float) -> None:
    say(hindsight, 10, 20, 30, steps=0, threshold=threshold)
    (judged,) = end(hindsight, steps=10, threshold=threshold)
    assert judged.error == pytest.approx(abs(said - 10) / 10)


def test_forecasts_from_before_a_turn_are_told_apart(hindsight: Hindsight) -> None:
    say(hindsight, 10, 20, 30, steps=2, threshold=0.9)
    say(hindsight, 10, 20, 30, steps=4, threshold=0.5)
    say(hindsight, 10, 20, 30, steps=6, threshold=0.5)
    assert [judged.threshold for judged in end(hindsight, steps=8, threshold=0.5)] == ["turned", "kept", "kept"]


def test_what_was_said_before_steps_were_lost_is_forgotten(hindsight: Hindsight) -> None:
    say(hindsight, 1, 1, 1, steps=9)
    say(hindsight, 2, 2, 2, steps=4)
    assert [judged.error for judged in end(hindsight, steps=8)] == [0.5]
    say(hindsight, 1, 1, 1, steps=9)
    assert end(hindsight, steps=12, attempt=2) == []


def test_a_worker_that_was_shut_out_is_not_heard(hindsight: Hindsight) -> None:
    say(hindsight, 4, 4, 4, steps=4, attempt=2)
    assert end(hindsight, steps=90, attempt=1) == []
    assert [judged.error for judged in end(hindsight, steps=8, attempt=2)] == [0.0]


def test_a_forecast_that_comes_after_the_end_is_not_kept(hindsight: Hindsight) -> None:
    report = make_state(steps=4)
    hindsight.note_report(report)
    assert end(hindsight, steps=5) == []
    hindsight.note_forecast(report, forecast(1, 1, 1))
    assert hindsight.num_followed == 0


def test_what_is_kept_is_bounded(hindsight: Hindsight) -> None:
    for name in ("a", "b", "c"):
        say(hindsight, 4, 4, 4, request_id=name, steps=1)
    assert hindsight.num_followed == 2
    assert end(hindsight, request_id="a", steps=5) == []
    for step in range(2, 200):
        say(hindsight, 4, 4, 4, request_id="b", steps=step)
    assert len(end(hindsight, request_id="b", steps=300)) == 64
