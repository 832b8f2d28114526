"""How long the step predictor of a profile takes over a batch, on one core."""

import os
from pathlib import Path
from random import Random
from typing import NamedTuple

from contracts import messages as m
from services.profile import Profile, load_profile
from services.step_predictor.config import MODEL_FILE
from tools.predictor.evaluate import timed

BATCHES = (1, 16, 256)
_REPEATS = 200


class BatchTime(NamedTuple):
    """Features, trees and bounds, up to the entries of the message."""

    requests: int
    thresholds: int
    p50_ms: float
    p95_ms: float


def measure_predictor(folder: str) -> list[BatchTime]:
    """For each of BATCHES; empty if the profile has no predictor. Raises ConfigError if it has one that is unfit."""
    from services.step_predictor.model import StepModel  # onnxruntime counts the cores when it is loaded

    if not (Path(folder) / MODEL_FILE).exists():
        return []
    profile = load_profile(folder)
    model = StepModel.of(profile)
    rng, thresholds = Random(0), profile.decoding.thresholds
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    found = []
    try:
        for count in BATCHES:
            requests = [_request(profile, number, rng) for number in range(count)]
            p50_s, p95_s = timed(lambda requests=requests: model.forecast(requests, thresholds, 0), _REPEATS)  # type: ignore[misc]
            found.append(BatchTime(count, len(thresholds), 1e3 * p50_s, 1e3 * p95_s))
    finally:
        os.sched_setaffinity(0, everywhere)
    return found


def _request(profile: Profile, number: int, rng: Random) -> m.RequestReport:
    """Somewhere on its way."""
    block_size = profile.decoding.block_size
    num_blocks = -(-profile.decoding.max_tokens // block_size)
    block_index, in_block = rng.randrange(num_blocks), rng.randrange(1, block_size)
    least, lower, median, upper, most = sorted(rng.uniform(0.4, 1.0) for _ in range(5))
    return m.RequestReport(
        request_id=f"{number:032}",
        attempt=1,
        block_index=block_index,
        num_blocks=num_blocks,
        steps=6 * block_index + in_block // 4 + 1,
        steps_in_block=in_block // 4 + 1,
        tokens_committed=block_index * block_size + in_block,
        tokens_committed_in_block=in_block,
        threshold=rng.choice(profile.decoding.thresholds),
        confidence=(least, lower, median, upper, most),
        next_recompute=False,
        finished=False,
        prompt_tokens=rng.randrange(20, 300),
        tokens_left_in_block=block_size - in_block,
    )
