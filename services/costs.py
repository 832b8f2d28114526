"""What a step costs: the latency profile and the prices derived from it. Pure; shared by all who decide.

1. What a pass has to do is a `PassLoad`: rows, steps of either kind, keys that are read, pairs of a row and a key that
   it attends to. Loads add up, whether steps share a pass or are averages of steps that do.
2. A pass takes curve(rows) + a time for each recompute step, cache step, key and pair. All rows run through the same
   weights at once: they share one curve, of whatever kind their steps are. Without rows it takes no time.
3. The curve is piecewise linear and never falls, flat below its first point, and goes on with its last slope beyond the
   last. No time is negative: more work of any sort never costs less.
4. A resident that recomputes once a block and runs S steps a block puts, on average, 1/S of a recompute step and
   (S-1)/S of a cache step into a pass: recomputes of a batch do not coincide.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from contracts.messages import CacheMode, Positive
from services.settings import ConfigError

StepKind = Literal["recompute", "cache"]
PassKind = Literal["recompute", "cache", "mixed"]
Milliseconds = Annotated[float, Meta(ge=0.0)]

HOW_TO_MEASURE = "`python -m services.denoiser profile`"
_FORMAT = 2  # of latency.json


# --- loads --------------------------------------------------------------------------------------------------------


class PassLoad(NamedTuple):
    """What a pass has to do. Fractions are averages over passes."""

    tokens: float = 0.0  # rows of all its steps
    recompute_steps: float = 0.0
    cache_steps: float = 0.0
    keys: float = 0.0  # what its requests see of their canvases, added up
    pairs: float = 0.0  # of a row and a key that it attends to

    def plus(self, other: "PassLoad") -> "PassLoad":
        """Both in one pass."""
        return PassLoad(
            self.tokens + other.tokens,
            self.recompute_steps + other.recompute_steps,
            self.cache_steps + other.cache_steps,
            self.keys + other.keys,
            self.pairs + other.pairs,
        )

    @property
    def kind(self) -> PassKind:
        if self.recompute_steps and self.cache_steps:
            return "mixed"
        return "recompute" if self.recompute_steps else "cache"


def step_load(kind: StepKind, tokens: float, seen_tokens: float, steps: float = 1.0) -> PassLoad:
    """`steps` steps of one kind, each of `tokens` rows that see so much of their canvas."""
    rows, keys = steps * tokens, steps * seen_tokens
    recompute_steps, cache_steps = (steps, 0.0) if kind == "recompute" else (0.0, steps)
    return PassLoad(rows, recompute_steps, cache_steps, keys, rows * seen_tokens)


class Resident(NamedTuple):
    """A request as it weighs on its instance."""

    canvas_tokens: int  # that it takes of the K/V pool
    block_size: int
    cache: CacheMode
    output_tokens_left: int  # from the start of its current block to the canvas's end
    blocks_ahead: int | None = None  # that the model sees beyond the current one; None: all

    @property
    def output_tokens_seen(self) -> int:
        """Of `output_tokens_left`, what the model sees: the rows of a prefix cache step."""
        if self.blocks_ahead is None:
            return self.output_tokens_left
        return min(self.output_tokens_left, (1 + self.blocks_ahead) * self.block_size)

    @property
    def seen_tokens(self) -> int:
        """Of the canvas, what the model sees: the keys of a step, and the rows of a recompute step."""
        return self.canvas_tokens - self.output_tokens_left + self.output_tokens_seen


def mean_pass(residents: Iterable[Resident], steps_per_block: float) -> PassLoad:
    """What these residents put, on average, into a pass (rule 4)."""
    tokens = recompute_steps = cache_steps = keys = pairs = 0.0
    for resident in residents:
        recompute = 1.0 if resident.cache == "none" else 1 / steps_per_block
        window = resident.block_size if resident.cache == "dual" else resident.output_tokens_seen
        seen = resident.seen_tokens
        rows = recompute * seen + (1 - recompute) * window
        tokens += rows
        recompute_steps += recompute
        cache_steps += 1 - recompute
        keys += seen
        pairs += rows * seen
    return PassLoad(tokens, recompute_steps, cache_steps, keys, pairs)


# --- prices -------------------------------------------------------------------------------------------------------


class PassCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the passes of a model cost on a kind of hardware at one TP degree (rules 2 and 3)."""

    curve: tuple[tuple[float, Milliseconds], ...]  # (tokens, ms), both ascending
    recompute_step_ms: Milliseconds = 0.0
    cache_step_ms: Milliseconds = 0.0
    key_ms: Milliseconds = 0.0
    pair_ms: Milliseconds = 0.0

    def __post_init__(self) -> None:
        if not self.curve:
            raise ValueError("a latency curve needs at least one point")
        for (tokens, ms), (more_tokens, more_ms) in pairwise(self.curve):
            if more_tokens <= tokens or more_ms < ms:
                raise ValueError(
                    f"a latency curve goes up: {more_ms:g} ms at {more_tokens:g} tokens after {ms:g} at {tokens:g}"
                )

    def ms(self, load: PassLoad) -> float:
        """Milliseconds of a pass."""
        return self.pass_ms(load.tokens, self.steps_ms(load))

    def steps_ms(self, load: PassLoad) -> float:
        """Milliseconds that it adds to a pass beside its rows' place on the curve: of several loads, their sum."""
        return (
            self.recompute_step_ms * load.recompute_steps
            + self.cache_step_ms * load.cache_steps
            + self.key_ms * load.keys
            + self.pair_ms * load.pairs
        )

    def pass_ms(self, tokens: float, steps_ms: float) -> float:
        """Milliseconds of a pass of so many rows and with so much beside them."""
        if tokens <= 0:
            return 0.0
        return self._curve_ms(tokens) + steps_ms

    def _curve_ms(self, tokens: float) -> float:
        curve = self.curve
        right = min(bisect_left(curve, (tokens,)), len(curve) - 1)
        if right == 0:
            return curve[0][1]
        (left_tokens, left_ms), (right_tokens, right_ms) = curve[right - 1], curve[right]
        return right_ms + (right_ms - left_ms) / (right_tokens - left_tokens) * (tokens - right_tokens)


class LatencyProfile:
    """Step latency of a model on a kind of hardware, by tensor-parallel degree."""

    def __init__(self, costs: Mapping[int, PassCost]) -> None:
        self._costs = dict(costs)
        self.degrees = sorted(self._costs)

    def step_ms(self, tp_degree: int, load: PassLoad) -> float:
        """Milliseconds of a pass. Raises ConfigError for a TP degree that was not measured."""
        return self.cost(tp_degree).ms(load)

    def cost(self, tp_degree: int) -> PassCost:
        """What passes cost at this degree. Raises ConfigError if it was not measured."""
        try:
            return self._costs[tp_degree]
        except KeyError:
            measured = ",".join(map(str, self.degrees))
            raise ConfigError(
                f"the latency profile holds TP degree {measured}, not {tp_degree}: "
                f"measure it too, {HOW_TO_MEASURE} with --tp {measured},{tp_degree}"
            ) from None

    def nearest_degree(self, tp_degree: int) -> int:
        """The highest measured TP degree that is not above, or else the lowest."""
        return max((degree for degree in self.degrees if degree <= tp_degree), default=self.degrees[0])


# --- latency.json -------------------------------------------------------------------------------------------------


class MeasuredPass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pass that was measured several times."""

    load: PassLoad
    ms: Milliseconds  # median
    low_ms: Milliseconds  # quartiles
    high_ms: Milliseconds
    samples: Positive


class FitError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Relative error of the fitted cost, over the passes of one kind: median and 95th percentile.

    `unseen`: by a fit that has not seen the pass. Of mixed passes it has seen none at all: how well costs add up.
    """

    kind: PassKind
    passes: Positive
    median: float
    p95: float
    unseen_median: float
    unseen_p95: float


class DegreeProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured at one TP degree, and the cost fitted to it."""

    tp_degree: Positive
    cost: PassCost
    errors: tuple[FitError, ...] = ()
    passes: tuple[MeasuredPass, ...] = ()


class LatencyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`latency.json`. The services read the costs; the rest is for people, plots and fits to come."""

    format: Literal[2] = 2
    hardware: str
    degrees: Annotated[tuple[DegreeProfile, ...], Meta(min_length=1)]


class _Version(msgspec.Struct):
    format: int = 1


def read_latency_file(path: Path) -> LatencyFile:
    """All of `latency.json`. Raises ConfigError."""
    try:
        content = path.read_bytes()
        if (found := msgspec.json.decode(content, type=_Version).format) != _FORMAT:
            raise ConfigError(f"{path} is of format {found}, not {_FORMAT}: measure it anew, {HOW_TO_MEASURE}")
        return msgspec.json.decode(content, type=LatencyFile)
    except FileNotFoundError:
        raise ConfigError(f"no latency profile at {path}: measure one, {HOW_TO_MEASURE}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def load_latency(path: Path) -> LatencyProfile:
    """What `latency.json` says about costs. Raises ConfigError."""
    return LatencyProfile({degree.tp_degree: degree.cost for degree in read_latency_file(path).degrees})


def dump_latency(path: Path, hardware: str, degrees: Sequence[DegreeProfile]) -> None:
    """Writes `latency.json`, one measured pass a line."""
    content = msgspec.json.encode(LatencyFile(hardware=hardware, degrees=tuple(degrees)))
    for start in (b'{"tp_degree"', b'"errors"', b'{"kind"', b'"passes":[', b'{"load"'):
        content = content.replace(start, b"\n" + start)
    path.write_bytes(content + b"\n")
