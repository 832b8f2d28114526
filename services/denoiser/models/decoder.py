"""The network behind LLaDA and Dream: a Llama-style decoder without a causal mask. A `DecoderSpec` tells them apart.

1. Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); query, key and value may have biases, nothing else has.
2. RMSNorm normalises in float32, casts back, then multiplies by the weight.
3. Rotary positions turn (first half, second half) pairs of each head, in float32.
4. The MLP is down(silu(gate(h)) * up(h)).
5. The last layer computes keys and values of all rows, everything else only of the rows whose logits are wanted.
6. Over several ranks each has its own heads, MLP columns and token ids. Three things are summed over the ranks: the
   embeddings (a token's is with one of them), and in each layer what attention and MLP add. Logits are never exchanged.

Shapes: T rows of a pass, M wanted ones, d width, D head size; on this rank: H query heads, K key heads, F MLP columns,
V token ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from services.denoiser.models.base import Batch, ModelShape
from services.denoiser.models.spec import DecoderSpec, layer_parts, outer_parts
from services.denoiser.parallel import Ranks
from services.denoiser.weights import Weights

_FIRST_POSITIONS = 1024  # of the rotary table, before a longer canvas comes


class Decoder:
    """A model on one device, or a rank's share of it."""

    def __init__(self, spec: DecoderSpec, ranks: Ranks, weights: Weights) -> None:
        share = spec.share(ranks)
        self.spec, self.ranks = spec, ranks
        self.device, self.dtype = weights.device, weights.dtype
        self.shape = ModelShape(
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            num_heads=share.heads.stop - share.heads.start,
            num_kv_heads=share.kv_heads.stop - share.kv_heads.start,
            head_dim=spec.head_dim,
            max_positions=spec.max_positions,
            mask_id=spec.mask_id,
            eos_ids=spec.eos_ids,
            shifted=spec.shifted,
        )
        self.first_token_id = share.vocab.start
        tensors = {name: weights.stack(parts) for name, parts in outer_parts(spec, share).items()}
        self._embedding, self._norm = tensors["embedding"], tensors["final_norm"]
        self._head = tensors.get("head", self._embedding)
        self._layers = [
            Layer(index, self, {name: weights.stack(parts) for name, parts in layer_parts(spec, share, index).items()})
            for index in range(spec.num_layers)
        ]
        self._rotary = rotary_table(spec, min(_FIRST_POSITIONS, spec.max_positions), self.device, self.dtype)

    @torch.inference_mode()
    def rotary(self, windows: Sequence[tuple[int, int]]) -> Tensor:
        """[T, 2, 1, D], for `rotate_`."""
        longest = max(end for _, end in windows)
        if longest > len(self._rotary):
            doubled = min(1 << (longest - 1).bit_length(), self.spec.max_positions)
            self._rotary = rotary_table(self.spec, doubled, self.device, self.dtype)
        pieces = [self._rotary[start:end] for start, end in windows]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """Final hidden states [M, d] of the wanted rows; writes the K/V of all T rows into the pool."""
        x_Td = self._embed(batch.token_ids_T)
        for layer in self._layers[:-1]:
            x_Td = layer.forward(x_Td, batch)
        x_Md = self._layers[-1].forward_wanted(x_Td, batch)
        return rms_norm(x_Md, self._norm, self.spec.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden_Md: Tensor) -> Tensor:
        """Logits [M, V] of this rank's share of the vocabulary."""
        return functional.linear(hidden_Md, self._head)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return functional.embedding(token_ids_T, self._embedding)
        row_T = token_ids_T - self.first_token_id
        elsewhere_T = (row_T < 0) | (row_T >= len(self._embedding))
        x_Td = functional.embedding(row_T.masked_fill_(elsewhere_T, 0), self._embedding)
        return self.ranks.all_reduce_(x_Td.masked_fill_(elsewhere_T.unsqueeze(-1), 0.0))


class Layer:
    """One layer of the decoder, or a rank's share of it."""

    def __init__(self, index: int, model: Decoder, tensors: dict[str, Tensor]) -> None:
        self.index, self.ranks, self.eps = index, model.ranks, model.spec.norm_eps
        self.H, self.K, self.D = model.shape.num_heads, model.shape.num_kv_heads, model.shape.head_dim
        self.attention_norm, self.mlp_norm = tensors["attention_norm"], tensors["mlp_norm"]
        self.qkv, self.gate_up = tensors["qkv"], tensors["gate_up"]
        self.qkv_bias = tensors.get("qkv_bias")
        num_query_rows = self.H * self.D
        self.query, self.key_value = self.qkv[:num_query_rows], self.qkv[num_query_rows:]
        bias = self.qkv_bias
        self.query_bias = None if bias is None else bias[:num_query_rows]
        self.key_value_bias = None if bias is None else bias[num_query_rows:]
        self.attention_out, self.down = tensors["attention_out"].t(), tensors["down"].t()

    def forward(self, x_Td: Tensor, batch: Batch) -> Tensor:
        """All rows in, all rows out."""
        h_Td = rms_norm(x_Td, self.attention_norm, self.eps)
        qkv = self._heads(functional.linear(h_Td, self.qkv, self.qkv_bias))
        rotate_(qkv[:, : self.H + self.K], batch.rotary_T)
        batch.attention.write(self.index, qkv[:, self.H :])
        attended = batch.attention.attend(self.index, qkv[:, : self.H], batch.row_counts)
        return self._mlp(self._add(x_Td, attended, self.attention_out))

    def forward_wanted(self, x_Td: Tensor, batch: Batch) -> Tensor:
        """All rows in, only the wanted ones out: keys and values are all that the others are for."""
        h_Td = rms_norm(x_Td, self.attention_norm, self.eps)
        kv = self._heads(functional.linear(h_Td, self.key_value, self.key_value_bias))
        rotate_(kv[:, : self.K], batch.rotary_T)
        batch.attention.write(self.index, kv)
        query = self._heads(functional.linear(h_Td[batch.wanted_M], self.query, self.query_bias))
        rotate_(query, batch.rotary_T[batch.wanted_M])
        attended = batch.attention.attend(self.index, query, batch.wanted_counts)
        return self._mlp(self._add(x_Td[batch.wanted_M], attended, self.attention_out))

    def _heads(self, x_TC: Tensor) -> Tensor:
        return x_TC.view(len(x_TC), -1, self.D)

    def _mlp(self, x_Td: Tensor) -> Tensor:
        gate_up = functional.linear(rms_norm(x_Td, self.mlp_norm, self.eps), self.gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._add(x_Td, functional.silu(gate).mul_(up), self.down)

    def _add(self, x_Td: Tensor, h_TC: Tensor, weight_Cd: Tensor) -> Tensor:
        """x + h @ weight, over the columns C of all ranks."""
        if self.ranks.size == 1:
            return torch.addmm(x_Td, h_TC, weight_Cd)
        return self.ranks.all_reduce_(h_TC @ weight_Cd).add_(x_Td)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32, cast back, multiply by the weight."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def rotary_table(spec: DecoderSpec, num_positions: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[positions, 2, 1, D] float32: cosines, and sines whose first half is negative (see `rotate_`)."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
    position = torch.arange(num_positions, dtype=torch.float32, device=device)
    angle = torch.outer(position, 1.0 / spec.rope_theta**exponent)
    cos, sin = angle.cos(), angle.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).unsqueeze(2)
    return table.to(dtype).float() if spec.rotary_in_dtype else table


def rotate_(heads: Tensor, rotary: Tensor) -> None:
    """Turn heads [T, heads, D] to their positions, in place, in float32.

    (a, b) becomes (a cos - b sin, b cos + a sin), a and b being the halves of a head: rolling a head by half its size
    swaps them, and the minus sits in the sines.
    """
    cos, sin = rotary.unbind(1)
    full = heads.float()  # heads itself if it is float32
    swapped = full.roll(heads.shape[-1] // 2, -1)
    turned = full.mul_(cos).addcmul_(swapped, sin)
    if turned is not heads:
        heads.copy_(turned)
