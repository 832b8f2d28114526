"""What a step costs: the latency profile and the prices derived from it. Pure; shared by all who decide.

1. A pass over R tokens of recompute steps and C tokens of cache steps takes recompute(R) + cache(C) milliseconds, less
   the cheaper one's fixed part when it has both: the pass is launched once.
2. Each curve is piecewise linear through the profiled points, made monotone by a running maximum (raw samples are
   not), flat below the first point, and extended with its last slope beyond the last.
3. A resident that recomputes once a block and runs S steps a block puts, on average, 1/S of its canvas and (S-1)/S of
   its window into a pass: recomputes of a batch do not coincide.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from contracts.messages import CacheMode
from services.settings import ConfigError

StepKind = Literal["recompute", "cache"]


class Curve(NamedTuple):
    """Latency (ms) over tokens in the pass; both ascending."""

    tokens: tuple[float, ...]
    ms: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> "Curve":
        """A monotone curve. Raises ValueError without a point."""
        slowest = dict(sorted(points))  # of equal tokens the last, which is the slowest
        if not slowest:
            raise ValueError("a latency curve needs at least one point")
        highest = 0.0
        ms = tuple(highest := max(highest, latency) for latency in slowest.values())
        return cls(tuple(slowest), ms)

    def at(self, tokens: float) -> float:
        """Latency in milliseconds of a pass over `tokens`; 0 for an empty pass."""
        if tokens <= 0:
            return 0.0
        if len(self.tokens) == 1 or tokens <= self.tokens[0]:
            return self.ms[0]
        right = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        left = right - 1
        slope = (self.ms[right] - self.ms[left]) / (self.tokens[right] - self.tokens[left])
        return self.ms[right] + slope * (tokens - self.tokens[right])


class LatencyProfile:
    """Step latency of a model on a kind of hardware, by tensor-parallel degree and kind of step."""

    def __init__(self, curves: dict[tuple[int, StepKind], Curve]) -> None:
        self._curves = curves
        self.degrees = sorted({degree for degree, _ in curves})

    def step_ms(self, tp_degree: int, recompute_tokens: float, cache_tokens: float) -> float:
        """Milliseconds of a pass with that many tokens of each kind. Raises KeyError for a degree not profiled."""
        recompute = self._curves[tp_degree, "recompute"]
        cache = self._curves[tp_degree, "cache"]
        total = recompute.at(recompute_tokens) + cache.at(cache_tokens)
        if recompute_tokens > 0 and cache_tokens > 0:
            total -= min(recompute.ms[0], cache.ms[0])
        return total


class _Points(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tp_degree: int
    kind: StepKind
    points: list[tuple[float, float]]  # tokens in the pass, milliseconds


class _LatencyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hardware: str
    measured: list[_Points]


def load_latency(path: Path) -> LatencyProfile:
    """Reads `latency.json`. Raises ConfigError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_LatencyFile)
        curves = {(p.tp_degree, p.kind): Curve.through(p.points) for p in found.measured}
    except FileNotFoundError:
        raise ConfigError(f"no latency profile at {path}: measure one, `python -m services.denoiser profile`") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for degree in {degree for degree, _ in curves}:
        if not {(degree, "recompute"), (degree, "cache")} <= curves.keys():
            raise ConfigError(f"{path}: TP degree {degree} lacks its recompute or its cache curve")
    if not curves:
        raise ConfigError(f"{path}: no curve in it")
    return LatencyProfile(curves)


def dump_latency(
    path: Path, hardware: str, measured: dict[tuple[int, StepKind], Sequence[tuple[float, float]]]
) -> None:
    """Writes `latency.json`: points (tokens in the pass, milliseconds) by TP degree and kind of step."""
    rows = [{"tp_degree": d, "kind": kind, "points": list(points)} for (d, kind), points in sorted(measured.items())]
    path.write_text(json.dumps({"hardware": hardware, "measured": rows}, indent=1) + "\n", encoding="utf-8")


class Resident(NamedTuple):
    """A request as it weighs on its instance."""

    canvas_tokens: int
    block_size: int
    cache: CacheMode
    output_tokens_left: int  # from the start of its current block to the canvas's end: the prefix cache's window


def mean_pass_tokens(residents: Iterable[Resident], steps_per_block: float) -> tuple[float, float]:
    """Tokens of recompute steps and of cache steps that these residents put, on average, into a pass (rule 3)."""
    recompute_tokens = cache_tokens = 0.0
    for resident in residents:
        if resident.cache == "none":
            recompute_tokens += resident.canvas_tokens
            continue
        window = resident.block_size if resident.cache == "dual" else resident.output_tokens_left
        recompute_tokens += resident.canvas_tokens / steps_per_block
        cache_tokens += window * (1 - 1 / steps_per_block)
    return recompute_tokens, cache_tokens
