"""The K/V cache of all requests of an instance: one preallocated pool, counted in tokens.

1. A request gets one run of consecutive slots, one for each position of its canvas, for as long as it is held.
2. First fit, lowest slot first.
3. When the free slots suffice but none of the gaps does, all runs slide down (their K/V are copied) until one gap is
   left: so a request fits exactly when `free_tokens` says so.
4. A pass writes the K/V of its rows in place; what a later pass of the same request overwrites was never kept.

Shapes: N layers, S slots of the pool, T rows of a pass, L tokens of a canvas, K key heads, D head size.
"""

import bisect
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor


class Span(msgspec.Struct, frozen=True):
    """A run of slots."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The first slot after it."""
        return self.start + self.length


class Move(msgspec.Struct, frozen=True):
    """Copy `length` slots from `source` to `target`; target < source, and the two may overlap."""

    source: int
    target: int
    length: int


class SlotAllocator:
    """Who holds which slots. Pure: what has to be copied is returned."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free_tokens = capacity
        self._spans: dict[str, Span] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._spans

    def span(self, request_id: str) -> Span:
        """The slots of a request; another allocation may move them."""
        return self._spans[request_id]

    def allocate(self, request_id: str, length: int) -> list[Move]:
        """Give a request its slots.

        Returns the copies that must be made first, in this order. The caller has checked `free_tokens`.
        """
        assert 0 < length <= self.free_tokens
        assert request_id not in self._spans
        start = self._first_fit(length)
        moves: list[Move] = []
        if start is None:
            moves = self._compact()
            start = self.capacity - self.free_tokens
        self._spans[request_id] = Span(start, length)
        self.free_tokens -= length
        return moves

    def free(self, request_id: str) -> None:
        """Take the slots of a request back."""
        self.free_tokens += self._spans.pop(request_id).length

    def _first_fit(self, length: int) -> int | None:
        start = 0
        for span in sorted(self._spans.values(), key=lambda span: span.start):
            if span.start - start >= length:
                return start
            start = span.end
        return start if self.capacity - start >= length else None

    def _compact(self) -> list[Move]:
        moves: list[Move] = []
        start = 0
        for request_id, span in sorted(self._spans.items(), key=lambda item: item[1].start):
            if span.start != start:
                moves.append(Move(span.start, start, span.length))
                self._spans[request_id] = Span(start, span.length)
            start += span.length
        return moves

    def check_invariants(self) -> None:
        """Raises AssertionError if slots are shared, out of range or miscounted (for tests)."""
        spans = sorted(self._spans.values(), key=lambda span: span.start)
        starts = [span.start for span in spans]
        assert all(bisect.bisect_right(starts, span.end - 1) == i + 1 for i, span in enumerate(spans))
        assert all(span.start >= 0 and span.end <= self.capacity for span in spans)
        assert self.free_tokens == self.capacity - sum(span.length for span in spans)


class KVPool:
    """The tensor behind the slots: of each layer [S, 2K, D], a slot's keys and then its values; the last is spare."""

    def __init__(
        self,
        *,
        capacity: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots, self.device = SlotAllocator(capacity), device
        self._views: dict[str, tuple[int, list[tuple[Tensor, Tensor]]]] = {}  # of each: how long, in each layer
        self.generation = 0  # counts compactions: who remembers slots across passes compares it
        self.spare_slot = capacity  # +1 slot, nobody's: padded rows write their keys and values there
        # Zeros, not empty: slots are read only after they were written, but NaN in a gap would hide a mistake.
        shape = (num_layers, capacity + 1, 2 * num_kv_heads, head_dim)
        self._kv_NSKD = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = self._kv_NSKD.unbind()
        self._halves = [(layer[:, :num_kv_heads], layer[:, num_kv_heads:]) for layer in self._layers]
        self._keys_N1KSD, self._values_N1KSD = self._kv_NSKD.transpose(1, 2).unsqueeze(1).chunk(2, dim=2)

    def allocate(self, request_id: str, length: int) -> None:
        """Give a request its slots, moving others if need be."""
        moves = self.slots.allocate(request_id, length)
        for layer in self._layers if moves else ():
            for move in moves:
                source = layer[move.source : move.source + move.length]
                layer[move.target : move.target + move.length] = source.clone()  # clone: the two may overlap
        if moves:
            self.generation += 1
            self._views.clear()

    def free(self, request_id: str) -> None:
        """Take the slots of a request back."""
        self.slots.free(request_id)
        self._views.pop(request_id, None)

    def run(self, request_id: str, window: tuple[int, int]) -> slice:
        """The slots of a request's positions [start, end)."""
        first = self.slots.span(request_id).start
        return slice(first + window[0], first + window[1])

    def slots_of(self, runs: Sequence[slice]) -> Tensor:
        """[T] int64: every slot of these runs, in order."""
        slots = [np.arange(run.start, run.stop) for run in runs]
        return torch.from_numpy(np.concatenate(slots)).to(self.device, non_blocking=True)

    def write_run(self, layer: int, run: slice, kv_nKD: Tensor) -> None:
        """Store keys and values [n, 2K, D] of the rows of one request."""
        self._layers[layer][run].copy_(kv_nKD)

    def write(self, layer: int, slots_T: Tensor, kv_TKD: Tensor) -> None:
        """Store keys and values [T, 2K, D] of a pass's rows."""
        self._layers[layer].index_copy_(0, slots_T, kv_TKD)

    def all_keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of all keys and values of a layer, both [S, K, D]."""
        return self._halves[layer]

    def keys_values(self, request_id: str, length: int) -> list[tuple[Tensor, Tensor]]:
        """Views of a request's first L = `length` keys and values in each layer, both [1, K, L, D]; for one generation.

        Kept until another length is wanted: cutting them anew would cost as much as a small kernel.
        """
        kept_length, views = self._views.get(request_id, (0, []))
        if kept_length != length:
            start = self.slots.span(request_id).start
            keys, values = (x.narrow(3, start, length) for x in (self._keys_N1KSD, self._values_N1KSD))
            views = list(zip(keys.unbind(), values.unbind(), strict=True))
            self._views[request_id] = (length, views)
        return views


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory that one slot takes: to size a pool from the free memory."""
    return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize
