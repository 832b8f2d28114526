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

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from services.costs import LatencyProfile, PassCost, PassLoad, Resident, step_load
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


class Steps(NamedTuple):
    """What a step of each kind puts into a pass: rows, and milliseconds beside these."""

    recompute_rows: float
    recompute_ms: float
    cache_rows: float
    cache_ms: float


_NOTHING = Steps(0.0, 0.0, 0.0, 0.0)


class Riders(NamedTuple):
    """What some requests put into a pass, on average."""

    recompute_rows: float = 0.0
    recompute_ms: float = 0.0
    cache_rows: float = 0.0
    cache_ms: float = 0.0
    none: float = 1.0  # probability that none of those recomputes that do not always
    always: int = 0  # requests that recompute in each pass: those without a cache

    def plus(self, steps: Steps, share: float) -> "Riders":
        """With a request more. `share`: of recompute steps among its steps."""
        return Riders(
            self.recompute_rows + share * steps.recompute_rows,
            self.recompute_ms + share * steps.recompute_ms,
            self.cache_rows + (1 - share) * steps.cache_rows,
            self.cache_ms + (1 - share) * steps.cache_ms,
            self.none * (1 - share) if share < 1 else self.none,
            self.always + (share >= 1),
        )

    def minus(self, steps: Steps, share: float) -> "Riders":
        """Without that request, which must be among them."""
        return Riders(
            self.recompute_rows - share * steps.recompute_rows,
            self.recompute_ms - share * steps.recompute_ms,
            self.cache_rows - (1 - share) * steps.cache_rows,
            self.cache_ms - (1 - share) * steps.cache_ms,
            self.none / (1 - share) if share < 1 else self.none,
            self.always - (share >= 1),
        )

    def recompute_pass_ms(self, cost: PassCost, steps: Steps) -> float:
        """Mean latency of a pass in which that request recomputes beside them."""
        rows = steps.recompute_rows + self.recompute_rows + self.cache_rows
        return cost.pass_ms(rows, steps.recompute_ms + self.recompute_ms + self.cache_ms)

    def cache_pass_ms(self, cost: PassCost, steps: Steps) -> float:
        """Mean latency of a pass in which that request does a cache step beside them."""
        rows, ms = self.cache_rows + steps.cache_rows, self.cache_ms + steps.cache_ms
        no_recompute = 0.0 if self.always else self.none
        if no_recompute >= 1:
            return cost.pass_ms(rows, ms)
        some = 1 - no_recompute
        where_some = cost.pass_ms(rows + self.recompute_rows / some, ms + self.recompute_ms / some)
        return some * where_some + no_recompute * cost.pass_ms(rows, ms)


def window_tokens(resident: Resident) -> float:
    """Rows of its cache steps, on average over its remaining blocks."""
    if resident.cache == "prefix":
        return min((resident.output_tokens_left + resident.block_size) / 2, resident.output_tokens_seen)
    return float(resident.block_size)


def slots(instance: Supply, canvas_tokens: int) -> int:
    """How many such requests it may hold at once."""
    return max(1, min(instance.max_requests, instance.kv_tokens // canvas_tokens))


def mean_share(fleet: Fleet, resident: Resident) -> float:
    """Of an instance, for each of the requests like this one that fill it; 1 without an instance."""
    shares = sum([pool.size / slots(kind, resident.canvas_tokens) for kind, pool in fleet.pools.items()])
    return shares / fleet.size if fleet.size else 1.0


def own_prices(
    latency: LatencyProfile,
    instance: Supply,
    batch: Sequence[Resident],
    shares: Sequence[float],
    wanted: Iterable[int],
) -> dict[int, StepPrices]:
    """Rule 1, of the `wanted` in a batch. `shares`: of recompute steps among each one's steps."""
    degree = latency.nearest_degree(instance.tp_degree)
    cost, ratio = latency.cost(degree), instance.latency_ratio
    steps = [_steps(latency, degree, resident) for resident in batch]
    riders = Riders()
    for one, share in zip(steps, shares, strict=True):
        riders = riders.plus(one, share)
    prices = {}
    for i in wanted:
        others = riders.minus(steps[i], shares[i])
        recompute_ms, cache_ms = others.recompute_pass_ms(cost, steps[i]), others.cache_pass_ms(cost, steps[i])
        prices[i] = StepPrices(recompute_ms / 1000 * ratio, cache_ms / 1000 * ratio)
    return prices


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
def _steps(latency: LatencyProfile, degree: int, resident: Resident) -> Steps:
    cost, recompute, cache = latency.cost(degree), _recompute(resident), _cache(resident)
    return Steps(recompute.tokens, cost.steps_ms(recompute), cache.tokens, cost.steps_ms(cache))


@lru_cache(_MOST_PRICES)
def _alone(latency: LatencyProfile, instance: Supply, resident: Resident) -> StepPrices:
    return own_prices(latency, instance, [resident], [0.0], [0])[0]


@lru_cache(_MOST_PRICES)
def _share(
    latency: LatencyProfile, instance: Supply, resident: Resident, steps_per_block: tuple[float, float]
) -> StepPrices:
    degree = latency.nearest_degree(instance.tp_degree)
    cost, steps = latency.cost(degree), _steps(latency, degree, resident)
    count = slots(instance, resident.canvas_tokens)
    factor = instance.latency_ratio / (1000 * count)
    if resident.cache == "none":
        price = max(cost.pass_ms(count * steps.recompute_rows, count * steps.recompute_ms) * factor, _LEAST_S)
        return StepPrices(price, price)

    def block_s(steps_a_block: float) -> float:
        share = 1 / steps_a_block
        recomputes, caches = count * share, count * (1 - share)
        full = Riders(
            recomputes * steps.recompute_rows,
            recomputes * steps.recompute_ms,
            caches * steps.cache_rows,
            caches * steps.cache_ms,
            (1 - share) ** count,
        )
        return steps_a_block * factor * full.cache_pass_ms(cost, _NOTHING)

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
    return StepPrices(per_token * resident.seen_tokens, per_token * window_tokens(resident))


def _recompute(resident: Resident) -> PassLoad:
    return step_load("recompute", resident.seen_tokens, resident.seen_tokens)


def _cache(resident: Resident) -> PassLoad:
    return step_load("cache", window_tokens(resident), resident.seen_tokens)
