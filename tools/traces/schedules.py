"""Which threshold a recorded run applies at each of its steps. Pure.

A schedule has a name:
1. a number, "0.7": this threshold throughout;
2. letters l, m and h, "lmh": so many equal parts of the output, by tokens committed, with the lowest, the middle and
   the highest threshold of the set;
3. "blocks": a random threshold of the set for each block;
4. "steps": a random one, and before each further step another one with probability SWITCH_SHARE, within blocks too.
What is random is a function of the key alone.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

SWITCH_SHARE = 0.25
DEFAULT = ("blocks", "steps", "lmh", "hml")  # those that change, besides one for each threshold


class Progress(NamedTuple):
    """How far a run is before a step."""

    steps: int  # run so far
    block_index: int
    tokens_committed: int


class Schedule(Protocol):
    def __call__(self, progress: Progress) -> float:
        """The threshold of the next step."""


def name_of(threshold: float) -> str:
    """The schedule that stays at this threshold."""
    return f"{threshold:g}"


def fixed_threshold(name: str) -> float | None:
    """The threshold of a schedule that never changes it, else None."""
    try:
        return float(name)
    except ValueError:
        return None


def check_name(name: str) -> None:
    """Raises ValueError unless there is a changing schedule of that name."""
    if name not in ("blocks", "steps") and (len(name) < 2 or not set(name) <= set("lmh")):
        raise ValueError(f'schedule {name!r} is neither "blocks" nor "steps" nor several of the letters l, m, h')


def make_schedule(name: str, thresholds: Sequence[float], *, planned_tokens: int, key: str) -> Schedule:
    """The schedule of that name. `thresholds`: the set, ascending; `planned_tokens`: the output that has the parts."""
    if (value := fixed_threshold(name)) is not None:
        return _Fixed(value)
    check_name(name)
    if name == "blocks":
        return _ByBlock(thresholds, key)
    if name == "steps":
        return _ByStep(thresholds, key)
    of_letter = {"l": thresholds[0], "m": thresholds[len(thresholds) // 2], "h": thresholds[-1]}
    return _ByPart([of_letter[letter] for letter in name], planned_tokens)


class _Fixed:
    def __init__(self, value: float) -> None:
        self._value = value

    def __call__(self, progress: Progress) -> float:
        return self._value


class _ByPart:
    def __init__(self, values: Sequence[float], planned_tokens: int) -> None:
        self._values, self._tokens = values, max(1, planned_tokens)

    def __call__(self, progress: Progress) -> float:
        part = progress.tokens_committed * len(self._values) // self._tokens
        return self._values[min(part, len(self._values) - 1)]  # the last one also for what is longer than planned


class _ByBlock:
    def __init__(self, thresholds: Sequence[float], key: str) -> None:
        self._thresholds, self._key = thresholds, key

    def __call__(self, progress: Progress) -> float:
        return Random(f"{self._key}/{progress.block_index}").choice(self._thresholds)


class _ByStep:
    def __init__(self, thresholds: Sequence[float], key: str) -> None:
        self._thresholds, self._rng = thresholds, Random(key)
        self._values: list[float] = []  # of the steps so far, drawn in their order

    def __call__(self, progress: Progress) -> float:
        while len(self._values) <= progress.steps:
            self._values.append(self._next())
        return self._values[progress.steps]

    def _next(self) -> float:
        if self._values and self._rng.random() >= SWITCH_SHARE:
            return self._values[-1]
        others = [value for value in self._thresholds if not self._values or value != self._values[-1]]
        return self._rng.choice(others or self._thresholds)
