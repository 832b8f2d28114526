"""Recorded runs by hand, and how two are compared."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tools.traces.reader import Recording
from tools.traces.runs import RecordedRun, quantise

EOS = 1

# Of a step: its block, its threshold, and (offset, token, confidence, committed) of what it chose from.
Entry = tuple[int, int, float, bool]
Step = tuple[int, float, list[Entry]]


def make_run(steps: Sequence[Step], output: Sequence[int], **changes: Any) -> RecordedRun:
    """A run with these steps; a block's first step is a recompute step."""
    blocks = [block for block, _, _ in steps]
    entries = [entry for _, _, chosen in steps for entry in chosen]
    offsets, tokens, confidences, committed = (np.array(column) for column in zip(*entries, strict=True))
    values: dict[str, Any] = {
        "prompt": 0,
        "cache": "dual",
        "schedule": "0.9",
        "prompt_tokens": 3,
        "planned_tokens": 0,
        "finish": "length",
        "correct": None,
        "output_T": np.array(output, dtype=np.int64),
        "block_S": np.array(blocks),
        "in_block_S": np.array([blocks[:number].count(block) for number, block in enumerate(blocks)]),
        "recompute_S": np.array([block not in blocks[:number] for number, block in enumerate(blocks)]),
        "threshold_S": np.array([threshold for _, threshold, _ in steps]),
        "tokens_committed_S": np.cumsum([sum(entry[3] for entry in chosen) for _, _, chosen in steps]),
        "confidence_S5": np.zeros((len(steps), 5), dtype=np.float32),
        "first_entry_S": np.cumsum([0, *(len(chosen) for _, _, chosen in steps)]),
        "offset_E": offsets,
        "token_E": tokens,
        "confidence_E": quantise(confidences),
        "eos_E": tokens == EOS,
        "committed_E": committed.astype(np.bool_),
    }
    return RecordedRun(**(values | changes))


def make_recording(**changes: Any) -> Recording:
    """Four output tokens in one block."""
    values: dict[str, Any] = {
        "model": "m",
        "weights": "w",
        "dtype": "float32",
        "device": "cpu",
        "source": "hand",
        "num_prompts": 1,
        "prompts_per_shard": 1,
        "block_size": 4,
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": False,
        "seed": 0,
        "caches": ["dual"],
        "thresholds": [0.5, 0.9],
        "changing": ["lh"],
    }
    return Recording(**(values | changes))


def assert_same(found: RecordedRun, expected: RecordedRun) -> None:
    for field in dataclasses.fields(RecordedRun):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)
        else:
            assert ours == theirs, field.name
