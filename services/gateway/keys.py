"""API keys: who may call, with which rights, how often, and how much at once. Pure; clocks are arguments.

1. The key file has a table for each key, by name. It holds the key's SHA-256, never the key. A fast hash is right here:
   a key is 256 random bits, so there is no dictionary to try, and a slow hash would only cost every call.
2. A key is found by the first characters of its hash, and compared in constant time.
3. Calls come out of a bucket of `burst` calls that fills at `calls_per_s`. One that finds it empty is told when to try
   again, and takes nothing.
4. A key has at most `max_open` requests open: one key alone cannot fill the queue that all share.
5. What a key has used is kept by its name, so it outlives a change of the file.
"""

import hashlib
import hmac
import math
import tomllib
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from services.profile import Tier

KeyFault: TypeAlias = Literal["missing", "unknown", "expired"]

NAME = r"^[A-Za-z0-9_-]{1,64}$"
_START = 4  # hexadecimal digits of a hash that are compared in a time that may tell something: 16 of its 256 bits


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one key may take, where the file does not say otherwise."""

    calls_per_s: float = 0.0
    burst: int = 1
    max_open: int = 0


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key's table in the file."""

    name: Annotated[str, Meta(pattern=NAME)]  # the table's
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]  # of the key, in hexadecimal
    tiers: Annotated[tuple[Tier, ...], Meta(min_length=1)] = ("default", "flex")  # the first is what calls get unasked
    pin: bool = False  # may pin the threshold
    calls_per_s: Annotated[float, Meta(ge=0.0)]  # in the long run; 0: no limit
    burst: Annotated[int, Meta(ge=1)]  # calls at once, after a pause
    max_open: Annotated[int, Meta(ge=0)]  # requests (prompts x n) at once, streamed or not; 0: no limit
    expires: Annotated[datetime, Meta(tz=True)] | None = None  # no call is taken from then on

    def __post_init__(self) -> None:
        if not math.isfinite(self.calls_per_s):
            raise ValueError(f"calls_per_s: {self.calls_per_s:g} is no rate; 0 stands for no limit")


# Of everybody, where there are no keys.
ANYONE = ApiKey(
    name="", sha256="", tiers=("default", "flex", "priority"), pin=True, calls_per_s=0.0, burst=1, max_open=0
)


def hash_key(key: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """The keys of a file."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.names: set[str] = set()
        self._by_start: dict[str, list[ApiKey]] = {}
        for key in keys:
            self.names.add(key.name)
            self._by_start.setdefault(key.sha256[:_START], []).append(key)

    def find(self, authorization: str, now: float) -> ApiKey | KeyFault:
        """The key in an `Authorization` header. `now`: wall clock, seconds."""
        scheme, _, sent = authorization.partition(" ")
        sent = sent.strip()
        if scheme.lower() != "bearer" or not sent:
            return "missing"
        digest = hash_key(sent)
        for key in self._by_start.get(digest[:_START], []):
            if hmac.compare_digest(key.sha256, digest):
                return "expired" if key.expires is not None and now >= key.expires.timestamp() else key
        return "unknown"


def read_keys(text: str, limits: KeyLimits) -> KeyRing:
    """The key file's content. Raises ValueError, which names the key and the reason, and holds nothing secret."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not valid TOML: {error}") from None
    if not tables:
        raise ValueError("it holds no key, so nobody could call")
    keys = [_read_key(name, table, limits) for name, table in tables.items()]
    by_hash: dict[str, str] = {}
    for key in keys:
        other = by_hash.setdefault(key.sha256, key.name)
        if other != key.name:
            raise ValueError(f"[{key.name}] has the sha256 of [{other}]: make a key of its own")
    return KeyRing(keys)


def _read_key(name: str, table: Any, limits: KeyLimits) -> ApiKey:
    if not isinstance(table, dict) or "name" in table:
        raise ValueError(f"{name!r}: every key is a table, and its name is the table's: [{name}]")
    try:
        return msgspec.convert({**msgspec.structs.asdict(limits), **table, "name": name}, ApiKey)
    except msgspec.ValidationError as error:
        raise ValueError(f"[{name}] {error}") from None


class Limiter:
    """What each key has used of what it may."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}  # when the key's bucket will be full again
        self._open: dict[str, int] = {}

    def take_call(self, key: ApiKey, now: float) -> float:
        """Takes a call out of the key's bucket: 0. Or takes nothing: the seconds until there is one.

        `now`: a clock that never goes back, seconds.
        """
        if key.calls_per_s == 0:
            return 0.0
        one_s, all_s = 1 / key.calls_per_s, key.burst / key.calls_per_s
        # at the latest when an empty bucket is full: the limits may have been wider before
        full_at = min(max(self._full_at.get(key.name, now), now), now + all_s)
        wait_s = full_at + one_s - (now + all_s)
        is_taken = wait_s <= 1e-9  # what rounding leaves over is no reason to refuse
        self._full_at[key.name] = full_at + one_s if is_taken else full_at
        return 0.0 if is_taken else wait_s

    def has_room(self, key: ApiKey, num_requests: int = 1) -> bool:
        """Whether the key may have so many more requests open."""
        return not key.max_open or self._open.get(key.name, 0) + num_requests <= key.max_open

    def enter(self, key: ApiKey, num_requests: int) -> None:
        """They are open from now on."""
        self._open[key.name] = self._open.get(key.name, 0) + num_requests

    def leave(self, key: ApiKey, num_requests: int) -> None:
        """They have ended."""
        left = self._open.get(key.name, 0) - num_requests
        assert left >= 0
        if left:
            self._open[key.name] = left
        else:
            del self._open[key.name]

    def keep(self, names: set[str]) -> None:
        """Forgets the buckets of keys that are no more."""
        self._full_at = {name: at for name, at in self._full_at.items() if name in names}
