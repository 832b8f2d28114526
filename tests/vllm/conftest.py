"""One thread, as in the other tests of the engine; and vLLM imported once, whose own warnings are none of ours."""

import warnings

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def vllm_is_imported() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
    with warnings.catch_warnings(action="ignore"):
        import services.denoiser.kernels_vllm  # noqa: F401
