"""A decoder as data: its numbers, what its checkpoint calls things, and which part of each tensor a rank holds. Pure.

Over several ranks (tensor parallelism) attention heads, MLP columns and the vocabulary are divided evenly, in order.
Key heads are too, unless there are fewer of them than ranks: then as many ranks as share one each hold it.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import torch

from services.denoiser.parallel import Ranks
from services.denoiser.weights import Part

Fields = TypeVar("Fields", bound=msgspec.Struct)
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
EosIds: TypeAlias = int | list[int] | None


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint calls things. Modules come without ".weight", and with {} for the number of the layer."""

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    query: str
    key: str
    value: str
    attention_out: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    # in config.json
    num_heads: str
    num_kv_heads: str
    mlp_width: str
    vocab_size: str


class Share(NamedTuple):
    """What one rank holds."""

    heads: slice
    kv_heads: slice
    mlp: slice  # columns
    vocab: slice  # token ids


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that tells one model from another."""

    architecture: str
    names: Names
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    max_positions: int
    mask_id: int
    eos_ids: tuple[int, ...]
    norm_eps: float
    rope_theta: float
    tied: bool  # the head is the embedding
    qkv_bias: bool
    shifted: bool  # row p predicts position p + 1
    rotary_in_dtype: bool  # sines and cosines are rounded to the activations' dtype

    def __post_init__(self) -> None:
        names = self.names
        if self.head_dim % 2:
            raise ValueError(f"config.json: heads of {self.head_dim} numbers cannot be turned in pairs")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: {names.num_heads} = {self.num_heads} must be a multiple of "
                f"{names.num_kv_heads} = {self.num_kv_heads}"
            )
        for token_id in (self.mask_id, *self.eos_ids):
            if not 0 <= token_id < self.vocab_size:
                what = "mask_token_id" if token_id == self.mask_id else "eos_token_id"
                raise ValueError(f"config.json: {what} = {token_id} is not among the {self.vocab_size} tokens")

    def share(self, ranks: Ranks) -> Share:
        """What this rank holds. Raises ValueError if the model cannot be divided over so many."""
        rank, size = ranks.rank, ranks.size
        if undivided := self._undivided(size):
            raise ValueError(
                f"tensor parallelism over {size} ranks does not divide {undivided}; "
                f"degrees that fit this model: {', '.join(map(str, self.degrees()))}"
            )
        kv_parts = min(self.num_kv_heads, size)
        return Share(
            heads=_part(self.num_heads, rank, size),
            kv_heads=_part(self.num_kv_heads, rank * kv_parts // size, kv_parts),
            mlp=_part(self.mlp_width, rank, size),
            vocab=_part(self.vocab_size, rank, size),
        )

    def degrees(self) -> list[int]:
        """The numbers of ranks over which it can be divided."""
        return [size for size in range(1, self.num_heads + 1) if not self._undivided(size)]

    def _undivided(self, size: int) -> str | None:
        names = self.names
        divided = (
            (names.num_heads, self.num_heads),
            (names.mlp_width, self.mlp_width),
            (names.vocab_size, self.vocab_size),
        )
        for name, total in divided:
            if total % size:
                return f"{name} = {total}"
        if self.num_kv_heads % size and size % self.num_kv_heads:
            return f"{names.num_kv_heads} = {self.num_kv_heads}, nor is it a multiple of that"
        return None


def outer_parts(spec: DecoderSpec, share: Share) -> dict[str, list[Part]]:
    """What a rank holds outside of the layers, each entry one tensor."""
    names, d, V = spec.names, spec.width, spec.vocab_size
    parts = {
        "embedding": [Part(f"{names.embedding}.weight", (V, d), rows=share.vocab)],
        "final_norm": [Part(f"{names.final_norm}.weight", (d,))],
    }
    if not spec.tied:
        parts["head"] = [Part(f"{names.head}.weight", (V, d), rows=share.vocab)]
    return parts


def layer_parts(spec: DecoderSpec, share: Share, index: int) -> dict[str, list[Part]]:
    """What a rank holds of a layer, each entry one tensor: query, key and value are one, and so are gate and up."""
    names, d, D, F = spec.names, spec.width, spec.head_dim, spec.mlp_width
    H, heads = spec.num_heads * D, _times(share.heads, D)
    K, kv_heads = spec.num_kv_heads * D, _times(share.kv_heads, D)
    qkv = ((names.query, H, heads), (names.key, K, kv_heads), (names.value, K, kv_heads))
    parts = {
        "attention_norm": [Part(f"{names.attention_norm}.weight", (d,))],
        "qkv": [Part(f"{name}.weight", (total, d), rows=rows) for name, total, rows in qkv],
        "attention_out": [Part(f"{names.attention_out}.weight", (d, H), columns=heads)],
        "mlp_norm": [Part(f"{names.mlp_norm}.weight", (d,))],
        "gate_up": [Part(f"{name}.weight", (F, d), rows=share.mlp) for name in (names.gate, names.up)],
        "down": [Part(f"{names.down}.weight", (d, F), columns=share.mlp)],
    }
    if spec.qkv_bias:
        parts["qkv_bias"] = [Part(f"{name}.bias", (total,), rows=rows) for name, total, rows in qkv]
    return {entry: [part._replace(name=part.name.format(index)) for part in of] for entry, of in parts.items()}


def all_parts(spec: DecoderSpec, share: Share) -> Iterator[Part]:
    """Every part that a rank reads."""
    for entries in (outer_parts(spec, share), *(layer_parts(spec, share, i) for i in range(spec.num_layers))):
        for parts in entries.values():
            yield from parts


def linear_parts(spec: DecoderSpec, share: Share) -> Iterator[Part]:
    """Every part of the layers' matrices: what can be quantised."""
    for index in range(spec.num_layers):
        entries = layer_parts(spec, share, index)
        for name in ("qkv", "attention_out", "gate_up", "down"):
            yield from entries[name]


def needed_bytes(parts: Iterable[Part], dtype: torch.dtype) -> int:
    """Memory that these parts take once they are loaded, all of it for as long as the model lives."""
    return sum(prod(part.shape) for part in parts) * dtype.itemsize


def read_fields(config: dict[str, Any], type_: type[Fields], supported: dict[str, tuple[Any, ...]]) -> Fields:
    """The fields of config.json that `type_` knows. Raises ValueError, naming one that is not as it must be.

    `supported` says of some fields which values are, the usual one first.
    """
    try:
        fields = msgspec.convert(config, type_)
    except msgspec.ValidationError as error:
        raise ValueError(f"config.json: {error}") from error
    for name, values in supported.items():
        if (value := getattr(fields, name)) not in values:
            raise ValueError(f"config.json: {name} = {value!r} is not supported, only {values[0]!r}")
    return fields


def eos_ids(config: EosIds, generation: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer: those of config.json, and those that generation_config.json adds."""
    found: list[int] = []
    for ids in (config, generation.get("eos_token_id")):
        found += ids if isinstance(ids, list) else [ids] if isinstance(ids, int) else []
    if not found:
        raise ValueError("config.json: eos_token_id is missing, and generation_config.json has none either")
    return tuple(dict.fromkeys(found))


def _part(total: int, rank: int, size: int) -> slice:
    part = total // size
    return slice(rank * part, (rank + 1) * part)


def _times(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)
