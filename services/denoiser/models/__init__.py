"""The architectures that can be loaded, by the name that config.json gives under `architectures`."""

from collections.abc import Callable
from typing import Any, TypeAlias

from services.denoiser.models.base import Batch, Model, ModelShape
from services.denoiser.models.llada import LladaModel
from services.denoiser.weights import Weights

Builder: TypeAlias = Callable[[str, dict[str, Any], Weights], Model]

ARCHITECTURES: dict[str, Builder] = {"LLaDAModelLM": LladaModel}

__all__ = ["ARCHITECTURES", "Batch", "Builder", "Model", "ModelShape"]
