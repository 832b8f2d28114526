"""What the model is told of a request and a threshold: one row of numbers, the same in training and in serving.

N requests, T thresholds, F features. O is the output area in tokens, B the block size.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from contracts import messages as m

Floats: TypeAlias = npt.NDArray[np.float32]

# A model is of this version of the features if it names the same ones in the same order.
FEATURES = (
    "steps / O",
    "tokens committed / O",
    "block / blocks",
    "tokens committed in block / B",
    "steps in block / B",
    "tokens left in block / B",
    "block holds an EOS",
    "O",
    "prompt tokens",
    "threshold so far",
    "confidence min",
    "confidence q25",
    "confidence median",
    "confidence q75",
    "confidence max",
    "threshold",  # from now on: the candidate
)
THRESHOLD = FEATURES.index("threshold")
# What a predictor without confidences has: the paper's "progress features".
PROGRESS = (
    "steps / O",
    "tokens committed / O",
    "block / blocks",
    "tokens committed in block / B",
    "O",
    "threshold",
)
# The features that the paper's authors published; the summary of confidences in a report has no mean, but a maximum.
PAPER = (
    *PROGRESS,
    "confidence min",
    "confidence q25",
    "confidence median",
    "confidence q75",
    "confidence max",
)


def feature_rows(requests: Sequence[m.RequestReport], thresholds: Sequence[float], block_size: int) -> Floats:
    """[N * T, F]: for each request a row for each threshold, in their order."""
    state_NF = np.array([_state(request, block_size) for request in requests], dtype=np.float32)
    rows_XF = np.repeat(state_NF.reshape(-1, len(FEATURES)), len(thresholds), axis=0)
    rows_XF[:, THRESHOLD] = np.tile(np.asarray(thresholds, dtype=np.float32), len(requests))
    return rows_XF


def _state(r: m.RequestReport, block_size: int) -> tuple[float, ...]:
    output_tokens = r.num_blocks * block_size
    return (
        r.steps / output_tokens,
        r.tokens_committed / output_tokens,
        r.block_index / r.num_blocks,
        r.tokens_committed_in_block / block_size,
        r.steps_in_block / block_size,
        r.tokens_left_in_block / block_size,
        r.ends_in_block,
        output_tokens,
        r.prompt_tokens,
        r.threshold if r.steps else 0.0,
        *r.confidence,
        0.0,  # the threshold, for each row another
    )
