"""Which of the running requests ride in the next forward pass.

A pass takes as long as its tokens, so a long recompute step delays every cache step that is packed with it.
1. Who has waited most passes comes first; ties: the earlier arrival. The first always rides, whatever its size.
2. Then each rides in that order if its rows fit in `max_batch_tokens`;
3. a recompute step only if it also fits in `max_recompute_tokens`, counted over the pass's recompute steps, or is the
   pass's first: recompute steps are spread over passes, and cache steps run in between.
Among N running requests nobody waits more than N - 1 passes: whoever rides falls behind all who waited.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal, Protocol, TypeAlias, TypeVar

import msgspec

StepKind: TypeAlias = Literal["recompute", "cache"]


class Candidate(Protocol):
    """A running request, as far as its next step goes."""

    passes_waited: int  # since it last rode

    @property
    def arrival_no(self) -> int: ...

    @property
    def kind(self) -> StepKind: ...

    @property
    def num_rows(self) -> int:
        """Tokens that it would add to the pass."""


C = TypeVar("C", bound=Candidate)


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one pass, in tokens."""

    max_batch_tokens: int
    max_recompute_tokens: int


def choose_riders(candidates: Sequence[C], limits: BatchLimits) -> list[C]:
    """The candidates that ride in this pass, by arrival. Never empty when there are candidates."""
    riders = candidates if _all_fit(candidates, limits) else _the_first_to_fit(candidates, limits)
    return sorted(riders, key=attrgetter("arrival_no"))


def note_waits(candidates: Iterable[Candidate], riders: Iterable[Candidate]) -> None:
    """That the riders ride, and the other candidates wait a pass more."""
    for candidate in candidates:
        candidate.passes_waited += 1
    for rider in riders:
        rider.passes_waited = 0


def _all_fit(candidates: Sequence[Candidate], limits: BatchLimits) -> bool:
    recompute_rows = [candidate.num_rows for candidate in candidates if candidate.kind == "recompute"]
    rows = sum([candidate.num_rows for candidate in candidates])
    recomputes_fit = len(recompute_rows) <= 1 or sum(recompute_rows) <= limits.max_recompute_tokens
    return recomputes_fit and rows <= limits.max_batch_tokens


def _the_first_to_fit(candidates: Sequence[C], limits: BatchLimits) -> list[C]:
    """Rules 1 to 3."""
    riders: list[C] = []
    free_rows = limits.max_batch_tokens
    free_recompute_rows = limits.max_recompute_tokens
    recomputes = 0
    for candidate in sorted(candidates, key=lambda c: (-c.passes_waited, c.arrival_no)):
        if riders and candidate.num_rows > free_rows:
            continue
        if candidate.kind == "recompute":
            if recomputes and candidate.num_rows > free_recompute_rows:
                continue
            recomputes += 1
            free_recompute_rows -= candidate.num_rows
        free_rows -= candidate.num_rows
        riders.append(candidate)
    return riders
