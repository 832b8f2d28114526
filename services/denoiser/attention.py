"""Attention of a packed pass: the one place that knows which kernel runs.

Every row sees all the keys of its own request and none of another's: no mask, no padding. Here each request is one call
of torch's fused attention on views of the pool; a varlen kernel would take `query_counts` and the spans as they are.

Shapes: T query rows of a pass, n those of one request, H query heads, K key heads (H = K * G), D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.denoiser.kv_pool import KVPool


class PackedAttention:
    """What the requests of a pass attend to, in the order in which their rows are packed."""

    def __init__(self, pool: KVPool, request_ids: Sequence[str]) -> None:
        self.pool = pool
        self._keys_values = list(zip(*(pool.keys_values(request_id) for request_id in request_ids), strict=True))

    def write(self, layer: int, slots_T: Tensor, kv_TKD: Tensor) -> None:
        """Store this pass's keys and values [T, 2K, D]; `attend` of the same layer sees them."""
        self.pool.write(layer, slots_T, kv_TKD)

    def attend(self, layer: int, query_THD: Tensor, query_counts: Sequence[int]) -> Tensor:
        """Attention output [T, H * D]; `query_counts` says how many rows each request has."""
        outputs = [
            _attend_one(query_nHD, key, value)
            for query_nHD, (key, value) in zip(
                torch.split(query_THD, list(query_counts)), self._keys_values[layer], strict=True
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
