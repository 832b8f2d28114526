"""When a forecast is due."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import messages as m
from services.settings import ConfigError, load_section
from services.step_predictor.config import StepPredictorConfig
from services.step_predictor.policy import Predict, StepPredictor
from tests.unit.step_predictor.builders import make_report, make_state


@pytest.fixture
def predictor() -> Iterator[StepPredictor]:
    predictor = StepPredictor(StepPredictorConfig(forget_after_s=10.0, max_requests=3), refresh_tokens=8)
    yield predictor
    predictor.check_invariants()


def test_a_request_is_forecast_when_it_is_first_heard_of(predictor: StepPredictor) -> None:
    first, second = make_state("a"), make_state("b")
    assert predictor.handle(make_report(first, second), 0.0) == [
        Predict("w-0", first, "new"),
        Predict("w-0", second, "new"),
    ]


def test_it_is_renewed_once_so_many_more_tokens_are_committed(predictor: StepPredictor) -> None:
    predictor.handle(make_report(make_state(tokens_committed=20)), 0.0)
    assert predictor.handle(make_report(make_state(tokens_committed=27)), 1.0) == []
    due = make_state(tokens_committed=28)
    assert predictor.handle(make_report(due), 2.0) == [Predict("w-0", due, "progress")]
    assert predictor.handle(make_report(make_state(tokens_committed=35)), 3.0) == []


def test_the_configured_number_of_tokens_wins_over_the_models() -> None:
    predictor = StepPredictor(StepPredictorConfig(refresh_tokens=2), refresh_tokens=8)
    predictor.handle(make_report(make_state(tokens_committed=20)), 0.0)
    assert len(predictor.handle(make_report(make_state(tokens_committed=22)), 1.0)) == 1


def test_a_move_to_another_instance_needs_no_new_forecast_but_the_next_one_goes_there(predictor: StepPredictor) -> None:
    predictor.handle(make_report(make_state(tokens_committed=20)), 0.0)
    assert predictor.handle(make_report(make_state(tokens_committed=21), instance_id="w-1"), 1.0) == []
    due = make_state(tokens_committed=30)
    assert predictor.handle(make_report(due, instance_id="w-1"), 2.0) == [Predict("w-1", due, "progress")]


def test_one_that_was_lost_and_starts_again_is_new_and_its_old_worker_is_not_heard(predictor: StepPredictor) -> None:
    predictor.handle(make_report(make_state(tokens_committed=40)), 0.0)
    again = make_state(attempt=2, tokens_committed=40)
    assert predictor.handle(make_report(again), 1.0) == [Predict("w-0", again, "new")]
    assert predictor.handle(make_report(make_state(attempt=1, tokens_committed=60)), 2.0) == []
    assert predictor.handle(make_report(make_state(attempt=1, finished=True)), 2.5) == []
    assert predictor.num_known == 1
    assert predictor.handle(make_report(make_state(attempt=2, tokens_committed=47)), 3.0) == []


def test_one_that_has_fewer_tokens_than_before_is_new(predictor: StepPredictor) -> None:
    predictor.handle(make_report(make_state(tokens_committed=40)), 0.0)
    back = make_state(tokens_committed=32)
    assert predictor.handle(make_report(back), 1.0) == [Predict("w-0", back, "new")]


def test_a_finished_request_is_forgotten_and_gets_no_forecast(predictor: StepPredictor) -> None:
    predictor.handle(make_report(make_state()), 0.0)
    assert predictor.handle(make_report(make_state(finished=True, tokens_committed=64)), 1.0) == []
    assert predictor.num_known == 0


def test_a_worker_that_does_not_say_the_prompts_length_is_too_old_for_forecasts(predictor: StepPredictor) -> None:
    assert predictor.handle(make_report(make_state(prompt_tokens=0)), 0.0) == []
    assert predictor.num_known == 0


def test_after_a_round_of_statuses_every_request_is_forecast_anew(predictor: StepPredictor) -> None:
    predictor.handle(make_report(make_state()), 0.0)
    assert predictor.handle(m.StatusAsk(), 1.0) == []
    assert predictor.handle(make_report(make_state()), 2.0) == [Predict("w-0", make_state(), "new")]
    assert predictor.handle(make_report(make_state()), 3.0) == []


def test_silent_requests_and_those_that_are_too_many_are_forgotten(predictor: StepPredictor) -> None:
    predictor.handle(make_report(make_state("a")), 0.0)
    predictor.handle(make_report(make_state("b")), 5.0)
    predictor.handle(make_report(make_state("c")), 10.0)
    assert predictor.num_known == 2, "a is silent for 10 s"
    predictor.handle(make_report(make_state("d"), make_state("e")), 11.0)
    assert predictor.num_known == 3, "b was silent longest"
    assert predictor.handle(make_report(make_state("c")), 11.5) == []


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 3), st.integers(0, 64), st.booleans()), max_size=60),
    st.integers(1, 20),
)
def test_what_is_known_is_never_older_than_the_refresh(
    heard: list[tuple[str, int, int, bool]], refresh_tokens: int
) -> None:
    predictor = StepPredictor(StepPredictorConfig(forget_after_s=1e9, max_requests=100), refresh_tokens)
    last: dict[str, tuple[int, int]] = {}  # attempt and tokens at the last forecast
    for number, (request_id, attempt, tokens, finished) in enumerate(heard):
        state = make_state(request_id, attempt=attempt, tokens_committed=tokens, finished=finished)
        commands = predictor.handle(make_report(state), float(number))
        predictor.check_invariants()
        if request_id in last and attempt < last[request_id][0]:
            assert commands == []
        elif finished:
            assert commands == []
            last.pop(request_id, None)
        elif commands:
            last[request_id] = attempt, tokens
        else:
            known_attempt, known_tokens = last[request_id]
            assert known_attempt == attempt
            assert 0 <= tokens - known_tokens < refresh_tokens


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("UPPER_LEVEL", "0.4"),
        ("UPPER_LEVEL", "1"),
        ("REFRESH_TOKENS", "-1"),
        ("FORGET_AFTER_S", "0"),
        ("MAX_REQUESTS", "0"),
    ],
)
def test_wrong_settings_are_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key.lower()):
        load_section(StepPredictorConfig, "step_predictor", {f"TEDISERVE_STEP_PREDICTOR_{key}": value})
