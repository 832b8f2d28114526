"""The network behind LLaDA and Dream: a Llama-style decoder without a causal mask. A `DecoderSpec` tells them apart.

1. Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); query, key and value may have biases, nothing else has.
2. RMSNorm normalises in float32, casts back, then multiplies by the weight.
3. Rotary positions turn (first half, second half) pairs of each head, in float32.
4. The MLP is down(silu(gate(h)) * up(h)).
5. The last layer computes keys and values of all rows, everything else only of the rows whose logits are wanted.
6. Over several ranks each has its own heads, MLP columns and token ids. Three things are summed over the ranks: the
   embeddings (a token's is with one of them), and in each layer what attention and MLP add. Logits are never exchanged.
7. Which code runs 1 to 4 is up to the kernels (kernels.py), and how rows attend is up to the batch (attention.py).

Shapes: T rows of a pass, M wanted ones, d width, D head size; on this rank: H query heads, K key heads, F MLP columns,
V token ids.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from services.denoiser.kernels import Kernels
from services.denoiser.linears import Linear, PlainLinear
from services.denoiser.models.base import Batch, ModelShape
from services.denoiser.models.spec import DecoderSpec, layer_parts, outer_parts
from services.denoiser.parallel import Ranks
from services.denoiser.weights import Weights


class Decoder:
    """A model on one device, or a rank's share of it."""

    def __init__(self, spec: DecoderSpec, ranks: Ranks, weights: Weights, kernels: Kernels) -> None:
        share = spec.share(ranks)
        self.spec, self.ranks, self.kernels = spec, ranks, kernels
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
        outer = outer_parts(spec, share)
        # The head first: what its packing leaves free, the embedding takes.
        head = kernels.full_linear(weights.stack(outer["head"])) if "head" in outer else None
        self._embedding, self._norm = weights.stack(outer["embedding"]), weights.stack(outer["final_norm"])
        self._head = head or PlainLinear(self._embedding)
        self.varlen = kernels.varlen(spec.head_dim, self.dtype)
        self.rope = kernels.rotary(
            head_dim=spec.head_dim,
            theta=spec.rope_theta,
            max_positions=spec.max_positions,
            dtype=self.dtype,
            rounded=spec.rotary_in_dtype,
        )
        self._layers: list[Layer] = []
        for index in range(spec.num_layers):
            kind = LastLayer if index == spec.num_layers - 1 else Layer
            parts = layer_parts(spec, share, index)
            self._layers.append(kind(index, self, {name: weights.stack(of) for name, of in parts.items()}))

    def rotary(self, windows: Sequence[tuple[int, int]]) -> Tensor:
        """[T, ...], as the kernels like it."""
        return self.rope.at(windows)

    def hidden(self, batch: Batch) -> Tensor:
        """Final hidden states [M, d] of the wanted rows; writes the K/V of all T rows into the pool."""
        x_Td = self._embed(batch.token_ids_T)
        for layer in self._layers:
            x_Td = layer.forward_(x_Td, batch)
        return self.kernels.rms_norm(x_Td, self._norm, self.spec.norm_eps)

    def logits(self, hidden_Md: Tensor) -> Tensor:
        """Logits [M, V] of this rank's share of the vocabulary."""
        return self._head(hidden_Md)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return functional.embedding(token_ids_T, self._embedding)
        row_T = token_ids_T - self.first_token_id
        elsewhere_T = (row_T < 0) | (row_T >= len(self._embedding))
        x_Td = functional.embedding(row_T.masked_fill_(elsewhere_T, 0), self._embedding)
        return self.ranks.all_reduce_(x_Td.masked_fill_(elsewhere_T.unsqueeze(-1), 0.0))


class Layer:
    """One layer of the decoder, or a rank's share of it: all rows in, all rows out, in place."""

    def __init__(self, index: int, model: Decoder, tensors: dict[str, Tensor]) -> None:
        """Takes its tensors out of the dict, so that no plain one stays beside its packed copy."""
        self.index, self.ranks, self.eps = index, model.ranks, model.spec.norm_eps
        self.kernels, self.rope = model.kernels, model.rope
        self.H, self.K, self.D = model.shape.num_heads, model.shape.num_kv_heads, model.shape.head_dim
        self.attention_norm, self.mlp_norm = tensors.pop("attention_norm"), tensors.pop("mlp_norm")
        self._take_qkv(tensors.pop("qkv"), tensors.pop("qkv_bias", None))
        linear = self.kernels.linear
        self.attention_out = linear(tensors.pop("attention_out"))
        self.gate_up, self.down = linear(tensors.pop("gate_up")), linear(tensors.pop("down"))

    def forward_(self, x_Td: Tensor, batch: Batch) -> Tensor:
        """The rows after this layer."""
        return self._mlp_(self._add_(x_Td, self._attended(x_Td, batch), self.attention_out))

    def _take_qkv(self, weight_OC: Tensor, bias_O: Tensor | None) -> None:
        self.qkv = self.kernels.linear(weight_OC, bias_O)

    def _attended(self, x_Td: Tensor, batch: Batch) -> Tensor:
        qkv = self._heads(self.qkv(self.kernels.rms_norm(x_Td, self.attention_norm, self.eps)))
        self.rope.rotate_(qkv[:, : self.H + self.K], batch.rotary_T)
        batch.attention.write(self.index, qkv[:, self.H :])
        return batch.attention.attend(self.index, qkv[:, : self.H], batch.row_counts)

    def _heads(self, x_TC: Tensor) -> Tensor:
        return x_TC.view(len(x_TC), -1, self.D)

    def _mlp_(self, x_Td: Tensor) -> Tensor:
        # Nested, so that no name holds a tensor that is done with: the rows of this line are the most of a pass.
        h_TF = self.kernels.silu_and_mul(self.gate_up(self.kernels.rms_norm(x_Td, self.mlp_norm, self.eps)))
        return self._add_(x_Td, h_TF, self.down)

    def _add_(self, x_Td: Tensor, h_TC: Tensor, linear: Linear) -> Tensor:
        """x + linear(h), over the columns C of all ranks."""
        if self.ranks.size == 1:
            return linear.add_to_(x_Td, h_TC)
        return x_Td.add_(self.ranks.all_reduce_(linear(h_TC)))


class LastLayer(Layer):
    """All rows in, only the wanted ones out: keys and values are all that the others are for."""

    def forward_(self, x_Td: Tensor, batch: Batch) -> Tensor:
        attended = self._attended(x_Td, batch)
        return self._mlp_(self._add_(x_Td[batch.wanted_M], attended, self.attention_out))

    def _take_qkv(self, weight_OC: Tensor, bias_O: Tensor | None) -> None:
        sizes = [self.H * self.D, 2 * self.K * self.D]
        biases = (None, None) if bias_O is None else bias_O.split_with_sizes(sizes)
        self.query, self.key_value = map(self.kernels.linear, weight_OC.split_with_sizes(sizes), biases)

    def _attended(self, x_Td: Tensor, batch: Batch) -> Tensor:
        h_Td = self.kernels.rms_norm(x_Td, self.attention_norm, self.eps)
        kv = self._heads(self.key_value(h_Td))
        self.rope.rotate_(kv[:, : self.K], batch.rotary_T)
        batch.attention.write(self.index, kv)
        query = self._heads(self.query(h_Td[batch.wanted_M]))
        self.rope.rotate_(query, batch.rotary_T[batch.wanted_M])
        return batch.attention.attend(self.index, query, batch.wanted_counts)
