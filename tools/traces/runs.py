"""What is recorded of a run, and the file that holds many.

A shard is one compressed .npz of flat columns (`COLUMNS`), three tables one inside the other: R runs; S steps, those of
a run after those of the one before; E entries, one for each position that was eligible before a step, by step and
ascending position. Confidences and thresholds are whole multiples of 1 / SCALE, confidences rounded down: a stored
confidence reaches a threshold exactly if the live one did. Every threshold of up to four decimals is such a multiple.
"""
# ruff: noqa: N802, N815 -- array names end in their shape

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from contracts.messages import CacheMode

Finish: TypeAlias = Literal["eos", "length"]
Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

FORMAT_VERSION = 1
SCALE = 60_000
CACHES: tuple[CacheMode, ...] = get_args(CacheMode)
FINISHES: tuple[Finish, ...] = get_args(Finish)
UNKNOWN = -1  # in the column run_correct

# Name -> type and meaning. What is not here (block size, seed, temperature) is the same for all runs: recording.json.
COLUMNS: dict[str, tuple[type[np.generic], str]] = {
    "run_prompt": (np.uint32, "number of its prompt in prompts.jsonl"),
    "run_cache": (np.uint8, "index in CACHES"),
    "run_schedule": (np.uint8, "index in the recording's schedule names"),
    "run_prompt_tokens": (np.uint32, "length of its prompt"),
    "run_planned_tokens": (np.uint32, "output length that the parts of its schedule were measured by"),
    "run_finish": (np.uint8, "index in FINISHES"),
    "run_correct": (np.int8, "1 or 0, where the task can say; else -1"),
    "run_steps": (np.uint32, "rows of the step table"),
    "run_output_tokens": (np.uint32, "rows of output_token"),
    "step_block": (np.uint16, "block index"),
    "step_in_block": (np.uint16, "from 0"),
    "step_recompute": (np.bool_, "a recompute step, not a cache step"),
    "step_threshold": (np.uint16, "that was applied, times SCALE"),
    "step_eligible": (np.uint16, "rows of the entry table"),
    "step_tokens_committed": (np.uint32, "`tokens_committed` of the worker's report after the step"),
    "step_confidence_min": (np.float32, "`confidence` of that report: minimum"),
    "step_confidence_q25": (np.float32, "lower quartile"),
    "step_confidence_q50": (np.float32, "median"),
    "step_confidence_q75": (np.float32, "upper quartile"),
    "step_confidence_max": (np.float32, "maximum"),
    "entry_offset": (np.uint16, "position within the block"),
    "entry_token": (np.uint32, "the token that the model would have put there"),
    "entry_confidence": (np.uint16, "its confidence, times SCALE, rounded down"),
    "entry_eos": (np.bool_, "the token is an end of sequence"),
    "entry_committed": (np.bool_, "the step committed it"),
    "output_token": (np.uint32, "the answer, cut before EOS"),
}
_SUMMARY = [name for name in COLUMNS if name.startswith("step_confidence_")]


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """One request as it was denoised. S steps, E entries of all of them, T output tokens."""

    prompt: int  # number of its prompt
    cache: CacheMode
    schedule: str
    prompt_tokens: int
    planned_tokens: int
    finish: Finish
    correct: bool | None
    output_T: Ints
    block_S: Ints
    in_block_S: Ints
    recompute_S: Bools
    threshold_S: Floats
    # The worker's report after the step: what a predictor sees when it is asked what is left.
    tokens_committed_S: Ints
    confidence_S5: npt.NDArray[np.float32]  # minimum, quartiles, maximum of the committed tokens' confidences
    # What the step chose from: step s has the entries from first_entry_S[s] to first_entry_S[s + 1] - 1.
    first_entry_S: Ints  # [S + 1]
    offset_E: Ints  # position within the block
    token_E: Ints
    confidence_E: Ints  # times SCALE
    eos_E: Bools  # the token is an end of sequence
    committed_E: Bools

    @property
    def num_steps(self) -> int:
        """Forward passes that it took part in."""
        return len(self.block_S)

    @property
    def eligible_S(self) -> Ints:
        """Positions that each step chose from."""
        return np.diff(self.first_entry_S)

    @property
    def committed_S(self) -> Ints:
        """Tokens that each step committed."""
        return np.add.reduceat(self.committed_E, self.first_entry_S[:-1], dtype=np.int64)

    def entries(self, step: int) -> slice:
        """Where the step's entries are."""
        return slice(int(self.first_entry_S[step]), int(self.first_entry_S[step + 1]))


def quantise(values: npt.ArrayLike) -> Ints:
    """Confidences times SCALE, rounded down; what is no number counts as 0, as in a worker's report."""
    known = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0)
    return np.floor(np.clip(known, 0.0, 1.0) * SCALE).astype(np.int64)


def check_threshold(value: float) -> None:
    """Raises ValueError unless stored confidences decide under this threshold as the live ones do."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"threshold {value} is not between 0 and 1")
    if round(value * SCALE) / SCALE != value:
        raise ValueError(f"threshold {value} has more decimals than a recording keeps: at most four")


def save_shard(path: Path, runs: Sequence[RecordedRun], schedules: Sequence[str]) -> None:
    """Writes the file under another name first: it is there as a whole or not at all."""
    columns = {name: np.asarray(values).astype(COLUMNS[name][0]) for name, values in _columns(runs, schedules).items()}
    assert columns.keys() == COLUMNS.keys()
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, format_version=np.array(FORMAT_VERSION), **columns)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _columns(runs: Sequence[RecordedRun], schedules: Sequence[str]) -> dict[str, Any]:
    def joined(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(run, name) for run in runs]) if runs else np.empty(0)

    summary_S5 = joined("confidence_S5").reshape(-1, 5)
    return {
        "run_prompt": [run.prompt for run in runs],
        "run_cache": [CACHES.index(run.cache) for run in runs],
        "run_schedule": [schedules.index(run.schedule) for run in runs],
        "run_prompt_tokens": [run.prompt_tokens for run in runs],
        "run_planned_tokens": [run.planned_tokens for run in runs],
        "run_finish": [FINISHES.index(run.finish) for run in runs],
        "run_correct": [UNKNOWN if run.correct is None else run.correct for run in runs],
        "run_steps": [run.num_steps for run in runs],
        "run_output_tokens": [len(run.output_T) for run in runs],
        "step_block": joined("block_S"),
        "step_in_block": joined("in_block_S"),
        "step_recompute": joined("recompute_S"),
        "step_threshold": np.rint(joined("threshold_S") * SCALE),
        "step_eligible": joined("eligible_S"),
        "step_tokens_committed": joined("tokens_committed_S"),
        **{name: summary_S5[:, index] for index, name in enumerate(_SUMMARY)},
        "entry_offset": joined("offset_E"),
        "entry_token": joined("token_E"),
        "entry_confidence": joined("confidence_E"),
        "entry_eos": joined("eos_E"),
        "entry_committed": joined("committed_E"),
        "output_token": joined("output_T"),
    }


def load_shard(path: Path, schedules: Sequence[str]) -> list[RecordedRun]:
    """The runs of a shard, in their order. Raises ValueError, naming the file, if it is none or of another version."""
    try:
        with path.open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            if (version := int(stored["format_version"])) != FORMAT_VERSION:
                raise ValueError(f"format version {version}; this program reads {FORMAT_VERSION}")
            columns = {name: stored[name] for name in COLUMNS}
    except (KeyError, EOFError, BadZipFile, ValueError) as error:
        raise ValueError(f"{path} is no shard of traces: {error}") from None
    return _runs(columns, schedules)


def _runs(columns: dict[str, npt.NDArray[Any]], schedules: Sequence[str]) -> list[RecordedRun]:
    def ints(name: str) -> Ints:
        return columns[name].astype(np.int64)

    first_step = _starts(ints("run_steps"))
    first_entry = _starts(ints("step_eligible"))
    first_output = _starts(ints("run_output_tokens"))
    summary_S5 = np.stack([columns[name] for name in _SUMMARY], axis=-1)
    runs = []
    for number in range(len(columns["run_prompt"])):
        steps = slice(first_step[number], first_step[number + 1])
        entries = slice(first_entry[steps.start], first_entry[steps.stop])
        outputs = slice(first_output[number], first_output[number + 1])
        correct = int(columns["run_correct"][number])
        runs.append(
            RecordedRun(
                prompt=int(columns["run_prompt"][number]),
                cache=CACHES[columns["run_cache"][number]],
                schedule=schedules[columns["run_schedule"][number]],
                prompt_tokens=int(columns["run_prompt_tokens"][number]),
                planned_tokens=int(columns["run_planned_tokens"][number]),
                finish=FINISHES[columns["run_finish"][number]],
                correct=None if correct == UNKNOWN else bool(correct),
                output_T=columns["output_token"][outputs].astype(np.int64),
                block_S=columns["step_block"][steps].astype(np.int64),
                in_block_S=columns["step_in_block"][steps].astype(np.int64),
                recompute_S=columns["step_recompute"][steps],
                threshold_S=columns["step_threshold"][steps] / SCALE,
                tokens_committed_S=columns["step_tokens_committed"][steps].astype(np.int64),
                confidence_S5=summary_S5[steps],
                first_entry_S=first_entry[steps.start : steps.stop + 1] - first_entry[steps.start],
                offset_E=columns["entry_offset"][entries].astype(np.int64),
                token_E=columns["entry_token"][entries].astype(np.int64),
                confidence_E=columns["entry_confidence"][entries].astype(np.int64),
                eos_E=columns["entry_eos"][entries],
                committed_E=columns["entry_committed"][entries],
            )
        )
    return runs


def _starts(counts: Ints) -> Ints:
    """Where each group begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
