from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.traces.schedules import Progress, Schedule, check_name, make_schedule, name_of

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)


def schedule(name: str, *, tokens: int = 30, key: str = "a") -> Schedule:
    return make_schedule(name, THRESHOLDS, planned_tokens=tokens, key=key)


def test_a_number_is_its_threshold_throughout() -> None:
    assert name_of(0.7) == "0.7"
    found = schedule("0.7")
    assert {found(Progress(steps, steps // 4, steps * 3)) for steps in range(20)} == {0.7}


def test_letters_are_equal_parts_of_the_output_and_the_last_one_goes_on() -> None:
    found = schedule("lmh", tokens=30)
    by_tokens = [found(Progress(0, 0, tokens)) for tokens in (0, 9, 10, 19, 20, 29, 30, 200)]
    assert by_tokens == [0.5, 0.5, 0.7, 0.7, 0.9, 0.9, 0.9, 0.9]
    assert [schedule("hl", tokens=3)(Progress(0, 0, tokens)) for tokens in range(4)] == [0.9, 0.9, 0.5, 0.5]


def test_parts_of_an_empty_output_are_its_last_one_after_the_first_token() -> None:
    found = schedule("hml", tokens=0)
    assert [found(Progress(0, 0, tokens)) for tokens in (0, 1)] == [0.9, 0.5]


def test_random_blocks_change_between_blocks_alone_and_random_steps_within_them() -> None:
    blocks = [schedule("blocks")(Progress(steps, steps // 8, steps)) for steps in range(320)]
    assert all(len(set(blocks[first : first + 8])) == 1 for first in range(0, 320, 8))
    assert set(blocks) == set(THRESHOLDS)
    drawn = schedule("steps")
    steps = [drawn(Progress(number, 0, number)) for number in range(2_000)]
    assert set(steps) == set(THRESHOLDS)
    switches = sum(a != b for a, b in pairwise(steps))
    assert 400 < switches < 600  # a quarter, give or take five standard deviations


@given(st.sampled_from(["blocks", "steps"]), st.text(max_size=5), st.lists(st.integers(0, 60), min_size=1))
def test_what_is_random_depends_on_key_and_place_and_not_on_the_order_of_asking(
    name: str, key: str, asked: list[int]
) -> None:
    places = [Progress(steps, steps // 7, steps) for steps in range(61)]
    in_order = [schedule(name, key=key)(place) for place in places]
    anew = schedule(name, key=key)
    assert [anew(places[steps]) for steps in asked] == [in_order[steps] for steps in asked]


def test_other_keys_draw_other_thresholds() -> None:
    drawn = {
        tuple(found(Progress(steps, 0, 0)) for steps in range(30))
        for found in (schedule("steps", key=f"{number}") for number in range(20))
    }
    assert len(drawn) == 20


def test_a_set_of_one_threshold_stays_there() -> None:
    assert make_schedule("steps", (0.9,), planned_tokens=1, key="")(Progress(50, 0, 0)) == 0.9


@pytest.mark.parametrize("name", ["", "l", "lx", "block", "0,9"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"schedule '{name}' is neither"):
        check_name(name)
    with pytest.raises(ValueError, match="is neither"):
        schedule(name)
