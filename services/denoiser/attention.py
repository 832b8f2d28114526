"""Attention of a packed pass: the one place that knows which kernel runs.

Every row sees all the keys of its own request and none of another's: no mask, no padding. Here each request is one call
of torch's fused attention on views of the pool; a varlen kernel would take `query_counts` and the runs as they are.
New keys and values are copied request by request on a CPU, where that is several times faster than by index, and by
index, in one kernel, on a GPU.

Shapes: T rows of a pass, n query rows of one request, L tokens of its canvas, H query heads, K key heads (H = K * G),
D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.denoiser.kv_pool import KVPool


class PackedAttention:
    """What the requests of a pass attend to, and where their keys and values go; good for one generation of the pool.

    `windows` gives the requests in the order in which their rows are packed, with the positions [start, end) of those.
    """

    def __init__(
        self, pool: KVPool, windows: Sequence[tuple[str, tuple[int, int]]], *, by_index: bool | None = None
    ) -> None:
        self.pool = pool
        self.runs = [pool.run(request_id, window) for request_id, window in windows]
        self._row_counts = [end - start for _, (start, end) in windows]
        by_index = pool.device.type == "cuda" if by_index is None else by_index
        self._slots_T = pool.slots_of(self.runs) if by_index else None
        self._keys_values = list(zip(*(pool.keys_values(request_id) for request_id, _ in windows), strict=True))

    def write(self, layer: int, kv_TKD: Tensor) -> None:
        """Store this pass's keys and values [T, 2K, D]; `attend` of the same layer sees them."""
        if self._slots_T is not None:
            self.pool.write(layer, self._slots_T, kv_TKD)
            return
        for run, rows in zip(self.runs, kv_TKD.split_with_sizes(self._row_counts), strict=True):
            self.pool.write_run(layer, run, rows)

    def attend(self, layer: int, query_THD: Tensor, query_counts: Sequence[int]) -> Tensor:
        """Attention output [T, H * D]; `query_counts` says how many rows each request has."""
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
