"""How a prompt is denoised at thresholds that were not recorded: recorded steps, chosen from anew. Pure.

A replay keeps a canvas of its own. For each step
1. it looks for the recorded state (the canvas before a recorded step of the same block) that is most like its own: the
   fewest tokens differ, where one in an earlier block counts BEFORE_WEIGHT and a threshold that was applied there and
   is off by 1 counts THRESHOLD_WEIGHT; ties: the first run's first step. A block's first step is looked for among
   first steps;
2. it takes tokens and confidences from there; for a position that is committed there already, those that it had when it
   was last eligible. Confidences that it has used before have DOUBT_KEPT of their doubt (1 - confidence) each time: the
   more of the context is known, the surer the model is;
3. it commits what reaches the threshold, and always the most confident position, and ends blocks and the request as
   the engine does. Where no recorded run has come as far, it ends as well.
The thresholds of a recorded run give that run again, step by step: its own states are the most alike, and stored
confidences decide as the live ones did.
"""
# ruff: noqa: N815 -- array names end in their shape

import copy
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from services.opening import Opening
from tools.traces.reader import Recording
from tools.traces.runs import SCALE, Bools, Finish, Floats, Ints, RecordedRun
from tools.traces.schedules import Progress, Schedule

# Round numbers: on the built-in model twice or half of the weights moves the error by less than a point.
BEFORE_WEIGHT = 0.3
THRESHOLD_WEIGHT = 5.0
DOUBT_KEPT = 0.8
_MASKED = -1


class ReplayedStep(NamedTuple):
    """What a step did: `RequestStep` of the engine, without what depends on the machine."""

    kind: Literal["recompute", "cache"]
    block_index: int
    step_in_block: int
    positions: list[int]  # committed, in the output area; with token_ids and confidences parallel lists
    token_ids: list[int]
    confidences: list[float]
    block_done: bool
    finished: Finish | None


class Behaviour:
    """What is known of one prompt with one cache: its recorded runs, as states that a replay can be in."""

    def __init__(self, runs: Sequence[RecordedRun], recording: Recording) -> None:
        """Raises ValueError unless there are runs and all are of one prompt and cache."""
        if len(found := {(run.prompt, run.cache) for run in runs}) != 1:
            raise ValueError(f"the runs of one prompt with one cache are needed, got those of {sorted(found)}")
        self.recording = recording
        self.cache = runs[0].cache
        self.outputs = [run.output_T for run in runs]
        states: dict[int, list[_State]] = {}
        for index, run in enumerate(runs):
            for block_index, found_there in _states(run, index, recording).items():
                states.setdefault(block_index, []).extend(found_there)
        self.blocks = {block_index: _Block(found_there) for block_index, found_there in states.items()}

    def start(self) -> "Replay":
        """The prompt before its first step."""
        return Replay(self)


class _State(NamedTuple):
    """Before a recorded step: the B positions of its block."""

    run: int
    is_first: bool  # of its block
    threshold: float  # that was applied
    canvas_B: Ints
    eligible_B: Bools
    # Of each position when it was last eligible, or else when it will be:
    token_B: Ints
    confidence_B: Floats
    eos_B: Bools
    source_B: Ints  # the step that this was, numbered over all runs
    committed_B: Bools  # by this step


def _states(run: RecordedRun, index: int, recording: Recording) -> dict[int, list[_State]]:
    """The states of a run, by block."""
    blocks: dict[int, list[_State]] = {}
    for step in range(run.num_steps):
        states = blocks.setdefault(int(run.block_S[step]), [])
        before = states[-1] if states else _nothing(recording.block_size)
        states.append(_state(run, index, step, before, recording.manner.opening))
    for states in blocks.values():
        for state, later in zip(states[-2::-1], states[:0:-1], strict=True):
            unknown_B = state.token_B == _MASKED
            state.token_B[unknown_B] = later.token_B[unknown_B]
            state.confidence_B[unknown_B] = later.confidence_B[unknown_B]
            state.eos_B[unknown_B] = later.eos_B[unknown_B]
            state.source_B[unknown_B] = later.source_B[unknown_B]
    return blocks


def _nothing(block_size: int) -> _State:
    masked_B, no_B = np.full(block_size, _MASKED), np.zeros(block_size, dtype=np.bool_)
    return _State(0, False, 0.0, masked_B, no_B, masked_B, np.zeros(block_size), no_B, masked_B, no_B)


def _state(run: RecordedRun, index: int, step: int, before: _State, opening: Opening) -> _State:
    """The state before this step, given the one before the step before."""
    entries = run.entries(step)
    offset_E = run.offset_E[entries]
    eligible_B, committed_B = np.zeros((2, len(before.canvas_B)), dtype=np.bool_)
    eligible_B[offset_E] = True
    committed_B[offset_E] = run.committed_E[entries]
    canvas_B = np.where(before.committed_B, before.token_B, before.canvas_B)
    state = _State(
        run=index,
        is_first=run.in_block_S[step] == 0,
        threshold=opening.applied(
            float(run.threshold_S[step]), committed=int((canvas_B != _MASKED).sum()), left=len(offset_E)
        ),
        canvas_B=canvas_B,
        eligible_B=eligible_B,
        token_B=before.token_B.copy(),
        confidence_B=before.confidence_B.copy(),
        eos_B=before.eos_B.copy(),
        source_B=before.source_B.copy(),
        committed_B=committed_B,
    )
    state.token_B[offset_E] = run.token_E[entries]
    state.confidence_B[offset_E] = run.confidence_E[entries] / SCALE
    state.eos_B[offset_E] = run.eos_E[entries]
    state.source_B[offset_E] = (index << 32) + step
    return state


class _Block:
    """The recorded states of a block, N of them, and its positions that were ever eligible."""

    def __init__(self, states: Sequence[_State]) -> None:
        self.states = states
        self.eligible_B: Bools = np.logical_or.reduce([state.eligible_B for state in states])
        self.canvas_NB = np.stack([state.canvas_B for state in states])
        self.run_N = np.array([state.run for state in states])
        self.is_first_N = np.array([state.is_first for state in states])
        self.threshold_N = np.array([state.threshold for state in states])

    def most_alike(self, canvas_B: Ints, threshold: float, before_R: Ints, *, is_first: bool) -> _State:
        """`before_R`: in how many tokens of earlier blocks each run differs."""
        difference_N = (self.canvas_NB != canvas_B).sum(-1) + BEFORE_WEIGHT * before_R[self.run_N]
        difference_N += THRESHOLD_WEIGHT * np.abs(self.threshold_N - threshold)
        if is_first:
            difference_N[~self.is_first_N] = np.inf
        return self.states[int(difference_N.argmin())]


class Replay:
    """A prompt on its way: `step` it, with a threshold for each step, until it has `finished`."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        recording = behaviour.recording
        self._block_size = recording.block_size
        self._num_blocks = -(-recording.max_tokens // recording.block_size)
        self.finished: Finish | None = None
        self.steps = 0
        self.output_ids: list[int] = []  # of whole blocks; when finished, the answer
        self._before_R = np.zeros(len(behaviour.outputs), dtype=np.int64)
        self._start_block(0)

    def _start_block(self, index: int) -> None:
        self._block_index, self._step_in_block = index, 0
        self._block = self._behaviour.blocks[index]
        self._canvas_B = np.full(self._block_size, _MASKED)
        self._eligible_B = self._block.eligible_B
        self._eos_B = np.zeros(self._block_size, dtype=np.bool_)  # committed ones
        self._source_B = np.full(self._block_size, _MASKED)  # the step that each confidence was last taken from,
        self._used_B = np.zeros(self._block_size, dtype=np.int64)  # and how often before

    @property
    def progress(self) -> Progress:
        """How far it is, as a schedule asks for it."""
        in_block = 0 if self.finished else int((self._canvas_B != _MASKED).sum())
        return Progress(self.steps, self._block_index, len(self.output_ids) + in_block)

    @property
    def tokens_left_in_block(self) -> int:
        """Positions that the current block still commits; nothing behind its first EOS is."""
        return 0 if self.finished else int(self._eligible_B.sum())

    @property
    def ends_in_block(self) -> bool:
        """The current block holds an EOS, so it is the last one."""
        return bool(self._eos_B.any())

    def copy(self) -> "Replay":
        """One that goes its own way from here."""
        other = copy.copy(self)
        other.output_ids, other._eos_B = list(self.output_ids), self._eos_B.copy()  # the others are never changed
        return other

    def step(self, threshold: float) -> ReplayedStep:
        """The next step of a request that runs at this threshold."""
        assert self.finished is None, "a finished request has no next step"
        threshold = self._behaviour.recording.manner.opening.applied(
            threshold, committed=int((self._canvas_B != _MASKED).sum()), left=self.tokens_left_in_block
        )
        block_index, step_in_block = self._block_index, self._step_in_block
        state = self._block.most_alike(self._canvas_B, threshold, self._before_R, is_first=step_in_block == 0)
        # Dream's first step of a block chooses from one position alone.
        eligible_B = self._eligible_B if step_in_block else self._eligible_B & state.eligible_B
        confidence_B = self._confidence(state, eligible_B)
        chosen_B = _choose(eligible_B, confidence_B, threshold, state.committed_B)
        self._canvas_B = np.where(chosen_B, state.token_B, self._canvas_B)
        self._eligible_B = self._eligible_B & ~chosen_B
        if not self._behaviour.recording.ignore_eos:
            self._eos_B |= chosen_B & state.eos_B
            if self._eos_B.any():
                self._eligible_B[self._eos_B.argmax() :] = False
        self.steps += 1
        self._step_in_block += 1
        if block_done := not self._eligible_B.any():
            self._end_block()
        return ReplayedStep(
            kind="cache" if step_in_block and self._behaviour.cache != "none" else "recompute",
            block_index=block_index,
            step_in_block=step_in_block,
            positions=(np.flatnonzero(chosen_B) + block_index * self._block_size).tolist(),
            token_ids=state.token_B[chosen_B].tolist(),
            confidences=confidence_B[chosen_B].tolist(),
            block_done=block_done,
            finished=self.finished,
        )

    def _confidence(self, state: _State, eligible_B: Bools) -> Floats:
        again_B = eligible_B & (state.source_B == self._source_B)
        self._used_B = np.where(again_B, self._used_B + 1, 0)
        self._source_B = np.where(eligible_B, state.source_B, self._source_B)
        grown_B = 1.0 - (1.0 - state.confidence_B) * DOUBT_KEPT**self._used_B
        return np.where(again_B, grown_B, state.confidence_B)  # exactly as stored when used for the first time

    def _end_block(self) -> None:
        done = self._block_index + 1
        if self._eos_B.any():
            self.finished = "eos"
            self.output_ids += self._canvas_B[: self._eos_B.argmax()].tolist()
            return
        self.output_ids += self._canvas_B[self._canvas_B != _MASKED].tolist()
        if done == self._num_blocks:
            self.finished = "length"
        elif done not in self._behaviour.blocks:
            self.finished = "eos"
        else:
            mine_T = np.array(self.output_ids)
            self._before_R = np.array([_differences(mine_T, output_T) for output_T in self._behaviour.outputs])
            self._start_block(done)


def _choose(eligible_B: Bools, confidence_B: Floats, threshold: float, recorded_B: Bools) -> Bools:
    """As the engine's threshold rule. `recorded_B`: what the recorded step committed; the best of it goes first where
    two are equal as they are stored, which they were not when live."""
    chosen_B = eligible_B & (confidence_B >= threshold)
    if not chosen_B.any():
        best_B = eligible_B & (confidence_B == confidence_B[eligible_B].max())
        recorded_best_B = best_B & recorded_B
        chosen_B[recorded_best_B.argmax() if recorded_best_B.any() else best_B.argmax()] = True
    return chosen_B


def _differences(mine_T: Ints, output_T: Ints) -> int:
    common = min(len(mine_T), len(output_T))
    return int((mine_T[:common] != output_T[:common]).sum()) + len(mine_T) - common


def replay(runs: Sequence[RecordedRun], schedule: Schedule, recording: Recording) -> Replay:
    """The finished replay of these runs of one prompt and cache under a schedule. Raises ValueError as Behaviour does.

    With one run it is that run under other thresholds; with the runs at all thresholds of the set it is the prompt
    under thresholds that change.
    """
    replayed = Behaviour(runs, recording).start()
    while replayed.finished is None:
        replayed.step(schedule(replayed.progress))
    return replayed
