"""Passes of few rows, as cache steps are, padded to a few fixed shapes and recorded as CUDA graphs.

Of such a pass a GPU's kernels take less time than the host needs to start them; a graph starts them all at once. It is
bound to its tensors, so everything that differs between passes lies in buffers, which are filled before each replay.
1. A bucket is a number of rows and a number of requests; a pass takes the smallest one that holds it. Passes that none
   holds run as they are.
2. Rows beyond the pass's own are padding. Their keys and values go to the pool's spare slot, and that slot is all that
   they attend to: one more sequence, after those of the requests.
3. The graph gives the hidden states of all rows; the wanted ones are picked from them.
4. All buckets are recorded at the start, the largest first: they share their memory.
Where the rows lie is filled in when the requests or their windows change, the tokens at each pass.

Shapes: T rows of a pass, M wanted ones, d width; a bucket's tensors have the bucket's rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from services.denoiser.attention import VarlenAttention
from services.denoiser.kernels import Varlen
from services.denoiser.kv_pool import KVPool
from services.denoiser.models.base import Batch, Model

Forward: TypeAlias = Callable[[], Tensor]


class Bucket(NamedTuple):
    """The most that a pass of this shape holds."""

    num_rows: int
    num_requests: int


BUCKETS = tuple(Bucket(rows, rows // 8) for rows in (32, 64, 96, 128, 192, 256, 384, 512))


def forward_of(model: Model, pool: KVPool) -> Callable[[Batch], Tensor]:
    """`model.hidden`, by graphs where they can be had: on a GPU, with a varlen kernel, on one rank alone."""
    if model.device.type == "cuda" and model.varlen is not None and model.ranks.size == 1:
        return PaddedPasses(model, pool, model.varlen, BUCKETS, GraphRecorder().record).hidden
    return model.hidden


def smallest_bucket(buckets: Sequence[Bucket], num_rows: int, num_requests: int) -> Bucket | None:
    """The first that holds so many; `buckets` ascend."""
    fitting = (bucket for bucket in buckets if num_rows <= bucket.num_rows and num_requests <= bucket.num_requests)
    return next(fitting, None)


class PaddedPasses:
    """`Model.hidden` in buckets. `record` makes a forward pass over fixed buffers repeatable."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        varlen: Varlen,
        buckets: Sequence[Bucket],
        record: Callable[[Forward], Forward],
    ) -> None:
        self._model, self._pool, self._buckets = model, pool, sorted(buckets)
        rows, sequences = self._buckets[-1].num_rows, _num_bounds(self._buckets[-1].num_requests)
        device = model.device
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(rows, device=device)
        self._rotary = model.rotary([(0, 1)] * rows).clone()
        self._slots = torch.full((rows,), pool.spare_slot, device=device)
        self._cu_rows = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._cu_keys = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._filled: VarlenAttention | None = None  # whose rows' places the buffers hold
        self._forwards: dict[Bucket, Forward] = {}
        for bucket in reversed(self._buckets):
            self._fill_bounds(bucket, self._cu_rows[:1], self._cu_keys[:1], num_rows=0)  # all rows are padding
            self._forwards[bucket] = record(self._forward(bucket, varlen))

    def hidden(self, batch: Batch) -> Tensor:
        """Final hidden states [M, d] of the wanted rows; writes the K/V of all T rows into the pool."""
        bucket = smallest_bucket(self._buckets, len(batch.token_ids_T), len(batch.row_counts))
        if bucket is None:
            return self._model.hidden(batch)
        if batch.attention is not self._filled:
            self._fill_places(bucket, batch)
        self._token_ids[: len(batch.token_ids_T)].copy_(batch.token_ids_T)
        return self._forwards[bucket]()[batch.wanted_M]

    def _forward(self, bucket: Bucket, varlen: Varlen) -> Forward:
        rows, bounds = bucket.num_rows, _num_bounds(bucket.num_requests)
        counts = [rows]
        batch = Batch(
            token_ids_T=self._token_ids[:rows],
            rotary_T=self._rotary[:rows],
            row_counts=counts,
            wanted_M=self._all_rows[:rows],
            wanted_counts=counts,
            attention=VarlenAttention(
                self._pool,
                varlen,
                slots_T=self._slots[:rows],
                row_counts=counts,
                cu_rows=self._cu_rows[:bounds],
                cu_keys=self._cu_keys[:bounds],
                max_rows=rows,
                max_keys=self._model.shape.max_positions,
            ),
        )
        return lambda: self._model.hidden(batch)

    def _fill_places(self, bucket: Bucket, batch: Batch) -> None:
        attention, num_rows = batch.attention, len(batch.token_ids_T)
        assert isinstance(attention, VarlenAttention)
        self._slots[:num_rows].copy_(attention.slots_T)
        self._slots[num_rows:].fill_(self._pool.spare_slot)
        self._rotary[:num_rows].copy_(batch.rotary_T)  # padding keeps what it has: any position will do
        self._fill_bounds(bucket, attention.cu_rows, attention.cu_keys, num_rows=num_rows)
        self._filled = attention

    def _fill_bounds(self, bucket: Bucket, cu_rows: Tensor, cu_keys: Tensor, *, num_rows: int) -> None:
        """The pass's own sequences, a gap up to the spare slot, the padding, and then empty ones."""
        spare, end = self._pool.spare_slot, len(cu_rows)
        last = _num_bounds(bucket.num_requests)
        for buffer, bounds, gap_end, padding_end in (
            (self._cu_rows, cu_rows, num_rows, bucket.num_rows),
            (self._cu_keys, cu_keys, spare, spare + 1),
        ):
            buffer[:end].copy_(bounds)
            buffer[end].fill_(gap_end)
            buffer[end + 1 : last].fill_(padding_end)


def _num_bounds(num_requests: int) -> int:
    """Two sequences for each request, two for padding, and the end of the last."""
    return 2 * num_requests + 2 + 1


class GraphRecorder:
    """Records forward passes as CUDA graphs, which share the memory of their activations."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, forward: Forward) -> Forward:
        """What replays it: its result is overwritten by the next replay."""
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            forward()  # loads and tunes kernels, which is no part of a graph
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            hidden = forward()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay
