"""A call that is being answered: records in, commands out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.messages import CanvasStep, ProgressRecord
from services.gateway.openai_api import Facts
from services.gateway.policy import (
    CallState,
    ClientGone,
    Command,
    EndCall,
    EndChoice,
    FailCall,
    RecordSeen,
    SendText,
    ShowStep,
    ShuttingDown,
    StepSeen,
    TediserveInfo,
    TimeIsUp,
    WriteCancelled,
    cancelled_record,
    summary,
)
from services.gateway.text import TextCodec
from tests import builders
from tests.unit.gateway.test_stops import first_complete

COST = builders.make_cost()


def make_record(token_ids: list[int] | None = None, state: str = "running", **more: Any) -> ProgressRecord:
    ids = token_ids or []
    fields: dict[str, Any] = {"state": state, "confidences": [0.5] * len(ids), "written_at": 5.0} | more
    return builders.make_record(token_ids=ids, **fields)


def make_state(codec: TextCodec, *, n: int = 1, stop: tuple[str, ...] = (), detached: bool = False) -> CallState:
    return CallState(Facts(body="", n=n, stop=stop), codec, detached=detached)


def see(state: CallState, record: ProgressRecord, seq: int, choice: int = 0) -> list[Command]:
    return state.handle(RecordSeen(choice, record, seq), now=9.0)


def texts(commands: list[Command]) -> list[str]:
    return [command.text for command in commands if isinstance(command, SendText)]


def without_tokens(commands: list[Command]) -> list[Command]:
    return [c._replace(tokens=()) if isinstance(c, SendText) else c for c in commands]


# --- text --------------------------------------------------------------------------------------------------------


def test_each_record_sends_its_news_and_the_last_one_ends(codec: TextCodec) -> None:
    ids = codec.encode_prompt("abcd")
    state = make_state(codec)
    assert without_tokens(see(state, make_record(ids[:2]), 1)) == [SendText(0, "ab", ())]
    last = make_record(ids, "finished", finish="eos")
    assert without_tokens(see(state, last, 2)) == [SendText(0, "cd", ()), EndChoice(0, "stop"), EndCall()]
    assert state.ended


def test_length_is_told_apart_from_the_end_token(codec: TextCodec) -> None:
    state = make_state(codec)
    assert see(state, make_record([], "finished", finish="length"), 1) == [EndChoice(0, "length"), EndCall()]


def test_records_may_be_missing_or_come_twice(codec: TextCodec) -> None:
    ids = codec.encode_prompt("abcdef")
    state = make_state(codec)
    assert texts(see(state, make_record(ids[:2]), 5)) == ["ab"]
    assert see(state, make_record(ids[:2]), 5) == []
    assert see(state, make_record(ids[:1]), 4) == []
    assert texts(see(state, make_record(ids, "finished", finish="eos"), 9)) == ["cdef"]
    assert see(state, make_record(ids, "finished", finish="eos"), 9) == []


def test_a_record_without_news_sends_nothing(codec: TextCodec) -> None:
    state = make_state(codec)
    see(state, make_record(codec.encode_prompt("ab")), 1)
    assert see(state, make_record(codec.encode_prompt("ab"), "released"), 2) == []


def test_a_character_over_two_blocks_is_sent_whole(codec: TextCodec) -> None:
    ids = codec.encode_prompt("x😀")
    state = make_state(codec)
    assert texts(see(state, make_record(ids[:3]), 1)) == ["x"]
    assert texts(see(state, make_record(ids, "finished", finish="eos"), 2)) == ["😀"]


def test_a_stop_string_over_two_blocks_ends_the_choice_and_cancels_the_rest(codec: TextCodec) -> None:
    ids = codec.encode_prompt("a b#!# c")
    state = make_state(codec, stop=("#!#",))
    assert texts(see(state, make_record(ids[:5]), 1)) == ["a b"]
    record = make_record(ids)
    told = see(state, record, 2)
    assert told == [EndChoice(0, "stop"), WriteCancelled(0, "stop_string", record, 2), EndCall()]
    assert state.choices[0].text == "a b"
    assert state.choices[0].num_tokens == 6


def test_a_stop_string_in_the_final_record_cancels_nothing(codec: TextCodec) -> None:
    state = make_state(codec, stop=("#",))
    told = see(state, make_record(codec.encode_prompt("a#b"), "finished", finish="length"), 1)
    assert without_tokens(told) == [SendText(0, "a", ()), EndChoice(0, "stop"), EndCall()]


def test_the_start_of_a_stop_string_that_never_came_is_sent_at_the_end(codec: TextCodec) -> None:
    state = make_state(codec, stop=("#!#",))
    told = see(state, make_record(codec.encode_prompt("a#!"), "finished", finish="eos"), 1)
    assert texts(told) == ["a#!"]


@given(
    text=st.text("ab#é😀", max_size=24),
    stops=st.lists(st.text("ab#é", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_what_is_sent_is_the_text_up_to_its_stop_string_whatever_the_blocks(
    codec: TextCodec, text: str, stops: list[str], cuts: list[int]
) -> None:
    ids = codec.encode_prompt(text)
    state = make_state(codec, stop=tuple(stops))
    sent: list[Command] = []
    for seq, count in enumerate(sorted(min(cut, len(ids)) for cut in cuts), start=1):
        sent += see(state, make_record(ids[:count]), seq)
    sent += see(state, make_record(ids, "finished", finish="eos"), 99)
    end = first_complete(text, stops)
    assert "".join(texts(sent)) == text[:end] == state.choices[0].text
    assert [c.finish for c in sent if isinstance(c, EndChoice)] == ["stop"]
    assert sent.count(EndCall()) == 1
    tokens = [token for command in sent if isinstance(command, SendText) for token in command.tokens]
    assert tokens == state.choices[0].tokens
    if end is None:
        assert [token.id for token in tokens] == ids


def test_tokens_come_with_the_text_that_they_complete(codec: TextCodec) -> None:
    state = make_state(codec)
    ids = codec.encode_prompt("hello é")
    (sent,) = see(state, make_record(ids[:-1], confidences=[0.25] * (len(ids) - 1)), 1)
    assert isinstance(sent, SendText)
    assert [(token.text, token.text_start) for token in sent.tokens][:2] == [("hello", 0), (" ", 5)]
    assert sent.tokens[0].logprob == pytest.approx(-1.3863, abs=1e-4)
    (more, *_) = see(state, make_record(ids, "finished", finish="eos"), 2)
    assert isinstance(more, SendText)
    assert [token.id for token in sent.tokens + more.tokens] == ids


# --- several choices ---------------------------------------------------------------------------------------------


def test_a_call_ends_with_its_last_choice(codec: TextCodec) -> None:
    state = make_state(codec, n=2)
    assert see(state, make_record([], "finished", finish="eos"), 1, choice=1) == [EndChoice(1, "stop")]
    assert see(state, make_record([], "finished", finish="eos"), 2, choice=0) == [EndChoice(0, "stop"), EndCall()]


def test_one_choice_that_fails_takes_the_others_along(codec: TextCodec) -> None:
    state = make_state(codec, n=3)
    see(state, make_record([], "finished", finish="eos"), 1, choice=0)
    running = make_record([7])
    see(state, running, 2, choice=1)
    failed = make_record([], "failed", reason="worker_lost")
    assert see(state, failed, 3, choice=2) == [
        WriteCancelled(1, "sibling_failed", running, 2),
        FailCall("worker_lost", failed),
    ]
    assert state.ended


def test_a_choice_ended_by_its_stop_string_is_not_cancelled_again(codec: TextCodec) -> None:
    state = make_state(codec, n=2, stop=("#",))
    see(state, make_record(codec.encode_prompt("a#")), 1, choice=0)
    assert state.handle(ClientGone(), 9.0) == [WriteCancelled(1, "client_gone", None, 0)]


# --- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state_name", "reason"),
    [("failed", "too_long"), ("failed", "expired"), ("cancelled", "client_deleted"), ("cancelled", "gateway_lost")],
)
def test_a_final_record_that_is_no_finish_fails_the_call(codec: TextCodec, state_name: str, reason: str) -> None:
    record = make_record([7], state_name, reason=reason)
    told = see(make_state(codec), record, 1)
    assert told[-1] == FailCall(reason, record)  # type: ignore[arg-type]
    assert EndCall() not in told


def test_a_hang_up_cancels(codec: TextCodec) -> None:
    state = make_state(codec)
    record = make_record([7])
    see(state, record, 3)
    assert state.handle(ClientGone(), 9.0) == [WriteCancelled(0, "client_gone", record, 3)]
    assert state.handle(ClientGone(), 9.0) == []
    assert see(state, make_record([7, 8]), 4) == []


def test_a_detached_call_goes_on_unseen(codec: TextCodec) -> None:
    state = make_state(codec, detached=True)
    assert state.handle(ClientGone(), 9.0) == []
    assert state.handle(ShuttingDown(), 9.0) == []
    assert see(state, make_record([], "finished", finish="eos"), 1) == [EndChoice(0, "stop"), EndCall()]


def test_time_is_up_for_a_detached_call_too(codec: TextCodec) -> None:
    state = make_state(codec, detached=True)
    assert state.handle(TimeIsUp(), 9.0) == [WriteCancelled(0, "expired", None, 0), FailCall("expired")]


def test_a_gateway_that_stops_tells_the_client(codec: TextCodec) -> None:
    state = make_state(codec)
    assert state.handle(ShuttingDown(), 9.0) == [WriteCancelled(0, "gateway_lost", None, 0), FailCall("gateway_lost")]


def test_a_request_that_another_gateway_ended_at_its_stop_string_is_complete(codec: TextCodec) -> None:
    record = make_record(codec.encode_prompt("a#b"), "cancelled", reason="stop_string")
    told = see(make_state(codec, stop=("#",), detached=True), record, 1)
    assert without_tokens(told) == [SendText(0, "a", ()), EndChoice(0, "stop"), EndCall()]


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["running", "released", "finished", "failed", "cancelled", "gone", "late", "down"]),
        st.integers(0, 6),
    ),
    max_size=12,
)


@given(events=EVENTS, detached=st.booleans())
def test_a_call_ends_once_and_says_nothing_after(codec: TextCodec, events: Any, detached: bool) -> None:
    ids = codec.encode_prompt("ab#cd#")
    state = make_state(codec, n=2, stop=("#c",), detached=detached)
    told: list[Command] = []
    others = {"gone": ClientGone(), "late": TimeIsUp(), "down": ShuttingDown()}
    for seq, (choice, what, count) in enumerate(events, start=1):
        assert not state.ended or not state.handle(ClientGone(), 9.0)
        if what in others:
            told += state.handle(others[what], 9.0)  # type: ignore[arg-type]
        else:
            finish = {"finish": "eos"} if what == "finished" else {}
            told += see(state, make_record(ids[:count], what, **finish), seq, choice)
    ends = [command for command in told if isinstance(command, EndCall | FailCall)]
    assert len(ends) <= 1
    assert not ends or (told[-1] is ends[0] and state.ended)
    for choice in (0, 1):
        assert sum(isinstance(c, EndChoice) and c.choice == choice for c in told) <= 1
        assert sum(isinstance(c, WriteCancelled) and c.choice == choice for c in told) <= 1


# --- records and sums --------------------------------------------------------------------------------------------


def test_a_cancelled_record_keeps_what_was_reached() -> None:
    first = builders.make_request(prompt_ids=[1, 2], deadline_at=1.5, fingerprint="f").first_record
    assert (first.prompt_tokens, first.deadline_at, first.fingerprint) == (2, 1.5, "f")
    final = cancelled_record(make_record([7], holder="i"), "client_gone", 4.0)
    assert (final.state, final.reason, final.holder, final.token_ids, final.written_at) == (
        "cancelled", "client_gone", "", [7], 4.0,
    )  # fmt: skip
    assert final.is_final


def test_the_sums_of_a_call() -> None:
    records = {
        0: make_record([7], blocks=[COST, COST], created_at=1.0, started_at=1.5, deadline_at=9.0, moves=1),
        1: make_record([7], blocks=[COST], created_at=1.0, started_at=2.0, deadline_at=9.0),
    }
    assert summary(records, 4.0) == TediserveInfo(
        deadline_met=True, steps=12, mean_threshold=0.8, moves=1, attempts=1,
        queue_ms=1000.0, run_ms=2000.0, total_ms=3000.0,
    )  # fmt: skip
    assert summary({}, 4.0).deadline_met is None


@pytest.mark.parametrize(
    ("state", "ended_at", "ended", "met"),
    [
        ("finished", 9.0, True, True),
        ("finished", 9.1, True, False),
        ("running", 4.0, False, None),
        ("running", 9.1, False, False),
        ("failed", 4.0, False, False),
        ("cancelled", 4.0, False, False),
    ],
)
def test_a_deadline_is_met_missed_or_still_open(state: str, ended_at: float, ended: bool, met: bool | None) -> None:
    records = {0: make_record([7], state, deadline_at=9.0)}
    assert summary(records, ended_at, ended=ended).deadline_met is met


# --- watching ----------------------------------------------------------------------------------------------------


def test_steps_are_shown_until_their_choice_ends(codec: TextCodec) -> None:
    step = CanvasStep(
        request_id="r",
        attempt=1,
        instance_id="i",
        tp_degree=1,
        kind="cache",
        block_index=0,
        step=3,
        threshold=0.9,
        positions=[1],
        token_ids=[5],
        confidences=[0.9],
    )
    state = make_state(codec, n=2)
    assert state.handle(StepSeen(1, step), now=1.0) == [ShowStep(1, step)]
    see(state, make_record([], "finished", finish="eos"), 1, choice=1)
    assert state.handle(StepSeen(1, step), now=1.0) == []
    assert state.handle(StepSeen(0, step), now=1.0) == [ShowStep(0, step)]
