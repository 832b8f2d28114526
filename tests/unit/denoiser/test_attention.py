"""Packed attention: what each request attends to, and where its keys and values go."""

import pytest
import torch

from services.denoiser.attention import PackedAttention
from services.denoiser.kv_pool import KVPool

H, K, D, L = 6, 2, 4, 5  # query heads, key heads, head size, tokens of each canvas
WINDOWS = [("b", (0, 5)), ("a", (2, 4)), ("c", (3, 5))]  # packed in another order than the slots'


@pytest.fixture
def pool() -> KVPool:
    pool = KVPool(
        capacity=20, num_layers=2, num_kv_heads=K, head_dim=D, dtype=torch.float32, device=torch.device("cpu")
    )
    for request_id in ("a", "b", "c"):
        pool.allocate(request_id, L)
    pool.write(1, torch.arange(3 * L), torch.randn(3 * L, 2 * K, D, generator=torch.Generator().manual_seed(0)))
    return pool


@pytest.mark.parametrize("by_index", [False, True])
def test_rows_are_written_where_their_request_s_positions_lie(pool: KVPool, by_index: bool) -> None:
    before = {name: torch.cat(pool.keys_values(name)[1], dim=1) for name in "abc"}
    kept = {name: kv.clone() for name, kv in before.items()}
    rows = 100.0 + torch.arange(9 * 2 * K * D).view(9, 2 * K, D)
    PackedAttention(pool, WINDOWS, by_index=by_index).write(1, rows)
    first = 0
    for name, (start, end) in WINDOWS:
        kept[name][:, :, start:end] = rows[first : first + end - start].transpose(0, 1)
        first += end - start
    for name, expected in kept.items():
        assert torch.equal(torch.cat(pool.keys_values(name)[1], dim=1), expected)
        assert not torch.cat(pool.keys_values(name)[0], dim=1).any(), "another layer's"


def test_each_row_sees_all_keys_of_its_own_request(pool: KVPool) -> None:
    counts = [4, 1, 2]
    query = torch.randn(7, H, D, generator=torch.Generator().manual_seed(1))
    found = PackedAttention(pool, WINDOWS).attend(1, query, counts)
    rows = []
    for (name, _), part in zip(WINDOWS, query.split(counts), strict=True):
        keys, values = (heads[0].double() for heads in pool.keys_values(name)[1])
        for row in part.double():
            heads = [
                (keys[h * K // H] @ row[h] / D**0.5).softmax(0) @ values[h * K // H] for h in range(H)
            ]  # three query heads a key head
            rows.append(torch.cat(heads))
    torch.testing.assert_close(found.double(), torch.stack(rows), rtol=0, atol=1e-5)
