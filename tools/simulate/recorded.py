"""Requests that denoise as recorded ones did: replays (tools/traces/replay.py), each step computed once.

Where a request stands follows from its prompt and the thresholds of its steps so far. So the steps of a prompt are a
tree, with a branch for each threshold that some request had there, and requests walk in it. The tree grows to
`max_steps` steps; beyond, steps are computed as often as they are run.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from contracts.messages import CacheMode
from services.denoiser.run import five_numbers
from services.settings import ConfigError
from tools.simulate.denoising import Finish, Left, Signs, interpolated
from tools.traces.prompts import Prompt
from tools.traces.reader import Recording, Traces, open_traces
from tools.traces.replay import Behaviour, Replay
from tools.traces.runs import RecordedRun
from tools.traces.schedules import name_of

Decode = Callable[[Sequence[int]], str]
_MAX_STEPS = 40_000  # of a few kilobytes each


class Recorded:
    """The prompts of a recording with one cache. `decode` turns an answer into text, so that it can be judged."""

    def __init__(
        self, folder: Path, cache: CacheMode, decode: Decode | None = None, *, max_steps: int = _MAX_STEPS
    ) -> None:
        """Raises ConfigError where there is nothing recorded with this cache."""
        traces = open_traces(folder)
        self.recording: Recording = traces.recording
        runs = list(_runs_by_prompt(traces, cache))
        if not runs:
            raise ConfigError(f"{folder} holds no run with cache {cache!r}, but {', '.join(self.recording.caches)}")
        self.ignore_eos = self.recording.ignore_eos
        self.num_prompts = len(runs)
        self._lengths = [of_prompt[0].prompt_tokens for of_prompt in runs]
        self._prompts: list[Prompt] = [traces.prompts[of_prompt[0].prompt] for of_prompt in runs]
        self._starts = [_Place(Behaviour(of_prompt, self.recording).start(), None) for of_prompt in runs]
        self._fixed = {value: _fixed_runs(runs, value) for value in self.recording.thresholds}
        self._decode = decode
        self._room = max_steps  # in the tree

    def prompt_tokens(self, prompt: int) -> int:
        return self._lengths[prompt]

    def max_tokens(self, prompt: int) -> int:
        return self.recording.max_tokens

    def start(self, prompt: int) -> "RecordedCourse":
        return RecordedCourse(self, prompt, self._starts[prompt])

    def mean(self, threshold: float) -> Left:
        fixed = self._fixed.values()
        steps = [fmean(run.num_steps for run in runs) for runs in fixed]
        blocks = [fmean(int(run.block_S[-1]) + 1 for run in runs) for runs in fixed]
        at = self.recording.thresholds
        return Left(interpolated(at, steps, threshold), interpolated(at, blocks, threshold))

    def accuracy(self, threshold: float) -> float | None:
        known = [[run.correct for run in runs if run.correct is not None] for runs in self._fixed.values()]
        if not all(known):
            return None
        return interpolated(self.recording.thresholds, [fmean(map(float, correct)) for correct in known], threshold)

    def grow(self, place: "_Place", threshold: float) -> "_Place":
        """The next place, computed."""
        replay = place.replay.copy()
        grown = _Place(replay, place)
        grown.take(replay.step(threshold).confidences)
        if self._room > 0:
            self._room -= 1
            place.next[threshold] = grown
        return grown

    def is_correct(self, prompt: int, replay: Replay) -> bool | None:
        return None if self._decode is None else self._prompts[prompt].is_correct(self._decode(replay.output_ids))


class _Place:
    """In the tree: a prompt after some steps."""

    __slots__ = (
        "_confidences",
        "_left",
        "_signs",
        "before",
        "block_index",
        "finish",
        "next",
        "replay",
        "steps_in_block",
    )

    def __init__(self, replay: Replay, before: "_Place | None") -> None:
        self.replay, self.before = replay, before
        self.next: dict[float, _Place] = {}
        self.block_index = self.steps_in_block = 0
        self.finish: Finish = ""
        self._confidences: list[float] = []  # committed by the step that led here
        self._left: dict[float, Left] = {}
        self._signs: Signs | None = None

    def take(self, confidences: list[float]) -> None:
        """The step from `before` to here has committed these."""
        assert self.before is not None
        self._confidences = confidences
        self.finish = self.replay.finished or ""
        progress = self.replay.progress
        ended = bool(self.finish) or progress.block_index > self.before.block_index
        self.block_index = self.before.block_index + ended
        self.steps_in_block = 0 if ended else self.before.steps_in_block + 1

    def signs(self) -> Signs:
        if self._signs is None:
            self._signs = self._look()
        return self._signs

    def _look(self) -> Signs:
        replay = self.replay
        in_block = 0 if self.finish else replay.progress.tokens_committed - len(replay.output_ids)
        return Signs(
            tokens_committed=len(replay.output_ids) + in_block,
            tokens_committed_in_block=in_block,
            tokens_left_in_block=replay.tokens_left_in_block,
            ends_in_block=replay.ends_in_block and not self.finish,
            confidence=five_numbers([confidence for place in self._path() for confidence in place._confidences]),
        )

    def _path(self) -> Iterator["_Place"]:
        place: _Place | None = self
        while place is not None:
            yield place
            place = place.before

    def left(self, threshold: float) -> Left:
        found = self._left.get(threshold)
        if found is None:
            found = self._left[threshold] = self._run_on(threshold)
        return found

    def _run_on(self, threshold: float) -> Left:
        if self.finish:
            return Left(0.0, 0.0)
        replay = self.replay.copy()
        steps, begun = 0, 0
        while replay.finished is None:
            begun += replay.step(threshold).step_in_block == 0
            steps += 1
        return Left(float(steps), float(begun))


class RecordedCourse:
    """A request on its way."""

    def __init__(self, behaviour: Recorded, prompt: int, start: _Place) -> None:
        self._behaviour, self._prompt, self._place = behaviour, prompt, start
        self.steps = 0

    @property
    def block_index(self) -> int:
        return self._place.block_index

    @property
    def steps_in_block(self) -> int:
        return self._place.steps_in_block

    @property
    def finish(self) -> Finish:
        return self._place.finish

    def step(self, threshold: float) -> bool:
        place = self._place.next.get(threshold) or self._behaviour.grow(self._place, threshold)
        self._place = place
        self.steps += 1
        return not place.steps_in_block

    def signs(self) -> Signs:
        return self._place.signs()

    def left(self, threshold: float) -> Left:
        return self._place.left(threshold)

    def go_back(self, blocks_done: int) -> None:
        while self._place.block_index > blocks_done or self._place.steps_in_block:
            assert self._place.before is not None, "it begins with no block done"
            self._place = self._place.before
            self.steps -= 1

    def correctness(self) -> float | None:
        correct = self._behaviour.is_correct(self._prompt, self._place.replay)
        return None if correct is None else float(correct)


def _runs_by_prompt(traces: Traces, cache: CacheMode) -> Iterator[list[RecordedRun]]:
    if cache in traces.recording.caches:
        for runs in traces.by_prompt(cache):
            yield list(runs.values())


def _fixed_runs(runs: Sequence[Sequence[RecordedRun]], threshold: float) -> list[RecordedRun]:
    """Of all prompts the run at this threshold."""
    return [run for of_prompt in runs for run in of_prompt if run.schedule == name_of(threshold)]
