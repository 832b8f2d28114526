"""Small LLaDA and Dream folders with random weights, whose confidences are spread over 0 to 1."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from services.denoiser.models.spec import DecoderSpec
from services.denoiser.weights import Part
from tools.bench.random_model import random_tensors

MASK_ID = 7
EOS_IDS = [5, 17, 23, 40]  # several, so that random models come upon one


LLADA_NAMES = {
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "layers": "n_layers",
    "width": "d_model",
    "mlp": "mlp_hidden_size",
    "vocab": "embedding_size",
    "tied": "weight_tying",
}
DREAM_NAMES = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "mlp": "intermediate_size",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
}


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


def dream_config(**changes: Any) -> dict[str, Any]:
    """A config.json of the other architecture."""
    return {
        "architectures": ["DreamModel"],
        "eos_token_id": EOS_IDS,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "mask_token_id": MASK_ID,
        "max_position_embeddings": 160,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 64,
    } | changes


def std(spec: DecoderSpec, part: Part) -> float:
    """Standard deviation of a tensor's entries."""
    if len(part.whole_shape) == 1:
        return 0.3 if part.name.endswith(".bias") else 0.1
    return {spec.names.embedding: 1.0, spec.names.head: 0.6}.get(part.name.removesuffix(".weight"), 0.25)


def write(folder: Path, *, seed: int = 0, dream: bool = False, **changes: Any) -> Path:
    """Write such a model into a new folder."""
    folder.mkdir(parents=True)
    made = (dream_config if dream else config)(**changes)
    (folder / "config.json").write_text(json.dumps(made))
    save_file(random_tensors(made, seed, std), folder / "model.safetensors")
    return folder
