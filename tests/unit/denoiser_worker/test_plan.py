"""Ranks that are told the same do the same, and who differs, is silent or gone is found out. Lines are real sockets."""

import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from services.denoiser.engine import Engine, EngineConfig, Factor, FixedSchedule, Job, Threshold
from services.denoiser.loader import load_model
from services.denoiser.models.base import Model
from services.denoiser.plan import (
    Admit,
    Begin,
    Check,
    Failed,
    Follower,
    FromFollower,
    FromLeader,
    Join,
    LeadingEngine,
    Line,
    LineClosed,
    Loaded,
    Message,
    ModelSource,
    Plan,
    RankFailed,
    Ready,
    Remove,
    SetThreshold,
    Up,
    follow,
)
from services.settings import ConfigError
from tests.unit.denoiser import random_model

CONFIG = EngineConfig(kv_budget_tokens=160, max_requests=4, max_batch_tokens=96)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(random_model.write(tmp_path_factory.mktemp("plan") / "model"))


def job(request_id: str = "a", **changes: Any) -> Job:
    values = {"prompt_ids": [1, 2, 3], "max_tokens": 24, "block_size": 8, "choice": Threshold(0.5), "ignore_eos": True}
    return Job(request_id=request_id, **values | changes)


class Pair:
    """The two ends of a line."""

    def __init__(self, limit_s: float = 30.0) -> None:
        ours, theirs = socket.socketpair()
        self.leaders: Line[FromFollower] = Line(ours, FromFollower)
        self.followers: Line[FromLeader] = Line(theirs, FromLeader)
        self.follower = Follower(1, self.leaders, limit_s)

    def close(self) -> None:
        self.leaders.close()
        self.followers.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


# --- lines --------------------------------------------------------------------------------------------------------

SAID = [
    Join(
        rank=1,
        size=2,
        folder="/tmp/ranks",
        limit_s=1.5,
        source=ModelSource(
            folder="m", device="cuda:1", dtype="float32", threads=3, kernels="torch", quantization="fp8"
        ),
    ),
    Begin(config=CONFIG),
    Plan(changes=[]),
    Plan(
        changes=[
            Admit(job=job(choice=Factor(1.0), temperature=0.5, seed=-(2**63), cache="prefix")),
            SetThreshold(request_id="a", value=0.25),
            Remove(request_id="a"),
            Admit(job=job(choice=FixedSchedule(6), committed_ids=[4] * 8, committed_confidences=[0.1] * 8)),
        ]
    ),
]
ANSWERED = [Up(), Loaded(free_bytes=2**40), Ready(), Check(checksum=2**32 - 1), Failed(detail="so", wrong_config=True)]


def test_every_message_arrives_as_it_was_sent(pair: Pair) -> None:
    assert {type(message) for message in SAID} == set(get_args(FromLeader))
    assert {type(message) for message in ANSWERED} == set(get_args(FromFollower))
    for message in SAID:
        pair.leaders.send(message)
    for answer in ANSWERED:
        pair.followers.send(answer)
    assert [pair.followers.receive(1.0) for _ in SAID] == SAID
    assert [pair.leaders.receive(1.0) for _ in ANSWERED] == ANSWERED


def test_a_message_larger_than_the_socket_holds_arrives_whole(pair: Pair) -> None:
    large = Plan(changes=[Admit(job=job(prompt_ids=list(range(500_000))))])
    sender = threading.Thread(target=pair.leaders.send, args=(large, 30.0))
    sender.start()
    assert pair.followers.receive(30.0) == large
    sender.join()


def test_what_the_other_end_does_not_take_has_a_limit(pair: Pair) -> None:
    large = Plan(changes=[Admit(job=job(prompt_ids=list(range(500_000))))])
    with pytest.raises(TimeoutError):
        pair.leaders.send(large, 0.05)


def test_a_closed_line_is_found_out_by_both_calls(pair: Pair) -> None:
    pair.followers.send(Up())
    pair.followers.close()
    assert pair.leaders.receive(1.0) == Up(), "what was said before still counts"
    with pytest.raises(LineClosed):
        pair.leaders.receive(1.0)
    with pytest.raises(LineClosed):
        pair.leaders.send(Plan(changes=[]))


def test_closing_ends_a_wait_at_this_end_too(pair: Pair) -> None:
    ended: queue.Queue[BaseException] = queue.Queue()

    def wait() -> None:
        try:
            pair.followers.receive()
        except LineClosed as closed:
            ended.put(closed)

    threading.Thread(target=wait, daemon=True).start()
    pair.followers.close()
    assert isinstance(ended.get(timeout=10), LineClosed)


# --- what rank 0 expects ------------------------------------------------------------------------------------------


def expectation(pair: Pair, answer: Message | None, kind: type[Message] = Ready) -> str:
    if answer is not None:
        pair.followers.send(answer)
    with pytest.raises((RankFailed, ConfigError)) as raised:
        pair.follower.expect(kind, 0.05)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_an_answer_that_is_not_due_missing_or_a_complaint_is_told_by_rank(pair: Pair) -> None:
    assert expectation(pair, Up()) == "RankFailed: rank 1 said Up where Ready was due"
    assert expectation(pair, None) == "RankFailed: rank 1 has not answered within 0.05 s"
    assert expectation(pair, Failed(detail="poison")) == "RankFailed: rank 1 failed: poison"
    assert expectation(pair, Failed(detail="no such file", wrong_config=True)) == "ConfigError: no such file"
    pair.followers.close()
    assert expectation(pair, None) == "RankFailed: rank 1 has closed its line"


def test_who_complains_is_told_from_who_is_silent(pair: Pair) -> None:
    pair.followers.send(Check(checksum=1))
    assert not pair.follower.complains(0.05)
    pair.followers.send(Check(checksum=1))
    pair.followers.send(Failed(detail="timed out"))
    assert pair.follower.complains(30.0)


# --- leading and following ----------------------------------------------------------------------------------------


class Following:
    """Another rank in a thread: an engine on the whole model, so that there is nothing to exchange."""

    def __init__(self, model: Model, limit_s: float = 30.0) -> None:
        self.pair = Pair(limit_s)
        self.engine = Engine(model, config=CONFIG)
        self.ended: queue.Queue[BaseException] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            follow(self.pair.followers, self.engine)
        except BaseException as error:
            self.ended.put(error)

    def end(self) -> None:
        self.pair.leaders.close()  # what was said before is still done
        assert isinstance(self.ended.get(timeout=30), LineClosed)
        self.pair.close()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("admit"),
            st.sampled_from("abcdef"),
            st.integers(1, 40),  # prompt
            st.sampled_from(["none", "prefix", "dual"]),
            st.sampled_from([0.0, 0.9]),  # temperature
        ),
        st.tuples(st.just("remove"), st.sampled_from("abcdef")),
        st.tuples(st.just("turn"), st.sampled_from("abcdef"), st.sampled_from([0.0, 0.3, 1.0])),
        st.tuples(st.just("step")),
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(actions=ACTIONS)
def test_two_ranks_hold_and_commit_the_same_as_one_alone(model: Model, actions: list[tuple[Any, ...]]) -> None:
    others = [Following(model), Following(model)]
    leader = LeadingEngine(model, config=CONFIG, followers=[other.pair.follower for other in others])
    alone = Engine(model, config=CONFIG)
    for action in [*actions, ("step",)]:
        assert _act(leader, action) == _act(alone, action)
    for other in others:
        other.end()
        assert other.engine.running == alone.running
        for request_id in alone.running:
            assert other.engine.output_ids(request_id) == alone.output_ids(request_id)
            assert other.engine.progress(request_id) == alone.progress(request_id)
            assert other.engine.pool.slots.span(request_id) == alone.pool.slots.span(request_id)


def _act(engine: Engine, action: tuple[Any, ...]) -> object:
    """What there is to compare of what the action did."""
    match action:
        case ("admit", request_id, prompt, cache, temperature):
            new = job(request_id, prompt_ids=[1] * prompt, cache=cache, temperature=temperature, seed=prompt)
            if refusal := engine.refusal(new):
                return refusal
            engine.admit(new)
        case ("remove", request_id) if request_id in engine.running:
            engine.remove(request_id)
        case ("turn", request_id, value) if request_id in engine.running:
            engine.set_threshold(request_id, value)
        case ("step",):
            return engine.step().requests
    return None


@pytest.fixture
def following(model: Model) -> Iterator[Following]:
    following = Following(model)
    yield following
    following.end()


def leading(model: Model, pair: Pair) -> LeadingEngine:
    return LeadingEngine(model, config=CONFIG, followers=[pair.follower])


def test_changes_go_out_with_the_next_step_and_nothing_before(model: Model, pair: Pair) -> None:
    engine = leading(model, pair)
    engine.admit(job("a"))
    engine.set_threshold("a", 0.75)
    with pytest.raises(ValueError, match="duplicate"):
        engine.admit(job("a"))
    with pytest.raises(KeyError):
        engine.remove("b")
    with pytest.raises(TimeoutError):
        pair.followers.receive(0.02)
    engine.step()
    changes = [Admit(job=job("a")), SetThreshold(request_id="a", value=0.75)]
    assert pair.followers.receive(1.0) == Plan(changes=changes), "what was refused is not passed on"
    engine.remove("a")
    engine.step()
    assert pair.followers.receive(1.0) == Plan(changes=[Remove(request_id="a")])


class Drifting(Engine):
    """From its second request on it runs another prompt than it was told."""

    def admit(self, job: Job) -> None:
        super().admit(replace(job, prompt_ids=[9] * len(job.prompt_ids)) if job.request_id == "b" else job)


def test_a_rank_that_commits_other_tokens_is_found_out_at_the_blocks_end(model: Model, following: Following) -> None:
    following.engine.__class__ = Drifting
    engine = leading(model, following.pair)
    engine.admit(job("a", max_tokens=8))
    engine.admit(job("b", choice=Threshold(1.0)))
    blocks_done = []

    def step_to_the_end() -> None:
        while engine.progress("b").finished is None:
            blocks_done.extend(step.request_id for step in engine.step().requests if step.block_done)

    with pytest.raises(RankFailed, match="rank 1 has committed other tokens than rank 0"):
        step_to_the_end()
    assert "b" not in blocks_done, "nobody hears of the block that differs"


def test_a_rank_that_is_gone_fails_the_step(model: Model, pair: Pair) -> None:
    engine = leading(model, pair)
    engine.admit(job())
    pair.followers.close()
    with pytest.raises(RankFailed, match="rank 1 has closed its line"):
        engine.step()


def test_a_rank_that_does_not_follow_fails_the_step_at_the_limit(model: Model) -> None:
    pair = Pair(limit_s=0.05)
    engine = leading(model, pair)
    engine.admit(job(choice=Threshold(0.0)))
    with pytest.raises(RankFailed, match="rank 1 has not answered within"):
        engine.step()
    pair.close()
