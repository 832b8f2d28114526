"""The network in the form that training wants: LLaDA's layers and names, attention as plain matrix products.

Tensor names end in their shape: B texts, T positions, D width, H heads, K width of a head, M masked positions.
"""

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.tiny_model.config import ModelConfig


class RMSNorm(nn.Module):
    """Normalise in float32, cast back, then scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return wide.to(x.dtype) * self.weight


class Block(nn.Module):
    """One layer: bidirectional attention and a gated MLP, both behind a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.d_model, config.mlp_hidden_size
        self._num_heads, self._scale = config.n_heads, (width // config.n_heads) ** -0.5
        self.attn_norm = RMSNorm(width, config.rms_norm_eps)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_norm = RMSNorm(width, config.rms_norm_eps)
        self.ff_proj = nn.Linear(width, hidden, bias=False)  # the gate
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, width, bias=False)

    def attention(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], bias_B11T: Tensor) -> Tensor:
        """The attention half of the layer with its residual."""
        out: Tensor = self.attn_out(self._attend(self.attn_norm(x_BTD), rotation, bias_B11T))
        return x_BTD + out

    def mlp(self, x_ND: Tensor) -> Tensor:
        """The MLP half with its residual, for any positions."""
        # One product for both halves: fewer, larger products suit a CPU.
        both = functional.linear(self.ff_norm(x_ND), torch.cat((self.ff_proj.weight, self.up_proj.weight)))
        gate, up = both.chunk(2, -1)
        out: Tensor = self.ff_out(functional.silu(gate) * up)
        return x_ND + out

    def _attend(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], bias_B11T: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        qkv = functional.linear(x_BTD, weight).view(B, T, 3, self._num_heads, -1).permute(2, 0, 3, 1, 4)
        q_BHTK, k_BHTK, v_BHTK = rotate(qkv[0], rotation) * self._scale, rotate(qkv[1], rotation), qkv[2]
        # The CPU's fused attention takes ten times longer backwards than these two products.
        scores_BHTT = torch.matmul(q_BHTK, k_BHTK.transpose(-1, -2)).float() + bias_B11T
        out_BHTK = torch.matmul(scores_BHTT.softmax(-1).to(v_BHTK.dtype), v_BHTK)
        return out_BHTK.transpose(1, 2).reshape(B, T, D)


class TinyLLaDA(nn.Module):
    """Embedding, blocks, norm and an untied head; parameter names are LLaDA's below `model.transformer.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = RMSNorm(config.d_model, config.rms_norm_eps)
        self.ff_out = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() != 2:
                continue
            std = 0.02 if name.startswith("wte") else parameter.shape[1] ** -0.5
            if name.startswith("blocks") and name.endswith(("attn_out.weight", "ff_out.weight")):
                std /= math.sqrt(2 * self.config.n_layers)
            nn.init.normal_(parameter, std=std)

    def logits(self, input_BT: Tensor, bias_B11T: Tensor, rotation: tuple[Tensor, Tensor], wanted_M: Tensor) -> Tensor:
        """Logits [M, vocab] of the flat positions `wanted_M`.

        `bias_B11T` is added to every score: 0, or very low for padding. The last MLP and the head run on the wanted
        positions alone, which saves a tenth of a training step.
        """
        x_BTD = self.wte(input_BT)
        *blocks, last = cast(Iterable[Block], self.blocks)
        for block in blocks:
            x_BTD = block.mlp(block.attention(x_BTD, rotation, bias_B11T))
        x_MD = last.mlp(last.attention(x_BTD, rotation, bias_B11T).flatten(0, 1)[wanted_M])
        out: Tensor = self.ff_out(self.ln_f(x_MD))
        return out


def rotation_table(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0..length-1 for `rotate`, float32 [length, K]."""
    width = config.d_model // config.n_heads
    rates = config.rope_theta ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_BHTK: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions, first half against second half, in float32."""
    cos_TK, sin_TK = rotation
    first, second = x_BHTK.float().chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    return (x_BHTK.float() * cos_TK + rotated * sin_TK).to(x_BHTK.dtype)
