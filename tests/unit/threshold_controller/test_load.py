"""Load control shares the instances' time out, first to the first, and nobody gains by another's coming."""

from hypothesis import example, given
from hypothesis import strategies as st

from services.threshold_controller.load import Works, grant, horizon

# quarters: exact in binary, so that sums are too
numbers = st.integers(0, 80).map(lambda quarters: quarters / 4)
works = st.lists(numbers, min_size=5, max_size=5).map(lambda w: tuple(sorted(w)))
pinned = numbers.map(lambda work: (work,))
requests = st.lists(works | pinned, max_size=12)


def total(given_to: list[Works], caps: list[int]) -> float:
    return sum(works[cap] for works, cap in zip(given_to, caps, strict=True))


def test_the_first_get_the_highest_threshold_and_the_rest_the_lowest() -> None:
    ask = (1.0, 2.0, 3.0, 4.0)
    assert grant([ask] * 4, 16.0).caps == [3, 3, 3, 3]
    assert grant([ask] * 4, 15.0).caps == [3, 3, 3, 2]
    assert grant([ask] * 4, 11.0).caps == [3, 3, 1, 0]
    assert grant([ask] * 4, 4.0).caps == [0, 0, 0, 0]
    assert grant([ask] * 4, 3.0).caps == [0, 0, 0, 0], "nothing fits, so everybody runs as fast as may be"


def test_what_the_first_limited_one_leaves_goes_to_nobody_or_by_the_paper_s_rule_to_the_later_ones() -> None:
    large, small = (1.0, 11.0), (1.0, 2.0)
    assert grant([large, small], 7.0).caps == [0, 0]
    assert grant([large, small], 7.0, paper=True).caps == [0, 1]


def test_a_pinned_request_counts_at_its_pin_and_leaves_the_order_open() -> None:
    ask = (1.0, 3.0)
    given = grant([(5.0,), ask, ask], 9.0)
    assert (given.caps, given.spare_s, given.is_open) == ([0, 1, 0], 0.0, False)
    assert grant([ask, (5.0,), ask], 11.0).caps == [1, 0, 1]


@given(requests, numbers, st.booleans())
def test_never_more_than_the_capacity_unless_all_are_at_the_lowest(
    asked: list[Works], capacity: float, paper: bool
) -> None:
    given_ = grant(asked, capacity, paper=paper)
    assert total(asked, given_.caps) <= capacity or not any(given_.caps)
    assert given_.spare_s == capacity - total(asked, given_.caps)


@given(requests, numbers, works | pinned, st.integers(0, 12))
@example([(0.0, 10.0), (0.0, 5.0)], 10.0, (1.0,), 0)  # pushes the first down; what that frees must not lift the second
def test_one_request_more_raises_no_cap_of_equal_or_later_rank(
    asked: list[Works], capacity: float, newcomer: Works, place: int
) -> None:
    place = min(place, len(asked))
    before = grant(asked, capacity).caps
    after = grant([*asked[:place], newcomer, *asked[place:]], capacity).caps
    del after[place]
    assert all(new <= old for new, old in zip(after, before, strict=True)), "nor one of an earlier rank"


@given(requests, numbers, numbers)
def test_more_capacity_lowers_no_cap(asked: list[Works], capacity: float, more: float) -> None:
    before, after = grant(asked, capacity).caps, grant(asked, capacity + more).caps
    assert all(new >= old for new, old in zip(after, before, strict=True))


@given(requests, numbers)
def test_the_paper_s_walk_gives_each_the_highest_that_fits_with_all_later_ones_at_the_lowest(
    asked: list[Works], capacity: float
) -> None:
    """Algorithm 2, as written."""
    committed, expected = 0.0, []
    for place, mine in enumerate(asked):
        later = sum(works[0] for works in asked[place + 1 :])
        fitting = [i for i, work in enumerate(mine) if committed + work + later <= capacity]
        expected.append(max(fitting, default=0))
        committed += mine[expected[-1]]
    assert grant(asked, capacity, paper=True).caps == expected


def test_the_horizon_is_the_mean_slo_weighted_by_work() -> None:
    assert horizon([]) is None
    assert horizon([(2.0, 1.0), (4.0, 3.0)]) == 3.5
    assert horizon([(0.3, 0.1)] * 7) == 0.3, "exactly, or one request more would change it"
    assert horizon([(2.0, 0.0), (4.0, 0.0)]) == 4.0, "no work: nobody to be limited"
