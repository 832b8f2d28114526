"""What a request still needs: forecasts count down, and without one the profile's means count."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.messages import RequestForecast
from services.threshold_controller.needs import Lengths, Need, Outlook, Shape, Standing

MEANS = (4.0, 8.0)
SHAPE = Shape(num_blocks=4, cache="dual", ignore_eos=True)
ENDS_AT_EOS = Shape(num_blocks=4, cache="dual", ignore_eos=False)


def make_forecast(mean: float = 10.0, upper: float = 14.0, blocks: float = 2.0, steps: int = 0) -> RequestForecast:
    """At the lower threshold; the higher needs twice as many steps."""
    return RequestForecast("r1", 1, steps, (mean, 2 * mean), (upper, 2 * upper), (blocks, blocks))


def needs(outlook: Outlook, standing: Standing, shape: Shape = SHAPE, risk: float = 0.0) -> list[Need]:
    outlook.note_standing(standing)
    return outlook.needs(standing, shape, MEANS, Lengths(), risk, len(MEANS))


def test_a_forecast_is_split_into_a_recompute_step_for_each_block_and_cache_steps() -> None:
    outlook = Outlook()
    outlook.note_forecast(make_forecast())
    assert needs(outlook, Standing()) == [Need(2.0, 8.0), Need(2.0, 18.0)]


def test_without_a_cache_all_are_recompute_steps() -> None:
    outlook = Outlook()
    outlook.note_forecast(make_forecast())
    assert needs(outlook, Standing(), SHAPE._replace(cache="none")) == [Need(10.0, 0.0), Need(20.0, 0.0)]


def test_it_counts_down_one_a_step_and_a_block_for_each_that_began() -> None:
    outlook = Outlook()
    needs(outlook, Standing(steps=3, steps_in_block=3))
    outlook.note_forecast(make_forecast(blocks=2.0, steps=3))
    assert needs(outlook, Standing(steps=7, steps_in_block=7))[0] == Need(2.0, 4.0)
    assert needs(outlook, Standing(steps=9, blocks_done=1, steps_in_block=1))[0] == Need(1.0, 3.0)


def test_a_forecast_that_comes_before_its_report_means_the_same() -> None:
    late, early = Outlook(), Outlook()
    reported, later = Standing(steps=5, blocks_done=1, steps_in_block=1), Standing(6, 1, 2)
    needs(late, reported)
    late.note_forecast(make_forecast(steps=5))
    early.note_forecast(make_forecast(steps=5))
    needs(early, reported)
    assert needs(late, later) == needs(early, later) == [Need(2.0, 7.0), Need(2.0, 17.0)]


def test_an_older_forecast_does_not_replace_a_newer_one() -> None:
    outlook = Outlook()
    assert outlook.note_forecast(make_forecast(steps=5))
    assert not outlook.note_forecast(make_forecast(steps=4))
    assert outlook.note_forecast(make_forecast(steps=5)), "made anew from the same report"


def test_what_has_outlived_its_forecast_needs_a_step_and_at_a_block_s_end_a_block() -> None:
    outlook = Outlook()
    outlook.note_forecast(make_forecast(mean=3.0, blocks=1.0))
    assert needs(outlook, Standing(steps=9, steps_in_block=9))[0] == Need(0.0, 1.0)
    assert needs(outlook, Standing(steps=9, blocks_done=1))[0] == Need(1.0, 0.0)


def test_no_more_blocks_are_needed_than_the_canvas_has() -> None:
    outlook = Outlook()
    outlook.note_forecast(make_forecast(blocks=9.0))
    assert needs(outlook, Standing(steps=2, blocks_done=2, steps_in_block=1))[0].recompute == 1.0


def test_risk_goes_from_below_the_mean_to_the_upper_bound_and_more_steps_come_in_more_blocks() -> None:
    outlook = Outlook()
    outlook.note_forecast(make_forecast(mean=10.0, upper=15.0, blocks=2.0))
    assert needs(outlook, Standing(), risk=1.0)[0] == Need(3.0, 12.0)
    assert needs(outlook, Standing(), risk=0.5)[0] == Need(2.5, 10.0)
    assert needs(outlook, Standing(), risk=-1.0)[0] == Need(1.0, 4.0)


def test_a_forecast_is_stale_once_two_blocks_have_begun_since() -> None:
    outlook = Outlook()
    outlook.note_forecast(make_forecast(mean=100.0, blocks=3.0))
    one, two = Standing(steps=8, blocks_done=0, steps_in_block=8), Standing(steps=9, blocks_done=1, steps_in_block=1)
    assert needs(outlook, one)[0] == Need(2.0, 90.0)
    # one masked block of 4 steps on average, and two to begin
    assert needs(outlook, two)[0] == Need(2.0, 10.0)


def test_without_a_forecast_blocks_take_the_profile_s_mean_and_the_open_one_what_is_masked_of_it() -> None:
    assert needs(Outlook(), Standing()) == [Need(4.0, 12.0), Need(4.0, 28.0)]
    half = Standing(steps=3, steps_in_block=3, masked_in_block=0.5)
    assert needs(Outlook(), half) == [Need(3.0, 11.0), Need(3.0, 25.0)]
    # an open block, however little is masked of it, takes a step
    assert needs(Outlook(), Standing(30, 3, 9, 0.05)) == [Need(0.0, 1.0), Need(0.0, 1.0)]


def test_without_a_forecast_a_text_may_end_with_its_open_block_unless_the_end_is_ignored() -> None:
    half = Standing(steps=3, steps_in_block=3, masked_in_block=0.5)
    assert needs(Outlook(), half, ENDS_AT_EOS, risk=-1.0) == [Need(0.0, 1.5), Need(0.0, 3.0)]
    assert needs(Outlook(), half, SHAPE, risk=-1.0)[0] == Need(3.0, 7.5)


def test_nothing_is_needed_behind_a_block_that_ends_the_text() -> None:
    ending = Standing(steps=3, steps_in_block=3, masked_in_block=0.5, is_last_block=True)
    assert needs(Outlook(), ending, ENDS_AT_EOS) == [Need(0.0, 2.0), Need(0.0, 4.0)]
    outlook = Outlook()
    outlook.note_forecast(make_forecast(mean=6.0, blocks=2.0, steps=3))
    assert needs(outlook, ending, ENDS_AT_EOS)[0] == Need(0.0, 6.0)


def test_finished_requests_say_how_many_blocks_will_begin() -> None:
    lengths = Lengths()
    for blocks in (1, 1, 2, 2, 2, 2, 3, 3):
        lengths.note(blocks)
    assert lengths.mean_left(0, 4) == 2.0
    assert lengths.mean_left(0, 2) == 1.75, "those that got longer stop at the canvas's end"
    assert lengths.mean_left(2, 4) == 2.0, "six are too few, so the whole canvas counts"
    lengths.note(2)
    lengths.note(4)
    assert lengths.mean_left(2, 4) == pytest.approx((0 * 5 + 1 * 2 + 2) / 8)


@given(
    st.lists(st.floats(0, 200), min_size=5, max_size=5),
    st.lists(st.floats(0, 20), min_size=5, max_size=5),
    st.integers(0, 40),
    st.builds(Standing, st.integers(0, 60), st.integers(0, 7), st.integers(0, 9), st.floats(0, 1)),
    st.sampled_from(["none", "prefix", "dual"]),
    st.booleans(),
    st.floats(-1, 1),
)
def test_a_higher_threshold_never_needs_less_and_nobody_needs_nothing(
    mean: list[float],
    blocks: list[float],
    at: int,
    standing: Standing,
    cache: str,
    with_forecast: bool,
    risk: float,
) -> None:
    outlook = Outlook()
    outlook.note_standing(standing)
    if with_forecast:
        upper = tuple(steps * 1.5 for steps in mean)
        outlook.note_forecast(RequestForecast("r1", 1, at, tuple(mean), upper, tuple(blocks)))
    shape = Shape(num_blocks=8, cache=cache, ignore_eos=False)  # type: ignore[arg-type]
    found = outlook.needs(standing, shape, (4.0, 5.0, 6.0, 7.0, 8.0), Lengths(), risk, 5)
    for need in found:
        assert need.recompute >= 0
        assert need.cache >= 0
        assert need.recompute + need.cache >= 1.0
        assert cache == "none" or need.recompute <= max(8 - standing.begun, 1)
    assert all(low.recompute <= high.recompute for low, high in itertools.pairwise(found))
    assert all(sum(low) <= sum(high) + 1e-9 for low, high in itertools.pairwise(found))
