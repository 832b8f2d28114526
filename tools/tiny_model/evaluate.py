"""How many held-out problems the model answers exactly, and in how many steps, per cache mode and threshold.

1. The problems are held out (`tasks.is_held_out`), all prompts different, and the same for every setting: differences
   between settings are taken problem by problem.
2. Decoding is the product's own engine; a problem's steps are the passes that it took part in.
3. Each process takes every n-th problem, so the result does not depend on the number of processes.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any, get_args

from tools.tiny_model.tasks import Problem, is_correct, sample

CACHE_MODES = ("none", "prefix", "dual")
# The engine holds this many problems at a time; larger batches gain nothing on a CPU.
RUNNING_TOGETHER = 16
OPENING_THRESHOLD = 0.9


@dataclass(frozen=True)
class Setting:
    """One way to decode."""

    cache: str
    threshold: float
    opening_share: float = 0.0  # of each block, at OPENING_THRESHOLD or more

    @property
    def words(self) -> str:
        """For a table."""
        return f"{self.threshold:g}" + (
            f" after {self.opening_share:.0%} at {OPENING_THRESHOLD}" * bool(self.opening_share)
        )


@dataclass(frozen=True)
class Outcome:
    """What came of one problem."""

    is_correct: bool
    num_steps: int
    text: str


@dataclass(frozen=True)
class EvaluationJob:
    """What to evaluate; `max_tokens` is the canvas of every problem."""

    model_folder: Path
    settings: tuple[Setting, ...]
    count: int = 1_500
    seed: int = 0
    max_tokens: int = 256
    block_size: int = 32
    blocks_ahead: int | None = None  # that the model sees beyond the current one; None: all
    dtype: str = "float32"
    num_processes: int = 1

    def __post_init__(self) -> None:
        for setting in self.settings:
            if (
                setting.cache not in CACHE_MODES
                or not 0 < setting.threshold <= 1
                or not 0 <= setting.opening_share <= 1
            ):
                raise ValueError(f"no such setting: cache {setting.cache}, threshold {setting.words}")
        if self.count < 2 or self.num_processes < 1:
            raise ValueError(f"count {self.count} and processes {self.num_processes} are too small")
        if self.blocks_ahead is not None and self.blocks_ahead < 0:
            raise ValueError(f"blocks_ahead {self.blocks_ahead} is negative")


def problems_of(count: int, seed: int) -> list[Problem]:
    """`count` held-out problems with different prompts."""
    rng = Random(f"evaluate/{seed}")
    problems: list[Problem] = []
    seen: set[str] = set()
    while len(problems) < count:
        problem = sample(rng, "held_out")
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            problems.append(problem)
    return problems


def evaluate(job: EvaluationJob) -> dict[Setting, list[Outcome]]:
    """The outcome of every problem under every setting, in the order of `problems_of`."""
    if job.num_processes == 1:
        parts = [_evaluate_part(job, 0)]
    else:
        with get_context("spawn").Pool(job.num_processes) as pool:
            parts = pool.starmap(_evaluate_part, [(job, index) for index in range(job.num_processes)])
    return {setting: _interleave([part[setting] for part in parts]) for setting in job.settings}


def _interleave(parts: Sequence[list[Outcome]]) -> list[Outcome]:
    return [parts[index % len(parts)][index // len(parts)] for index in range(sum(map(len, parts)))]


def _evaluate_part(job: EvaluationJob, index: int) -> dict[Setting, list[Outcome]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    problems = problems_of(job.count, job.seed)[index :: job.num_processes]
    decoder = Decoder(job)
    return {setting: decoder.outcomes(problems, setting) for setting in job.settings}


class Decoder:
    """Answers problems with the product's engine."""

    def __init__(self, job: EvaluationJob) -> None:
        from tokenizers import Tokenizer

        from services.denoiser.engine import Engine, EngineConfig
        from services.denoiser.loader import load_model

        self._job = job
        self._tokenizer = Tokenizer.from_file(str(job.model_folder / "tokenizer.json"))
        config = json.loads((job.model_folder / "tokenizer_config.json").read_text())
        self._template = str(config["chat_template"])
        model = load_model(job.model_folder, dtype=job.dtype)
        longest = model.shape.max_positions
        self._engine = Engine(
            model, config=EngineConfig(kv_budget_tokens=RUNNING_TOGETHER * longest, max_requests=RUNNING_TOGETHER)
        )

    def outcomes(self, problems: Sequence[Problem], setting: Setting) -> list[Outcome]:
        """One outcome a problem, in order."""
        found: dict[int, Outcome] = {}
        waiting: Iterator[tuple[int, Problem]] = iter(enumerate(problems))
        steps: dict[str, int] = {}
        while len(found) < len(problems):
            for index, problem in islice(waiting, RUNNING_TOGETHER - len(steps)):
                self._admit(str(index), problem, setting)
                steps[str(index)] = 0
            for step in self._engine.step().requests:
                steps[step.request_id] += 1
                if step.finished:
                    index = int(step.request_id)
                    text = self._tokenizer.decode(self._engine.output_ids(step.request_id))
                    self._engine.remove(step.request_id)
                    found[index] = Outcome(is_correct(problems[index], text), steps.pop(step.request_id), text)
        return [found[index] for index in range(len(problems))]

    def _admit(self, request_id: str, problem: Problem, setting: Setting) -> None:
        from services.denoiser.engine import CacheMode, Job, Threshold
        from services.opening import Opening
        from tools.tiny_model.tokenizer import render_chat

        cache: CacheMode = next(mode for mode in get_args(CacheMode) if mode == setting.cache)
        text = render_chat([{"role": "user", "content": problem.prompt}], self._template)
        self._engine.admit(
            Job(
                request_id=request_id,
                prompt_ids=self._tokenizer.encode(text, add_special_tokens=False).ids,
                max_tokens=self._job.max_tokens,
                block_size=self._job.block_size,
                cache=cache,
                blocks_ahead=self._job.blocks_ahead,
                choice=Threshold(setting.threshold, Opening(share=setting.opening_share, threshold=OPENING_THRESHOLD)),
            )
        )


# --- what the outcomes say ---


def report(job: EvaluationJob, outcomes: dict[Setting, list[Outcome]]) -> dict[str, Any]:
    """The evaluation as one JSON object: a row for each setting, and high against low threshold for each cache mode."""
    problems = problems_of(job.count, job.seed)
    return {
        "count": job.count,
        "seed": job.seed,
        "max_tokens": job.max_tokens,
        "block_size": job.block_size,
        "blocks_ahead": job.blocks_ahead,
        "dtype": job.dtype,
        "settings": [_row(setting, found, problems) for setting, found in outcomes.items()],
        "paired": _paired_rows(outcomes),
    }


def _row(setting: Setting, outcomes: list[Outcome], problems: list[Problem]) -> dict[str, Any]:
    tasks = sorted({problem.task for problem in problems})
    return {
        "cache": setting.cache,
        "threshold": setting.words,
        **_summary(outcomes),
        "tasks": {
            task: _summary([o for o, problem in zip(outcomes, problems, strict=True) if problem.task == task])
            for task in tasks
        },
    }


def _summary(outcomes: list[Outcome]) -> dict[str, Any]:
    steps = sorted(outcome.num_steps for outcome in outcomes)
    return {
        "count": len(outcomes),
        "exact_percent": round(100 * fmean(outcome.is_correct for outcome in outcomes), 2),
        "steps_mean": round(fmean(steps), 2),
        "steps_p5": _quantile(steps, 0.05),
        "steps_p50": _quantile(steps, 0.5),
        "steps_p95": _quantile(steps, 0.95),
        "steps_max": steps[-1],
    }


def _quantile(ordered: list[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _paired_rows(outcomes: dict[Setting, list[Outcome]]) -> list[dict[str, Any]]:
    """Of each cache mode from the highest to the lowest threshold, and to each with an opening."""
    rows = []
    for cache in dict.fromkeys(setting.cache for setting in outcomes):
        settings = sorted((s for s in outcomes if s.cache == cache), key=lambda s: (s.opening_share, s.threshold))
        plain = [setting for setting in settings if not setting.opening_share]
        # 0.9 where there is one: nothing is gained above it.
        high = next((setting for setting in plain if setting.threshold == OPENING_THRESHOLD), plain[-1])
        for low in settings:
            if low == plain[0] != high or low.opening_share:
                difference = paired_difference(outcomes[high], outcomes[low])
                rows.append({"cache": cache, "from": high.words, "to": low.words, **difference})
    return rows


def paired_difference(above: Sequence[Outcome], below: Sequence[Outcome]) -> dict[str, float]:
    """Points of accuracy lost from `above` to `below` with a 95 % normal interval, and the share of steps saved."""
    differences = [100.0 * (a.is_correct - b.is_correct) for a, b in zip(above, below, strict=True)]
    mean, half = fmean(differences), 1.96 * stdev(differences) / math.sqrt(len(differences))
    saved = 1 - fmean(o.num_steps for o in below) / fmean(o.num_steps for o in above)
    return {
        "points_lost": round(mean, 2),
        "points_lost_low": round(mean - half, 2),
        "points_lost_high": round(mean + half, 2),
        "steps_saved_percent": round(100 * saved, 1),
    }


def markdown(content: dict[str, Any]) -> str:
    """The report as tables."""
    ahead = content["blocks_ahead"]
    sight = "all of it" if ahead is None else f"{ahead} blocks ahead"
    lines = [
        f"{content['count']} held-out prompts, canvas {content['max_tokens']} tokens, {sight} in sight, "
        f"block {content['block_size']}, {content['dtype']}:",
        "",
        "| cache | threshold | exact | mean steps | p5 | p50 | p95 | most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['cache']} | {row['threshold']} | {row['exact_percent']:.1f} % | {row['steps_mean']:.1f} | "
        f"{row['steps_p5']} | {row['steps_p50']} | {row['steps_p95']} | {row['steps_max']} |"
        for row in content["settings"]
    ]
    lines += [
        "",
        "| cache | from | to | points lost (95 % interval, paired) | steps saved |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['cache']} | {row['from']} | {row['to']} | {row['points_lost']:.1f} ({row['points_lost_low']:.1f} to "
        f"{row['points_lost_high']:.1f}) | {row['steps_saved_percent']:.0f} % |"
        for row in content["paired"]
    ]
    lines += _task_lines(content["settings"])
    return "\n".join(lines) + "\n"


def _task_lines(settings: list[dict[str, Any]]) -> list[str]:
    """Exact answers and mean steps per kind of task, one column a setting of the last cache mode."""
    columns = [row for row in settings if row["cache"] == settings[-1]["cache"]]
    head = " | ".join(f"{row['cache']} {row['threshold']}" for row in columns)
    lines = ["", f"| task | prompts | {head} |", "|---" * (len(columns) + 2) + "|"]
    for task, first in columns[0]["tasks"].items():
        cells = (
            f"{row['tasks'][task]['exact_percent']:.0f} % / {row['tasks'][task]['steps_mean']:.1f}" for row in columns
        )
        lines.append(f"| {task} | {first['count']} | {' | '.join(cells)} |")
    return lines
