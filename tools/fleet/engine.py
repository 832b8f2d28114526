"""What takes the engine's place in a simulated instance: passes are slept through, requests denoise as counted.

1. A pass takes what the latency profile says of its load; `choose_riders` chooses it, as in the engine.
2. A request denoises as the published one does that its seed numbers (tools/simulate/denoising.py, `Counted`). One that
   comes with blocks done has done them here, at the threshold that it comes with. Openings are not counted: none here.
3. Of tokens and confidences nothing is published: all tokens are one and the same, as sure as the threshold asks.
"""

from dataclasses import dataclass
from typing import NamedTuple

from services.costs import PassCost, PassLoad, step_load
from services.denoiser.batching import BatchLimits, StepKind, choose_riders, note_waits
from services.denoiser.engine import Commits, EngineConfig, Job, RequestStep, StepResult, Threshold
from tools.simulate.denoising import Counted, CountedCourse

MASK_ID, TOKEN_ID = 0, 1


class Shape(NamedTuple):
    """Of the model that is not there: what a worker asks of it."""

    max_positions: int
    vocab_size: int = 2
    mask_id: int = MASK_ID
    eos_ids: tuple[int, ...] = ()


class Nothing(NamedTuple):
    """In the place of the model."""

    shape: Shape
    device: str = "no device"


class Place(NamedTuple):
    """How far a request is, as far as the hot loop asks."""

    step_in_block: int


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    arrival_no: int
    course: CountedCourse
    threshold: float
    in_block: int = 0  # tokens committed in the block
    passes_waited: int = 0

    @property
    def kind(self) -> StepKind:
        return "cache" if self.course.steps_in_block and self.job.cache != "none" else "recompute"

    @property
    def num_keys(self) -> int:
        return self.job.seen_tokens(self.course.block_index)

    @property
    def num_rows(self) -> int:
        if self.kind == "recompute":
            return self.num_keys
        if self.job.cache == "dual":
            return self.job.block_size
        return self.num_keys - len(self.job.prompt_ids) - self.course.block_index * self.job.block_size

    def step(self, threshold: float) -> RequestStep:
        """Rule 2, and what the engine would say of it."""
        course, job = self.course, self.job
        kind, num_rows, num_keys = self.kind, self.num_rows, self.num_keys
        block_index, step_in_block = course.block_index, course.steps_in_block
        block_done = course.step(threshold)
        end = min((block_index + 1) * job.block_size, job.max_tokens)
        before = block_index * job.block_size + self.in_block
        self.in_block = 0 if block_done else course.signs().tokens_committed_in_block
        after = end if block_done else block_index * job.block_size + self.in_block
        count = after - before
        return RequestStep(
            request_id=job.request_id,
            kind=kind,
            block_index=block_index,
            step_in_block=step_in_block,
            num_rows=num_rows,
            num_keys=num_keys,
            threshold=threshold,
            commits=Commits(list(range(before, after)), [TOKEN_ID] * count, [threshold] * count),
            block_done=block_done,
            finished=course.finish or None,
        )


class SleepingEngine:
    """As much of `services.denoiser.engine.Engine` as the hot loop uses. Its step is in two parts: `begin_pass` says
    how long to sleep, `step` what came of it."""

    def __init__(self, config: EngineConfig, max_positions: int, cost: PassCost, behaviour: Counted) -> None:
        self.config, self.model = config, Nothing(Shape(max_positions))
        self._cost, self._behaviour = cost, behaviour
        self._limits = BatchLimits(
            max_batch_tokens=config.max_batch_tokens, max_recompute_tokens=config.max_recompute_tokens
        )
        self._running: dict[str, _Running] = {}  # by arrival
        self._arrivals = 0
        self._riders: list[tuple[_Running, float]] = []  # of the pass under way, with the threshold that applies
        self._seconds = 0.0  # that it takes

    def admit(self, job: Job) -> None:
        """Take a job; it rides from the next pass."""
        assert isinstance(job.choice, Threshold), "a worker admits no job with another rule"
        threshold = job.choice.value
        course = self._behaviour.start(job.seed % self._behaviour.num_prompts)
        while course.block_index < len(job.committed_ids) // job.block_size:
            course.step(threshold)
        self._running[job.request_id] = _Running(job, self._arrivals, course, threshold)
        self._arrivals += 1

    def set_threshold(self, request_id: str, value: float) -> None:
        """Turn a request's threshold, from its next step on."""
        self._running[request_id].threshold = value

    def remove(self, request_id: str) -> None:
        """Forget a request, done or not."""
        del self._running[request_id]

    def progress(self, request_id: str) -> Place:
        """How far a request is."""
        return Place(self._running[request_id].course.steps_in_block)

    def begin_pass(self) -> float:
        """Seconds that the next pass takes. Nothing may be removed before its `step`."""
        held = list(self._running.values())
        chosen = choose_riders(held, self._limits)
        note_waits(held, chosen)
        load = PassLoad()
        for running in chosen:
            load = load.plus(step_load(running.kind, running.num_rows, running.num_keys))
        self._riders = [(running, running.threshold) for running in chosen]
        self._seconds = self._cost.ms(load) / 1e3
        return self._seconds

    def step(self, took_s: float) -> StepResult:
        """The pass is over; `took_s`: what it took in truth, in seconds. What is longer than it should is overhead."""
        steps = [running.step(threshold) for running, threshold in self._riders]
        return StepResult(
            requests=steps,
            tokens_in_pass=sum(step.num_rows for step in steps),
            forward_s=self._seconds,
            commit_s=0.0,
            total_s=took_s,
        )
