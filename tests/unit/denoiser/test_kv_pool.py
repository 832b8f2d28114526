"""The pool hands out what is free, whatever was freed before, and never loses what a request has stored."""

import zlib

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.denoiser.kv_pool import KVPool, Move, SlotAllocator, kv_bytes_per_token

CAPACITY = 40


def make_pool() -> KVPool:
    return KVPool(
        capacity=CAPACITY, num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu")
    )


class PoolMachine(RuleBasedStateMachine):
    """Random admissions and removals; each request's slots hold its own number and the position."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.lengths: dict[str, int] = {}

    @rule(target=held, length=st.integers(1, 25))
    def admit(self, length: int) -> str | None:
        request_id = f"r{len(self.lengths)}-{length}-{self.pool.generation}"
        while request_id in self.lengths:
            request_id += "x"
        if length > self.pool.slots.free_tokens:
            return None
        self.pool.allocate(request_id, length)  # fits, in one gap or in many
        self.lengths[request_id] = length
        slots = torch.arange(length) + self.pool.slots.span(request_id).start
        for layer in range(2):
            self.pool.write(layer, slots, self.mark(request_id, layer))
        return request_id

    @rule(request_id=consumes(held))
    def remove(self, request_id: str | None) -> None:
        if request_id is not None:
            self.pool.free(request_id)
            del self.lengths[request_id]

    def mark(self, request_id: str, layer: int) -> torch.Tensor:
        """[length, 2, 2], different for each request, layer, position, head and element."""
        length = self.lengths[request_id]
        return (
            torch.arange(length * 4).view(length, 2, 2)
            + 1000.0 * (zlib.crc32(request_id.encode()) % 9973)
            + 500.0 * layer
        )

    @invariant()
    def slots_are_disjoint_and_counted(self) -> None:
        self.pool.slots.check_invariants()
        assert self.pool.slots.free_tokens == CAPACITY - sum(self.lengths.values())

    @invariant()
    def everyone_finds_what_was_stored(self) -> None:
        for request_id in self.lengths:
            for layer, (keys, values) in enumerate(self.pool.keys_values(request_id, self.lengths[request_id])):
                stored = self.mark(request_id, layer)
                assert torch.equal(keys, stored[:, :1].transpose(0, 1).unsqueeze(0))
                assert torch.equal(values, stored[:, 1:].transpose(0, 1).unsqueeze(0))


PoolMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestPool = PoolMachine.TestCase


def test_first_fit_takes_the_lowest_gap() -> None:
    slots = SlotAllocator(10)
    assert [slots.allocate(name, 3) for name in "abc"] == [[], [], []]
    slots.free("b")
    assert slots.allocate("d", 2) == []
    assert slots.span("d").start == 3


def test_gaps_are_closed_only_when_none_of_them_suffices() -> None:
    slots = SlotAllocator(10)
    for name in "abcde":
        slots.allocate(name, 2)
    slots.free("b")
    slots.free("d")
    assert slots.allocate("f", 3) == [Move(source=4, target=2, length=2), Move(source=8, target=4, length=2)]
    assert slots.span("f").start == 6
    assert slots.free_tokens == 1


def test_views_follow_a_move() -> None:
    pool = make_pool()
    pool.allocate("a", 10)
    pool.allocate("b", 20)
    pool.write(0, torch.arange(10, 30), torch.ones(20, 2, 2))
    pool.keys_values("b", 20)
    pool.free("a")
    pool.allocate("c", 15)
    assert pool.generation == 1
    assert pool.keys_values("b", 20)[0][0].eq(1).all()


def test_views_are_as_long_as_asked_for_and_kept_until_then() -> None:
    pool = make_pool()
    pool.allocate("a", 10)
    shorter = pool.keys_values("a", 4)
    assert {view.shape[2] for layer in shorter for view in layer} == {4}
    assert pool.keys_values("a", 4) is shorter
    assert {view.shape[2] for layer in pool.keys_values("a", 10) for view in layer} == {10}


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_bytes_per_token(dtype: torch.dtype, size: int) -> None:
    assert kv_bytes_per_token(num_layers=32, num_kv_heads=32, head_dim=128, dtype=dtype) == 32 * 2 * 32 * 128 * size
