"""Small LLaDA folders with random weights, whose confidences are spread over 0 to 1."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MASK_ID = 7
EOS_IDS = [5, 17, 23, 40]  # several, so that random models come upon one


def config(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    return {
        "architectures": ["LLaDAModelLM"],
        "activation_type": "silu",
        "block_type": "llama",
        "d_model": 32,
        "embedding_size": 64,
        "eos_token_id": EOS_IDS,
        "layer_norm_type": "rms",
        "mask_token_id": MASK_ID,
        "max_sequence_length": 160,
        "mlp_hidden_size": 48,
        "n_heads": 4,
        "n_kv_heads": 4,
        "n_layers": 2,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 10000.0,
        "vocab_size": 64,
        "weight_tying": False,
    } | changes


def tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Random weights for it, by checkpoint name."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, std: float = 0.25) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    def norm() -> Tensor:
        return 1.0 + 0.1 * torch.randn(d, generator=generator)

    d, F, V = config["d_model"], config["mlp_hidden_size"], config["vocab_size"]
    key_width = d // config["n_heads"] * config["n_kv_heads"]
    made = {"model.transformer.wte.weight": matrix(V, d, 1.0), "model.transformer.ln_f.weight": norm()}
    if not config["weight_tying"]:
        made["model.transformer.ff_out.weight"] = matrix(V, d, 0.6)
    for index in range(config["n_layers"]):
        layer = {
            "attn_norm": norm(),
            "q_proj": matrix(d, d),
            "k_proj": matrix(key_width, d),
            "v_proj": matrix(key_width, d),
            "attn_out": matrix(d, d),
            "ff_norm": norm(),
            "ff_proj": matrix(F, d),
            "up_proj": matrix(F, d),
            "ff_out": matrix(d, F),
        }
        made |= {f"model.transformer.blocks.{index}.{name}.weight": tensor for name, tensor in layer.items()}
    return made


def write(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write such a model into a new folder."""
    folder.mkdir(parents=True)
    made = config(**changes)
    (folder / "config.json").write_text(json.dumps(made))
    save_file(tensors(made, seed), folder / "model.safetensors")
    return folder
