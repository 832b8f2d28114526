"""What the engine asks of a model, and what a model gets for one forward pass.

Shapes: T rows of the pass, M of them wanted (whose logits are asked for), V tokens of this rank's share of the
vocabulary, d width.
"""
# ruff: noqa: N815 -- tensor names end in their shape

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from services.denoiser.attention import Attention
from services.denoiser.kernels import Varlen
from services.denoiser.parallel import Ranks


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model in numbers, the same for every architecture."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int  # on this rank
    num_kv_heads: int  # on this rank
    head_dim: int
    max_positions: int  # longest canvas
    mask_id: int
    eos_ids: tuple[int, ...]
    shifted: bool = False  # row p predicts position p + 1 instead of p


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One packed pass: the rows of one request after those of another, no padding."""

    token_ids_T: Tensor  # int64
    rotary_T: Tensor  # the model's own `rotary(windows)`
    row_counts: Sequence[int]  # rows of each request; they add up to T
    wanted_M: Tensor  # int64, which of the T rows predict an eligible position, ascending
    wanted_counts: Sequence[int]  # of each request; they add up to M
    attention: Attention


class Model(Protocol):
    """A loaded model on one device, or one rank's share of it: every rank is asked for the same at the same time."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    first_token_id: int  # of this rank's share of the vocabulary
    varlen: Varlen | None  # attends for all requests of a pass at once; None: they attend one by one

    def rotary(self, windows: Sequence[tuple[int, int]]) -> Tensor:
        """What rotates queries and keys at the positions of these windows [start, end), one after the other.

        As the model likes it, T of them; may be kept from pass to pass.
        """

    def hidden(self, batch: Batch) -> Tensor:
        """Final hidden states [M, d] of the wanted rows; writes the K/V of all T rows into the pool."""

    def logits(self, hidden_Md: Tensor) -> Tensor:
        """Logits [M, V] of this rank's share of the vocabulary."""
