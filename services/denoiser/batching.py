"""Which of the running requests ride in the next forward pass.

A pass takes as long as its tokens, so a long recompute step delays every cache step that is packed with it.
1. Who has waited most passes comes first; ties: the earlier arrival. The first always rides, whatever its size.
2. Then each rides in that order if its rows fit in `max_batch_tokens`;
3. a recompute step only if it also fits in `max_recompute_tokens`, counted over the pass's recompute steps, or is the
   pass's first: recompute steps are spread over passes, and cache steps run in between.
Among N running requests nobody waits more than N - 1 passes: whoever rides falls behind all who waited.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

StepKind: TypeAlias = Literal["recompute", "cache"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A running request and its next step."""

    arrival_no: int
    kind: StepKind
    num_rows: int  # tokens that it would add to the pass
    passes_waited: int  # passes since it last rode


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one pass, in tokens."""

    max_batch_tokens: int
    max_recompute_tokens: int


def choose_riders(candidates: Sequence[Candidate], limits: BatchLimits) -> list[Candidate]:
    """The candidates that ride in this pass, by arrival. Never empty when there are candidates."""
    riders: list[Candidate] = []
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
    return sorted(riders, key=lambda c: c.arrival_no)
