"""Which passes the profiler measures. Pure.

Varied are, one at a time and together: rows, requests, canvases (which the rows attend to), the kind of step, and the
mixture of both kinds in one pass; as far as an engine of this size could come to make such a pass.
"""

from collections.abc import Iterator
from typing import NamedTuple

from services.costs import PassLoad, step_load
from services.denoiser.engine import EngineConfig

_CANVASES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


class Mix(NamedTuple):
    """What rides in a pass."""

    recomputes: int  # requests with a recompute step, each over a canvas of
    recompute_canvas: int
    cached: int  # requests with a cache step, each
    window: int  # rows of a canvas of
    cached_canvas: int

    @property
    def load(self) -> PassLoad:
        """What such a pass has to do."""
        recompute = step_load("recompute", self.recompute_canvas, self.recompute_canvas, self.recomputes)
        return recompute.plus(step_load("cache", self.window, self.cached_canvas, self.cached))

    @property
    def canvas_tokens(self) -> int:
        """Of all requests together."""
        return self.recomputes * self.recompute_canvas + self.cached * self.cached_canvas

    def __str__(self) -> str:
        parts = []
        if self.recomputes:
            parts.append(f"{self.recomputes} x {self.recompute_canvas}")
        if self.cached:
            parts.append(f"{self.cached} x {self.window} of {self.cached_canvas}")
        return " + ".join(parts)


def plan_mixes(block_size: int, longest: int, config: EngineConfig, *, quick: bool) -> list[Mix]:
    """Passes that the engine could come to make, with canvases of up to `longest` tokens."""
    axes = (
        _single_recomputes(block_size, longest),
        _several_recomputes(longest, config.max_requests),
        _cache_steps(block_size, longest, config.max_requests),
        _wide_cache_steps(block_size, longest),
        _mixed(block_size, longest, config.max_requests),
    )
    plan: dict[Mix, None] = {}  # in order, each once
    for axis in axes:
        possible = [mix for mix in axis if _is_possible(mix, block_size, longest, config)]
        plan |= dict.fromkeys(possible[::3] + possible[-1:] if quick else possible)
    return list(plan)


def _is_possible(mix: Mix, block_size: int, longest: int, config: EngineConfig) -> bool:
    canvases = [mix.recompute_canvas] * bool(mix.recomputes) + [mix.cached_canvas] * bool(mix.cached)
    window = mix.window if mix.cached else block_size
    return (
        all(window < canvas <= longest for canvas in canvases)
        and mix.recomputes + mix.cached <= config.max_requests
        and mix.load.tokens <= config.max_batch_tokens
        # The cached requests' own recompute steps come first, unmeasured: no more of them than is worth the time.
        and mix.canvas_tokens <= min(config.kv_budget_tokens, 2 * config.max_batch_tokens)
    )


def _single_recomputes(block_size: int, longest: int) -> Iterator[Mix]:
    for canvas in (2 * block_size, *_CANVASES, longest):
        yield Mix(1, canvas, 0, 0, 0)


def _several_recomputes(longest: int, most: int) -> Iterator[Mix]:
    for count in _powers_of_two(most)[1:]:
        for share in (8, 4, 2, 1):
            yield Mix(count, longest // share, 0, 0, 0)


def _cache_steps(block_size: int, longest: int, most: int) -> Iterator[Mix]:
    for count in _powers_of_two(most):
        for canvas in (2 * block_size, longest // 4, longest // 2, longest):
            yield Mix(0, 0, count, block_size, canvas)


def _wide_cache_steps(block_size: int, longest: int) -> Iterator[Mix]:
    """The prefix cache's: of several blocks."""
    for blocks in (2, 4, 8):
        for count in (1, 4):
            for canvas in (longest // 2, longest):
                yield Mix(0, 0, count, blocks * block_size, canvas)


def _mixed(block_size: int, longest: int, most: int) -> Iterator[Mix]:
    for count in _powers_of_two(most)[1:]:
        for recompute_canvas in (longest // 8, longest // 3, longest):
            for cached_canvas in (longest // 3, longest):
                yield Mix(1, recompute_canvas, count - 1, block_size, cached_canvas)
    yield Mix(2, longest // 3, 2, block_size, longest // 2)
    yield Mix(2, longest // 3, 6, block_size, longest // 2)


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]
