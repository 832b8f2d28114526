"""Attention of a packed pass: the one place that knows which kernel runs.

Every row sees all the keys of its own request and none of another's: no mask, no padding. There are two ways:
1. PackedAttention: each request is one call of torch's fused attention, on views of the pool. On a CPU, and on a GPU in
   float32.
2. VarlenAttention: one call for all requests, where there is a kernel for it. It wants keys and values one sequence
   after the other, but in the pool there are gaps between the requests' runs. So each gap is a sequence too, one
   without rows, which costs nothing: nothing is copied, and no page table is needed.
New keys and values are copied request by request on a CPU, where that is several times faster than by index, and by
index, in one kernel, on a GPU.

Shapes: T rows of a pass, n query rows of one request, L tokens of its canvas, H query heads, K key heads (H = K * G),
D head size, R requests.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.denoiser.kernels import Varlen
from services.denoiser.kv_pool import KVPool, Span


class Place(NamedTuple):
    """Of a request in a pass."""

    request_id: str
    window: tuple[int, int]  # the positions [start, end) of its rows
    num_keys: int  # that each of them attends to: the first of its canvas


class Attention(Protocol):
    """What a pass attends to, and where its keys and values go; good for one generation of the pool."""

    def write(self, layer: int, kv_TKD: Tensor) -> None:
        """Store this pass's keys and values [T, 2K, D]; `attend` of the same layer sees them."""

    def attend(self, layer: int, query_THD: Tensor, query_counts: Sequence[int]) -> Tensor:
        """Attention output [T, H * D]; `query_counts` says how many rows each request has."""


def attention_over(pool: KVPool, places: Sequence[Place], varlen: Varlen | None) -> Attention:
    """For requests in the order in which their rows are packed, which must be the order of their slots."""
    return PackedAttention(pool, places) if varlen is None else varlen_attention(pool, places, varlen)


class PackedAttention:
    """Request by request."""

    def __init__(self, pool: KVPool, places: Sequence[Place], *, by_index: bool | None = None) -> None:
        self.pool = pool
        self.runs = [pool.run(request_id, window) for request_id, window, _ in places]
        self._row_counts = [end - start for _, (start, end), _ in places]
        by_index = pool.device.type == "cuda" if by_index is None else by_index
        self._slots_T = pool.slots_of(self.runs) if by_index else None
        of_each = [pool.keys_values(request_id, num_keys) for request_id, _, num_keys in places]
        self._keys_values = list(zip(*of_each, strict=True))

    def write(self, layer: int, kv_TKD: Tensor) -> None:
        if self._slots_T is not None:
            self.pool.write(layer, self._slots_T, kv_TKD)
            return
        for run, rows in zip(self.runs, kv_TKD.split_with_sizes(self._row_counts), strict=True):
            self.pool.write_run(layer, run, rows)

    def attend(self, layer: int, query_THD: Tensor, query_counts: Sequence[int]) -> Tensor:
        outputs = [
            _attend_one(query_nHD, key, value)
            for query_nHD, (key, value) in zip(
                query_THD.split_with_sizes(list(query_counts)), self._keys_values[layer], strict=True
            )
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_one(query_nHD: Tensor, key_1KLD: Tensor, value_1KLD: Tensor) -> Tensor:
    n, H, D = query_nHD.shape
    K = key_1KLD.shape[1]
    if H == K:
        query = query_nHD.transpose(0, 1).unsqueeze(0)
        return scaled_dot_product_attention(query, key_1KLD, value_1KLD)[0].transpose(0, 1).reshape(n, H * D)
    # Query heads that share a key head are more rows of it: without a mask that is the same, and no key is copied.
    group = H // K
    query = query_nHD.view(n, K, group, D).permute(1, 2, 0, 3).reshape(1, K, group * n, D)
    output = scaled_dot_product_attention(query, key_1KLD, value_1KLD)
    return output.view(K, group, n, D).permute(2, 0, 1, 3).reshape(n, H * D)


class VarlenAttention:
    """All requests in one call. The tensors may be refilled between passes, which graphs make use of."""

    def __init__(
        self,
        pool: KVPool,
        varlen: Varlen,
        *,
        slots_T: Tensor,  # int64, where each row's keys and values go
        row_counts: Sequence[int],
        cu_rows: Tensor,  # int32, as in `cumulative_rows`
        cu_keys: Tensor,  # int32, as in `cumulative_keys`
        max_rows: int,  # of a request
        max_keys: int,
    ) -> None:
        self.pool, self._varlen = pool, varlen
        self.slots_T, self.row_counts, self.cu_rows, self.cu_keys = slots_T, row_counts, cu_rows, cu_keys
        # With max_query = 1 some kernels take it that every sequence has a row.
        self._max_rows, self._max_keys = max(2, max_rows), max_keys

    def write(self, layer: int, kv_TKD: Tensor) -> None:
        self.pool.write(layer, self.slots_T, kv_TKD)

    def attend(self, layer: int, query_THD: Tensor, query_counts: Sequence[int]) -> Tensor:
        key_SKD, value_SKD = self.pool.all_keys_values(layer)
        output_THD = self._varlen(
            query_THD, key_SKD, value_SKD, self._cu_rows_of(query_counts), self.cu_keys, self._max_rows, self._max_keys
        )
        return output_THD.reshape(len(query_THD), -1)

    def _cu_rows_of(self, query_counts: Sequence[int]) -> Tensor:
        if query_counts == self.row_counts:
            return self.cu_rows
        return torch.from_numpy(cumulative_rows(query_counts)).to(self.cu_rows.device, non_blocking=True)


def varlen_attention(pool: KVPool, places: Sequence[Place], varlen: Varlen) -> VarlenAttention:
    """As `attention_over`."""
    row_counts = [end - start for _, (start, end), _ in places]
    spans = [Span(pool.slots.span(request_id).start, num_keys) for request_id, _, num_keys in places]
    return VarlenAttention(
        pool,
        varlen,
        slots_T=pool.slots_of([pool.run(request_id, window) for request_id, window, _ in places]),
        row_counts=row_counts,
        cu_rows=torch.from_numpy(cumulative_rows(row_counts)).to(pool.device, non_blocking=True),
        cu_keys=torch.from_numpy(cumulative_keys(spans)).to(pool.device, non_blocking=True),
        max_rows=max(row_counts),
        max_keys=max(span.length for span in spans),
    )


def cumulative_rows(row_counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """[2R + 1]: where the rows of each sequence begin, and where the last ones end. Before each request a gap."""
    ends = np.cumsum([0, *row_counts], dtype=np.int32)
    return np.repeat(ends, 2)[:-1]


def cumulative_keys(spans: Sequence[Span]) -> npt.NDArray[np.int32]:
    """[2R + 1]: where the keys of each sequence begin, and where the last ones end. Before each request a gap."""
    bounds = np.array([0, *(bound for span in spans for bound in (span.start, span.end))], dtype=np.int32)
    assert np.all(bounds[1:] >= bounds[:-1]), "requests are not in the order of their slots"
    return bounds
