"""Packed attention: what each request attends to, and where its keys and values go."""

import pytest
import torch

from services.denoiser.attention import (
    PackedAttention,
    Place,
    attention_over,
    cumulative_keys,
    cumulative_rows,
    varlen_attention,
)
from services.denoiser.kv_pool import KVPool, Span
from tests.unit.denoiser.reference_varlen import reference_varlen

H, K, D, L = 6, 2, 4, 5  # query heads, key heads, head size, tokens of each canvas
# Packed in another order than the slots'; "a" is not seen to its end.
PLACES = [Place("b", (0, 5), L), Place("a", (2, 4), 4), Place("c", (3, 5), L)]


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
    before = {name: torch.cat(pool.keys_values(name, L)[1], dim=1) for name in "abc"}
    kept = {name: kv.clone() for name, kv in before.items()}
    rows = 100.0 + torch.arange(9 * 2 * K * D).view(9, 2 * K, D)
    PackedAttention(pool, PLACES, by_index=by_index).write(1, rows)
    first = 0
    for name, (start, end), _ in PLACES:
        kept[name][:, :, start:end] = rows[first : first + end - start].transpose(0, 1)
        first += end - start
    for name, expected in kept.items():
        assert torch.equal(torch.cat(pool.keys_values(name, L)[1], dim=1), expected)
        assert not torch.cat(pool.keys_values(name, L)[0], dim=1).any(), "another layer's"


def test_each_row_sees_the_keys_of_its_own_request_as_far_as_it_is_seen(pool: KVPool) -> None:
    counts = [4, 1, 2]
    query = torch.randn(7, H, D, generator=torch.Generator().manual_seed(1))
    found = PackedAttention(pool, PLACES).attend(1, query, counts)
    rows = []
    for (name, _, num_keys), part in zip(PLACES, query.split(counts), strict=True):
        keys, values = (heads[0, :, :num_keys].double() for heads in pool.keys_values(name, L)[1])
        for row in part.double():
            heads = [
                (keys[h * K // H] @ row[h] / D**0.5).softmax(0) @ values[h * K // H] for h in range(H)
            ]  # three query heads a key head
            rows.append(torch.cat(heads))
    torch.testing.assert_close(found.double(), torch.stack(rows), rtol=0, atol=1e-5)


# --- all requests in one call -----------------------------------------------------------------------------------------

IN_ORDER = [Place("a", (2, 4), 4), Place("c", (3, 5), L)]  # the slots of "b" are in the gap between them


def test_each_request_is_a_gap_without_rows_and_a_run() -> None:
    assert cumulative_rows([4, 1]).tolist() == [0, 0, 4, 4, 5]
    assert cumulative_keys([Span(0, 5), Span(9, 6)]).tolist() == [0, 0, 5, 9, 15]


def test_requests_out_of_the_order_of_their_slots_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="order of their slots"):
        cumulative_keys([Span(9, 6), Span(0, 5)])


@pytest.mark.parametrize("counts", [[2, 2], [1, 1], [1, 2]], ids=["as packed", "one row each", "some"])
def test_one_call_for_all_requests_gives_what_a_call_for_each_gives(pool: KVPool, counts: list[int]) -> None:
    for half in pool.all_keys_values(1):
        half[4:10] = torch.nan  # of "a" what is not seen, and "b", whom nobody asks about
        half[15:] = torch.nan
    query = torch.randn(sum(counts), H, D, generator=torch.Generator().manual_seed(1))
    expected = PackedAttention(pool, IN_ORDER).attend(1, query, counts)
    found = attention_over(pool, IN_ORDER, reference_varlen).attend(1, query, counts)
    assert found.shape == (sum(counts), H * D)
    torch.testing.assert_close(found, expected)


def test_one_call_writes_where_many_write(pool: KVPool) -> None:
    rows = torch.arange(4 * 2 * K * D, dtype=torch.float32).view(4, 2 * K, D)
    varlen_attention(pool, IN_ORDER, reference_varlen).write(1, rows)
    kv = torch.cat(pool.all_keys_values(1), dim=1)
    assert torch.equal(kv[[2, 3, 13, 14]], rows)
    found = kv.clone()
    PackedAttention(pool, IN_ORDER, by_index=False).write(1, rows)
    assert torch.equal(torch.cat(pool.all_keys_values(1), dim=1), found)
