"""What a predictor learns from: states of requests as reports tell them, and what was left from there on.

1. `fixed`: before each step of a run at one threshold; what is left is what the run took.
2. `turned`: before each step of any run, at another threshold from there on: a replay of the prompt's recorded runs
   (tools/traces/replay.py) says what would have been left. Without them the model would have seen each threshold only
   in company of the past that this threshold makes.
3. `short`: those of 1 and 2 as if fewer blocks had been asked for, of which the first are the same.
4. `kept`, to judge with and not to learn from: before the steps of "blocks" runs after which the threshold happened to
   stay. Nothing there is replayed. Those with more blocks to come stay more rarely: their weight makes up for it.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace

from contracts import messages as m
from tools.traces.reader import Recording, Traces
from tools.traces.replay import Behaviour
from tools.traces.runs import RecordedRun
from tools.traces.schedules import fixed_threshold

Kind: TypeAlias = Literal["fixed", "turned", "short", "kept"]


class Row(NamedTuple):
    """A state, a threshold from there on, and what is left under it."""

    kind: Kind
    prompt: int
    request: m.RequestReport
    threshold: float
    steps_left: int
    blocks_left: int  # still to begin
    total_steps: int  # from the request's start
    weight: float = 1.0


def reports(run: RecordedRun, recording: Recording) -> list[m.RequestReport]:
    """The run before each of its steps, by steps run; the first one is a request that has not begun."""
    block_size = recording.block_size
    num_blocks = -(-recording.max_tokens // block_size)
    committed_S, eligible_S = run.committed_S, run.eligible_S
    found = [_report(run, num_blocks, min(block_size, recording.max_tokens))]
    in_block, ends = 0, False
    for step in range(run.num_steps - 1):
        entries = run.entries(step)
        in_block += int(committed_S[step])
        if not recording.ignore_eos:
            ends = ends or bool((run.committed_E[entries] & run.eos_E[entries]).any())
        block_index = int(run.block_S[step + 1])
        if block_index != run.block_S[step]:
            in_block, ends = 0, False
        found.append(
            _report(
                run,
                num_blocks,
                int(eligible_S[step + 1]),
                block_index=block_index,
                steps=step + 1,
                steps_in_block=int(run.in_block_S[step + 1]),
                tokens_committed=int(run.tokens_committed_S[step]),
                tokens_committed_in_block=in_block,
                threshold=float(run.threshold_S[step]),
                confidence=tuple(run.confidence_S5[step].tolist()),
                ends_in_block=ends,
            )
        )
    return found


def _report(
    run: RecordedRun,
    num_blocks: int,
    tokens_left_in_block: int,
    *,
    block_index: int = 0,
    steps: int = 0,
    steps_in_block: int = 0,
    tokens_committed: int = 0,
    tokens_committed_in_block: int = 0,
    threshold: float = 0.0,
    confidence: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0),
    ends_in_block: bool = False,
) -> m.RequestReport:
    least, lower, median, upper, most = confidence
    return m.RequestReport(
        request_id=str(run.prompt),
        attempt=1,
        block_index=block_index,
        num_blocks=num_blocks,
        steps=steps,
        steps_in_block=steps_in_block,
        tokens_committed=tokens_committed,
        tokens_committed_in_block=tokens_committed_in_block,
        threshold=threshold,
        confidence=(least, lower, median, upper, most),
        next_recompute=run.cache == "none" or steps_in_block == 0,
        finished=False,
        prompt_tokens=run.prompt_tokens,
        tokens_left_in_block=tokens_left_in_block,
        ends_in_block=ends_in_block,
    )


def training_rows(traces: Traces, seed: int = 0) -> list[Row]:
    """Rows 1 to 3 of all runs."""
    rows: list[Row] = []
    for cache in traces.recording.caches:
        for runs in traces.by_prompt(cache):
            rows += _of_prompt(list(runs.values()), traces.recording, Random(f"{seed}/{cache}/{_prompt_of(runs)}"))
    return rows


def _prompt_of(runs: dict[str, RecordedRun]) -> int:
    return next(iter(runs.values())).prompt


def _of_prompt(runs: Sequence[RecordedRun], recording: Recording, rng: Random) -> Iterator[Row]:
    behaviour = Behaviour(runs, recording)
    for run in runs:
        own = fixed_threshold(run.schedule)
        for request in reports(run, recording):
            if own is not None:
                blocks = run.block_S[request.steps :]
                yield from _with_short("fixed", run, request, own, blocks.tolist(), rng)
            if request.steps:
                other = rng.choice([value for value in recording.thresholds if value != own] or [own or 0.0])
                yield from _with_short("turned", run, request, other, _replayed(behaviour, run, request, other), rng)


def _replayed(behaviour: Behaviour, run: RecordedRun, request: m.RequestReport, threshold: float) -> list[int]:
    """The block of each step that would follow at this threshold; empty if the replay ends before that state."""
    replay = behaviour.start()
    blocks = []
    while replay.finished is None:
        done = replay.steps
        step = replay.step(float(run.threshold_S[done]) if done < request.steps else threshold)
        blocks.append(step.block_index)
    return blocks[request.steps :]


def _with_short(
    kind: Literal["fixed", "turned"],
    run: RecordedRun,
    request: m.RequestReport,
    threshold: float,
    blocks: Sequence[int],
    rng: Random,
) -> Iterator[Row]:
    """The row, if anything is left, and in every second case one with fewer blocks. `blocks`: of the steps left."""
    if blocks:
        yield _row(kind, run, request, threshold, blocks)
    if request.num_blocks - request.block_index > 1 and rng.random() < 0.5:
        num_blocks = rng.randrange(request.block_index + 1, request.num_blocks)
        if kept := [block for block in blocks if block < num_blocks]:
            yield _row("short", run, _asked_for(request, num_blocks), threshold, kept)


def _asked_for(request: m.RequestReport, num_blocks: int) -> m.RequestReport:
    return replace(request, num_blocks=num_blocks)


def _row(kind: Kind, run: RecordedRun, request: m.RequestReport, threshold: float, blocks: Sequence[int]) -> Row:
    begun = request.block_index + (request.steps_in_block > 0)
    to_begin = len({block for block in blocks if block >= begun})
    return Row(kind, run.prompt, request, threshold, len(blocks), to_begin, request.steps + len(blocks))


def fixed_rows(traces: Traces) -> list[Row]:
    """Rows 1 of all runs at one threshold, in the order of their steps."""
    return [
        _row("fixed", run, request, threshold, run.block_S[request.steps :].tolist())
        for run in traces.runs()
        if (threshold := fixed_threshold(run.schedule)) is not None
        for request in reports(run, traces.recording)
    ]


def kept_rows(traces: Traces) -> list[Row]:
    """Rows 4 of all "blocks" runs, but for those whose past had the same threshold."""
    chances = len(traces.recording.thresholds)
    rows = []
    for run in traces.runs():
        if run.schedule != "blocks":
            continue
        for request in reports(run, traces.recording)[1:]:
            left_S = run.threshold_S[request.steps :]
            past_S = run.threshold_S[: request.steps]
            blocks = run.block_S[request.steps :].tolist()
            if len(set(left_S)) == 1 and np.any(past_S != left_S[0]):
                weight = float(chances ** (len(set(blocks)) - 1))
                rows.append(_row("kept", run, request, float(left_S[0]), blocks)._replace(weight=weight))
    return rows
