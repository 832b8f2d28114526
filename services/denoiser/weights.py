"""Reads tensors out of a Hugging Face folder, each checked against the shape that the model expects.

Files are memory mapped: a tensor is read when it is taken, straight to its place, in its final dtype. This is also the
seam for tensor parallelism: a rank would take its rows or columns here and read nothing else.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Weights:
    """The tensors of a checkpoint, sharded or not."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self.folder, self.device, self.dtype = folder, device, dtype
        self._stack = contextlib.ExitStack()
        self._handles = {name: self._open(folder / name) for name in sorted(set(_shards(folder)))}
        self._file_of = {tensor: name for name, handle in self._handles.items() for tensor in _names(handle)}

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor. Raises ValueError if it is missing or has another shape."""
        return self.stack({name: shape})

    def stack(self, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
        """Several tensors as one, along their first dimension; views of one buffer, so nothing is held twice."""
        num_rows = sum(shape[0] for shape in shapes.values())
        tail = next(iter(shapes.values()))[1:]
        fused = torch.empty((num_rows, *tail), dtype=self.dtype, device=self.device)
        row = 0
        for name, shape in shapes.items():
            fused[row : row + shape[0]].copy_(self._read(name, shape))
            row += shape[0]
        return fused

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._file_of:
            raise ValueError(f"{self.folder}: tensor {name} is missing")
        handle = self._handles[self._file_of[name]]
        found = tuple(handle.get_slice(name).get_shape())
        if found != shape:
            raise ValueError(f"{self.folder}: tensor {name} has shape {list(found)}, config.json says {list(shape)}")
        tensor: Tensor = handle.get_tensor(name)
        if not tensor.is_floating_point():
            raise ValueError(f"{self.folder}: tensor {name} is {tensor.dtype}; quantised checkpoints are not supported")
        return tensor

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error


def _names(handle: Any) -> list[str]:
    names: list[str] = list(handle.keys())
    return names


def _shards(folder: Path) -> list[str]:
    index = folder / INDEX_NAME
    if not index.is_file():
        return [SINGLE_NAME]
    try:
        names = list(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except msgspec.DecodeError as error:
        raise ValueError(f"{index} is no index of shards: {error}") from error
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: shard {name!r} lies outside of the folder")
    return names


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
