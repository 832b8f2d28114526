"""One request that a worker holds: what of it is done, what of that is stored, and how it is told. Pure.

Times are monotonic seconds, but those that end in `_at` or are named `wall`.
"""

from typing import Literal

import msgspec

from contracts import messages as m
from services.denoiser.worker_events import Assigned, Stepped
from services.opening import NO_OPENING, Opening


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance is, fixed while it lives."""

    instance_id: str
    node_id: str
    model: str
    kv_tokens: int  # size of its K/V pool
    max_requests: int
    max_canvas_tokens: int  # the longest canvas that it could ever run
    vocab_size: int
    mask_id: int
    eos_ids: frozenset[int]
    opening: Opening = NO_OPENING  # of the blocks of requests whose threshold is not the client's
    tp_degree: int = 1
    drain_limit_s: float = 30.0


class Run:
    """A request that is held: what it has so far, and what of it is stored."""

    def __init__(self, run_id: str, event: Assigned, threshold: float, instance: Instance, now: float) -> None:
        assign, resume = event.assign, event.assign.resume
        self.run_id, self.request, self.trace = run_id, assign.request, event.trace
        self.attempt, self.epoch = assign.attempt, assign.epoch
        self.threshold = threshold
        self.instance = instance
        self.wall_offset = event.wall - now
        self.expires = assign.request.expires_at - self.wall_offset
        self.eos_ids = frozenset() if assign.request.ignore_eos else instance.eos_ids
        self.moves = resume.moves + (resume.holder not in ("", instance.instance_id)) if resume else 0
        self.started_at = event.wall if resume is None or resume.started_at is None else resume.started_at
        self.token_ids = list(resume.token_ids) if resume else []  # of whole blocks
        self.confidences = _padded(resume.confidences, len(self.token_ids)) if resume else []
        self.blocks_done = resume.blocks_done if resume else 0
        self.blocks = list(resume.blocks) if resume else []  # what they cost, as far as it is known
        self.steps_before = sum(b.recompute_steps + b.cache_steps for b in self.blocks)  # the current block
        self._start_block()
        # storing
        self.seq = assign.from_seq  # of the record that the next write continues from
        self.blocks_stored = len(self.blocks)
        self.unstored: m.ProgressRecord | None = None  # the newest; None: the newest is stored
        self.writing = False
        # where it is
        self.in_engine = True
        self.letting_go = False
        self.over = False  # the newest record is the last one of this run
        self.finished = False  # and of the request

    def _start_block(self) -> None:
        self.block: dict[int, tuple[int, float]] = {}  # position -> token and confidence
        self.recompute_steps = self.cache_steps = 0
        self.threshold_sum = 0.0
        self.block_started: float | None = None

    @property
    def steps_in_block(self) -> int:
        return self.recompute_steps + self.cache_steps

    def note(self, step: Stepped) -> None:
        """Takes in what a step committed."""
        if self.block_started is None:
            self.block_started = step.started
        if step.kind == "recompute":
            self.recompute_steps += 1
        else:
            self.cache_steps += 1
        self.threshold_sum += step.threshold
        for position, token_id, confidence in zip(step.positions, step.token_ids, step.confidences, strict=True):
            assert position not in self.block, "a committed position is final"
            self.block[position] = (token_id, _probability(confidence))
        if step.block_done:
            self._end_block(step)

    def _end_block(self, step: Stepped) -> None:
        committed = sorted(self.block.items())
        if step.finish == "eos":  # what was committed behind the first EOS is no part of the answer
            first = next(i for i, (_, (token_id, _)) in enumerate(committed) if token_id in self.eos_ids)
            committed = committed[:first]
        start = len(self.token_ids)
        assert [position for position, _ in committed] == list(range(start, start + len(committed))), "a gap"
        self.token_ids += [token_id for _, (token_id, _) in committed]
        self.confidences += [confidence for _, (_, confidence) in committed]
        assert self.block_started is not None
        self.blocks.append(
            m.BlockCost(
                instance_id=self.instance.instance_id,
                tp_degree=self.instance.tp_degree,
                recompute_steps=self.recompute_steps,
                cache_steps=self.cache_steps,
                mean_threshold=_probability(self.threshold_sum / self.steps_in_block),
                seconds=max(0.0, step.ended - self.block_started),
            )
        )
        self.blocks_done += 1
        self.steps_before += self.steps_in_block
        self._start_block()

    def record(
        self,
        state: m.State,
        now: float,
        *,
        finish: Literal["", "eos", "length"] = "",
        reason: m.Reason = "",
    ) -> m.ProgressRecord:
        """Where it stands, to be written down."""
        request = self.request
        return m.ProgressRecord(
            request_id=request.request_id,
            gateway_id=request.gateway_id,
            attempt=self.attempt,
            state=state,
            holder=self.instance.instance_id,
            epoch=self.epoch,
            reason=reason,
            blocks_done=self.blocks_done,
            token_ids=list(self.token_ids),
            confidences=list(self.confidences),
            blocks=list(self.blocks),
            finish=finish,
            moves=self.moves,
            prompt_tokens=len(request.prompt_ids),
            created_at=request.created_at,
            deadline_at=request.deadline_at,
            started_at=self.started_at,
            written_at=now + self.wall_offset,
            fingerprint=request.fingerprint,
        )

    def report(self) -> m.RequestReport:
        """How far it is, for those who decide."""
        confidences = self.confidences + [confidence for _, confidence in self.block.values()]
        start = self.blocks_done * self.request.block_size
        end = min(start + self.request.block_size, self.request.max_tokens)
        first_eos = min((p for p, (token_id, _) in self.block.items() if token_id in self.eos_ids), default=None)
        end = end if first_eos is None else first_eos
        return m.RequestReport(
            request_id=self.request.request_id,
            attempt=self.attempt,
            block_index=self.blocks_done,
            num_blocks=self.request.num_blocks,
            steps=self.steps_before + self.steps_in_block,
            steps_in_block=self.steps_in_block,
            tokens_committed=len(confidences),
            tokens_committed_in_block=len(self.block),
            threshold=self.threshold,
            confidence=five_numbers(confidences),
            next_recompute=self.request.cache == "none" or self.steps_in_block == 0,
            finished=self.finished,
            prompt_tokens=len(self.request.prompt_ids),
            tokens_left_in_block=0 if self.finished else end - start - sum(p < end for p in self.block),
            ends_in_block=first_eos is not None,
        )

    def canvas_step(self, step: Stepped) -> m.CanvasStep:
        """A step that is not noted yet, for who looks on."""
        return m.CanvasStep(
            request_id=self.request.request_id,
            attempt=self.attempt,
            instance_id=self.instance.instance_id,
            tp_degree=self.instance.tp_degree,
            kind=step.kind,
            block_index=step.block_index,
            step=self.steps_before + self.steps_in_block + 1,
            threshold=step.threshold,
            positions=step.positions,
            token_ids=step.token_ids,
            confidences=[_probability(confidence) for confidence in step.confidences],
        )

    def held(self) -> m.Held:
        """What a status says about it."""
        return m.Held(
            request_id=self.request.request_id,
            attempt=self.attempt,
            canvas_tokens=self.request.canvas_tokens,
            block_size=self.request.block_size,
            cache=self.request.cache,
            blocks_ahead=self.request.blocks_ahead,
            blocks_done=self.blocks_done,
        )


def _probability(value: float) -> float:
    """Within 0 to 1; what is no number (a broken model's) becomes 0, or no reader could decode the record."""
    return min(1.0, max(0.0, value)) if value == value else 0.0


def _padded(confidences: list[float], length: int) -> list[float]:
    return (confidences + [0.0] * length)[:length]


def five_numbers(values: list[float]) -> tuple[float, float, float, float, float]:
    """Minimum, quartiles and maximum, interpolated linearly; zeros for no values."""
    if not values:
        return (0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)

    def at(quarters: int) -> float:
        whole, rest = divmod(quarters * (len(ordered) - 1), 4)
        below = ordered[whole]
        return below + (ordered[whole + 1] - below) * rest / 4 if rest else below

    return (at(0), at(1), at(2), at(3), at(4))
