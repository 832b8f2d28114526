"""What runs on a GPU alone: attention in one call, CUDA graphs, matrices in eight bits, vLLM's kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.denoiser.attention import PackedAttention, Place, attention_over
from services.denoiser.cuda_graphs import PaddedPasses
from services.denoiser.engine import Engine, EngineConfig, FixedSchedule, Job, Threshold
from services.denoiser.kernels import Kernels, KernelsName, choose_kernels
from services.denoiser.kv_pool import KVPool
from services.denoiser.loader import load_model
from services.denoiser.models import Batch
from tests.unit.denoiser import random_model
from tests.unit.denoiser.oracle import OracleModel, decode
from tests.unit.denoiser.test_engine_against_oracle import assert_same, engine_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
HALF = torch.bfloat16
LLADA = {"d_model": 64, "mlp_hidden_size": 96, "n_kv_heads": 2}
DREAM = {"hidden_size": 64, "intermediate_size": 96, "dream": True}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, HALF)


@pytest.fixture(params=["torch", "vllm"])
def name(request: pytest.FixtureRequest) -> KernelsName:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    found: KernelsName = request.param
    return found


@pytest.fixture(params=[LLADA, DREAM], ids=["llada", "dream"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return random_model.write(tmp_path / "model", **request.param)


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[32, 32], [1, 1], [5, 1]], ids=["as packed", "one row each", "some"])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (8, 2)])
def test_one_call_for_all_requests(name: KernelsName, H: int, K: int, counts: list[int]) -> None:
    """One row each with shared key heads is where a kernel takes another way, which counts sequences."""
    D, L = 128, 200
    pool = KVPool(capacity=1000, num_layers=1, num_kv_heads=K, head_dim=D, dtype=HALF, device=CUDA)
    for request_id in ("a", "b", "c"):
        pool.allocate(request_id, L)
    pool.write(0, torch.arange(3 * L, device=CUDA), numbers(3 * L, 2 * K, D))
    for half in pool.all_keys_values(0):
        half[L : 2 * L] = torch.nan  # of "b"
        half[3 * L :] = torch.nan
    places = [Place("a", (10, 42), 120), Place("c", (100, 132), L)]
    query = numbers(sum(counts), H, D, seed=1)
    varlen = choose_kernels(name, CUDA, HALF).varlen(D, HALF)
    found = attention_over(pool, places, varlen).attend(0, query, counts)
    assert varlen is not None
    torch.testing.assert_close(found, PackedAttention(pool, places).attend(0, query, counts), rtol=0.02, atol=0.02)


# --- whole models -----------------------------------------------------------------------------------------------------


def make_job(request_id: str, **changes: Any) -> Job:
    return Job(
        **{
            "request_id": request_id,
            "prompt_ids": [3, 9, 12] * 5,
            "max_tokens": 16,
            "block_size": 8,
            "choice": Threshold(0.9),
            "ignore_eos": True,
        }
        | changes
    )


def test_in_float32_a_gpu_commits_the_oracle_s_tokens(folder: Path) -> None:
    expected = decode(OracleModel(folder), make_job("job"))
    steps, outputs = run(engine_of(load_model(folder, device="cuda", dtype="float32")), [make_job("job")], [0])
    assert expected.margin > 1e-4
    assert_same(steps["job"], outputs["job"], expected)


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_graphs_compute_what_passes_without_them_compute(folder: Path, name: KernelsName, quantization: Any) -> None:
    """Requests come, go and leave gaps; each pass runs both ways, over the same pool."""
    model = load_model(folder, device="cuda", dtype="bfloat16", kernels=name, quantization=quantization)
    engine = Engine(model, config=EngineConfig(kv_budget_tokens=200))
    by_graph = engine.forward
    assert isinstance(getattr(by_graph, "__self__", None), PaddedPasses)
    compared = []

    def both(batch: Batch) -> Tensor:
        expected = model.hidden(batch)
        found = by_graph(batch)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        compared.append(len(batch.row_counts))
        return found

    engine.forward = both
    for number in range(6):
        engine.admit(make_job(str(number), max_tokens=8 * (1 + number % 3)))
        for _ in range(2):
            for step in engine.step().requests:
                if step.finished:
                    engine.remove(step.request_id)
    assert len(compared) == 12
    assert max(compared) > 1


def test_a_step_waits_for_the_gpu_once(folder: Path) -> None:
    """For the scores; nothing else may read back."""
    engine = Engine(load_model(folder, device="cuda", dtype="bfloat16"), config=EngineConfig(kv_budget_tokens=200))
    engine.admit(make_job("a", choice=FixedSchedule(16)))
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            engine.step()  # the read-back of the scores
        batch = engine._pack(engine._choose_riders())
        engine.forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- one by one -------------------------------------------------------------------------------------------------------


def test_matrices_in_eight_bits(name: KernelsName) -> None:
    kernels, on_cpu = choose_kernels(name, CUDA, HALF, "fp8"), Kernels(torch.device("cpu"), "fp8")
    weight, bias, x = numbers(64, 128), numbers(64, seed=1), numbers(5, 128, seed=2)
    found = kernels.linear(weight, bias)
    expected = on_cpu.linear(weight.cpu(), bias.cpu())
    torch.testing.assert_close(found(x).cpu(), expected(x.cpu()), rtol=0.02, atol=0.2)


def test_vllm_s_kernels_are_torch_s() -> None:
    pytest.importorskip("vllm")
    ours, theirs = choose_kernels("torch", CUDA, HALF), choose_kernels("vllm", CUDA, HALF)
    x, weight, gate_up = numbers(5, 96), numbers(96, seed=1), numbers(5, 192, seed=2)
    torch.testing.assert_close(theirs.rms_norm(x, weight, 1e-5), ours.rms_norm(x, weight, 1e-5), rtol=0.02, atol=0.02)
    torch.testing.assert_close(theirs.silu_and_mul(gate_up), ours.silu_and_mul(gate_up), rtol=0.02, atol=0.02)
    for rounded in (True, False):
        turned = []
        for kernels in (ours, theirs):
            rotary = kernels.rotary(head_dim=64, theta=1e4, max_positions=4000, dtype=HALF, rounded=rounded)
            heads = numbers(5, 4, 64, seed=3)
            rotary.rotate_(heads[:, :3], rotary.at([(3990, 3993), (0, 2)]))
            turned.append(heads)
        torch.testing.assert_close(turned[1], turned[0], rtol=0.02, atol=0.02)
