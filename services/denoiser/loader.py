"""Loads a model, or one rank's share of it, from its Hugging Face folder: config.json and (sharded) safetensors."""

from pathlib import Path
from typing import Any

import msgspec
import torch

from services.denoiser.host_memory import available_bytes, keep_freed_memory
from services.denoiser.kernels import FP8, KernelsName, Quantization, choose_kernels
from services.denoiser.linears import LEAST_GAIN, bfloat16_gain
from services.denoiser.models import ARCHITECTURES, Model
from services.denoiser.models.decoder import Decoder
from services.denoiser.models.spec import DecoderSpec, Share, all_parts, linear_parts, needed_bytes
from services.denoiser.parallel import Alone, Ranks
from services.denoiser.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALONE = Alone()


def choose_dtype(wanted: str, device: str) -> str:
    """The number format for `auto`: on a GPU bfloat16, on a processor what it multiplies faster."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device == "cuda" or bfloat16_gain() > LEAST_GAIN else "float32"


def load_model(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    ranks: Ranks = ALONE,
    kernels: KernelsName = "auto",
    quantization: Quantization = "",
) -> Model:
    """Load this rank's share of the model in `folder`, with all its weights as `dtype` on `device`.

    Raises ValueError, naming file and reason, for an unknown architecture or dtype, a setting in config.json that is
    not supported, a model that so many ranks cannot share, kernels that this machine cannot run, a file or tensor that
    is missing or does not fit, and too little memory; all that before anything large is taken. On the CPU it also has
    the process keep freed memory (see host_memory.py).
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r} is not one of {sorted(DTYPES)}")
    folder, device = Path(folder), torch.device(device)
    spec = read_spec(folder)
    share = spec.share(ranks)
    chosen = choose_kernels(kernels, device, DTYPES[dtype], quantization)
    with Weights(folder, device=device, dtype=DTYPES[dtype]) as weights:
        weights.check(all_parts(spec, share))
        _check_memory(folder, _loaded_bytes(spec, share, weights.dtype, quantization), device)
        if device.type == "cpu":
            keep_freed_memory()
        return Decoder(spec, ranks, weights, chosen)


def read_spec(folder: Path) -> DecoderSpec:
    """What model the folder holds. Raises ValueError, naming what is not known or not supported."""
    config = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    if config.get("quantization_config") is not None:
        raise ValueError(f"{folder}: config.json: quantization_config is set; quantised checkpoints are not supported")
    architecture = _architecture(folder, config)
    try:
        return ARCHITECTURES[architecture](architecture, config, generation)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ValueError(f"{path} is missing" if not path.exists() else f"{path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no JSON object: {error}") from error


def _architecture(folder: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures")
    known = [name for name in names if name in ARCHITECTURES] if isinstance(names, list) else []
    if not known:
        raise ValueError(f"{folder / 'config.json'}: architectures = {names!r}, known are {sorted(ARCHITECTURES)}")
    return str(known[0])


def _loaded_bytes(spec: DecoderSpec, share: Share, dtype: torch.dtype, quantization: Quantization) -> int:
    loaded = needed_bytes(all_parts(spec, share), dtype)
    if quantization:
        matrices = list(linear_parts(spec, share))
        loaded += needed_bytes(matrices, FP8) - needed_bytes(matrices, dtype)
    return loaded


def _check_memory(folder: Path, needed: int, device: torch.device) -> None:
    available = available_bytes(device)
    if available is not None and needed > available:
        raise ValueError(
            f"{folder}: the weights take {needed / 2**30:.2f} GiB on {device}, where {available / 2**30:.2f} GiB are "
            "available: bfloat16 halves float32, and more ranks share the rest"
        )
