"""Loads a model from its Hugging Face folder: config.json and (sharded) safetensors."""

from pathlib import Path
from typing import Any

import msgspec
import torch

from services.denoiser.host_memory import keep_freed_memory
from services.denoiser.models import ARCHITECTURES, Model
from services.denoiser.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(folder: str | Path, *, device: str | torch.device = "cpu", dtype: str = "float32") -> Model:
    """Load the model in `folder`, with all its weights as `dtype` on `device`.

    Raises ValueError, naming file and reason, for an unknown architecture or dtype, a setting in config.json that is
    not supported, and a file or tensor that is missing or does not fit. On the CPU it also has the process keep freed
    memory (see host_memory.py).
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r} is not one of {sorted(DTYPES)}")
    folder = Path(folder)
    config = read_config(folder)
    architecture = _architecture(folder, config)
    device = torch.device(device)
    if device.type == "cpu":
        keep_freed_memory()
    with Weights(folder, device=device, dtype=DTYPES[dtype]) as weights:
        return ARCHITECTURES[architecture](architecture, config, weights)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ValueError if it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no JSON object: {error}") from error


def _architecture(folder: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures")
    known = [name for name in names if name in ARCHITECTURES] if isinstance(names, list) else []
    if not known:
        raise ValueError(f"{folder / 'config.json'}: architectures = {names!r}, known are {sorted(ARCHITECTURES)}")
    return str(known[0])
