"""API keys: what a file may say, who is found by a key, and what a key may take."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.gateway.keys import ANYONE, ApiKey, KeyLimits, Limiter, hash_key, read_keys

LIMITS = KeyLimits(calls_per_s=5.0, burst=10, max_open=7)
HASH = "0" * 64


def make_key(name: str = "alice", calls_per_s: float = 0.0, burst: int = 1, max_open: int = 0) -> ApiKey:
    return ApiKey(name=name, sha256=HASH, calls_per_s=calls_per_s, burst=burst, max_open=max_open)


# --- the file ----------------------------------------------------------------------------------------------------


def test_what_a_table_leaves_unsaid_comes_from_the_settings() -> None:
    ring = read_keys(
        f'[alice]\nsha256 = "{hash_key("one")}"\n'
        f'[bob]\nsha256 = "{hash_key("two")}"\ntiers = ["flex"]\npin = true\nmax_open = 0\ncalls_per_s = 2\n',
        LIMITS,
    )
    assert ring.names == {"alice", "bob"}
    assert ring.find("Bearer one", 0.0) == ApiKey(
        name="alice",
        sha256=hash_key("one"),
        tiers=("default", "flex"),
        pin=False,
        calls_per_s=5.0,
        burst=10,
        max_open=7,
    )
    assert ring.find("bearer  two", 0.0) == ApiKey(
        name="bob", sha256=hash_key("two"), tiers=("flex",), pin=True, calls_per_s=2.0, burst=10, max_open=0
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("[alice", "not valid TOML"),
        ("alice = 1", "'alice': every key is a table"),
        (f"[alice]\nname = 'bob'\nsha256 = '{HASH}'", "'alice': every key is a table"),
        ("[alice]\npin = true", r"\[alice\] .*sha256"),
        ("[alice]\nsha256 = 'tds-secret'", r"\[alice\] .*sha256"),
        (f"['a b']\nsha256 = '{HASH}'", r"\[a b\] .*name"),
        (f"[alice]\nsha256 = '{HASH}'\n[bob]\nsha256 = '{HASH}'", r"\[bob\] has the sha256 of \[alice\]"),
        (f"[alice]\nsha256 = '{HASH}'\nrate = 1", r"\[alice\] .*rate"),
        (f"[alice]\nsha256 = '{HASH}'\ntiers = []", r"\[alice\] .*tiers"),
        (f"[alice]\nsha256 = '{HASH}'\ntiers = ['gold']", r"\[alice\] .*gold.*tiers"),
        (f"[alice]\nsha256 = '{HASH}'\ncalls_per_s = -1", r"\[alice\] .*calls_per_s"),
        (f"[alice]\nsha256 = '{HASH}'\ncalls_per_s = inf", r"\[alice\] calls_per_s: inf"),
        (f"[alice]\nsha256 = '{HASH}'\nburst = 0", r"\[alice\] .*burst"),
        (f"[alice]\nsha256 = '{HASH}'\nmax_open = -1", r"\[alice\] .*max_open"),
        (f"[alice]\nsha256 = '{HASH}'\nexpires = 2027-01-01T00:00:00", r"\[alice\] .*timezone.*expires"),
        (f"[alice]\nsha256 = '{HASH}'\nexpires = 2027-01-01", r"\[alice\] .*expires"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_reason(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        read_keys(text, LIMITS)
    assert "tds-secret" not in str(caught.value)


# --- who it is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer ", "Basic one", "one"])
def test_who_sends_no_key_is_told_so(sent: str) -> None:
    assert read_keys(f"[alice]\nsha256 = '{hash_key('one')}'", LIMITS).find(sent, 0.0) == "missing"


@given(st.text(min_size=1).filter(lambda text: text.strip()))
def test_only_the_key_itself_is_found(sent: str) -> None:
    ring = read_keys(f"[alice]\nsha256 = '{hash_key('one')}'", LIMITS)
    found = ring.find(f"Bearer {sent}", 0.0)
    assert (found == "unknown") == (sent.strip() != "one")


def test_hashes_that_begin_alike_are_told_apart() -> None:
    """Keys whose hashes share what they are found by."""
    by_start: dict[str, str] = {}
    for number in range(10_000):
        key = f"key-{number}"
        other = by_start.setdefault(hash_key(key)[:4], key)
        if other != key:
            break
    ring = read_keys(f"[alice]\nsha256 = '{hash_key(key)}'\n[bob]\nsha256 = '{hash_key(other)}'", LIMITS)
    found = [ring.find(f"Bearer {sent}", 0.0) for sent in (key, other)]
    assert [key.name for key in found if isinstance(key, ApiKey)] == ["alice", "bob"]


def test_a_key_ends_at_its_time() -> None:
    end = datetime(2027, 1, 1, tzinfo=UTC)
    ring = read_keys(f"[alice]\nsha256 = '{hash_key('one')}'\nexpires = {end.isoformat()}", LIMITS)
    assert isinstance(ring.find("Bearer one", (end - timedelta(seconds=1)).timestamp()), ApiKey)
    assert ring.find("Bearer one", end.timestamp()) == "expired"


# --- how often ---------------------------------------------------------------------------------------------------


def test_after_a_pause_the_burst_then_the_rate() -> None:
    limiter, key = Limiter(), make_key(calls_per_s=2.0, burst=3)
    assert [limiter.take_call(key, 100.0) for _ in range(3)] == [0.0] * 3
    assert limiter.take_call(key, 100.0) == pytest.approx(0.5)
    assert limiter.take_call(key, 100.4) == pytest.approx(0.1), "a refused call takes nothing"
    assert limiter.take_call(key, 100.5) == 0.0
    assert [limiter.take_call(key, 200.0) > 0 for _ in range(4)] == [False] * 3 + [True], "no more than the burst"


def test_keys_do_not_share_a_bucket() -> None:
    limiter = Limiter()
    alice, bob = make_key("alice", 1.0), make_key("bob", 1.0)
    assert limiter.take_call(alice, 0.0) == 0.0
    assert limiter.take_call(alice, 0.0) > 0.0
    assert limiter.take_call(bob, 0.0) == 0.0


def test_wider_limits_count_at_once() -> None:
    limiter, slow, quick = Limiter(), make_key(calls_per_s=0.001, burst=100), make_key(calls_per_s=10.0, burst=1)
    for _ in range(100):
        assert limiter.take_call(slow, 0.0) == 0.0
    assert 0 < limiter.take_call(quick, 0.0) <= 0.1
    assert limiter.take_call(quick, 0.1) == 0.0


def test_without_keys_or_a_rate_nothing_is_limited() -> None:
    limiter = Limiter()
    for _ in range(1000):
        assert limiter.take_call(ANYONE, 0.0) == 0.0
        limiter.enter(ANYONE, 128)
    assert limiter.has_room(ANYONE, 10**6)


RATES = st.floats(min_value=0.01, max_value=1000.0)
GAPS = st.lists(st.floats(min_value=0.0, max_value=100.0), min_size=1, max_size=60)


@given(RATES, st.integers(1, 20), GAPS)
def test_no_span_of_time_has_more_calls_than_burst_and_rate_allow(rate: float, burst: int, gaps: list[float]) -> None:
    limiter, key = Limiter(), make_key(calls_per_s=rate, burst=burst)
    now, taken = 1e5, []
    for gap in gaps:
        now += gap / rate
        if limiter.take_call(key, now) == 0.0:
            taken.append(now)
    for first, begin in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - begin) + 1e-3


@given(RATES, st.integers(1, 20), GAPS)
def test_who_waits_as_told_is_served_and_who_keeps_to_the_rate_always(
    rate: float, burst: int, gaps: list[float]
) -> None:
    limiter, key = Limiter(), make_key(calls_per_s=rate, burst=burst)
    now = 1e5
    for gap in gaps:
        now += gap / rate / 20  # faster than the rate
        wait_s = limiter.take_call(key, now)
        assert 0 <= wait_s <= 1 / rate * 1.001 + 1e-6, "one call is there after one call's time"
        if wait_s:
            now += wait_s
            assert limiter.take_call(key, now) == 0.0
    steady = Limiter()
    assert all(steady.take_call(key, 1e5 + number / rate) == 0.0 for number in range(50))


# --- how much at once --------------------------------------------------------------------------------------------


class OpenRequests(RuleBasedStateMachine):
    """Calls of three keys come and go; a model counts along."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = Limiter()
        self.keys = [make_key(str(limit), max_open=limit) for limit in (1, 5, 0)]
        self.open: list[tuple[int, int]] = []

    def held(self, index: int) -> int:
        return sum(num for whose, num in self.open if whose == index)

    @rule(index=st.integers(0, 2), num=st.integers(1, 6))
    def call(self, index: int, num: int) -> None:
        key = self.keys[index]
        room = self.limiter.has_room(key, num)
        assert room == (key.max_open == 0 or self.held(index) + num <= key.max_open)
        if room:
            self.limiter.enter(key, num)
            self.open.append((index, num))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index, num = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.limiter.leave(self.keys[index], num)

    @rule()
    def read_the_file_again(self) -> None:
        self.limiter.keep({"1"})  # the others are revoked; what they have open still ends

    @invariant()
    def nothing_is_kept_of_who_has_nothing_open(self) -> None:
        assert self.limiter._open == {key.name: self.held(i) for i, key in enumerate(self.keys) if self.held(i)}


TestOpenRequests = OpenRequests.TestCase
TestOpenRequests.settings = settings(max_examples=30, stateful_step_count=30)
