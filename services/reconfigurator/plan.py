"""What a plan says: how many instances at each TP degree, on which devices, and what they can reach."""

from typing import Literal, TypeAlias

import msgspec

from contracts.messages import Id

StepKind: TypeAlias = Literal["recompute", "cache"]
Layout: TypeAlias = dict[int, int]  # TP degree -> instances, ascending, without zeros
Outcome: TypeAlias = Literal[
    "planned",
    "no_requests",  # today's layout stays
    "overload",  # all at the lowest degree: too many requests, whatever was promised
    "broken_promises",  # all at the lowest degree: too many requests for what was promised
    "out_of_time",  # today's layout stays
]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts of a plan."""


class ClassFigures(_Part, frozen=True, kw_only=True):
    """What a class gets."""

    name: str
    mean_threshold: float
    latency_s: float
    slo_s: float | None  # that was planned for
    share_by_degree: dict[int, float]  # of its steps


class DegreeFigures(_Part, frozen=True, kw_only=True):
    """What a TP degree does."""

    tp_degree: int
    instances: int
    load: float  # instance-seconds a second
    batch_tokens: dict[StepKind, int]  # most used; with time sharing there may be others

    @property
    def utilisation(self) -> float:
        return self.load / self.instances if self.instances else 0.0


class Figures(_Part, frozen=True, kw_only=True):
    """The objective's parts for a layout, and what they are made of."""

    mean_threshold: float  # per token
    mean_latency_s: float  # per request
    busiest: float  # highest utilisation of a degree
    classes: tuple[ClassFigures, ...]
    degrees: tuple[DegreeFigures, ...]


class Placed(_Part, frozen=True, kw_only=True, order=True):
    """An instance as planned. One that is kept has its id; a new one has none yet."""

    node_id: Id
    devices: tuple[int, ...]
    instance_id: str = ""

    @property
    def tp_degree(self) -> int:
        return len(self.devices)


class Plan(_Part, frozen=True, kw_only=True):
    """What should run, and why."""

    outcome: Outcome
    layout: Layout
    because: str
    instances: tuple[Placed, ...] = ()
    figures: Figures | None = None  # none: without requests, or more than the layout can carry
    today: Figures | None = None  # of today's layout; none: it breaks a promise, is overloaded, or is not known
    today_is_known: bool = True  # no: time ran out
    softened: tuple[str, ...] = ()  # classes whose promise was taken back: they would miss it even alone
    too_long: tuple[str, ...] = ()  # classes left out: no batch holds them
    proven: bool = True  # no layout is better
    gap: float = 0.0  # relative, of the objective that time cut short
    solver: str = ""
    seconds: float = 0.0  # that both stages took

    @property
    def kept(self) -> int:
        """Instances that run on as they are."""
        return sum(bool(one.instance_id) for one in self.instances)


class Alternative(_Part, frozen=True, kw_only=True):
    """A layout that was not chosen, and what it could reach."""

    name: str
    layout: Layout
    figures: Figures | None  # none: it breaks a promise or is overloaded
