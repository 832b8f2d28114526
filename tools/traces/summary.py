"""What a recording holds, and how well replays predict it, as tables."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from statistics import fmean
from typing import NamedTuple, TypeAlias

import numpy as np

from tools.traces.reader import Recording, Traces
from tools.traces.replay import replay
from tools.traces.runs import RecordedRun
from tools.traces.schedules import name_of


def describe(traces: Traces) -> str:
    """Sizes, and a row for each cache and schedule."""
    recording = traces.recording
    tallies: dict[tuple[str, str], _Tally] = {}
    for run in traces.runs():
        tallies.setdefault((run.cache, run.schedule), _Tally()).add(run)
    num_steps = sum(sum(tally.steps) for tally in tallies.values())
    lines = [
        f"{recording.model} (weights {recording.weights}, {recording.dtype} on {recording.device}); "
        f"{recording.num_prompts} prompts of {recording.source}, seed {recording.seed}",
        f"blocks of {recording.block_size}, {recording.max_tokens} output tokens"
        f"{' without end at EOS' if recording.ignore_eos else ''}, temperature {recording.temperature:g}, "
        f"{recording.manner.words}",
        f"{len(traces.shards)} of {recording.num_shards} shards, {sum(len(t.steps) for t in tallies.values())} runs, "
        f"{num_steps} steps, {traces.num_bytes / 1e6:.2f} MB: {traces.num_bytes / max(1, num_steps):.1f} bytes a step",
        "",
        "| cache | thresholds | runs | steps | p50 | p95 | recompute steps | tokens a step | mean threshold set | "
        "output tokens | correct |",
        "|---" * 11 + "|",
    ]
    for cache in recording.caches:
        lines += [
            f"| {cache} | {schedule} | {tally.row()} |"
            for schedule in recording.schedules
            if (tally := tallies.get((cache, schedule)))
        ]
    return "\n".join(lines)


class _Tally:
    """The runs of one cache and schedule."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._recompute_steps = self._tokens = self._output_tokens = 0
        self._thresholds = 0.0
        self._correct: list[bool] = []

    def add(self, run: RecordedRun) -> None:
        self.steps.append(run.num_steps)
        self._recompute_steps += int(run.recompute_S.sum())
        self._tokens += int(run.committed_E.sum())
        self._output_tokens += len(run.output_T)
        self._thresholds += float(run.threshold_S.sum())
        if run.correct is not None:
            self._correct.append(run.correct)

    def row(self) -> str:
        runs, steps = len(self.steps), sum(self.steps)
        p50, p95 = np.percentile(self.steps, [50, 95])
        return (
            f"{runs} | {steps / runs:.2f} | {p50:.0f} | {p95:.0f} | "
            f"{self._recompute_steps / runs:.2f} | {self._tokens / steps:.2f} | {self._thresholds / steps:.3f} | "
            f"{self._output_tokens / runs:.1f} | {_share(self._correct)}"
        )


class Replayed(NamedTuple):
    """A replay beside the recorded run that it should have been."""

    steps: int
    recorded_steps: int
    same_answer: bool
    correct: bool | None  # None: unknown
    recorded_correct: bool | None


def _row(found: Sequence[Replayed]) -> str:
    recorded = sum(one.recorded_steps for one in found)
    bias = sum(one.steps for one in found) / recorded - 1
    error = sum(abs(one.steps - one.recorded_steps) for one in found) / recorded
    exact = fmean(one.steps == one.recorded_steps for one in found)
    judged = [one for one in found if one.correct is not None]
    return (
        f"{recorded / len(found):.2f} | {recorded * (1 + bias) / len(found):.2f} | {bias:+.1%} | {error:.1%} | "
        f"{exact:.0%} | {fmean(one.same_answer for one in found):.0%} | "
        f"{_share([one.recorded_correct for one in judged])} | {_share([one.correct for one in judged])}"
    )


def _share(correct: Sequence[bool | None]) -> str:
    return f"{fmean(map(bool, correct)):.1%}" if correct else "unknown"


Decode: TypeAlias = Callable[[Sequence[int]], str]
_Runs: TypeAlias = dict[str, RecordedRun]  # of one prompt, by schedule


def describe_replays(traces: Traces, num_prompts: int, decode: Decode | None = None) -> str:
    """How replays from some runs of a prompt predict others, over the first prompts of each cache.

    Bias: steps too many, as a share of the recorded ones. Error: steps too many or too few, request by request.
    """
    lines: list[str] = []
    for cache in traces.recording.caches:
        prompts = list(islice(traces.by_prompt(cache), num_prompts))
        if not prompts:
            continue
        lines += [
            f"Replays, cache {cache}, {len(prompts)} prompts: steps as predicted and as recorded",
            "",
            "| from the runs at | thresholds | recorded | predicted | bias | error | exact | same answer | correct, "
            "recorded | correct, predicted |",
            "|---" * 10 + "|",
        ]
        for label, sources, target in _questions(traces.recording):
            found = [_replayed(traces, runs, sources, target, decode) for runs in prompts]
            lines.append(f"| {label} | {target} | {_row(found)} |")
        lines.append("")
    return "\n".join(lines)


def _questions(recording: Recording) -> Iterator[tuple[str, list[str], str]]:
    """Schedules to replay from, with what to call them, and the one to predict."""
    fixed = [name_of(value) for value in recording.thresholds]
    for source in dict.fromkeys((fixed[-1], fixed[0])):
        yield from ((source, [source], target) for target in fixed)
    if len(fixed) > 2:
        yield from (("the others", [name for name in fixed if name != target], target) for target in fixed)
    yield from (("the set", fixed, target) for target in recording.changing)


def _replayed(traces: Traces, runs: _Runs, sources: Sequence[str], target: str, decode: Decode | None) -> Replayed:
    run = runs[target]
    schedule = traces.recording.schedule(target, run.prompt, run.planned_tokens)
    replayed = replay([runs[name] for name in sources], schedule, traces.recording)
    return Replayed(
        steps=replayed.steps,
        recorded_steps=run.num_steps,
        same_answer=replayed.output_ids == run.output_T.tolist(),
        correct=traces.prompts[run.prompt].is_correct(decode(replayed.output_ids)) if decode else None,
        recorded_correct=run.correct,
    )
