"""The LLaDA architecture: a Llama-style decoder without a causal mask.

1. Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); no biases; the head is a matrix of its own unless tied.
2. RMSNorm normalises in float32, casts back, then multiplies by the weight.
3. Rotary positions turn (first half, second half) pairs of each head, in float32.
4. The MLP is ff_out(silu(ff_proj(h)) * up_proj(h)): ff_proj is the gate.
5. The last layer computes keys and values of all rows, everything else only of the rows whose logits are wanted.

Shapes: T rows of a pass, M eligible ones, d width, H query heads, K key heads, D head size, F MLP width, V vocabulary.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from services.denoiser.models.base import Batch, ModelShape
from services.denoiser.weights import Weights


class LladaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that change what is computed; those with one supported value are checked."""

    d_model: int
    n_heads: int
    n_layers: int
    max_sequence_length: int
    vocab_size: int
    mask_token_id: int
    eos_token_id: int | list[int]
    n_kv_heads: int | None = None
    mlp_hidden_size: int | None = None
    mlp_ratio: int = 4
    embedding_size: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    weight_tying: bool = False
    activation_type: str = "silu"
    block_type: str = "llama"
    layer_norm_type: str = "rms"
    rope: bool = True
    alibi: bool = False
    attention_layer_norm: bool = False
    include_bias: bool = False
    include_qkv_bias: bool = False
    input_emb_norm: bool = False
    scale_logits: bool = False
    multi_query_attention: bool | None = None

    def __post_init__(self) -> None:
        for name, supported in _SUPPORTED.items():
            if (value := getattr(self, name)) not in supported:
                raise ValueError(f"config.json: {name} = {value!r} is not supported, only {supported[0]!r}")
        if self.d_model % self.n_heads or self.n_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: n_heads = {self.n_heads} must divide d_model = {self.d_model} "
                f"and be a multiple of n_kv_heads = {self.num_kv_heads}"
            )

        for name, ids in (("mask_token_id", (self.mask_token_id,)), ("eos_token_id", self.eos_ids)):
            if not all(0 <= token_id < self.vocab_rows for token_id in ids):
                raise ValueError(
                    f"config.json: {name} = {getattr(self, name)} is not among the {self.vocab_rows} tokens"
                )

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: one in published checkpoints, a list is taken too."""
        ids = self.eos_token_id
        return tuple(ids) if isinstance(ids, list) else (ids,)

    @property
    def num_kv_heads(self) -> int:
        """Key heads; left out of the file, each query head has its own."""
        return self.n_kv_heads or self.n_heads

    @property
    def mlp_width(self) -> int:
        """functional."""
        return self.mlp_hidden_size or self.mlp_ratio * self.d_model

    @property
    def vocab_rows(self) -> int:
        """V: the embedding may have more rows than there are tokens."""
        return self.embedding_size or self.vocab_size

    def shape(self, architecture: str) -> ModelShape:
        """The model in numbers."""
        return ModelShape(
            architecture=architecture,
            vocab_size=self.vocab_rows,
            num_layers=self.n_layers,
            num_heads=self.n_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.d_model // self.n_heads,
            max_positions=self.max_sequence_length,
            mask_id=self.mask_token_id,
            eos_ids=self.eos_ids,
        )


_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_type": ("silu",),
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "multi_query_attention": (None, False),
}


class LladaModel:
    """A LLaDA model on one device. Query, key and value matrices are one, and so are gate and up."""

    def __init__(self, architecture: str, config: dict[str, Any], weights: Weights) -> None:
        try:
            self.config = msgspec.convert(config, LladaConfig)
        except msgspec.ValidationError as error:
            raise ValueError(f"config.json: {error}") from error
        self.shape = self.config.shape(architecture)
        self.device, self.dtype = weights.device, weights.dtype
        d, V = self.config.d_model, self.config.vocab_rows
        self._embedding = weights.take("model.transformer.wte.weight", (V, d))
        self._layers = [LladaLayer(index, self.config, weights) for index in range(self.config.n_layers)]
        self._norm = weights.take("model.transformer.ln_f.weight", (d,))
        tied = self.config.weight_tying
        self._head = self._embedding if tied else weights.take("model.transformer.ff_out.weight", (V, d))
        self._rotary = rotary_table(self.shape, self.config.rope_theta, self.device)

    @torch.inference_mode()
    def rotary(self, positions_T: Tensor) -> Tensor:
        """[T, 2, 1, D], for `rotate_`."""
        return self._rotary[positions_T]

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """Final hidden states [M, d] of the eligible rows; writes the K/V of all T rows into the pool."""
        x_Td = functional.embedding(batch.token_ids_T, self._embedding)
        for layer in self._layers[:-1]:
            x_Td = layer.forward(x_Td, batch)
        x_Md = self._layers[-1].forward_eligible(x_Td, batch)
        return rms_norm(x_Md, self._norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden_Md: Tensor) -> Tensor:
        """Logits [M, V]."""
        return functional.linear(hidden_Md, self._head)


class LladaLayer:
    """One block of the decoder."""

    def __init__(self, index: int, config: LladaConfig, weights: Weights) -> None:
        self.index = index
        self.eps = config.rms_norm_eps
        self.H, self.K, self.D = config.n_heads, config.num_kv_heads, config.d_model // config.n_heads
        d, F = config.d_model, config.mlp_width
        prefix = f"model.transformer.blocks.{index}."
        self.attn_norm = weights.take(prefix + "attn_norm.weight", (d,))
        self.qkv = weights.stack(
            {
                prefix + "q_proj.weight": (self.H * self.D, d),
                prefix + "k_proj.weight": (self.K * self.D, d),
                prefix + "v_proj.weight": (self.K * self.D, d),
            }
        )
        self.query, self.key_value = torch.split(self.qkv, [self.H * self.D, 2 * self.K * self.D])
        self.attn_out = weights.take(prefix + "attn_out.weight", (d, self.H * self.D)).t()
        self.ff_norm = weights.take(prefix + "ff_norm.weight", (d,))
        self.gate_up = weights.stack({prefix + "ff_proj.weight": (F, d), prefix + "up_proj.weight": (F, d)})
        self.ff_out = weights.take(prefix + "ff_out.weight", (d, F)).t()

    def forward(self, x_Td: Tensor, batch: Batch) -> Tensor:
        """All rows in, all rows out."""
        qkv = self._heads(functional.linear(rms_norm(x_Td, self.attn_norm, self.eps), self.qkv))
        rotate_(qkv[:, : self.H + self.K], batch.rotary_T)
        batch.attention.write(self.index, batch.slots_T, qkv[:, self.H :])
        attended = batch.attention.attend(self.index, qkv[:, : self.H], batch.row_counts)
        return self._mlp(torch.addmm(x_Td, attended, self.attn_out))

    def forward_eligible(self, x_Td: Tensor, batch: Batch) -> Tensor:
        """All rows in, only the eligible ones out: keys and values are all that the others are for."""
        h_Td = rms_norm(x_Td, self.attn_norm, self.eps)
        kv = self._heads(functional.linear(h_Td, self.key_value))
        rotate_(kv[:, : self.K], batch.rotary_T)
        batch.attention.write(self.index, batch.slots_T, kv)
        query = self._heads(functional.linear(h_Td[batch.eligible_M], self.query))
        rotate_(query, batch.rotary_T[batch.eligible_M])
        attended = batch.attention.attend(self.index, query, batch.eligible_counts)
        return self._mlp(torch.addmm(x_Td[batch.eligible_M], attended, self.attn_out))

    def _heads(self, x_TC: Tensor) -> Tensor:
        return x_TC.view(len(x_TC), -1, self.D)

    def _mlp(self, x_Td: Tensor) -> Tensor:
        gate_up = functional.linear(rms_norm(x_Td, self.ff_norm, self.eps), self.gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.addmm(x_Td, functional.silu(gate).mul_(up), self.ff_out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32, cast back, multiply by the weight."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def rotary_table(shape: ModelShape, theta: float, device: torch.device) -> Tensor:
    """[positions, 2, 1, D] float32: cosines, and sines whose first half is negative (see `rotate_`)."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    position = torch.arange(shape.max_positions, dtype=torch.float32, device=device)
    angle = torch.outer(position, 1.0 / theta**exponent)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).unsqueeze(2)


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
