"""Torch's own kernels compute what their names say, and what cannot run is refused with the reason."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.denoiser.engine import Engine, EngineConfig, Job, Threshold
from services.denoiser.kernels import FP8, FP8_MAX, Fp8Linear, Kernels, choose_kernels, torch_varlen
from services.denoiser.loader import load_model
from tests.unit.denoiser import random_model
from tests.unit.denoiser.thread_ranks import on_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 0.02)]
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=["float32", "bfloat16"])


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@each_dtype
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = numbers(5, 24, dtype=dtype), numbers(24, seed=1, dtype=dtype)
    root = (x.double().square().mean(-1, keepdim=True) + 0.1).sqrt()
    found = Kernels(CPU).rms_norm(x, weight, 0.1)
    assert found.dtype == dtype
    assert_near(found, x.double() / root * weight.double(), tolerance)


@each_dtype
def test_silu_and_mul(dtype: torch.dtype, tolerance: float) -> None:
    gate_up = numbers(5, 24, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(Kernels(CPU).silu_and_mul(gate_up), gate * gate.sigmoid() * up, tolerance)


@each_dtype
@pytest.mark.parametrize("windows", [[(3, 8)], [(1990, 1993), (0, 2)]], ids=["one request", "beyond the first table"])
def test_rotary_turns_pairs_of_halves(dtype: torch.dtype, tolerance: float, windows: list[tuple[int, int]]) -> None:
    rotary = Kernels(CPU).rotary(head_dim=6, theta=100.0, max_positions=2000, dtype=dtype, rounded=False)
    heads = numbers(5, 4, 6, dtype=dtype)
    before = heads.double()
    rotary.rotate_(heads[:, :3], rotary.at(windows))
    position = torch.cat([torch.arange(start, end) for start, end in windows]).double()
    angle = torch.outer(position, 100.0 ** (-torch.arange(3, dtype=torch.float64) / 3)).unsqueeze(1)
    turned = torch.polar(torch.ones_like(angle), angle) * torch.complex(before[..., :3], before[..., 3:])
    assert_near(heads[:, :3], torch.cat((turned.real, turned.imag), -1)[:, :3], max(tolerance, 2e-4))
    assert torch.equal(heads[:, 3].double(), before[:, 3])


# --- matrices ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    magnitudes=st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e30]), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_rows_in_eight_bits_are_within_a_sixteenth(magnitudes: list[float], dtype: torch.dtype, seed: int) -> None:
    """Three bits of mantissa, and the largest number of a row is the largest there is."""
    x = (numbers(len(magnitudes), 12, seed=seed) * torch.tensor(magnitudes).unsqueeze(1)).to(dtype)
    quantized, scale = Kernels(CPU).quantize_fp8(x)
    assert (quantized.dtype, scale.dtype, scale.shape) == (FP8, torch.float32, (len(magnitudes), 1))
    found, largest = quantized.double() * scale.double(), x.double().abs().amax(-1, keepdim=True)
    error = (found - x.double()).abs()
    assert (error <= x.double().abs() / 16 + largest * 2.0**-9 / FP8_MAX).all()


@each_dtype
def test_a_matrix_in_eight_bits(dtype: torch.dtype, tolerance: float) -> None:
    kernels = Kernels(CPU, "fp8")
    weight, bias, x = numbers(7, 16, dtype=dtype), numbers(7, seed=1, dtype=dtype), numbers(3, 16, seed=2, dtype=dtype)
    weight[4] *= 1000  # which spoils no other output
    linear = kernels.linear(weight, bias)
    assert isinstance(linear, Fp8Linear)
    (x_q, x_scale), (weight_q, weight_scale) = kernels.quantize_fp8(x), kernels.quantize_fp8(weight)
    expected = (x_q.double() * x_scale) @ (weight_q.double() * weight_scale).T + bias.double()
    assert linear(x).dtype == dtype
    assert_near(linear(x), expected, tolerance)
    y = numbers(3, 7, seed=3, dtype=dtype)
    assert_near(kernels.linear(weight).add_to_(y.clone(), x), y.double() + expected - bias.double(), 2 * tolerance)
    exact = x.double() @ weight.double().T + bias.double()
    assert ((expected - exact).abs() <= 0.13 * (x.double().abs() @ weight.double().abs().T)).all()  # twice a sixteenth


@pytest.mark.parametrize("dream", [False, True], ids=["llada", "dream"])
def test_a_quantised_model_answers_almost_the_same_over_any_ranks(tmp_path: Path, dream: bool) -> None:
    """Its confidences differ a little, so everything is committed at once: one step a block, two with a shift."""
    folder = random_model.write(tmp_path / "model", dream=dream)
    job = Job(request_id="a", prompt_ids=[3, 9, 12], max_tokens=8, block_size=8, choice=Threshold(0.0), ignore_eos=True)

    def confidences(**load: Any) -> list[float]:
        engine = Engine(load_model(folder, **load), config=EngineConfig(kv_budget_tokens=16))
        engine.admit(job)
        while engine.step().requests[0].finished is None:
            pass
        return engine.output_confidences("a")

    plain, quantised = confidences(), confidences(quantization="fp8")
    assert quantised != plain
    assert quantised == pytest.approx(plain, abs=0.25)
    for of_rank in on_ranks(2, lambda ranks: confidences(quantization="fp8", ranks=ranks)):
        assert of_rank == pytest.approx(plain, abs=0.25)


def test_a_quantised_model_needs_a_quarter_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its layers' matrices in float32: 8 numbers of 32 x 32 or 32 x 48 in each of two layers."""
    folder = random_model.write(tmp_path / "model")
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 48)
    others = 2 * 64 * 32 + (2 * 2 + 1) * 32
    monkeypatch.setattr("services.denoiser.loader.available_bytes", lambda _: 4 * others + matrices)
    load_model(folder, quantization="fp8")
    with pytest.raises(ValueError, match="the weights take"):
        load_model(folder)
    monkeypatch.setattr("services.denoiser.loader.available_bytes", lambda _: 4 * others + matrices - 1)
    with pytest.raises(ValueError, match="the weights take"):
        load_model(folder, quantization="fp8")


def test_torch_s_attention_in_one_call_takes_what_it_is_given() -> None:
    """As far as tensors without numbers tell: there is no such kernel for a CPU."""
    query, key, value = (
        torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in [(10, 8, 64), (50, 2, 64), (50, 2, 64)]
    )
    bounds = torch.empty(5, device="meta", dtype=torch.int32)
    assert torch_varlen()(query, key, value, bounds, bounds, 4, 20).shape == query.shape


# --- which ones run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it raises ImportError


def a_gpu(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.version.cuda", "13.0")


def test_auto_is_torch_on_a_cpu_and_where_vllm_is_missing(without_vllm: None) -> None:
    for device in (CPU, CUDA):
        assert choose_kernels("auto", device, torch.float32).name == "torch"


def test_kernels_asked_for_by_name_must_be_there(without_vllm: None) -> None:
    with pytest.raises(ValueError, match=r'kernels = "vllm" cannot be used: .*vllm.*; "torch" needs nothing more'):
        choose_kernels("vllm", CPU, torch.float32)


def test_auto_falls_back_on_torch_where_vllm_is_broken(
    without_vllm: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert choose_kernels("auto", CUDA, torch.bfloat16).name == "torch"
    assert "vLLM is installed but cannot be used" in caplog.text


def test_eight_bits_want_a_gpu_that_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch, 8, 0)
    with pytest.raises(ValueError, match=r'"fp8" takes a GPU of compute capability 8\.9 or more, this one has 8\.0'):
        choose_kernels("torch", CUDA, torch.bfloat16, "fp8")
    a_gpu(monkeypatch, 9, 0)
    with pytest.raises(ValueError, match=r'"fp8" on a GPU takes dtype = "bfloat16"'):
        choose_kernels("torch", CUDA, torch.float32, "fp8")
    assert choose_kernels("torch", CUDA, torch.bfloat16, "fp8").quantization == "fp8"


def test_a_worker_on_a_cpu_imports_neither_vllm_nor_torch_s_compiler() -> None:
    """They would take seconds and memory at each start."""
    code = "import services.denoiser.instance, sys; print({'vllm', 'torch._dynamo'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert found.stdout == "set()\n"


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "expected"),
    [
        ((8, 0), 128, torch.bfloat16, True),
        ((9, 0), 256, torch.float16, True),
        ((7, 5), 128, torch.bfloat16, False),
        ((9, 0), 128, torch.float32, False),
        ((9, 0), 36, torch.bfloat16, False),
        ((9, 0), 264, torch.bfloat16, False),
    ],
)
def test_one_call_for_all_requests_where_flash_attention_runs(
    capability: tuple[int, int], head_dim: int, dtype: torch.dtype, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(monkeypatch, *capability)
    assert (Kernels(CUDA).varlen(head_dim, dtype) is not None) == expected
    assert Kernels(CPU).varlen(head_dim, dtype) is None
    monkeypatch.setattr("torch.version.cuda", None)  # ROCm
    assert Kernels(CUDA).varlen(head_dim, dtype) is None
