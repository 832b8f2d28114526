"""How requests denoise: `Course`s, each a request on its way, which a step at some threshold moves on.

A `Behaviour` knows prompts and how they denoise. Two kinds:
1. `Counted` knows how many steps each request takes at each threshold of a set, and nothing of single steps. A request
   that takes N steps for its K blocks at a threshold is moved on by K / N blocks by each step at that threshold, what
   goes beyond a block's end counts for the next block. So at one threshold it takes N steps exactly, and a threshold
   that changes on the way has its share. Between two thresholds of the set N is in proportion, beyond them as at the
   nearest. A block takes a step at least.
   What is expected of an answer's correctness is the mean over its tokens of the accuracy of the thresholds that they
   were committed at. Of confidences nothing is known: they are said as zeros.
2. `Recorded` (recorded.py) replays recorded runs, step by step.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from contracts.messages import Positive, Probability
from services.settings import ConfigError

Finish: TypeAlias = Literal["", "eos", "length"]
FiveNumbers: TypeAlias = tuple[float, float, float, float, float]  # minimum, quartiles, maximum
_NO_CONFIDENCE: FiveNumbers = (0.0, 0.0, 0.0, 0.0, 0.0)
_ROUNDING = 1e-9


class Signs(NamedTuple):
    """What a report says beside where the request stands: see `RequestReport`."""

    tokens_committed: int
    tokens_committed_in_block: int
    tokens_left_in_block: int
    ends_in_block: bool
    confidence: FiveNumbers


class Lengths(NamedTuple):
    """Of a request."""

    prompt_tokens: int
    output_tokens: int  # whole blocks


class Left(NamedTuple):
    """What is left of a request."""

    steps: float
    blocks: float  # still to begin


class Course(Protocol):
    """A request on its way."""

    @property
    def steps(self) -> int:
        """Run so far."""

    @property
    def block_index(self) -> int:
        """Blocks done."""

    @property
    def steps_in_block(self) -> int: ...

    @property
    def finish(self) -> Finish:
        """ "": it goes on."""

    def step(self, threshold: float) -> bool:
        """Runs a step; whether it ended a block."""

    def signs(self) -> Signs: ...

    def left(self, threshold: float) -> Left:
        """What is truly left of it, if it goes on at this threshold."""

    def go_back(self, blocks_done: int) -> None:
        """To the end of that block: what came after it is lost."""

    def correctness(self) -> float | None:
        """Of a finished one: 1 or 0, or what is expected; None where nobody can tell."""


class Behaviour(Protocol):
    """Prompts, numbered from 0, and how they denoise."""

    num_prompts: int
    ignore_eos: bool  # requests run through all their blocks

    def prompt_tokens(self, prompt: int) -> int: ...

    def max_tokens(self, prompt: int) -> int: ...

    def start(self, prompt: int) -> Course: ...

    def mean(self, threshold: float) -> Left:
        """Of a request that has not begun, over all prompts."""

    def accuracy(self, threshold: float) -> float | None:
        """Of all prompts at this threshold, where it is known."""


# --- counted steps ------------------------------------------------------------------------------------------------


class StepCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counted steps as a file holds them: `tools/simulate/published/*.json`."""

    source: str
    output_tokens: Positive
    block_size: Positive
    prompt_tokens: tuple[Positive, Positive]  # shortest and longest; evenly spread between
    prompt_tokens_source: str
    thresholds: Annotated[tuple[Probability, ...], Meta(min_length=1)]  # ascending
    accuracy: tuple[Probability, ...] = ()  # at each threshold; (): unknown
    accuracy_source: str = ""
    steps: Annotated[tuple[tuple[Positive, ...], ...], Meta(min_length=1)]  # of each request, at each threshold

    def __post_init__(self) -> None:
        if list(self.thresholds) != sorted(set(self.thresholds)):
            raise ValueError(f"thresholds must be ascending, are {self.thresholds}")
        for number, counts in enumerate(self.steps):
            if len(counts) != len(self.thresholds):
                raise ValueError(f"steps[{number}] has {len(counts)} numbers for {len(self.thresholds)} thresholds")
        if self.accuracy and len(self.accuracy) != len(self.thresholds):
            raise ValueError(f"accuracy has {len(self.accuracy)} numbers for {len(self.thresholds)} thresholds")
        if self.prompt_tokens[0] > self.prompt_tokens[1]:
            raise ValueError(f"prompt_tokens: {self.prompt_tokens[0]} is more than {self.prompt_tokens[1]}")

    @property
    def means(self) -> tuple[float, ...]:
        """Steps of a request at each threshold."""
        return tuple(sum(counts) / len(self.steps) for counts in zip(*self.steps, strict=True))


def read_step_counts(path: Path) -> StepCounts:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepCounts)
    except OSError as error:
        raise ConfigError(f"cannot read the step counts: {error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


class Counted:
    """Requests of counted steps, each prompt one that was counted (rule 1)."""

    ignore_eos = True

    def __init__(
        self,
        counts: StepCounts,
        *,
        output_tokens: int | None = None,
        mean_steps_per_block: Sequence[float] | None = None,
        prompt_tokens: tuple[int, int] | None = None,
        lengths: Sequence[Lengths] | None = None,
    ) -> None:
        """`output_tokens`, a multiple of the block size: steps in proportion. `mean_steps_per_block`, at each of the
        thresholds: the steps are scaled so that these are the means. `lengths`: of each prompt, instead of these and
        those that were counted; prompts beyond the counted requests go by their steps again."""
        self._counts = counts
        if lengths is None:
            shortest, longest = prompt_tokens or counts.prompt_tokens
            lengths = _even_lengths(len(counts.steps), shortest, longest, output_tokens or counts.output_tokens)
        for one in lengths:
            if one.output_tokens % counts.block_size:
                raise ConfigError(
                    f"output of {one.output_tokens} tokens is no whole number of blocks of {counts.block_size}"
                )
        self._lengths = lengths
        self.num_prompts = len(lengths)
        self._mean_blocks = sum(one.output_tokens for one in lengths) / len(lengths) / counts.block_size
        self._scale = self._scales(mean_steps_per_block)

    def _scales(self, means: Sequence[float] | None) -> list[float]:
        """Steps a block here, over steps a request there; by threshold."""
        if means is None:
            return [self._counts.block_size / self._counts.output_tokens] * len(self._counts.thresholds)
        return [mean / counted for mean, counted in zip(means, self._counts.means, strict=True)]

    def prompt_tokens(self, prompt: int) -> int:
        return self._lengths[prompt].prompt_tokens

    def max_tokens(self, prompt: int) -> int:
        return self._lengths[prompt].output_tokens

    def start(self, prompt: int) -> "CountedCourse":
        counts = self._counts.steps[prompt % len(self._counts.steps)]
        steps = [max(1.0, count * scale) for count, scale in zip(counts, self._scale, strict=True)]
        return CountedCourse(self, steps, self._lengths[prompt].output_tokens // self._counts.block_size)

    def mean(self, threshold: float) -> Left:
        scaled = [mean * scale for mean, scale in zip(self._counts.means, self._scale, strict=True)]
        blocks = self._mean_blocks
        return Left(blocks * interpolated(self._counts.thresholds, scaled, threshold), blocks)

    def accuracy(self, threshold: float) -> float | None:
        known = self._counts.accuracy
        return interpolated(self._counts.thresholds, known, threshold) if known else None

    def steps_per_block(self, steps: Sequence[float], threshold: float) -> float:
        return interpolated(self._counts.thresholds, steps, threshold)

    @property
    def block_size(self) -> int:
        return self._counts.block_size


def _even_lengths(num_prompts: int, shortest: int, longest: int, output_tokens: int) -> list[Lengths]:
    """Which prompts are long has nothing to do with their steps: nothing is known of both."""
    spread = longest - shortest + 1
    return [Lengths(shortest + prompt * 7919 % spread, output_tokens) for prompt in range(num_prompts)]


class CountedCourse:
    """One of them on its way."""

    def __init__(self, behaviour: Counted, steps_per_block: Sequence[float], num_blocks: int) -> None:
        self._behaviour = behaviour
        self._steps_per_block = steps_per_block  # by threshold of the set
        self._num_blocks = num_blocks
        self._done = 0.0  # blocks
        self._threshold, self._move = -1.0, 0.0  # of the last step, and how many blocks it takes one on
        self._turns: list[tuple[float, float]] = []  # blocks done when a threshold began, and which
        self._block_ends = [(0.0, 0)]  # blocks and steps done when each began
        self.steps = self.block_index = self.steps_in_block = 0
        self.finish: Finish = ""

    def step(self, threshold: float) -> bool:
        if threshold != self._threshold:
            self._turn(threshold)
        self._done += self._move
        self.steps += 1
        self.steps_in_block += 1
        if self._done < self.block_index + 1 - _ROUNDING:
            return False
        self.block_index += 1
        self.steps_in_block = 0
        self._block_ends.append((self._done, self.steps))
        if self.block_index == self._num_blocks:
            self.finish = "length"
        return True

    def _turn(self, threshold: float) -> None:
        self._turns.append((self._done, threshold))
        self._threshold = threshold
        self._move = 1 / self._behaviour.steps_per_block(self._steps_per_block, threshold)

    def go_back(self, blocks_done: int) -> None:
        del self._block_ends[blocks_done + 1 :]
        self._done, self.steps = self._block_ends[-1]
        self._turns = [turn for turn in self._turns if turn[0] < self._done]
        self._threshold = -1.0
        self.block_index, self.steps_in_block, self.finish = blocks_done, 0, ""

    def signs(self) -> Signs:
        block_size = self._behaviour.block_size
        before = self.block_index * block_size
        in_block = 0
        if self.steps_in_block:
            in_block = min(block_size - 1, max(self.steps_in_block, int((self._done - self.block_index) * block_size)))
        left = 0 if self.finish else block_size - in_block
        return Signs(before + in_block, in_block, left, False, _NO_CONFIDENCE)

    def left(self, threshold: float) -> Left:
        if self.finish:
            return Left(0.0, 0.0)
        steps_per_block = self._behaviour.steps_per_block(self._steps_per_block, threshold)
        blocks = self._num_blocks - self.block_index - (self.steps_in_block > 0)
        steps = -(-(self._num_blocks - self._done - _ROUNDING) * steps_per_block // 1)
        return Left(max(steps, blocks + (self.steps_in_block > 0)), float(blocks))

    def correctness(self) -> float | None:
        weighed = 0.0
        for (begin, threshold), (end, _) in pairwise([*self._turns, (self._done, -1.0)]):
            accuracy = self._behaviour.accuracy(threshold)
            if accuracy is None:
                return None
            weighed += accuracy * (end - begin)
        return weighed / self._done


def interpolated(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Between two places in proportion, beyond them as at the nearest."""
    right = bisect_left(places, at)
    if right == 0:
        return values[0]
    if right == len(places):
        return values[-1]
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
