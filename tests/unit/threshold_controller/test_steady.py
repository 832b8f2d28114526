"""A choice falls at once and rises only with something to spare."""

from hypothesis import given
from hypothesis import strategies as st

from services.threshold_controller.steady import Steady, between

indices = st.integers(0, 4)


def test_it_stays_between_what_can_be_afforded_and_what_leaves_a_margin() -> None:
    assert [between(before, 1, 3) for before in range(5)] == [1, 1, 2, 3, 3]


@given(indices, indices, indices, indices, st.booleans())
def test_it_never_falls_where_what_can_be_afforded_rises(a: int, b: int, up: int, before: int, later: bool) -> None:
    low, high = min(a, b), max(a, b)
    assert low <= between(before, low, high) <= high
    assert between(before, min(low + up * later, high + up), high + up) >= between(before, low, high)


def test_all_that_is_chosen_at_one_time_follows_what_stood_before() -> None:
    choice = Steady(4)
    choice.choose(2, now=1.0)
    choice.choose(1, now=1.0)
    assert (choice.index, choice.before(1.0), choice.before(2.0)) == (1, 4, 1)
    choice.choose(3, now=2.0)
    assert (choice.index, choice.before(2.0), choice.before(2.5)) == (3, 1, 3)
