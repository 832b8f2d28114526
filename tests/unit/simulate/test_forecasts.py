from collections.abc import Sequence
from random import Random
from statistics import fmean

import pytest

from contracts.messages import RequestForecast, RequestReport
from tests.unit.simulate.build import COUNTS, STEPS, THRESHOLDS
from tests.unit.threshold_controller.build import entry
from tools.simulate.denoising import Counted
from tools.simulate.forecasts import Blur, First, Oracle, Remembered


def test_the_oracle_says_what_is_left_at_each_threshold() -> None:
    course = Counted(COUNTS).start(0)
    for _ in range(12):
        course.step(0.9)
    (found,) = Oracle({"r1": course}.__getitem__, THRESHOLDS).forecast([entry("r1", 12)])
    # 12 of 40 steps: seven tenths are left, and two blocks are to begin
    assert found == RequestForecast("r1", 1, 12, (12.0, 17.0, 28.0), (12.0, 17.0, 28.0), (2.0, 2.0, 2.0))


def test_blurred_forecasts_have_mean_1_and_the_error_that_is_asked_for() -> None:
    blur = Blur(0.19, Random(3))
    drawn = [blur.draw(f"r{n}") for n in range(4000)]
    assert fmean(factor for factor, _ in drawn) == pytest.approx(1.0, abs=0.02)
    assert fmean(abs(factor - 1) for factor, _ in drawn) == pytest.approx(0.19, rel=0.06)
    assert fmean(upper >= 1.0 for _, upper in drawn) == pytest.approx(0.9, abs=0.03)


def test_half_of_the_error_stays_with_the_request() -> None:
    blur = Blur(0.2, Random(4))
    pairs = [(blur.draw(f"r{n}")[0], blur.draw(f"r{n}")[0]) for n in range(4000)]
    mean = fmean(factor for pair in pairs for factor in pair)
    shared = fmean((one - mean) * (two - mean) for one, two in pairs)
    spread = fmean((factor - mean) ** 2 for pair in pairs for factor in pair)
    assert shared / spread == pytest.approx(0.5, abs=0.06)


class Counting:
    """Says the steps run as the steps left."""

    def __init__(self) -> None:
        self.asked: list[RequestReport] = []

    def forecast(self, requests: Sequence[RequestReport]) -> list[RequestForecast]:
        self.asked += requests
        return [RequestForecast(r.request_id, r.attempt, r.steps, (r.steps,), (r.steps,), (1.0,)) for r in requests]


def test_what_was_asked_before_is_not_computed_again() -> None:
    trees = Counting()
    remembered = Remembered(trees)
    same, other = entry("r2", 3), entry("r3", 4)
    asked = [entry("r1", 3), same, other, entry("r4", 3, threshold=0.8)]
    first = remembered.forecast(asked)
    again = remembered.forecast(asked)
    assert first == again == Counting().forecast(asked)
    assert len(trees.asked) == 3


def test_the_first_forecast_is_the_mean_and_counts_down() -> None:
    first = First(Counted(COUNTS), THRESHOLDS)
    means = [sum(counts) / 3 for counts in zip(*STEPS, strict=True)]
    found = first.forecast([entry("r1", 10, block_index=1, steps_in_block=2, num_blocks=4)])[0]
    assert found.steps_left == pytest.approx([mean - 10 for mean in means])
    assert found.blocks_left == (2.0, 2.0, 2.0)
    assert first.forecast([entry("r1", 50, block_index=3, steps_in_block=2, num_blocks=4)])[0].steps_left == (1.0,) * 3
