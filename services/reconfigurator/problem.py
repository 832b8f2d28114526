"""What the reconfigurator plans from: the workload, what steps cost, the nodes, and what runs on them today.

1. A problem is a value. It checks itself when it is made: an error names the field, its value and what would be right.
2. Its JSON form is the Struct's, field by field (docs/planning.md). `degrees` are those of a profile's `latency.json`.
3. Request classes without requests, and classes that no batch could hold, are not the problem's fault: the planner
   leaves them out and says so.
4. A TP degree that fits on no node is no fault either: it is never used.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from contracts.messages import CacheMode, Count, Id, Positive, Probability
from services.costs import DegreeProfile

T = TypeVar("T")
Rate = Annotated[float, Meta(ge=0.0, le=1e9)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=1e9)]
TokensPerStep = Annotated[float, Meta(ge=1.0, le=1e6)]  # a step commits at least one token
SolverName = Literal["auto", "highs", "gurobi"]

MAX_NODE_DEVICES = 64  # stage 2 looks at every way to divide a node


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the parts of a problem."""


class RequestClass(_Part, frozen=True, kw_only=True):
    """Requests of about the same size that were promised about the same latency."""

    name: Annotated[str, Meta(min_length=1, max_length=80)]
    rate_per_s: Rate
    prompt_tokens: Count  # mean
    output_tokens: Positive  # mean
    slo_s: PositiveSeconds | None = None  # mean latency promised; none: best effort
    priority: int = 0  # higher is more urgent: where promises must be broken, others' are broken first
    tokens_per_step: tuple[TokensPerStep, ...] = ()  # at each of the problem's thresholds; (): as the problem has it

    @property
    def canvas_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Threshold(_Part, frozen=True, kw_only=True):
    """A candidate threshold, and what it is worth."""

    threshold: Probability
    tokens_per_step: TokensPerStep  # mean number of tokens that a step commits at it


class Node(_Part, frozen=True, kw_only=True):
    """A machine and its devices."""

    node_id: Id
    devices: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_NODE_DEVICES)]

    def __post_init__(self) -> None:
        if repeated := _repeated(self.devices):
            raise ValueError(f"node {self.node_id}: devices names {repeated[0]} twice: each of a node's devices once")


class Instance(_Part, frozen=True, kw_only=True):
    """An instance that runs today. Its TP degree is the number of its devices."""

    instance_id: Id
    node_id: Id
    devices: Annotated[tuple[Count, ...], Meta(min_length=1)]

    @property
    def tp_degree(self) -> int:
        return len(self.devices)


class Planning(_Part, frozen=True, kw_only=True):
    """How to plan."""

    max_utilisation: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.85  # rho; 1 lets a degree fill up, and queues with it
    threshold_tolerance: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.01  # of mean threshold, given away for latency
    # A degree may mix batch sizes: far quicker to solve, and right where sizes of requests are mixed. Without it all
    # passes of a degree are of one size, so a short request looks as slow as the long ones beside it.
    time_sharing: bool = True
    # New layouts are planned for so many times the rates, today's is judged at the rates as they are: a load that sways
    # by less does not turn the layout back and forth.
    headroom: Annotated[float, Meta(ge=1.0, le=10.0)] = 1.0
    min_gain: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.1  # a change must be better than today's layout by this share
    solver: SolverName = "auto"  # auto and gurobi: Gurobi where it is installed and licensed for the size, else HiGHS
    time_limit_s: PositiveSeconds = 10.0  # of both stages together; then the best plan so far


class Problem(_Part, frozen=True, kw_only=True, dict=True):
    """Everything that a plan depends on."""

    nodes: Annotated[tuple[Node, ...], Meta(min_length=1)]
    degrees: Annotated[tuple[DegreeProfile, ...], Meta(min_length=1)]  # TP degrees and what a pass costs at each
    thresholds: Annotated[tuple[Threshold, ...], Meta(min_length=1)]  # ascending
    classes: tuple[RequestClass, ...] = ()
    today: tuple[Instance, ...] = ()
    block_size: Positive = 32
    cache: CacheMode = "dual"
    blocks_ahead: Count | None = None  # that the model sees beyond the current one; none: all
    batch_tokens: tuple[Positive, ...] = ()  # bins of recompute passes, ascending; (): powers of two, 32 to 8192
    cache_batch_tokens: tuple[Positive, ...] = ()  # bins of cache passes; (): those of recompute passes
    planning: Planning = Planning()

    def __post_init__(self) -> None:
        _check_names("nodes", (node.node_id for node in self.nodes))
        _check_names("classes", (one.name for one in self.classes))
        _check_names("today", (instance.instance_id for instance in self.today))
        _check_names("degrees", (str(degree.tp_degree) for degree in self.degrees))
        _check_ascending("batch_tokens", self.batch_tokens)
        _check_ascending("cache_batch_tokens", self.cache_batch_tokens)
        self._check_thresholds()
        self._check_classes()
        self._check_today()
        if not self.usable_degrees:
            largest = max(len(node.devices) for node in self.nodes)
            degrees = [degree.tp_degree for degree in self.degrees]
            raise ValueError(f"degrees {degrees}: none fits on a node, the largest has {largest} devices")

    @cached_property
    def usable_degrees(self) -> tuple[int, ...]:
        """TP degrees that fit on some node, ascending."""
        largest = max(len(node.devices) for node in self.nodes)
        return tuple(sorted(d.tp_degree for d in self.degrees if d.tp_degree <= largest))

    @cached_property
    def layout_today(self) -> dict[int, int]:
        """Instances at each TP degree, ascending, none left out but those at zero."""
        return dict(sorted(Counter(instance.tp_degree for instance in self.today).items()))

    def _check_thresholds(self) -> None:
        for low, high in pairwise(self.thresholds):
            if high.threshold <= low.threshold:
                raise ValueError(f"thresholds must be ascending, {high.threshold:g} comes after {low.threshold:g}")
        _check_falling("thresholds: tokens_per_step", [one.tokens_per_step for one in self.thresholds])

    def _check_classes(self) -> None:
        for one in self.classes:
            if one.tokens_per_step and len(one.tokens_per_step) != len(self.thresholds):
                raise ValueError(
                    f"class {one.name}: tokens_per_step needs a number for each of the {len(self.thresholds)} "
                    f"thresholds, has {len(one.tokens_per_step)}"
                )
            _check_falling(f"class {one.name}: tokens_per_step", one.tokens_per_step)

    def _check_today(self) -> None:
        devices = {node.node_id: node.devices for node in self.nodes}
        holders: dict[tuple[str, int], str] = {}
        for instance in self.today:
            label = f"today: instance {instance.instance_id}"
            if instance.node_id not in devices:
                raise ValueError(f"{label} is on node {instance.node_id}, which is none of nodes")
            for device in instance.devices:
                if device not in devices[instance.node_id]:
                    raise ValueError(f"{label} is on device {device}, which node {instance.node_id} does not have")
                holder = holders.setdefault((instance.node_id, device), instance.instance_id)
                if holder != instance.instance_id or instance.devices.count(device) > 1:
                    raise ValueError(f"{label} is on device {device} of node {instance.node_id}, which {holder} holds")


def _repeated(values: Iterable[T]) -> list[T]:
    return [value for value, times in Counter(values).items() if times > 1]


def _check_names(field: str, names: Iterable[str]) -> None:
    if repeated := _repeated(names):
        raise ValueError(f"{field} names {repeated[0]} twice: each one once")


def _check_ascending(field: str, values: Sequence[float]) -> None:
    for left, right in pairwise(values):
        if right <= left:
            raise ValueError(f"{field} must be ascending, {right:g} comes after {left:g}")


def _check_falling(field: str, values: Sequence[float]) -> None:
    for left, right in pairwise(values):
        if right > left:
            raise ValueError(f"{field} must not rise: a higher threshold never commits more, {right:g} after {left:g}")
