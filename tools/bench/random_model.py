"""Models of any size with random weights, in Hugging Face folders: for measurements, where only shapes count."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.denoiser.models import ARCHITECTURES
from services.denoiser.models.spec import DecoderSpec, all_parts
from services.denoiser.parallel import Alone
from services.denoiser.weights import Part


class Gains(msgspec.Struct, frozen=True, kw_only=True):
    """How large weights are. A matrix's standard deviation is its gain / sqrt(columns): at 1 it keeps the scale."""

    sharpness: float = 1.5  # of query and key: masks look all alike, only what they attend to tells one from another
    head: float = 16.0  # is the standard deviation of the logits, and so decides how sure the model is
    rest: float = 0.8

    def std(self, spec: DecoderSpec, part: Part) -> float:
        """Standard deviation of a tensor's entries; the embedding's is 1."""
        names, module = spec.names, part.name.removesuffix(".weight")
        if module == names.embedding:
            return 1.0
        if len(part.whole_shape) == 1:
            return 0.1
        sharp = any(
            module == name.format(layer) for name in (names.query, names.key) for layer in range(spec.num_layers)
        )
        gain = self.head if module == names.head else self.sharpness if sharp else self.rest
        return gain / math.sqrt(part.whole_shape[1])


def llada_config(
    *, width: int, num_layers: int, num_heads: int, mlp_width: int, vocab_size: int, max_positions: int
) -> dict[str, Any]:
    """A config.json: the last token is the mask, the one before it EOS."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": width,
        "n_layers": num_layers,
        "n_heads": num_heads,
        "n_kv_heads": num_heads,
        "mlp_hidden_size": mlp_width,
        "vocab_size": vocab_size,
        "embedding_size": vocab_size,
        "max_sequence_length": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "weight_tying": False,
        "mask_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 2,
    }


def random_tensors(
    config: Mapping[str, Any], seed: int, std: Callable[[DecoderSpec, Part], float]
) -> dict[str, Tensor]:
    """Normal weights for a config.json, by checkpoint name: norms around 1, all else around 0.

    Any known architecture will do; the same seed gives the same weights.
    """
    generator = torch.Generator().manual_seed(seed)
    (architecture,) = config["architectures"]
    spec = ARCHITECTURES[architecture](architecture, dict(config), {})
    made = {}
    for part in all_parts(spec, spec.share(Alone())):
        tensor = torch.randn(part.whole_shape, generator=generator).mul_(std(spec, part))
        is_norm = len(part.whole_shape) == 1 and part.name.endswith(".weight")
        made[part.name] = tensor.add_(1.0) if is_norm else tensor
    return made


def write_model(folder: Path, config: Mapping[str, Any], *, seed: int = 0, gains: Gains | None = None) -> Path:
    """Write such a model into a new folder, in float32, and return that."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(random_tensors(config, seed, (gains or Gains()).std), folder / "model.safetensors")
    return folder
