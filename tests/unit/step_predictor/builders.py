"""Reports as the predictor hears them."""

from typing import Any

from contracts import messages as m


def make_state(request_id: str = "r1", **changes: Any) -> m.RequestReport:
    """Four blocks of 16; in the second one, 20 of 64 tokens committed after 6 steps."""
    values: dict[str, Any] = {
        "attempt": 1,
        "block_index": 1,
        "num_blocks": 4,
        "steps": 6,
        "steps_in_block": 2,
        "tokens_committed": 20,
        "tokens_committed_in_block": 4,
        "threshold": 0.9,
        "confidence": (0.5, 0.6, 0.7, 0.8, 0.9),
        "next_recompute": False,
        "finished": False,
        "prompt_tokens": 32,
        "tokens_left_in_block": 12,
    } | changes
    return m.RequestReport(request_id=request_id, **values)


def make_report(*states: m.RequestReport, instance_id: str = "w-0") -> m.Report:
    return m.Report(instance_id, 1000.0, list(states))
