"""What a varlen kernel computes, one sequence after the other; it refuses what a kernel may not be given."""

import itertools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def reference_varlen(
    query_THD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    max_query: int,
    max_key: int,
) -> Tensor:
    assert cu_query.dtype == cu_key.dtype == torch.int32
    assert cu_query.shape == cu_key.shape
    assert key_SKD.stride(-1) == value_SKD.stride(-1) == query_THD.stride(-1) == 1
    assert max_query > 1, "taken to mean that every sequence has one row"
    rows, keys = cu_query.tolist(), cu_key.tolist()
    assert (rows[0], rows[-1]) == (0, len(query_THD)), "every row belongs to a sequence"
    assert rows == sorted(rows)
    assert keys == sorted(keys)
    assert keys[-1] <= len(key_SKD)
    output = torch.full_like(query_THD, torch.nan, memory_format=torch.contiguous_format)
    for (start, end), (first, last) in zip(itertools.pairwise(rows), itertools.pairwise(keys), strict=True):
        if start == end:
            continue
        assert end - start <= max_query
        assert 0 < last - first <= max_key
        query, key, value = (
            heads.transpose(0, 1) for heads in (query_THD[start:end], key_SKD[first:last], value_SKD[first:last])
        )
        output[start:end] = scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(0, 1)
    return output
