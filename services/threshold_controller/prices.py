"""What a request's steps cost, in seconds: to itself on its instance, and to all as a share of an instance. Pure.

A pass that a request rides in holds what the others put into it. Their recomputes do not coincide: with some chance
there is any, and then as many of its tokens as make the mean right.
To itself, for its deadline:
1. A step lasts as long as its pass, times the instance's measured over profiled latency.
   `paper`: all recompute steps of the batch coincide, and so do all cache steps.
2. Alone on the fastest instance no step can be cheaper.
Shared, for load control:
3. An instance full of such requests (as many as it may hold and its K/V pool has room for) spends its passes on them in
   equal parts. So the price does not depend on who else is there, and one request more makes nobody cheaper.
4. What a block costs at the fewest and at the most steps that the profile knows gives the price of each kind of step.
   `paper`: a token costs what it does in a batch of requests of `_PAPER_TOKENS` with a step for each token.
5. Over several instances: what a step costs where the work is spread so that all end together.
6. A measured latency ratio makes all of an instance's prices so many times as high. So what a kind of instance charges
   at the profiled latency is computed once, and a cluster of as many ratios as instances is no more work than one.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from services.costs import LatencyProfile, PassLoad, Resident, step_load
from services.threshold_controller.config import PolicyName

_PAPER_TOKENS = 1536
_LEAST_S = 1e-9  # of a price: in a profile with a flat curve a step more may cost nothing
_MOST_PRICES = 16_384  # that are kept, of kinds of instances for kinds of requests


class StepPrices(NamedTuple):
    """Seconds of one step of each kind."""

    recompute: float
    cache: float


class Supply(NamedTuple):
    """An instance, as far as it bears on prices."""

    tp_degree: int
    max_requests: int
    kv_tokens: int
    latency_ratio: float


class Pool(NamedTuple):
    """All instances of one kind."""

    size: int
    speed: float  # of all, in instances of the profiled latency
    least_ratio: float


class Fleet:
    """Some instances, by kind: `Supply` at the profiled latency (rule 6)."""

    def __init__(self, supplies: Iterable[Supply] = ()) -> None:
        ratios: dict[Supply, list[float]] = {}
        for supply in sorted(supplies):  # whoever was heard first, a sum is the same
            ratios.setdefault(supply._replace(latency_ratio=1.0), []).append(supply.latency_ratio)
        self.size = sum(map(len, ratios.values()))
        self.pools = {kind: Pool(len(of), sum([1 / ratio for ratio in of]), min(of)) for kind, of in ratios.items()}


class Riders(NamedTuple):
    """What some requests put into a pass, on average."""

    recompute: PassLoad
    cache: PassLoad
    none: float  # probability that none of those recomputes that do not always
    always: int = 0  # requests that recompute in each pass: those without a cache

    @property
    def no_recompute(self) -> float:
        """Probability that none of them recomputes."""
        return 0.0 if self.always else self.none

    def plus(self, resident: Resident, share: float) -> "Riders":
        """With a request more. `share`: of recompute steps among its steps."""
        return Riders(
            self.recompute.plus(_recompute(resident, share)),
            self.cache.plus(_cache(resident, 1 - share)),
            self.none * (1 - share) if share < 1 else self.none,
            self.always + (share >= 1),
        )

    def minus(self, resident: Resident, share: float) -> "Riders":
        """Without that request, which must be among them."""
        return Riders(
            self.recompute.plus(_recompute(resident, -share)),
            self.cache.plus(_cache(resident, share - 1)),
            self.none / (1 - share) if share < 1 else self.none,
            self.always - (share >= 1),
        )


NOBODY = Riders(PassLoad(), PassLoad(), 1.0)


def window_tokens(resident: Resident) -> float:
    """Rows of its cache steps, on average over its remaining blocks."""
    if resident.cache == "prefix":
        return (resident.output_tokens_left + resident.block_size) / 2
    return float(resident.block_size)


def slots(instance: Supply, canvas_tokens: int) -> int:
    """How many such requests it may hold at once."""
    return max(1, min(instance.max_requests, instance.kv_tokens // canvas_tokens))


def mean_share(fleet: Fleet, resident: Resident) -> float:
    """Of an instance, for each of the requests like this one that fill it; 1 without an instance."""
    shares = sum([pool.size / slots(kind, resident.canvas_tokens) for kind, pool in fleet.pools.items()])
    return shares / fleet.size if fleet.size else 1.0


def own_prices(latency: LatencyProfile, instance: Supply, resident: Resident, others: Riders) -> StepPrices:
    """Rule 1."""
    degree = latency.nearest_degree(instance.tp_degree)
    recompute_ms = latency.step_ms(degree, _recompute(resident).plus(others.recompute).plus(others.cache))
    cache_ms = _mean_ms(latency, degree, others._replace(cache=others.cache.plus(_cache(resident))))
    return StepPrices(recompute_ms / 1000 * instance.latency_ratio, cache_ms / 1000 * instance.latency_ratio)


def paper_own_prices(latency: LatencyProfile, instance: Supply, batch: Iterable[Resident]) -> StepPrices:
    """Rule 1, `paper`. `batch`: all that the instance holds, the request included."""
    degree = latency.nearest_degree(instance.tp_degree)
    recompute = cache = PassLoad()
    for resident in batch:
        recompute, cache = recompute.plus(_recompute(resident)), cache.plus(_cache(resident))
    factor = instance.latency_ratio / 1000
    return StepPrices(latency.step_ms(degree, recompute) * factor, latency.step_ms(degree, cache) * factor)


def alone_prices(latency: LatencyProfile, fleet: Fleet, resident: Resident) -> StepPrices:
    """Rule 2; nothing costs anything without an instance."""
    prices = [(_alone(latency, kind, resident), pool.least_ratio) for kind, pool in fleet.pools.items()]
    return StepPrices(
        min((alone.recompute * ratio for alone, ratio in prices), default=0.0),
        min((alone.cache * ratio for alone, ratio in prices), default=0.0),
    )


def shared_prices(
    latency: LatencyProfile,
    fleet: Fleet,
    resident: Resident,
    steps_per_block: tuple[float, float],
    policy: PolicyName,
) -> StepPrices:
    """Rules 3 to 5, in seconds of a mean instance. `steps_per_block`: fewest, most."""
    recomputes = caches = 0.0  # steps per second, of all
    for kind, pool in fleet.pools.items():
        if policy == "paper":
            prices = _paper_share(latency, kind, resident)
        else:
            prices = _share(latency, kind, resident, steps_per_block)
        recomputes += pool.speed / prices.recompute
        caches += pool.speed / prices.cache
    return StepPrices(fleet.size / recomputes, fleet.size / caches) if fleet.size else StepPrices(_LEAST_S, _LEAST_S)


@lru_cache(_MOST_PRICES)
def _alone(latency: LatencyProfile, instance: Supply, resident: Resident) -> StepPrices:
    return own_prices(latency, instance, resident, NOBODY)


@lru_cache(_MOST_PRICES)
def _share(
    latency: LatencyProfile, instance: Supply, resident: Resident, steps_per_block: tuple[float, float]
) -> StepPrices:
    degree = latency.nearest_degree(instance.tp_degree)
    count = slots(instance, resident.canvas_tokens)
    factor = instance.latency_ratio / (1000 * count)
    if resident.cache == "none":
        price = max(latency.step_ms(degree, _recompute(resident, count)) * factor, _LEAST_S)
        return StepPrices(price, price)

    def block_s(steps: float) -> float:
        share = 1 / steps
        full = Riders(_recompute(resident, count * share), _cache(resident, count * (1 - share)), (1 - share) ** count)
        return steps * factor * _mean_ms(latency, degree, full)

    fewest, most = steps_per_block
    most = max(most, fewest + 1.0)
    at_fewest = block_s(fewest)
    cache_price = max((block_s(most) - at_fewest) / (most - fewest), _LEAST_S)
    return StepPrices(max(at_fewest - (fewest - 1) * cache_price, _LEAST_S), cache_price)


@lru_cache(_MOST_PRICES)
def _paper_share(latency: LatencyProfile, instance: Supply, resident: Resident) -> StepPrices:
    degree = latency.nearest_degree(instance.tp_degree)
    count = slots(instance, _PAPER_TOKENS)
    block, cache_steps = resident.block_size, max(resident.block_size - 1, 1)
    ms = latency.step_ms(degree, step_load("recompute", _PAPER_TOKENS, _PAPER_TOKENS, count))
    ms += cache_steps * latency.step_ms(degree, step_load("cache", block, _PAPER_TOKENS, count))
    tokens = count * (_PAPER_TOKENS + cache_steps * block)
    per_token = max(ms / tokens * instance.latency_ratio / 1000, _LEAST_S)
    return StepPrices(per_token * resident.canvas_tokens, per_token * window_tokens(resident))


def _recompute(resident: Resident, steps: float = 1.0) -> PassLoad:
    return step_load("recompute", resident.canvas_tokens, resident.canvas_tokens, steps)


def _cache(resident: Resident, steps: float = 1.0) -> PassLoad:
    return step_load("cache", window_tokens(resident), resident.canvas_tokens, steps)


def _mean_ms(latency: LatencyProfile, degree: int, passes: Riders) -> float:
    """Mean latency of such passes."""
    without = latency.step_ms(degree, passes.cache)
    any_recompute = 1 - passes.no_recompute
    if any_recompute <= 0:
        return without
    where_any = PassLoad(*(part / any_recompute for part in passes.recompute))
    return any_recompute * latency.step_ms(degree, passes.cache.plus(where_any)) + passes.no_recompute * without
