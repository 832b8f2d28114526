"""A second implementation of the decoding rules: one request, float64, nothing clever.

It shares no code with the engine. `decode` also says how close its closest decision was, so that tests can leave out
what float32 may decide either way.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from services.denoiser.engine import Factor, Job, Threshold

Cache = list[tuple[Tensor, Tensor]]  # keys (turned) and values of all positions, one pair a layer


@dataclass
class Step:
    kind: str
    block: int
    commits: dict[int, int]  # position in the output area -> token
    confidences: dict[int, float]


@dataclass
class Decoded:
    steps: list[Step] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    finished: str = ""
    margin: float = math.inf

    def note_gap(self, a: float, b: float) -> None:
        self.margin = min(self.margin, abs(a - b))


# What the two checkpoints call the same things.
SETTINGS = {
    "LLaDAModelLM": {
        "layers": "n_layers",
        "heads": "n_heads",
        "kv_heads": "n_kv_heads",
        "tied": "weight_tying",
        "embedding": "model.transformer.wte.weight",
        "layer": "model.transformer.blocks.",
        "norm": "model.transformer.ln_f.weight",
        "head": "model.transformer.ff_out.weight",
    },
    "DreamModel": {
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "tied": "tie_word_embeddings",
        "embedding": "model.embed_tokens.weight",
        "layer": "model.layers.",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
}
LLADA_NAME = {
    "input_layernorm": "attn_norm",
    "o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "gate_proj": "ff_proj",
    "down_proj": "ff_out",
}


class OracleModel:
    """LLaDA and Dream as their descriptions say, in float64."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.names = SETTINGS[self.config["architectures"][0]]
        self.shifted = self.config["architectures"] == ["DreamModel"]
        self.tensors = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        self.heads, self.kv_heads = self.setting("heads"), self.setting("kv_heads")
        self.layers = [self.layer(index) for index in range(self.setting("layers"))]

    def setting(self, name: str) -> int:
        value: int = self.config[self.names[name]]
        return value

    def layer(self, index: int) -> dict[str, Tensor]:
        """Its tensors by LLaDA's names; `q_proj.bias` where there is one."""
        found = {}
        for name, tensor in self.tensors.items():
            if name.startswith(f"{self.names['layer']}{index}."):
                module, kind = name.split(".")[-2:]
                module = LLADA_NAME.get(module, module)
                found[module if kind == "weight" else f"{module}.bias"] = tensor
        return found

    def forward(self, ids: list[int], start: int, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Logits of all rows, and all K/V: those of `cache` with positions `start`... replaced by the rows' own."""
        positions = torch.arange(start, start + len(ids))
        x = self.tensors[self.names["embedding"]][ids]
        new_cache: Cache = []
        for index, w in enumerate(self.layers):
            h = self.norm(x, w["attn_norm"])
            q, k, v = (h @ w[name].T + w.get(f"{name}.bias", 0.0) for name in ("q_proj", "k_proj", "v_proj"))
            q = self.turn(q.view(len(ids), self.heads, -1), positions)
            k = self.turn(k.view(len(ids), self.kv_heads, -1), positions)
            v = v.view(len(ids), self.kv_heads, -1)
            if cache is not None:
                old_k, old_v = cache[index]
                end = start + len(ids)
                k = torch.cat((old_k[:start], k, old_k[end:]))
                v = torch.cat((old_v[:start], v, old_v[end:]))
            new_cache.append((k, v))
            group = self.heads // self.kv_heads
            heads = []
            for number in range(self.heads):
                scores = q[:, number] @ k[:, number // group].T / math.sqrt(q.shape[-1])
                heads.append(scores.softmax(-1) @ v[:, number // group])
            x = x + torch.cat(heads, -1) @ w["attn_out"].T
            h = self.norm(x, w["ff_norm"])
            x = x + (torch.nn.functional.silu(h @ w["ff_proj"].T) * (h @ w["up_proj"].T)) @ w["ff_out"].T
        head = self.tensors[self.names["embedding" if self.setting("tied") else "head"]]
        return self.norm(x, self.tensors[self.names["norm"]]) @ head.T, new_cache

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        root: Tensor = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / root * weight

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequency = torch.tensor([self.config["rope_theta"] ** (-i / half) for i in range(half)], dtype=torch.float64)
        angle = positions.double().unsqueeze(-1) * frequency
        cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def decode(model: OracleModel, job: Job) -> Decoded:
    """Decode one request to its end."""
    mask, eos = model.config["mask_token_id"], set(model.config["eos_token_id"])
    P, B = len(job.prompt_ids), job.block_size
    blocks = math.ceil(job.max_tokens / B)
    x = job.prompt_ids + job.committed_ids + [mask] * (blocks * B - len(job.committed_ids))
    result = Decoded()
    for block in range(len(job.committed_ids) // B, blocks):
        s, e = P + block * B, P + (block + 1) * B
        seen = len(x) if job.blocks_ahead is None else min(len(x), e + job.blocks_ahead * B)
        cache: Cache | None = None
        masks_at_start, step = 0, 0
        while eligible := eligible_positions(x, s, min(e, P + job.max_tokens), mask, set() if job.ignore_eos else eos):
            masks_at_start = masks_at_start or len(eligible)
            kind = "recompute" if step == 0 or job.cache == "none" else "cache"
            if kind == "recompute":
                start, (logits, cache) = 0, model.forward(x[:seen], 0, None)
            else:
                start, end = s, e if job.cache == "dual" else seen
                logits, cache = model.forward(x[start:end], start, cache)
            # Shifted, the rows of the later steps of a block do not predict its first position.
            first_alone = model.shifted and step == 0 and job.cache != "none"
            if first_alone:
                eligible = eligible[:1]
            tokens, confidences = {}, {}
            for p in eligible:
                row = max(p - 1, 0) if model.shifted else p
                tokens[p], confidences[p] = token_and_confidence(
                    logits[row - start].clone(), mask, job, p, step, result
                )
            chosen = (
                eligible if first_alone else choose(job, eligible, confidences, masks_at_start, blocks, step, result)
            )
            for p in chosen:
                x[p] = tokens[p]
            result.steps.append(
                Step(kind, block, {p - P: tokens[p] for p in chosen}, {p - P: confidences[p] for p in chosen})
            )
            step += 1
        output = x[P : min(e, P + job.max_tokens)]
        first_eos = next((i for i, token in enumerate(output) if token in eos), None)
        if first_eos is not None and not job.ignore_eos:
            result.output, result.finished = output[:first_eos], "eos"
            return result
        result.output, result.finished = output, "length"
    return result


def eligible_positions(x: list[int], start: int, end: int, mask: int, eos: set[int]) -> list[int]:
    eligible = []
    for p in range(start, end):
        if x[p] in eos:
            break
        if x[p] == mask:
            eligible.append(p)
    return eligible


def token_and_confidence(row: Tensor, mask: int, job: Job, p: int, step: int, result: Decoded) -> tuple[int, float]:
    row[mask] = -math.inf
    noisy = row.tolist()
    if job.temperature > 0:
        noisy = [
            logit - job.temperature * math.log(-math.log(uniform(job.seed, p, step, token)))
            for token, logit in enumerate(noisy)
        ]
    token = max(range(len(noisy)), key=lambda i: noisy[i])
    result.note_gap(noisy[token], sorted(noisy)[-2])
    return token, float(row.softmax(-1)[token])


def choose(
    job: Job, eligible: list[int], conf: dict[int, float], masks: int, blocks: int, step: int, result: Decoded
) -> list[int]:
    order = sorted(eligible, key=lambda p: (-conf[p], p))
    ranked = [conf[p] for p in order]
    if isinstance(job.choice, Threshold):
        for c in ranked:
            result.note_gap(c, job.choice.value)
        count = max(1, sum(c >= job.choice.value for c in ranked))
    elif isinstance(job.choice, Factor):
        count = factor_count(ranked, job.choice.value, result)
    else:
        steps_per_block = job.choice.steps // blocks
        count = masks // steps_per_block + (1 if step < masks % steps_per_block else 0)
    if count < len(ranked):
        result.note_gap(ranked[count - 1], ranked[count])
    return sorted(order[:count])


def factor_count(ranked: list[float], factor: float, result: Decoded) -> int:
    for k in range(2, len(ranked)):  # ranks from 1; the first always passes, the last decides nothing
        bound = 1 - factor / (k + 1)
        result.note_gap(ranked[k - 1], bound)
        if ranked[k - 1] < bound:
            return k - 1
    return len(ranked)


def uniform(seed: int, position: int, step: int, token: int) -> float:
    """The sampling noise as its definition says, in plain integers."""
    word = 1 << 64

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % word
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((seed % word + golden) % word)
    key = mix(((key ^ position) + golden) % word)
    key = mix(((key ^ step) + golden) % word)
    return ((mix((key + (token + 1) * golden) % word) >> 12) + 0.5) / 2**52
