"""Reads tensors out of a Hugging Face folder, each checked against the shape that the model expects.

Files are memory mapped: a rank reads the rows or columns that are its share and nothing else, when they are taken,
straight to their place, in their final dtype.
"""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors call them
_ALL = slice(None)
_LFS_POINTER = b"version https://git-lfs"


class Part(NamedTuple):
    """One rank's part of a tensor: some of its rows, or some of its columns."""

    name: str
    whole_shape: tuple[int, ...]
    rows: slice = _ALL
    columns: slice = _ALL

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        slices = (self.rows, self.columns)
        return tuple(len(range(*part.indices(size))) for part, size in zip(slices, self.whole_shape, strict=False))


class Weights:
    """The tensors of a checkpoint, sharded or not. Raises ValueError, naming the file, where one cannot be read."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self.folder, self.device, self.dtype = folder, device, dtype
        self._stack = contextlib.ExitStack()
        self._handles = {name: self._open(folder / name) for name in sorted(set(_shards(folder)))}
        self._file_of = {tensor: name for name, handle in self._handles.items() for tensor in _names(handle)}

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, parts: Iterable[Part]) -> None:
        """Raises ValueError if a tensor is missing, has another shape than expected or is quantised."""
        parts = list(parts)
        if missing := [part.name for part in parts if part.name not in self._file_of]:
            others = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise ValueError(f"{self.folder}: tensor {missing[0]} is missing{others}")
        for part in parts:
            tensor = self._slice(part.name)
            found = tuple(tensor.get_shape())
            if found != part.whole_shape:
                raise ValueError(
                    f"{self.folder}: tensor {part.name} has shape {list(found)}, "
                    f"config.json says {list(part.whole_shape)}"
                )
            if (dtype := tensor.get_dtype()) not in _PLAIN_DTYPES:
                raise ValueError(
                    f"{self.folder}: tensor {part.name} is {dtype}; quantised checkpoints are not supported, "
                    f"only {', '.join(_PLAIN_DTYPES)}"
                )

    def stack(self, parts: Sequence[Part]) -> Tensor:
        """Parts that passed `check` as one tensor, along their first dimension: nothing is held twice."""
        num_rows = sum(part.shape[0] for part in parts)
        fused = torch.empty((num_rows, *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        row = 0
        for part in parts:
            end = row + part.shape[0]
            slices = (part.rows, part.columns)[: len(part.whole_shape)]
            fused[row:end].copy_(self._slice(part.name)[slices])
            row = end
        return fused

    def _slice(self, name: str) -> Any:
        return self._handles[self._file_of[name]].get_slice(name)

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        try:
            with path.open("rb") as file:
                if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                    raise ValueError(f"{path} is a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file, or only a part of one: {error}") from error
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error


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
