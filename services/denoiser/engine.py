"""The denoising engine: requests in, one packed forward pass a step, committed tokens out. No I/O.

How a request is decoded:
1. Its canvas is the prompt, then the output area: `max_tokens` masks rounded up to whole blocks. Blocks are done left
   to right, those in `committed_ids` are taken over. With `blocks_ahead` the model sees the canvas only so many blocks
   beyond the current one, without it all of it. The first step of a block is a recompute step: all rows that are seen.
   After it follow cache steps: the block's rows (dual), or the block's and all seen after it (prefix); with cache
   "none" every step is a recompute step.
2. Eligible are the masked positions of the current block below `max_tokens` and, unless `ignore_eos`, before the first
   EOS in the block. Only their logits are computed, and the sampler chooses among them.
3. Where a model is shifted (Dream), row p - 1 predicts position p, and row 0 position 0 too. The rows of a cache step
   start with the block, so none of them predicts the block's first position: the recompute step before them commits
   that one position, however sure it is, and no other. With cache "none" all rows are there and nothing is special.
4. A block is done when nothing in it is eligible, however many steps that takes. The request is finished when that
   block holds EOS ("eos") or is the last one ("length"). A finished request keeps its slots until it is removed.
One step (`Engine.step`): choose the riders, pack their rows, forward, score, choose, commit.

In float32 a request's tokens do not depend on which others ride along, nor on how many ranks share the model, as long
as no decision is closer than 1e-4. Several ranks run an engine each, which must be told the same in the same order.

Shapes: T rows of a pass, M rows that predict an eligible position, E eligible positions of one request, V token ids of
this rank, d width.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from services.costs import Resident
from services.denoiser.attention import Attention, Place, attention_over
from services.denoiser.batching import BatchLimits, StepKind, choose_riders, note_waits
from services.denoiser.cuda_graphs import forward_of
from services.denoiser.kv_pool import KVPool
from services.denoiser.models.base import Batch, Model, ModelShape
from services.denoiser.sampler import (
    BoolArray,
    Budget,
    ChoiceRule,
    EntropySchedule,
    Factor,
    FixedSchedule,
    FloatArray,
    IntArray,
    Noise,
    Threshold,
    budget,
    choose_by_budget,
    choose_by_factor,
    choose_by_quota,
    choose_by_threshold,
    negative_entropy,
    noise_keys,
    quota,
    score,
    share_of_time,
)

__all__ = [
    "Budget",
    "CacheMode",
    "ChoiceRule",
    "Commits",
    "Engine",
    "EngineConfig",
    "EntropySchedule",
    "Factor",
    "FixedSchedule",
    "Job",
    "Progress",
    "Refusal",
    "RequestStep",
    "Scores",
    "StepResult",
    "Threshold",
]

CacheMode: TypeAlias = Literal["none", "prefix", "dual"]
Finish: TypeAlias = Literal["eos", "length"]
RefusalReason: TypeAlias = Literal["bad_request", "too_long", "kv_full", "batch_full", "duplicate"]


_COPIED_BYTES = 8 << 20  # of a CPU's logits in float32 at once, where that is a copy: more is no faster


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of an engine. Device, dtype, mask and EOS ids are the model's."""

    kv_budget_tokens: int  # slots of the K/V pool: the canvases of all held requests together
    max_requests: int = 64
    max_batch_tokens: int = 8192  # rows of one pass; a longer canvas rides alone
    max_recompute_tokens: int = 2048  # of those, rows of recompute steps
    max_logits_bytes: int = 512 << 20  # float32 logits of as many rows as this holds are scored at once

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} = {value} must be at least 1")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request to denoise."""

    request_id: str
    prompt_ids: list[int]
    max_tokens: int  # exact number of output tokens wanted
    block_size: int = 32
    cache: CacheMode = "dual"
    blocks_ahead: int | None = None  # that the model sees beyond the current one; None: all
    choice: ChoiceRule = Threshold(0.9)
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    committed_ids: list[int] = []  # output tokens of blocks already done elsewhere, whole blocks: the next block starts
    committed_confidences: list[float] = []  # theirs, or empty where unknown (then 0.0)

    @property
    def num_blocks(self) -> int:
        """Blocks of the output area."""
        return -(-self.max_tokens // self.block_size)

    @property
    def canvas_tokens(self) -> int:
        """Length of prompt and output area, in tokens: what it takes of the K/V pool."""
        return len(self.prompt_ids) + self.num_blocks * self.block_size

    def seen_tokens(self, block_index: int) -> int:
        """Of those, what the model sees while it does that block."""
        left = (self.num_blocks - block_index) * self.block_size
        return Resident(self.canvas_tokens, self.block_size, self.cache, left, self.blocks_ahead).seen_tokens


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job cannot be taken: "kv_full" and "batch_full" pass, the others do not."""

    reason: RefusalReason
    text: str


class Commits(msgspec.Struct, frozen=True):
    """Tokens that became final, by ascending position: parallel lists."""

    positions: list[int]  # in the output area, from 0
    token_ids: list[int]
    confidences: list[float]


class Scores(msgspec.Struct, frozen=True):
    """What a step chose from, by ascending position: parallel arrays."""

    positions: IntArray  # in the output area, from 0
    token_ids: IntArray  # the model's choice for each
    confidences: FloatArray


class RequestStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did to one request."""

    request_id: str
    kind: StepKind
    block_index: int
    step_in_block: int  # from 0
    num_rows: int  # that it had in the pass
    num_keys: int  # that each row attended to: the length of its canvas, as far as it is seen
    threshold: float | None  # that was applied: in a block's opening perhaps more than was set; None for other rules
    commits: Commits
    block_done: bool
    finished: Finish | None
    scores: Scores | None = None  # of an engine that keeps them


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did, and how long its parts took."""

    requests: list[RequestStep]  # in the order of their slots; empty when nothing runs
    tokens_in_pass: int
    forward_s: float  # the model's layers
    commit_s: float  # logits of eligible rows, scores, read-back, choice
    total_s: float  # of the step; what forward and commit leave is its overhead


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a request is."""

    block_index: int  # the current block; `num_blocks` when all are done
    num_blocks: int
    step_in_block: int  # the next step's number
    tokens_committed: int  # in all blocks, in the current one too
    tokens_committed_in_block: int
    next_kind: StepKind
    threshold: float | None
    finished: Finish | None


class Engine:
    """Requests that share one model. Not thread-safe: one caller steps, admits and removes in turn."""

    def __init__(self, model: Model, *, config: EngineConfig, keep_scores: bool = False) -> None:
        """With `keep_scores` steps also tell what they did not commit: for recorders."""
        self.model, self.config, self._keep_scores = model, config, keep_scores
        shape = model.shape
        self.pool = KVPool(
            capacity=config.kv_budget_tokens,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self.forward = forward_of(model, self.pool)  # the model's `hidden`
        self.on_forward: Callable[[], object] = lambda: None  # called as each forward pass begins, and within its time
        self._running: dict[str, _Running] = {}  # by arrival
        self._arrivals = 0
        self._limits = BatchLimits(
            max_batch_tokens=config.max_batch_tokens, max_recompute_tokens=config.max_recompute_tokens
        )
        self._layout: _Layout | None = None
        float_row_bytes = 4 * shape.vocab_size // model.ranks.size
        self._rows_of_logits = max(1, config.max_logits_bytes // float_row_bytes)
        copies = model.device.type == "cpu" and model.dtype != torch.float32
        self._rows_per_score = max(1, _COPIED_BYTES // float_row_bytes) if copies else self._rows_of_logits
        self._eos_ids = frozenset(shape.eos_ids)

    # --- what is held ---

    @property
    def running(self) -> list[str]:
        """Ids of the held requests, by arrival; finished ones stay until removed."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        """Number of held requests."""
        return len(self._running)

    @property
    def free_kv_tokens(self) -> int:
        """A job fits if its `canvas_tokens` are not more than this."""
        return self.pool.slots.free_tokens

    def refusal(self, job: Job) -> Refusal | None:
        """Why the job cannot be taken now, or None: `admit` would succeed."""
        shape = self.model.shape
        if text := _mistake(job, vocab_size=shape.vocab_size, mask_id=shape.mask_id, eos_ids=self._eos_ids):
            return Refusal(reason="bad_request", text=text)
        if job.request_id in self._running:
            return Refusal(reason="duplicate", text=f"request {job.request_id} is already held")
        if job.canvas_tokens > (longest := min(shape.max_positions, self.config.kv_budget_tokens)):
            return Refusal(
                reason="too_long",
                text=f"{len(job.prompt_ids)} prompt tokens and {job.canvas_tokens - len(job.prompt_ids)} output tokens "
                f"make a canvas of {job.canvas_tokens}; at most {longest} fit",
            )
        if self.num_running >= self.config.max_requests:
            return Refusal(reason="batch_full", text=f"max_requests = {self.config.max_requests} are held")
        if job.canvas_tokens > self.free_kv_tokens:
            return Refusal(
                reason="kv_full", text=f"{job.canvas_tokens} tokens needed, {self.free_kv_tokens} of the K/V pool free"
            )
        return None

    def admit(self, job: Job) -> None:
        """Take a job; it rides from the next step. Raises ValueError if `refusal` has a reason."""
        if refusal := self.refusal(job):
            raise ValueError(f"{refusal.reason}: {refusal.text}")
        self.pool.allocate(job.request_id, job.canvas_tokens)
        self._running[job.request_id] = _Running(job, self._arrivals, self.model.shape)
        self._arrivals += 1

    def set_threshold(self, request_id: str, value: float) -> None:
        """Turn a request's threshold, from its next step on; a request with another choice rule keeps its rule.

        Raises KeyError if it is not held, ValueError if the value is outside 0 to 1.
        """
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"threshold = {value} is not between 0 and 1")
        request = self._running[request_id]
        if isinstance(request.rule, Threshold):
            request.rule = msgspec.structs.replace(request.rule, value=value)

    def remove(self, request_id: str) -> None:
        """Forget a request, done or not, and free its slots. Raises KeyError if it is not held."""
        del self._running[request_id]
        self.pool.free(request_id)

    def output_ids(self, request_id: str) -> list[int]:
        """Committed output tokens of whole blocks, in order, those taken over included.

        When finished: the answer, cut before its first EOS or at `max_tokens`. Raises KeyError if it is not held.
        """
        request = self._running[request_id]
        start = len(request.job.prompt_ids)
        ids: list[int] = request.ids[start : start + request.final_length].tolist()
        return ids

    def output_confidences(self, request_id: str) -> list[float]:
        """The confidence at commit of each token of `output_ids`."""
        request = self._running[request_id]
        confidences: list[float] = request.confidences[: request.final_length].tolist()
        return confidences

    def progress(self, request_id: str) -> Progress:
        """How far a request is. Raises KeyError if it is not held."""
        return self._running[request_id].progress()

    # --- the step ---

    @torch.inference_mode()  # around all of it: packing makes many small tensors, which cost less so
    def step(self) -> StepResult:
        """One pass over the requests that ride in it. Without unfinished requests nothing happens."""
        started = time.perf_counter()
        riders = self._choose_riders()
        if not riders:
            return StepResult(requests=[], tokens_in_pass=0, forward_s=0.0, commit_s=0.0, total_s=0.0)
        batch = self._pack(riders)
        timer = _ForwardTimer(self.model.device)
        self.on_forward()
        hidden_Md = self.forward(batch)
        timer.stop()
        token_M, confidence_M = self._score(hidden_Md, self._noise(riders), _by_entropy(riders))
        steps = self._commit(riders, token_M, confidence_M)
        committed = time.perf_counter()
        forward_s = timer.seconds()
        return StepResult(
            requests=steps,
            tokens_in_pass=len(batch.token_ids_T),
            forward_s=forward_s,
            commit_s=max(0.0, committed - timer.started - forward_s),
            total_s=time.perf_counter() - started,
        )

    def _choose_riders(self) -> "list[_Running]":
        waiting = [request for request in self._running.values() if request.finished is None]
        riders = choose_riders(waiting, self._limits)
        note_waits(waiting, riders)
        return sorted(riders, key=self._first_slot)

    def _first_slot(self, request: "_Running") -> int:
        """Rows are packed in the order of their slots, as attention in one call wants keys."""
        return self.pool.slots.span(request.job.request_id).start

    def _pack(self, riders: "Sequence[_Running]") -> Batch:
        layout = self._layout_of(riders)
        wanted = [r.wanted_rows(start) for r, start in zip(riders, layout.row_starts, strict=True)]
        wanted_counts = [len(rows) for rows in wanted]
        # One copy to the device for all that changes from step to step.
        packed = self._to_device(np.concatenate([r.ids[slice(*r.window)] for r in riders] + wanted))
        token_ids_T, wanted_M = packed.split_with_sizes([layout.num_rows, sum(wanted_counts)])
        return Batch(
            token_ids_T=token_ids_T,
            rotary_T=layout.rotary_T,
            row_counts=layout.row_counts,
            wanted_M=wanted_M,
            wanted_counts=wanted_counts,
            attention=layout.attention,
        )

    def _layout_of(self, riders: "Sequence[_Running]") -> "_Layout":
        """Where the rows lie; kept while the same requests ride with the same windows, as in a row of cache steps."""
        key = (self.pool.generation, *((r.arrival_no, *r.window) for r in riders))
        if self._layout is None or self._layout.key != key:
            windows = [r.window for r in riders]
            self._layout = _Layout(
                key=key,
                row_counts=[end - start for start, end in windows],
                rotary_T=self.model.rotary(windows),
                attention=attention_over(self.pool, [r.place for r in riders], self.model.varlen),
            )
        return self._layout

    def _noise(self, riders: "Sequence[_Running]") -> Noise | None:
        hot = [r.job.temperature > 0.0 for r in riders]
        if not any(hot):
            return None
        counts = [len(r.asked) for r in riders]
        hot_M = np.repeat(hot, counts)
        keys = noise_keys(
            np.repeat(np.array([r.seed for r in riders], dtype=np.int64), counts)[hot_M],
            np.concatenate([r.asked for r in riders])[hot_M],
            np.repeat(np.array([r.step_in_block for r in riders]), counts)[hot_M],
        )
        temperature = np.repeat(np.array([r.job.temperature for r in riders], dtype=np.float64), counts)[hot_M]
        return Noise(rows=np.flatnonzero(hot_M), keys=keys, temperature=temperature)

    def _score(
        self, hidden_Md: Tensor, noise: Noise | None, by_entropy_M: BoolArray | None
    ) -> tuple[IntArray, FloatArray]:
        """Token and confidence of each wanted row, on the host: the one read-back of a step."""
        mask_id, first_id, ranks = self.model.shape.mask_id, self.model.first_token_id, self.model.ranks
        parts = []
        for first, logits_MV in self._logits(hidden_Md):
            last = first + len(logits_MV)
            entropy_M = None
            if by_entropy_M is not None:
                entropy_M = negative_entropy(logits_MV.clone(), mask_id, first_id=first_id, ranks=ranks)
                by_entropy = self._to_device(by_entropy_M[first:last])
            token_M, confidence_M = score(
                logits_MV, mask_id, noise and noise.between(first, last), first_id=first_id, ranks=ranks
            )
            if entropy_M is not None:
                confidence_M = entropy_M.where(by_entropy, confidence_M)
            parts.append(torch.stack([token_M.double(), confidence_M.double()]))  # an id is exact in float64
        token_M, confidence_M = torch.cat(parts, dim=1).cpu().numpy()
        return token_M.astype(np.int64), confidence_M

    def _logits(self, hidden_Md: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Logits [.., V] of some rows at a time, and the number of the first of them."""
        for first in range(0, len(hidden_Md), self._rows_of_logits):
            logits_MV = self.model.logits(hidden_Md[first : first + self._rows_of_logits])
            for start in range(0, len(logits_MV), self._rows_per_score):
                yield first + start, logits_MV[start : start + self._rows_per_score]

    def _commit(self, riders: "Sequence[_Running]", token_M: IntArray, confidence_M: FloatArray) -> list[RequestStep]:
        steps = []
        first = 0
        for rider in riders:
            last = first + len(rider.asked)
            steps.append(rider.commit(token_M[first:last], confidence_M[first:last], keep_scores=self._keep_scores))
            first = last
        return steps

    def _to_device(self, array: IntArray | BoolArray) -> Tensor:
        return torch.from_numpy(array).to(self.model.device, non_blocking=True)


class _Running:
    """A held request: its canvas, and where it stands. Positions are absolute, from the prompt's first token."""

    def __init__(self, job: Job, arrival_no: int, shape: ModelShape) -> None:
        self.job, self.arrival_no, self.shifted = job, arrival_no, shape.shifted
        self.rule = job.choice
        self.seed = (job.seed + (1 << 63)) % (1 << 64) - (1 << 63)  # any integer, folded into 64 bits
        self.eos_ids = frozenset(() if job.ignore_eos else shape.eos_ids)
        self.prompt_tokens = len(job.prompt_ids)
        self.ids: IntArray = np.full(job.canvas_tokens, shape.mask_id, dtype=np.int64)
        self.ids[: self.prompt_tokens] = job.prompt_ids
        self.ids[self.prompt_tokens :][: len(job.committed_ids)] = job.committed_ids
        self.confidences: FloatArray = np.zeros(job.canvas_tokens - self.prompt_tokens)
        self.confidences[: len(job.committed_confidences)] = job.committed_confidences
        self.passes_waited = 0
        self.finished: Finish | None = None
        self.final_length = len(job.committed_ids)  # of the output: whole blocks, or the cut answer
        self._start_block(len(job.committed_ids) // job.block_size)

    def _start_block(self, index: int) -> None:
        job = self.job
        self.block_index, self.step_in_block = index, 0
        self.block_start = self.prompt_tokens + index * job.block_size
        end = min(self.block_start + job.block_size, self.prompt_tokens + job.max_tokens)
        self.eligible: IntArray = np.arange(self.block_start, end)
        self.masks_at_start = len(self.eligible)
        self.num_committed = 0  # in this block
        self.first_eos: int | None = None  # position of the first EOS in this block
        self.seen_tokens = job.seen_tokens(index)
        self.window = (0, self.seen_tokens)
        self.kind: StepKind = "recompute"
        self.settles_first = self.shifted and job.cache != "none"  # this step commits the block's first position alone

    @property
    def place(self) -> Place:
        """Of its next step."""
        return Place(self.job.request_id, self.window, self.seen_tokens)

    @property
    def asked(self) -> IntArray:
        """Positions among which the next step chooses."""
        return self.eligible[:1] if self.settles_first else self.eligible

    def wanted_rows(self, first_row: int) -> IntArray:
        """Rows of the pass that predict them, where the window begins at `first_row`."""
        rows = np.maximum(self.asked - 1, 0) if self.shifted else self.asked
        return rows + (first_row - self.window[0])

    @property
    def by_entropy(self) -> bool:
        """Whether the next step's confidences are negative entropies."""
        return isinstance(self.rule, EntropySchedule) and not self.settles_first

    @property
    def num_rows(self) -> int:
        """Of its next step."""
        start, end = self.window
        return end - start

    def commit(self, token_E: IntArray, confidence_E: FloatArray, *, keep_scores: bool) -> RequestStep:
        """Choose among the eligible positions, given their scores, and move on to the next step."""
        threshold = self._applied_threshold
        chosen = self._choose(confidence_E, threshold)
        scores = Scores(self.asked - self.prompt_tokens, token_E, confidence_E) if keep_scores else None
        positions = self.asked[chosen]
        self.ids[positions] = token_E[chosen]
        self.confidences[positions - self.prompt_tokens] = confidence_E[chosen]
        commits = Commits(
            (positions - self.prompt_tokens).tolist(), token_E[chosen].tolist(), confidence_E[chosen].tolist()
        )
        block_index, step_in_block, kind, (start, end) = self.block_index, self.step_in_block, self.kind, self.window
        num_keys = self.seen_tokens
        self.eligible = self.eligible[1:] if self.settles_first else self.eligible[~chosen]
        self.num_committed += len(positions)
        self._look_for_eos(commits)
        block_done = len(self.eligible) == 0
        if block_done:
            self._end_block()
        else:
            self._next_step()
        return RequestStep(
            request_id=self.job.request_id,
            kind=kind,
            block_index=block_index,
            step_in_block=step_in_block,
            num_rows=end - start,
            num_keys=num_keys,
            threshold=threshold,
            commits=commits,
            block_done=block_done,
            finished=self.finished,
            scores=scores,
        )

    def _choose(self, confidence_E: FloatArray, threshold: float | None) -> BoolArray:
        if self.settles_first:
            return np.ones(1, dtype=np.bool_)
        match self.rule:
            case Threshold():
                assert threshold is not None
                return choose_by_threshold(confidence_E, threshold)
            case Factor(value):
                return choose_by_factor(confidence_E, value)
            case FixedSchedule(steps):
                count = quota(self.masks_at_start, steps // self.job.num_blocks, self.step_in_block)
                return choose_by_quota(confidence_E, count)
            case Budget(value, steps):
                due = budget(self.masks_at_start, steps // self.job.num_blocks, self.step_in_block)
                committed = self.masks_at_start - len(self.eligible)
                return choose_by_budget(confidence_E, value, max(1, due - committed))
            case EntropySchedule(steps):
                count = share_of_time(len(self.eligible), steps // self.job.num_blocks, self.step_in_block)
                return choose_by_quota(confidence_E, count)

    def _look_for_eos(self, commits: Commits) -> None:
        if self.eos_ids.isdisjoint(commits.token_ids):
            return
        first = next(i for i, token_id in enumerate(commits.token_ids) if token_id in self.eos_ids)
        # Before any EOS that was there already, since what follows that was not eligible.
        self.first_eos = self.prompt_tokens + commits.positions[first]
        self.eligible = self.eligible[self.eligible < self.first_eos]

    def _next_step(self) -> None:
        job = self.job
        self.step_in_block += 1
        self.settles_first = False
        if job.cache != "none":
            self.kind = "cache"
            end = self.block_start + job.block_size if job.cache == "dual" else self.seen_tokens
            self.window = (self.block_start, end)

    def _end_block(self) -> None:
        done = self.block_index + 1
        if self.first_eos is not None:
            self.finished = "eos"
            self.final_length = self.first_eos - self.prompt_tokens
        elif done == self.job.num_blocks:
            self.finished = "length"
            self.final_length = self.job.max_tokens
        else:
            self.final_length = done * self.job.block_size
            self._start_block(done)

    @property
    def _applied_threshold(self) -> float | None:
        if not isinstance(self.rule, Threshold):
            return None
        return self.rule.opening.applied(self.rule.value, committed=self.num_committed, left=len(self.eligible))

    def progress(self) -> Progress:
        """How far it is."""
        in_block = 0 if self.finished else self.masks_at_start - len(self.eligible)
        return Progress(
            block_index=self.job.num_blocks if self.finished else self.block_index,
            num_blocks=self.job.num_blocks,
            step_in_block=self.step_in_block,
            tokens_committed=self.final_length + in_block,
            tokens_committed_in_block=in_block,
            next_kind=self.kind,
            threshold=self.rule.value if isinstance(self.rule, Threshold) else None,
            finished=self.finished,
        )


def _by_entropy(riders: Sequence[_Running]) -> BoolArray | None:
    """Of which wanted rows the confidence is a negative entropy; None where of none."""
    if not any(rider.by_entropy for rider in riders):
        return None
    return np.repeat([rider.by_entropy for rider in riders], [len(rider.asked) for rider in riders])


class _Layout:
    """Where the rows of a pass lie: what does not change while requests stay in their blocks."""

    def __init__(
        self,
        *,
        key: tuple[object, ...],
        row_counts: list[int],
        rotary_T: Tensor,
        attention: Attention,
    ) -> None:
        self.key = key
        self.row_counts = row_counts
        self.num_rows = sum(row_counts)
        self.row_starts = list(itertools.accumulate(row_counts[:-1], initial=0))
        self.rotary_T, self.attention = rotary_T, attention


class _ForwardTimer:
    """Time of the forward pass: on a GPU by events, read once the step's results are, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._events = _two_events() if device.type == "cuda" else None
        if self._events:
            self._events[0].record()
        self.started = self._stopped = time.perf_counter()

    def stop(self) -> None:
        """The forward pass has been issued."""
        self._stopped = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """How long it ran; call after the results were read back."""
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return self._stopped - self.started


def _two_events() -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]


def _mistake(job: Job, *, vocab_size: int, mask_id: int, eos_ids: frozenset[int]) -> str | None:
    """What is wrong with a job whatever is running."""
    if job.max_tokens < 1 or job.block_size < 1:
        return f"max_tokens = {job.max_tokens} and block_size = {job.block_size} must be at least 1"
    if not 0.0 <= job.temperature < float("inf"):
        return f"temperature = {job.temperature} is not a finite number from 0 up"
    if job.cache not in ("none", "prefix", "dual"):
        return f"cache = {job.cache!r} is not one of none, prefix, dual"
    if job.blocks_ahead is not None and job.blocks_ahead < 0:
        return f"blocks_ahead = {job.blocks_ahead} must not be negative"
    return (
        _rule_mistake(job)
        or _ids_mistake("prompt_ids", job.prompt_ids, vocab_size, mask_id)
        or _ids_mistake("committed_ids", job.committed_ids, vocab_size, mask_id)
        or _committed_mistake(job, eos_ids)
    )


def _rule_mistake(job: Job) -> str | None:
    match job.choice:
        case Threshold(value) | Budget(value) if not 0.0 <= value <= 1.0:
            return f"threshold = {value} is not between 0 and 1"
        case Factor(value) if not 0.0 <= value < float("inf"):
            return f"factor = {value} is not a finite number from 0 up"
        case FixedSchedule(steps) | EntropySchedule(steps) | Budget(_, steps) if steps < 1 or steps % job.num_blocks:
            return f"steps = {steps} is not a multiple of the {job.num_blocks} blocks"
    return None


def _ids_mistake(name: str, ids: list[int], vocab_size: int, mask_id: int) -> str | None:
    if not ids:
        return None
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"{name} holds a token id outside 0 to {vocab_size - 1}"
    if mask_id in ids:
        return f"{name} holds the mask token {mask_id}"
    return None


def _committed_mistake(job: Job, eos_ids: frozenset[int]) -> str | None:
    if len(job.committed_ids) % job.block_size or len(job.committed_ids) >= job.max_tokens:
        return (
            f"{len(job.committed_ids)} committed_ids are not whole blocks of {job.block_size} "
            f"that leave some of max_tokens = {job.max_tokens} to do"
        )
    if job.committed_confidences and len(job.committed_confidences) != len(job.committed_ids):
        return f"{len(job.committed_confidences)} committed_confidences for {len(job.committed_ids)} committed_ids"
    if not job.ignore_eos and not eos_ids.isdisjoint(job.committed_ids):
        return "committed_ids hold an EOS token: the request is finished"
    return None
