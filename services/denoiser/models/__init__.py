"""The architectures that can be loaded, by the name that config.json gives under `architectures`."""

from collections.abc import Callable
from typing import Any, TypeAlias

from services.denoiser.models.base import Batch, Model, ModelShape
from services.denoiser.models.dream import dream_spec
from services.denoiser.models.llada import llada_spec
from services.denoiser.models.spec import DecoderSpec

# From the architecture's name, config.json and generation_config.json (empty where there is none).
SpecReader: TypeAlias = Callable[[str, dict[str, Any], dict[str, Any]], DecoderSpec]

ARCHITECTURES: dict[str, SpecReader] = {"LLaDAModelLM": llada_spec, "DreamModel": dream_spec}

__all__ = ["ARCHITECTURES", "Batch", "Model", "ModelShape", "SpecReader"]
