"""Write the trained model as a folder in Hugging Face form, with LLaDA's config keys and tensor names."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_model.config import ModelConfig
from tools.tiny_model.tokenizer import save_tokenizer

EXPORT_DTYPE = torch.bfloat16
_PREFIX = "model.transformer."


def export_model(folder: Path, config: ModelConfig, state: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write config.json, generation_config.json, model.safetensors (bfloat16) and the tokenizer's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{_PREFIX}{name}": value.to(EXPORT_DTYPE).contiguous() for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", llada_config(config))
    _write_json(folder / "generation_config.json", generation_config(config))
    save_tokenizer(tokenizer, folder, config.max_sequence_length)


def load_exported(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The state of a model that `export_model` wrote, in float32; ValueError if its shape is another."""
    if json.loads((folder / "config.json").read_text()) != llada_config(config):
        raise ValueError(f"model folder {folder}: its config.json is not that of this recipe")
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(_PREFIX): tensor.float() for name, tensor in tensors.items()}


def llada_config(config: ModelConfig) -> dict[str, object]:
    """The content of config.json, key by key as LLaDA-8B has it."""
    return {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "bos_token_id": config.bos_token_id,
        "d_model": config.d_model,
        "embedding_dropout": 0.0,
        "embedding_size": config.vocab_size,
        "eos_token_id": config.eos_token_id,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": config.mask_token_id,
        "max_sequence_length": config.max_sequence_length,
        "mlp_hidden_size": config.mlp_hidden_size,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_heads,
        "n_layers": config.n_layers,
        "pad_token_id": config.eos_token_id,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": config.rope_theta,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": config.vocab_size,
        "weight_tying": False,
    }


def generation_config(config: ModelConfig) -> dict[str, object]:
    """The content of generation_config.json."""
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.eos_token_id,
        "temperature": 0.0,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
