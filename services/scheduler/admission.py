"""Whether a request can still meet its deadline, and what it starts at. Pure.

1. It takes at least as long as alone on the fastest instance at its pin or floor (else the lowest threshold), in
   `_FEWEST` of the steps that a block takes there on average. A text may end in its first block, so further blocks
   count only for a request that ignores the end of text. An instance that is slower than profiled may become faster
   again.
2. Where there is no room for it, as many must end as wait ahead of it, and one more. The load state says how much work
   all open requests are at the lowest threshold (`floor_s`), and so how often one ends, with all instances at work.
3. A newcomer starts at the cap of its priority; where nobody of that priority is open, at that of the next less urgent
   one, who gets no more than it would; where there is none, at the lowest. Never above the profile's threshold.
"""

from bisect import bisect_right
from collections.abc import Iterable

from contracts.messages import GenerateRequest, LoadState
from services.costs import LatencyProfile, step_load
from services.profile import Decoding
from services.scheduler.instances import Instance, resident_of

_FEWEST = 0.75  # of the mean steps of a block: hardly any request needs fewer


def least_s(
    request: GenerateRequest, decoding: Decoding, latency: LatencyProfile, instances: Iterable[Instance]
) -> float:
    """Rule 1, in seconds; 0 without an instance."""
    speeds = {(latency.nearest_degree(i.tp_degree), min(1.0, i.latency_ratio)) for i in instances}
    return min((ratio * _alone_ms(request, decoding, latency, degree) for degree, ratio in speeds), default=0.0) / 1000


def _alone_ms(request: GenerateRequest, decoding: Decoding, latency: LatencyProfile, degree: int) -> float:
    seen = resident_of(request, 0, request.num_blocks).seen_tokens
    recompute_ms = latency.step_ms(degree, step_load("recompute", seen, seen))
    cache_ms = latency.step_ms(degree, step_load("cache", request.block_size, seen))
    further = max(1.0, _FEWEST * steps_at(request.threshold or request.floor, decoding)) - 1
    block_ms = recompute_ms + further * (recompute_ms if request.cache == "none" else cache_ms)
    return block_ms * (request.num_blocks if request.ignore_eos else 1)


def steps_at(threshold: float, decoding: Decoding) -> float:
    """Mean steps of a block, at the highest threshold of the set that is not above this one; else at the lowest."""
    return decoding.mean_steps[max(0, bisect_right(decoding.thresholds, threshold) - 1)]


def wait_s(load: LoadState, ahead: int) -> float:
    """Rule 2, in seconds. `ahead`: requests that wait before it."""
    if load.capacity_s <= 0 or load.horizon_s <= 0 or not load.num_open:
        return 0.0
    instances = load.capacity_s / load.horizon_s
    return (ahead + 1) * load.floor_s / (load.num_open * instances)


def cap_for(load: LoadState, priority: int, highest: float) -> float:
    """Rule 3; `highest` where nobody is open."""
    not_above = [cap.threshold for cap in load.caps if cap.priority <= priority]  # the most urgent of them first
    return (not_above or [cap.threshold for cap in load.caps[-1:]] or [highest])[0]
