"""Random models: reproducible, of the scale they are asked for, and loadable."""

from pathlib import Path

import pytest
import torch

from services.denoiser.loader import load_model
from tools.bench.random_model import Gains, llada_config, random_tensors, write_model

CONFIG = llada_config(width=64, num_layers=3, num_heads=2, mlp_width=192, vocab_size=500, max_positions=96)


def test_same_seed_same_weights() -> None:
    first, again, other = (random_tensors(CONFIG, seed, Gains().std) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_scale_is_what_the_gains_say() -> None:
    tensors = random_tensors(CONFIG, 0, Gains(sharpness=3.0, head=10.0, rest=1.0).std)
    names = {
        "wte": 1.0,
        "blocks.2.q_proj": 3.0 / 8,
        "blocks.0.k_proj": 3.0 / 8,
        "blocks.1.v_proj": 1.0 / 8,
        "blocks.1.ff_out": 1.0 / 192**0.5,
        "ff_out": 10.0 / 8,
    }
    for name, std in names.items():
        assert tensors[f"model.transformer.{name}.weight"].std().item() == pytest.approx(std, rel=0.05), name
    assert tensors["model.transformer.ln_f.weight"].mean().item() == pytest.approx(1.0, abs=0.1)


def test_written_model_loads(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "model", CONFIG))
    assert (model.shape.vocab_size, model.shape.num_layers, model.shape.head_dim) == (500, 3, 32)
    assert (model.shape.mask_id, model.shape.eos_ids) == (499, (498,))
