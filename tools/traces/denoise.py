"""Makes recorded runs on the product's own engine.

1. Of each prompt and cache the runs at fixed thresholds come first: the parts of a schedule are measured by the output
   of the run at the highest one.
2. A worker's own bookkeeping (`services/denoiser/run.py`) makes the report after each step, so that what is recorded
   is what a worker would have said.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from contracts import messages as m
from contracts.messages import CacheMode
from services.denoiser.engine import Engine, Finish, Job, RequestStep, Scores, Threshold
from services.denoiser.instance import engine_config, load_profile_model
from services.denoiser.run import Instance, Run
from services.denoiser.worker_events import Assigned, Stepped
from services.gateway.text import TextCodec
from services.profile import Profile
from tools.traces.prompts import Asked, codec_of
from tools.traces.reader import Recording
from tools.traces.runs import CACHES, RecordedRun, quantise
from tools.traces.schedules import Progress, Schedule, name_of

_ID = "recorder"


class _Plan(NamedTuple):
    """A run that is to be made."""

    asked: Asked
    cache: CacheMode
    schedule: str
    planned_tokens: int = 0


class Recorder:
    """Runs prompts on one engine. Nothing of one `shard` is left for the next."""

    def __init__(self, engine: Engine, recording: Recording, codec: TextCodec) -> None:
        """The engine must keep scores and hold nothing else."""
        self.engine, self.recording, self._codec = engine, recording, codec

    @classmethod
    def of(cls, profile: Profile, recording: Recording) -> "Recorder":
        """With the profile's model, as the profile serves it. Raises ConfigError."""
        torch.set_num_threads(profile.engine.threads)
        model = load_profile_model(profile)
        engine = Engine(model, config=engine_config(profile, model), keep_scores=True)
        return cls(engine, recording, codec_of(profile))

    def shard(self, asked: Sequence[Asked]) -> list[RecordedRun]:
        """All runs of these prompts, by prompt, cache and schedule."""
        recording = self.recording
        pairs = [(one, cache) for one in asked for cache in recording.caches]
        fixed = [_Plan(one, cache, name_of(value)) for one, cache in pairs for value in recording.thresholds]
        runs = self._decode(fixed)
        highest = name_of(recording.thresholds[-1])
        lengths = {(run.prompt, run.cache): len(run.output_T) for run in runs if run.schedule == highest}
        runs += self._decode(
            [
                _Plan(one, cache, name, planned_tokens=lengths[one.prompt.number, cache])
                for one, cache in pairs
                for name in recording.changing
            ]
        )
        order = recording.schedules.index
        return sorted(runs, key=lambda run: (run.prompt, CACHES.index(run.cache), order(run.schedule)))

    def _decode(self, plans: Sequence[_Plan]) -> list[RecordedRun]:
        engine = self.engine
        waiting, tapes, runs = deque(plans), dict[str, _Tape](), list[RecordedRun]()
        while waiting or tapes:
            self._admit(waiting, tapes)
            for request_id, tape in tapes.items():
                engine.set_threshold(request_id, tape.turn())
            for step in engine.step().requests:
                tape = tapes[step.request_id]
                tape.note(step)
                if step.finished:
                    output_ids = engine.output_ids(step.request_id)
                    engine.remove(step.request_id)
                    del tapes[step.request_id]
                    correct = tape.plan.asked.prompt.is_correct(self._codec.decode(output_ids))
                    runs.append(tape.recorded(output_ids, step.finished, correct))
        return runs

    def _admit(self, waiting: deque[_Plan], tapes: dict[str, "_Tape"]) -> None:
        while waiting:
            plan = waiting[0]
            job = self._job(plan)
            if (refusal := self.engine.refusal(job)) and tapes and refusal.reason in ("kv_full", "batch_full"):
                return
            self.engine.admit(job)  # raises for what will never fit
            tapes[job.request_id] = _Tape(waiting.popleft(), job, self.recording, self.engine.model.shape.eos_ids)

    def _job(self, plan: _Plan) -> Job:
        recording, number = self.recording, plan.asked.prompt.number
        return Job(
            request_id=f"{number}-{plan.cache}-{recording.schedules.index(plan.schedule)}",
            prompt_ids=plan.asked.ids,
            max_tokens=recording.max_tokens,
            block_size=recording.block_size,
            cache=plan.cache,
            blocks_ahead=recording.manner.blocks_ahead,
            choice=Threshold(recording.thresholds[-1], recording.manner.opening),  # until the schedule says
            temperature=recording.temperature,
            seed=recording.seed + number,
            ignore_eos=recording.ignore_eos,
        )


class _Tape:
    """What is noted of a run while it is made."""

    def __init__(self, plan: _Plan, job: Job, recording: Recording, eos_ids: Iterable[int]) -> None:
        self.plan, self._job, self._eos_ids = plan, job, list(eos_ids)
        self._schedule: Schedule = recording.schedule(plan.schedule, plan.asked.prompt.number, plan.planned_tokens)
        self._run = _bookkeeping(job, recording.model, frozenset(eos_ids))
        self._steps: list[RequestStep] = []
        self._threshold = 0.0  # that the schedule asks for
        self._thresholds: list[float] = []
        self._reports: list[m.RequestReport] = []

    def turn(self) -> float:
        progress = Progress(0, 0, 0)
        if self._reports:
            report = self._reports[-1]
            progress = Progress(report.steps, report.block_index, report.tokens_committed)
        self._threshold = self._schedule(progress)
        return self._threshold

    def note(self, step: RequestStep) -> None:
        self._steps.append(step)
        self._thresholds.append(self._threshold)
        self._run.note(_stepped(step))
        self._reports.append(self._run.report())

    def recorded(self, output_ids: list[int], finish: Finish, correct: bool | None) -> RecordedRun:
        steps, reports, block_size = self._steps, self._reports, self._job.block_size
        scores: list[Scores] = []
        committed = []
        for step in steps:
            assert step.scores is not None
            scores.append(step.scores)
            committed.append(np.isin(step.scores.positions, step.commits.positions))
        token_E = np.concatenate([s.token_ids for s in scores])
        return RecordedRun(
            prompt=self.plan.asked.prompt.number,
            cache=self.plan.cache,
            schedule=self.plan.schedule,
            prompt_tokens=len(self._job.prompt_ids),
            planned_tokens=self.plan.planned_tokens,
            finish=finish,
            correct=correct,
            output_T=np.array(output_ids, dtype=np.int64),
            block_S=np.array([step.block_index for step in steps]),
            in_block_S=np.array([step.step_in_block for step in steps]),
            recompute_S=np.array([step.kind == "recompute" for step in steps]),
            threshold_S=np.array(self._thresholds, dtype=np.float64),
            tokens_committed_S=np.array([report.tokens_committed for report in reports]),
            confidence_S5=np.array([report.confidence for report in reports], dtype=np.float32),
            first_entry_S=np.cumsum([0, *(len(s.positions) for s in scores)]),
            offset_E=np.concatenate([s.positions for s in scores]) % block_size,
            token_E=token_E,
            confidence_E=quantise(np.concatenate([s.confidences for s in scores])),
            eos_E=np.isin(token_E, self._eos_ids),
            committed_E=np.concatenate(committed),
        )


def _bookkeeping(job: Job, model: str, eos_ids: frozenset[int]) -> Run:
    """The request as a worker holds it."""
    request = m.GenerateRequest(
        request_id=job.request_id,
        gateway_id=_ID,
        model=model,
        prompt_ids=job.prompt_ids,
        max_tokens=job.max_tokens,
        block_size=job.block_size,
        cache=job.cache,
        created_at=0.0,
        expires_at=0.0,
        ignore_eos=job.ignore_eos,
    )
    instance = Instance(
        instance_id=_ID,
        node_id=_ID,
        model=model,
        kv_tokens=job.canvas_tokens,
        max_requests=1,
        max_canvas_tokens=job.canvas_tokens,
        vocab_size=0,
        mask_id=0,
        eos_ids=eos_ids,
    )
    assigned = Assigned(assign=m.Assign(epoch=1, attempt=1, request=request, threshold=0.0), wall=0.0)
    return Run(job.request_id, assigned, 0.0, instance, 0.0)


def _stepped(step: RequestStep) -> Stepped:
    """The step as the worker's policy hears of it."""
    assert step.threshold is not None, "only the threshold rule is recorded"
    return Stepped(
        run_id=step.request_id,
        kind=step.kind,
        block_index=step.block_index,
        threshold=step.threshold,
        positions=step.commits.positions,
        token_ids=step.commits.token_ids,
        confidences=step.commits.confidences,
        block_done=step.block_done,
        finish=step.finished or "",
        left=False,
        started=0.0,
        ended=0.0,
    )
