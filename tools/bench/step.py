"""What a worker's step costs outside the forward pass and the commit, read from the metrics of a live worker.

What the worker's other thread takes of the interpreter and the core during a forward pass is part of that pass. So the
time from step to step stands beside it: what only moves from one to the other does not change that.
"""

import re
from typing import NamedTuple

import httpx

_HISTOGRAM = "tediserve_worker_step_overhead_seconds"
_STEP = "tediserve_worker_step_seconds"
_BETWEEN = "tediserve_worker_between_steps_seconds"
_SAMPLE = re.compile(r"^(\w+?)_(bucket|sum|count|total)(?:\{le=\"([^\"]+)\"\})? (\S+)$", re.MULTILINE)


class StepOverhead(NamedTuple):
    """Over all steps that a worker ran back to back."""

    steps: int
    mean_ms: float
    share_under_0_2_ms: float
    share_under_1_ms: float
    mean_turn_ms: float  # from a step's start to the next one's


def read_overhead(metrics_url: str) -> StepOverhead:
    """From the worker's `/metrics`. Raises ValueError if it has run no step."""
    samples: dict[tuple[str, str, str], float] = {}
    for name, kind, bound, value in _SAMPLE.findall(httpx.get(metrics_url, timeout=5).text):
        samples[name, kind, bound] = float(value)
    steps = int(samples.get((_HISTOGRAM, "count", ""), 0))
    if not steps:
        raise ValueError(f"{metrics_url}: the worker has run no step")
    step_s = samples[_STEP, "sum", ""] / samples[_STEP, "count", ""]
    return StepOverhead(
        steps=steps,
        mean_ms=1e3 * samples[_HISTOGRAM, "sum", ""] / steps,
        share_under_0_2_ms=samples[_HISTOGRAM, "bucket", "0.0002"] / steps,
        share_under_1_ms=samples[_HISTOGRAM, "bucket", "0.001"] / steps,
        mean_turn_ms=1e3 * (step_s + samples[_BETWEEN, "total", ""] / steps),
    )
