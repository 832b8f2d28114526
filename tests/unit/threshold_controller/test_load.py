"""Load control shares the instances' time out, first to the first, and nobody gains by another's coming."""

from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.threshold_controller.load import Claims, Works, claims_of, paper_caps, paper_horizon, walk

# quarters: exact in binary, so that sums are too
numbers = st.integers(0, 80).map(lambda quarters: quarters / 4)
works = st.lists(numbers, min_size=5, max_size=5).map(lambda w: tuple(sorted(w)))
pinned = numbers.map(lambda work: (work,) * 5)


class Asked(NamedTuple):
    """A request, as load control knows it."""

    works: Works
    horizon_s: float = 16.0
    share: float = 0.25


asked = st.builds(Asked, works | pinned, st.sampled_from([4.0, 6.0, 16.0, 128.0]), st.sampled_from([0.25, 0.5, 1.0]))
requests = st.lists(asked, max_size=10)
instances = st.integers(0, 32).map(lambda quarters: quarters / 4)


def claims(requests: list[Asked]) -> list[Claims]:
    return claims_of([r.works for r in requests], [r.horizon_s for r in requests], [r.share for r in requests])


def caps_of(requests: list[Asked], num_instances: float) -> list[int]:
    return walk(claims(requests), num_instances)


def alike(ask: Works, count: int) -> list[Asked]:
    return [Asked(ask)] * count


def test_the_first_get_the_highest_threshold_and_the_rest_the_lowest() -> None:
    ask = (1.0, 2.0, 3.0, 4.0)
    assert caps_of(alike(ask, 4), 16 / 16) == [3, 3, 3, 3]
    assert caps_of(alike(ask, 4), 15 / 16) == [3, 3, 3, 2]
    assert caps_of(alike(ask, 4), 11 / 16) == [3, 3, 1, 0]
    assert caps_of(alike(ask, 4), 4 / 16) == [0, 0, 0, 0]
    assert caps_of(alike(ask, 4), 3 / 16) == [0, 0, 0, 0], "nothing fits, so everybody runs as fast as may be"


def test_what_the_first_limited_one_leaves_goes_to_nobody_or_by_the_paper_s_rule_to_the_later_ones() -> None:
    large, small = (1.0, 11.0), (1.0, 2.0)
    assert caps_of([Asked(large), Asked(small)], 7 / 16) == [0, 0]
    assert paper_caps([large, small], 7.0) == [0, 1]


def test_a_pinned_request_counts_at_its_pin_and_leaves_the_order_open() -> None:
    ask = (1.0, 3.0)
    assert caps_of([Asked((5.0, 5.0)), Asked(ask), Asked(ask)], 9 / 16) == [1, 1, 0]
    assert caps_of([Asked(ask), Asked((5.0, 5.0)), Asked(ask)], 11 / 16) == [1, 1, 1]


def test_of_a_shorter_horizon_a_loose_request_claims_what_its_place_is_worth() -> None:
    loose, tight = Asked((1.0, 3.0), 128.0, 0.25), Asked((0.5, 1.0), 4.0, 0.25)
    # of 4 s four places of 1 s each: loose ones claim 1 of them at any threshold, and 4 s hold three and the tight one
    assert caps_of([loose, loose, loose, tight], 1.0) == [1, 1, 1, 1]
    assert caps_of([loose, loose, loose, loose, tight], 1.0) == [0, 0, 0, 0, 0], "there is no place for five"
    # loose ones that need less than their place can make room
    loose = loose._replace(works=(0.5, 1.0))
    assert caps_of([loose, loose, loose, loose, tight], 1.0) == [1, 1, 1, 0, 0]
    assert caps_of([loose] * 5, 1.0) == [1] * 5, "alone they have all the time in the world"


def test_the_shortest_horizon_of_an_octave_counts() -> None:
    asked = [Asked((1.0, 2.0), horizon_s, 0.5) for horizon_s in (5.0, 0.9, 0.6, 7.9, 0.3, 8.0)]
    assert [c.length_s for c in claims(asked)] == [0.3, 0.6, 5.0, 8.0]
    # of 0.6 s the three shortest claim their work, the others their places of 0.3 s; of 5 s all but the last their work
    assert [c.demand_s([1] * 6) for c in claims(asked)] == pytest.approx([2 + 5 * 0.15, 3 * 2 + 3 * 0.3, 12, 12])


def test_no_request_leaves_nothing_to_share() -> None:
    assert claims([]) == []
    assert caps_of([], 1.0) == []


def most_of(requests: list[Asked], caps: list[int], num_instances: float) -> float:
    """By how much the claims exceed what the instances have, at the worst horizon."""
    return max((c.demand_s(caps) - c.length_s * num_instances for c in claims(requests)), default=0.0)


@given(requests, instances)
def test_never_more_than_the_capacity_unless_all_are_at_the_lowest(asked: list[Asked], num_instances: float) -> None:
    caps = caps_of(asked, num_instances)
    assert most_of(asked, caps, num_instances) <= 0 or not any(caps)


@given(requests, instances)
def test_nobody_could_have_the_next_threshold_up_but_those_behind_the_first_limited_one(
    asked: list[Asked], num_instances: float
) -> None:
    caps = caps_of(asked, num_instances)
    limited = next((n for n, one in enumerate(asked) if caps[n] < len(one.works) - 1), None)
    if limited is not None and most_of(asked, caps, num_instances) <= 0:
        caps[limited] += 1
        claimed = most_of(asked, caps, num_instances)
        top = len(asked[limited].works) - 1
        while caps[limited] < top and claimed <= 0:  # as good as the next one: so may the highest be
            caps[limited] += 1
            claimed = most_of(asked, caps, num_instances)
        assert claimed > 0


@given(requests, instances, asked, st.integers(0, 10))
@example(
    [Asked((0.0, 10.0)), Asked((0.0, 5.0))], 10 / 16, Asked((1.0, 1.0)), 0
)  # pushes the first down; what that frees must not lift the second
def test_one_request_more_raises_nobody_s_cap(
    asked: list[Asked], num_instances: float, newcomer: Asked, place: int
) -> None:
    place = min(place, len(asked))
    before = caps_of(asked, num_instances)
    after = caps_of([*asked[:place], newcomer, *asked[place:]], num_instances)
    del after[place]
    assert all(new <= old for new, old in zip(after, before, strict=True))


@given(requests, instances, instances)
def test_more_capacity_lowers_no_cap(asked: list[Asked], num_instances: float, more: float) -> None:
    before, after = caps_of(asked, num_instances), caps_of(asked, num_instances + more)
    assert all(new >= old for new, old in zip(after, before, strict=True))


@given(st.lists(works | pinned, max_size=12), numbers)
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
    assert paper_caps(asked, capacity) == expected


def test_the_paper_s_horizon_is_the_mean_slo_weighted_by_work() -> None:
    assert paper_horizon([]) is None
    assert paper_horizon([(2.0, 1.0), (4.0, 3.0)]) == 3.5
    assert paper_horizon([(0.3, 0.1)] * 7) == 0.3, "exactly, or one request more would change it"
    assert paper_horizon([(2.0, 0.0), (4.0, 0.0)]) == pytest.approx(4.0), "no work: nobody to be limited"
