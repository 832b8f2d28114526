"""What the classes of a problem need: tokens, blocks, and what their steps cost at each TP degree and batch size.

1. Classes without requests need nothing. A class whose canvas no bin of a usable degree holds is too long.
2. A block takes at least one step, so a step commits at most the mean number of tokens of a class's blocks.
3. With caching the first step of each block recomputes (prompt and output pass), the others pass a block (dual cache),
   or on average half of the output area and half a block (prefix cache). With `blocks_ahead` it is what the model sees
   of prompt and output, on average over the blocks.
4. A step in a batch of b tokens lasts as long as a pass of b tokens made of such steps, and costs its share of it.
5. A promise is impossible if the class misses it alone, at the lowest threshold, at its fastest degree and batch.
"""

import math
from typing import NamedTuple

from services.costs import DegreeProfile, step_load
from services.reconfigurator.plan import StepKind
from services.reconfigurator.problem import Problem, RequestClass

DEFAULT_BATCH_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Option(NamedTuple):
    """A way to run one step of a class."""

    kind: StepKind
    tp_degree: int
    batch_tokens: int
    seconds: float  # that the request sees
    instance_s: float  # that it costs: its share of the pass


class Demand(NamedTuple):
    """What a request of a class needs."""

    name: str
    rate_per_s: float
    output_tokens: int
    blocks: int  # with caching also the number of recompute steps
    slo_s: float | None
    priority: int
    tokens_per_step: tuple[float, ...]  # at each threshold, ascending
    options: tuple[Option, ...]

    @property
    def most_steps(self) -> float:
        """Steps at the highest threshold."""
        return self.output_tokens / self.tokens_per_step[-1]

    @property
    def fewest_steps(self) -> float:
        """Steps at the lowest threshold."""
        return self.output_tokens / self.tokens_per_step[0]

    def steps_of(self, kind: StepKind, steps: float, caching: bool) -> float:
        """How many of that many steps are of this kind."""
        if not caching:
            return steps if kind == "recompute" else 0.0
        return float(self.blocks) if kind == "recompute" else steps - self.blocks

    def least(self, caching: bool, tp_degree: int | None = None) -> tuple[float, float]:
        """The shortest latency and the least cost of a request, each by itself: seconds, instance-seconds."""
        options = [o for o in self.options if tp_degree in (None, o.tp_degree)]
        seconds = instance_s = 0.0
        for kind in kinds(caching):
            steps = self.steps_of(kind, self.fewest_steps, caching)
            if steps <= 0:
                continue
            seconds += steps * min((o.seconds for o in options if o.kind == kind), default=math.inf)
            instance_s += steps * min((o.instance_s for o in options if o.kind == kind), default=math.inf)
        return seconds, instance_s


class Workload(NamedTuple):
    """The demands of the classes that can be planned for, and those that cannot."""

    demands: tuple[Demand, ...]
    too_long: tuple[str, ...]  # classes left out
    softened: tuple[str, ...]  # classes whose promise is impossible, so that it was taken back


def kinds(caching: bool) -> tuple[StepKind, ...]:
    return ("recompute", "cache") if caching else ("recompute",)


def workload_of(problem: Problem) -> Workload:
    """What the problem's classes need."""
    demands: list[Demand] = []
    too_long: list[str] = []
    softened: list[str] = []
    caching = problem.cache != "none"
    for one in problem.classes:
        if one.rate_per_s <= 0:
            continue
        demand = _demand(problem, one)
        if not all(any(o.kind == kind for o in demand.options) for kind in kinds(caching)):
            too_long.append(one.name)
            continue
        if one.slo_s is not None and demand.least(caching)[0] > one.slo_s:
            softened.append(one.name)
            demand = demand._replace(slo_s=None)
        demands.append(demand)
    return Workload(tuple(demands), tuple(too_long), tuple(softened))


def _demand(problem: Problem, one: RequestClass) -> Demand:
    blocks = -(-one.output_tokens // problem.block_size)
    listed = one.tokens_per_step or tuple(threshold.tokens_per_step for threshold in problem.thresholds)
    most = one.output_tokens / blocks  # rule 2
    return Demand(
        name=one.name,
        rate_per_s=one.rate_per_s,
        output_tokens=one.output_tokens,
        blocks=blocks,
        slo_s=one.slo_s,
        priority=one.priority,
        tokens_per_step=tuple(min(tokens, most) for tokens in listed),
        options=tuple(_options(problem, one, blocks)),
    )


def _options(problem: Problem, one: RequestClass, blocks: int) -> list[Option]:
    usable = [degree for degree in problem.degrees if degree.tp_degree in problem.usable_degrees]
    recompute_bins = problem.batch_tokens or DEFAULT_BATCH_TOKENS
    cache_bins = problem.cache_batch_tokens or recompute_bins
    seen, seen_from_block = _seen_tokens(problem, one, blocks)
    options = [_option("recompute", degree, seen, bin_, seen) for degree in usable for bin_ in recompute_bins]
    if problem.cache != "none":
        rows = problem.block_size if problem.cache == "dual" else seen_from_block
        options += [_option("cache", degree, seen, bin_, rows) for degree in usable for bin_ in cache_bins]
    return [option for option in options if option is not None]


def _seen_tokens(problem: Problem, one: RequestClass, blocks: int) -> tuple[float, float]:
    """Of a canvas, and of it from the current block on: both on average over its blocks."""
    block_size, ahead = problem.block_size, blocks if problem.blocks_ahead is None else problem.blocks_ahead
    seen_blocks = [min(index + 1 + ahead, blocks) for index in range(blocks)]
    from_block = block_size * sum(seen - index for index, seen in enumerate(seen_blocks)) / blocks
    output = sum(min(seen * block_size, one.output_tokens) for seen in seen_blocks) / blocks
    return one.prompt_tokens + output, from_block


def _option(kind: StepKind, degree: DegreeProfile, seen_tokens: float, batch_tokens: int, rows: float) -> Option | None:
    """A step of `rows` tokens in such a batch (rule 4). None: it does not fit in."""
    if rows > batch_tokens:
        return None
    steps = batch_tokens / rows
    seconds = degree.cost.ms(step_load(kind, rows, seen_tokens, steps)) / 1000
    return Option(kind, degree.tp_degree, batch_tokens, seconds, seconds / steps)
