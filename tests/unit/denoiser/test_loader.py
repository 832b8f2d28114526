"""Folders are loaded whole, or refused with the file, the name and the reason."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.denoiser.attention import PackedAttention, Place
from services.denoiser.kv_pool import KVPool
from services.denoiser.loader import DTYPES, load_model, read_spec
from services.denoiser.models import Batch, Model
from services.denoiser.models.spec import all_parts, layer_parts, needed_bytes, outer_parts
from services.denoiser.weights import Part, Weights
from tests.unit.denoiser import random_model
from tests.unit.denoiser.thread_ranks import on_ranks

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
                rotary_T=model.rotary([(0, len(rows))]),
                row_counts=[len(IDS)],
                wanted_M=rows[3:],
                wanted_counts=[3],
                attention=PackedAttention(pool, [Place("canvas", (0, len(IDS)), len(IDS))]),
            )
        )
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_model.write(tmp_path / "model", n_kv_heads=2)


@pytest.fixture
def dream_folder(tmp_path: Path) -> Path:
    return random_model.write(tmp_path / "dream", dream=True)


class Rank:
    """One of several that never exchange anything."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("loading exchanges nothing")

    all_gather = all_reduce_


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


def test_dream_s_config_is_read_too(dream_folder: Path) -> None:
    shape = load_model(dream_folder).shape
    assert (shape.architecture, shape.vocab_size, shape.num_layers, shape.shifted) == ("DreamModel", 64, 2, True)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.max_positions) == (4, 2, 8, 160)
    assert (shape.mask_id, shape.eos_ids) == (random_model.MASK_ID, tuple(random_model.EOS_IDS))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (5, None, (5,)),
        (5, {"eos_token_id": 6, "mask_token_id": None}, (5, 6)),
        (5, {"eos_token_id": [6, 5]}, (5, 6)),
        (None, {"eos_token_id": 6}, (6,)),
        ([5, 6], {"temperature": 0.0}, (5, 6)),
    ],
)
def test_an_eos_of_either_config_ends_an_answer(
    dream_folder: Path, config: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    change_config(dream_folder, eos_token_id=config)
    if generation is not None:
        (dream_folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_model(dream_folder).shape.eos_ids == expected


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

    whole, part = load_file(folder / "model.safetensors"), read_share(sharded, 1, 2)
    assert torch.equal(part["0.down"], whole["model.transformer.blocks.0.ff_out.weight"][:, 24:])

    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_model(sharded)


def test_bfloat16_agrees_with_float32(folder: Path) -> None:
    full, half = load_model(folder), load_model(folder, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    expected, found = logits_of(full), logits_of(half).float()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def read_share(folder: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    """What a rank holds, layers by their number."""
    spec = read_spec(folder)
    share = spec.share(Rank(rank, size))
    entries = outer_parts(spec, share)
    for index in range(spec.num_layers):
        entries |= {f"{index}.{name}": parts for name, parts in layer_parts(spec, share, index).items()}
    with Weights(folder, device=torch.device("cpu"), dtype=torch.float32) as weights:
        return {name: weights.stack(parts) for name, parts in entries.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_shares_of_all_ranks_are_the_whole(dream_folder: Path, size: int) -> None:
    """4 query heads of 8, 2 key heads, 48 MLP columns, 64 token ids, over so many ranks."""
    whole = load_file(dream_folder / "model.safetensors")
    shares = [read_share(dream_folder, rank, size) for rank in range(size)]
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    kv_heads = min(2, size)  # in so many parts; four ranks hold each of the two heads twice
    rows = {"q": 32 // size, "k": 16 // kv_heads, "v": 16 // kv_heads}
    for kind, entry in (("weight", "1.qkv"), ("bias", "1.qkv_bias")):
        for rank, share in enumerate(shares):
            q, k, v = share[entry].split([rows["q"], rows["k"], rows["v"]])
            kv_rank = rank * kv_heads // size
            assert torch.equal(q, whole[f"{attention}q_proj.{kind}"].split(rows["q"])[rank])
            assert torch.equal(k, whole[f"{attention}k_proj.{kind}"].split(rows["k"])[kv_rank])
            assert torch.equal(v, whole[f"{attention}v_proj.{kind}"].split(rows["v"])[kv_rank])
    gates, ups = zip(*(share["1.gate_up"].chunk(2) for share in shares), strict=True)
    assert torch.equal(torch.cat(gates), whole[f"{mlp}gate_proj.weight"])
    assert torch.equal(torch.cat(ups), whole[f"{mlp}up_proj.weight"])
    for entry, name in (("1.attention_out", f"{attention}o_proj.weight"), ("1.down", f"{mlp}down_proj.weight")):
        assert torch.equal(torch.cat([share[entry] for share in shares], dim=1), whole[name])
    for entry, name in (("embedding", "model.embed_tokens.weight"), ("head", "lm_head.weight")):
        assert torch.equal(torch.cat([share[entry] for share in shares]), whole[name])
    for share in shares:
        assert torch.equal(share["final_norm"], whole["model.norm.weight"])


def resident_bytes(file_name: str) -> int:
    """Of the mappings of such a file in this process."""
    counted, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counted = line.endswith(file_name)
        elif counted and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="not Linux")
def test_a_rank_reads_its_rows_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"matrix": torch.ones(4096, 2048)}, path)
    with Weights(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16) as weights:
        weights.check([Part("matrix", (4096, 2048))])
        share = weights.stack([Part("matrix", (4096, 2048), rows=slice(1024, 2048))])
        quarter = path.stat().st_size // 4
        assert quarter <= resident_bytes(str(path)) < 2 * quarter  # more than a quarter: pages come in groups
    assert share.eq(1.0).all()


def test_a_rank_s_shape_counts_its_own_heads(dream_folder: Path) -> None:
    models = [load_model(dream_folder, ranks=Rank(rank, 4)) for rank in range(4)]
    assert [(m.shape.num_heads, m.shape.num_kv_heads, m.first_token_id) for m in models] == [
        (1, 1, 0),
        (1, 1, 16),
        (1, 1, 32),
        (1, 1, 48),
    ]
    assert {m.shape.vocab_size for m in models} == {64}


@pytest.mark.parametrize(
    ("changes", "size", "text"),
    [
        ({}, 3, "3 ranks does not divide num_attention_heads = 4; degrees that fit this model: 1, 2, 4"),
        ({}, 8, "num_attention_heads = 4"),
        ({"intermediate_size": 49}, 2, "does not divide intermediate_size = 49; degrees that fit this model: 1$"),
        ({"vocab_size": 65}, 2, "does not divide vocab_size = 65"),
        (
            {"num_attention_heads": 12, "hidden_size": 48, "num_key_value_heads": 4, "vocab_size": 72},
            6,
            "num_key_value_heads = 4, nor is it a multiple of that; degrees that fit this model: 1, 2, 4, 12$",
        ),
    ],
)
def test_a_degree_that_does_not_divide_the_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], size: int, text: str
) -> None:
    folder = random_model.write(tmp_path / "model", dream=True, **changes)
    with pytest.raises(ValueError, match=text):
        load_model(folder, ranks=Rank(0, size))


@pytest.mark.parametrize(("size", "dtype", "itemsize"), [(1, "float32", 4), (2, "float32", 4), (4, "bfloat16", 2)])
def test_needed_bytes_are_those_of_the_tensors(dream_folder: Path, size: int, dtype: str, itemsize: int) -> None:
    spec = read_spec(dream_folder)
    held = read_share(dream_folder, 0, size)
    parts = list(all_parts(spec, spec.share(Rank(0, size))))
    assert needed_bytes(parts, DTYPES[dtype]) == sum(tensor.numel() for tensor in held.values()) * itemsize


def test_too_little_memory_is_told_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(folder)
    needed = needed_bytes(all_parts(spec, spec.share(Rank(0, 1))), torch.float32)
    monkeypatch.setattr("services.denoiser.loader.available_bytes", lambda device: needed - 1)
    with pytest.raises(ValueError, match=r"model: the weights take 0\.00 GiB on cpu, where 0\.00 GiB are available"):
        load_model(folder)
    load_model(folder, ranks=Rank(0, 2))
    monkeypatch.setattr("services.denoiser.loader.available_bytes", lambda device: needed)
    load_model(folder)
    monkeypatch.setattr("services.denoiser.loader.available_bytes", lambda device: None)  # the system does not say
    load_model(folder)


@pytest.mark.parametrize("dream", [False, True], ids=["llada", "dream"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_the_logits_of_one(tmp_path: Path, dream: bool, dtype: str, tolerance: float, size: int) -> None:
    folder = random_model.write(tmp_path / "model", dream=dream)
    expected = logits_of(load_model(folder))
    shares = on_ranks(size, lambda ranks: logits_of(load_model(folder, dtype=dtype, ranks=ranks)))
    found = torch.cat(shares, dim=-1).float()
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


def test_positions_beyond_the_first_table_are_turned_the_same(tmp_path: Path) -> None:
    """The table of angles grows with the longest canvas; what was handed out before stays."""
    model = load_model(random_model.write(tmp_path / "model", dream=True, max_position_embeddings=5000))
    before = model.rotary([(1000, 1010)])
    kept = before.clone()
    after = model.rotary([(4990, 5000), (1000, 1010)])
    assert torch.equal(after[10:], kept)
    assert torch.equal(before, kept)
    frequency = 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    expected = torch.outer(torch.arange(4990, 5000, dtype=torch.float64), frequency).cos()
    torch.testing.assert_close(after[:10, 0, 0, :4].double(), expected, rtol=0, atol=1e-3)  # 5000 radians in float32


def test_dream_s_angles_are_rounded_to_the_activations_dtype(tmp_path: Path) -> None:
    windows = [(0, 50)]
    for dream, rounded in ((True, True), (False, False)):
        folder = random_model.write(tmp_path / str(dream), dream=dream)
        half = load_model(folder, dtype="bfloat16").rotary(windows)
        assert half.dtype == torch.float32
        assert torch.equal(half, half.bfloat16().float()) == rounded


def test_extra_tensors_are_of_no_concern(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.extra": torch.zeros(3)}))
    load_model(folder)


def test_missing_tensors_are_counted(folder: Path) -> None:
    def drop_a_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".blocks.1." in name]:
            del tensors[name]

    change_tensors(folder, drop_a_layer)
    with pytest.raises(
        ValueError, match=r"tensor model\.transformer\.blocks\.1\.attn_norm\.weight is missing and 8 more"
    ):
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


@pytest.mark.parametrize(("dtype", "text"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantised_weights_are_refused(folder: Path, dtype: torch.dtype, text: str) -> None:
    name = "model.transformer.blocks.0.k_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(16, 32, dtype=dtype)}))
    with pytest.raises(ValueError, match=f"{name} is {text}; quantised checkpoints are not supported, only F64"):
        load_model(folder)
    change_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="quantization_config is set"):
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
        ({"mask_token_id": -1}, "mask_token_id = -1"),
        ({"eos_token_id": [5, 64]}, "eos_token_id = 64 is not among the 64 tokens"),
        ({"eos_token_id": None}, r"eos_token_id is missing, and generation_config\.json has none either"),
        ({"n_layers": 0}, "n_layers"),
        ({"n_heads": 32, "n_kv_heads": 32}, "heads of 1 numbers cannot be turned in pairs"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], text: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=text):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling = {'type': 'yarn'} is not supported, only None"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"use_mrope": True}, "use_mrope = True"),
        ({"num_attention_heads": 5}, "num_attention_heads = 5 must divide hidden_size = 32"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 must be a multiple of num_key_value_heads = 3"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_a_dream_config_that_does_not_fit_is_refused(dream_folder: Path, changes: dict[str, Any], text: str) -> None:
    change_config(dream_folder, **changes)
    with pytest.raises(ValueError, match=re.escape(text)):
        load_model(dream_folder)


def test_a_dream_model_needs_its_biases(dream_folder: Path) -> None:
    name = "model.layers.0.self_attn.v_proj.bias"
    change_tensors(dream_folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"tensor {name} is missing$"):
        load_model(dream_folder)


def test_weights_that_were_not_fetched_whole_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file, or only a part of one"):
        load_model(folder)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is a Git LFS pointer, not the weights"):
        load_model(folder)


def test_an_index_that_is_none_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json is no index of shards"):
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
