"""The reference algorithm, written plainly: what the engine is measured against.

One request at a time, as the public implementations of LLaDA and Fast-dLLM decode:
1. Blocks are done left to right. With cache "none" every step passes the whole canvas. With "prefix" and "dual" the
   block's first step does; later ones pass the block and all after it (prefix) or the block alone (dual), against the
   keys and values that the first step left.
2. Logits of every row that was passed, over the whole vocabulary; the mask token's are minus infinity.
3. Confidence of every row: the softmax of its logits, in float64, at its argmax.
4. The choice rule commits among the masked positions up to the block's end; the block ends when none is left.
Query, key and value are layers of their own, and so are gate and up. Keys are kept as they were before rotation and all
of them are rotated anew in each pass. It shares no code with the engine.

Shapes: n rows of a pass, L keys, H query heads, K key heads, D head size, d width, V vocabulary. The batch is one.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from services.denoiser.engine import CacheMode, Factor, FixedSchedule, Threshold

Choice = Threshold | Factor | FixedSchedule
KeysValues = list[tuple[Tensor, Tensor]]  # [1, K, L, D] each, keys before rotation, one pair a layer


class Committed(NamedTuple):
    """One committed token."""

    position: int  # in the output area
    token_id: int
    confidence: float


class Step(NamedTuple):
    """One forward pass and what it committed, by ascending position."""

    num_rows: int
    commits: list[Committed]
    seconds: float


class Decoded(NamedTuple):
    """One request, decoded as far as was asked."""

    output_ids: list[int]
    steps: list[Step]
    margin: float  # of its closest decision (see `_Margin`), or infinite where margins were not wanted


# --- the model ----------------------------------------------------------------------------------------------------


class RmsNorm(nn.Module):
    """Normalises in float32, casts back, multiplies by the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        normed = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Layer(nn.Module):
    """One block of the decoder; its submodules are called as in the checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d, F, eps = config["d_model"], config["mlp_hidden_size"], config["rms_norm_eps"]
        self.H, self.K = config["n_heads"], config["n_kv_heads"]
        self.D = d // self.H
        self.attn_norm, self.ff_norm = RmsNorm(d, eps), RmsNorm(d, eps)
        self.q_proj = nn.Linear(d, self.H * self.D, bias=False)
        self.k_proj = nn.Linear(d, self.K * self.D, bias=False)
        self.v_proj = nn.Linear(d, self.K * self.D, bias=False)
        self.attn_out = nn.Linear(self.H * self.D, d, bias=False)
        self.ff_proj = nn.Linear(d, F, bias=False)
        self.up_proj = nn.Linear(d, F, bias=False)
        self.ff_out = nn.Linear(F, d, bias=False)

    def forward(
        self, x: Tensor, start: int, old: tuple[Tensor, Tensor] | None, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Rows in and out [1, n, d], the first of them at position `start`; keys and values of the canvas.

        `angles` are the cosines and sines of all positions, [positions, D] each.
        """
        h = self.attn_norm(x)
        query, key, value = self._heads(self.q_proj(h)), self._heads(self.k_proj(h)), self._heads(self.v_proj(h))
        if old is not None:
            key, value = _replace(old[0], key, start), _replace(old[1], value, start)
        attended = functional.scaled_dot_product_attention(
            _rotate(query, start, angles),
            self._for_each_query_head(_rotate(key, 0, angles)),
            self._for_each_query_head(value),
        )
        x = x + self.attn_out(attended.transpose(1, 2).flatten(2))
        h = self.ff_norm(x)
        return x + self.ff_out(functional.silu(self.ff_proj(h)) * self.up_proj(h)), (key, value)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(1, x.shape[1], -1, self.D).transpose(1, 2)

    def _for_each_query_head(self, x: Tensor) -> Tensor:
        return x if self.K == self.H else x.repeat_interleave(self.H // self.K, dim=1)


def _replace(old: Tensor, new: Tensor, start: int) -> Tensor:
    """`old` with positions from `start` on replaced by `new`; what lies behind these stays."""
    return torch.cat((old[:, :, :start], new, old[:, :, start + new.shape[2] :]), dim=2)


def _rotate(heads: Tensor, start: int, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [1, heads, n, D] turned to positions from `start` on, in float32."""
    cos, sin = (table[start : start + heads.shape[2]] for table in angles)
    full = heads.float()
    first, second = full.chunk(2, dim=-1)
    return (full * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


class PlainModel(nn.Module):
    """LLaDA, batch of one, on the CPU."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d, V = config["d_model"], config["embedding_size"]
        self.mask_id: int = config["mask_token_id"]
        self.wte = nn.Embedding(V, d)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config["n_layers"]))
        self.ln_f = RmsNorm(d, config["rms_norm_eps"])
        self.ff_out = nn.Linear(d, V, bias=False)
        half = torch.arange(0, d // config["n_heads"], 2, dtype=torch.float32, device="cpu")
        position = torch.arange(config["max_sequence_length"], dtype=torch.float32, device="cpu")
        angle = torch.outer(position, config["rope_theta"] ** (-half / (d // config["n_heads"]))).repeat(1, 2)
        self.angles = (angle.cos(), angle.sin())

    def forward(self, ids: Tensor, start: int, old: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Logits of all rows [n, V], and the canvas's keys and values: `old` with the rows' own from `start` on."""
        x = self.wte(ids).unsqueeze(0)
        keys_values: KeysValues = []
        for index, block in enumerate(self.blocks):
            x, own = block(x, start, old[index] if old else None, self.angles)
            keys_values.append(own)
        return self.ff_out(self.ln_f(x))[0], keys_values


def load_plain(folder: Path, dtype: torch.dtype = torch.float32) -> PlainModel:
    """The LLaDA model in `folder`, whose config.json states every size."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = PlainModel(config)
    tensors = load_file(folder / "model.safetensors")
    named = {name.removeprefix("model.transformer."): tensor.to(dtype) for name, tensor in tensors.items()}
    if config["weight_tying"]:
        named["ff_out.weight"] = named["wte.weight"]
    model.load_state_dict(named, assign=True)
    return model.eval()


# --- decoding -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def decode(
    model: PlainModel,
    prompt_ids: list[int],
    *,
    max_tokens: int,
    block_size: int,
    cache: CacheMode,
    choice: Choice,
    num_blocks: int | None = None,
    margins: bool = False,
) -> Decoded:
    """Decode one request, at temperature 0 and past EOS: all of `max_tokens`, or only its first `num_blocks` blocks.

    `max_tokens` is a multiple of `block_size`. `margins` notes the closest decision, which costs time.
    """
    ids = torch.tensor([*prompt_ids, *[model.mask_id] * max_tokens])
    prompt_tokens, all_blocks = len(prompt_ids), max_tokens // block_size
    steps: list[Step] = []
    margin = _Margin(choice) if margins else None
    for block in range(all_blocks if num_blocks is None else num_blocks):
        start = prompt_tokens + block * block_size
        choose = _chooser(choice, block_size, all_blocks)
        steps += _decode_block(model, ids, (start, start + block_size), prompt_tokens, cache, choose, margin)
    done = block_size * (all_blocks if num_blocks is None else num_blocks)
    output: list[int] = ids[prompt_tokens : prompt_tokens + done].tolist()
    return Decoded(output, steps, margin.closest if margin else math.inf)


Chooser = Callable[[Tensor, int], int]  # confidences from high to low, number of the step -> how many to commit


def _decode_block(
    model: PlainModel,
    ids: Tensor,
    block: tuple[int, int],
    prompt_tokens: int,
    cache: CacheMode,
    choose: Chooser,
    margin: "_Margin | None",
) -> list[Step]:
    start, end = block
    steps: list[Step] = []
    kept: KeysValues | None = None
    while (ids[start:end] == model.mask_id).any():
        began = time.perf_counter()
        if kept is None:
            first, last = 0, len(ids)
        else:
            first, last = start, end if cache == "dual" else len(ids)
        logits, keys_values = model(ids[first:last], first, kept)
        if kept is None and cache != "none":
            kept_rows = len(ids) if cache == "dual" else start
            kept = [(key[:, :, :kept_rows], value[:, :, :kept_rows]) for key, value in keys_values]
        logits[:, model.mask_id] = -torch.inf
        token = logits.argmax(-1)
        confidence = logits.double().softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
        position = torch.arange(first, last)
        open_to_choice = (ids[first:last] == model.mask_id) & (position < end)
        ranked, order = torch.where(open_to_choice, confidence, -torch.inf).sort(descending=True, stable=True)
        ranked = ranked[: int(open_to_choice.sum())]
        count = choose(ranked, len(steps))
        rows = order[:count].sort().values
        ids[first + rows] = token[rows]
        if margin is not None:
            margin.note(logits[rows], ranked, count)
        commits = [
            Committed(first + row - prompt_tokens, token_id, value)
            for row, token_id, value in zip(rows.tolist(), token[rows].tolist(), confidence[rows].tolist(), strict=True)
        ]
        steps.append(Step(last - first, commits, time.perf_counter() - began))
    return steps


def _chooser(choice: Choice, num_masks: int, num_blocks: int) -> Chooser:
    match choice:
        case Threshold(value):
            return lambda ranked, _: max(1, int((ranked >= value).sum()))
        case Factor(value):
            return lambda ranked, _: _count_by_factor(ranked.tolist(), value)
        case FixedSchedule(steps):
            whole, rest = divmod(num_masks, steps // num_blocks)
            return lambda _, step: whole + (1 if step < rest else 0)


def _count_by_factor(ranked: list[float], factor: float) -> int:
    """Ranks before the first (from the second on) that misses its bound; the last one's miss does not count."""
    for rank in range(2, len(ranked)):
        if ranked[rank - 1] < 1.0 - factor / (rank + 1):
            return rank - 1
    return len(ranked)


class _Margin:
    """How close the closest decision was: between the two best logits of a committed token, between the confidences
    of the last place and the first that missed it, between a confidence and the threshold.

    The bounds of Factor are left out.
    """

    def __init__(self, choice: Choice) -> None:
        self.threshold = choice.value if isinstance(choice, Threshold) else None
        self.closest = math.inf

    def note(self, committed_logits: Tensor, ranked: Tensor, count: int) -> None:
        best, second = committed_logits.topk(2, dim=-1).values.unbind(-1)
        gaps = [best.sub(second).double()]
        if count < len(ranked):
            gaps.append(ranked[count - 1 : count] - ranked[count : count + 1])
        if self.threshold is not None:
            gaps.append((ranked - self.threshold).abs())
        self.closest = min(self.closest, float(torch.cat(gaps).min()))
