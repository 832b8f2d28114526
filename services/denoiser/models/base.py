"""What the engine asks of a model, and what a model gets for one forward pass.

Shapes: T rows of the pass, M of them eligible (whose logits are wanted), V vocabulary, d width.
"""
# ruff: noqa: N815 -- tensor names end in their shape

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from services.denoiser.attention import PackedAttention


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model in numbers, the same for every architecture."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int  # longest canvas
    mask_id: int
    eos_ids: tuple[int, ...]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One packed pass: the rows of one request after those of another, no padding."""

    token_ids_T: Tensor  # int64
    slots_T: Tensor  # int64, where each row's K/V go in the pool
    rotary_T: Tensor  # the model's own `rotary(positions)`
    row_counts: Sequence[int]  # rows of each request; they add up to T
    eligible_M: Tensor  # int64, which of the T rows are wanted, ascending
    eligible_counts: Sequence[int]  # of each request; they add up to M
    attention: PackedAttention


class Model(Protocol):
    """A loaded model on one device."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype

    def rotary(self, positions_T: Tensor) -> Tensor:
        """What rotates queries and keys at these positions, as the model likes it; may be kept from pass to pass."""

    def hidden(self, batch: Batch) -> Tensor:
        """Final hidden states [M, d] of the eligible rows; writes the K/V of all T rows into the pool."""

    def logits(self, hidden_Md: Tensor) -> Tensor:
        """Logits [M, V], row p predicting position p."""
