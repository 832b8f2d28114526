"""Folders are loaded whole, or refused with the file, the name and the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.denoiser.attention import PackedAttention
from services.denoiser.kv_pool import KVPool
from services.denoiser.loader import load_model
from services.denoiser.models import Batch, Model
from tests.unit.denoiser import random_model

IDS = torch.tensor([3, 9, 12, random_model.MASK_ID, 30, random_model.MASK_ID])


def logits_of(model: Model) -> torch.Tensor:
    shape, rows = model.shape, torch.arange(len(IDS))
    pool = KVPool(
        capacity=len(IDS),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=model.dtype,
        device=model.device,
    )
    pool.allocate("canvas", len(IDS))
    return model.logits(
        model.hidden(
            Batch(
                token_ids_T=IDS,
                slots_T=rows,
                rotary_T=model.rotary([(0, len(rows))]),
                row_counts=[len(IDS)],
                wanted_M=rows[3:],
                wanted_counts=[3],
                attention=PackedAttention(pool, ["canvas"]),
            )
        )
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_model.write(tmp_path / "model", n_kv_heads=2)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_shape_is_read_from_the_config(folder: Path) -> None:
    shape = load_model(folder).shape
    assert (shape.architecture, shape.vocab_size, shape.num_layers) == ("LLaDAModelLM", 64, 2)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.max_positions) == (4, 2, 8, 160)
    assert (shape.mask_id, shape.eos_ids) == (random_model.MASK_ID, tuple(random_model.EOS_IDS))


def test_shards_make_the_same_model(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((folder / "config.json").read_text())
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, sharded / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(logits_of(load_model(sharded)), logits_of(load_model(folder)))

    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_model(sharded)


def test_bfloat16_agrees_with_float32(folder: Path) -> None:
    full, half = load_model(folder), load_model(folder, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    expected, found = logits_of(full), logits_of(half).float()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_extra_tensors_are_of_no_concern(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.extra": torch.zeros(3)}))
    load_model(folder)


@pytest.mark.parametrize(
    "name",
    ["model.transformer.blocks.1.up_proj.weight", "model.transformer.ff_out.weight", "model.transformer.wte.weight"],
)
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        load_model(folder)


def test_a_wrong_shape_is_told_with_both_shapes(folder: Path) -> None:
    name = "model.transformer.blocks.0.k_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(32, 32)}))
    with pytest.raises(ValueError, match=rf"{name} has shape \[32, 32\], config.json says \[16, 32\]"):
        load_model(folder)


def test_quantised_weights_are_refused(folder: Path) -> None:
    name = "model.transformer.blocks.0.k_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(16, 32, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=f"{name} is I8; quantised"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"\['GPT2LMHeadModel'\], known are \['DreamModel', 'LLaDAModelLM'"),
        ({"architectures": None}, "architectures = None"),
        ({"alibi": True}, "alibi = True is not supported"),
        ({"include_bias": True}, "include_bias = True"),
        ({"activation_type": "gelu"}, "activation_type = 'gelu' is not supported, only 'silu'"),
        ({"n_heads": 5}, "n_heads = 5 must divide d_model = 32"),
        ({"n_kv_heads": 3}, "multiple of n_kv_heads = 3"),
        ({"d_model": "wide"}, "d_model"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": 64}, "mask_token_id = 64"),
        ({"eos_token_id": [5, 64]}, "eos_token_id"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], text: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=text):
        load_model(folder)


def test_broken_folders_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype = 'int8' is not one of"):
        load_model(folder, dtype="int8")
    (folder / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(ValueError, match="no safetensors file"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no JSON object"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_model(folder)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd"])
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, shard: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match="outside of the folder"):
        load_model(folder)
