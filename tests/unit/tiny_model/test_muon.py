import pytest
import torch

from tools.tiny_model.muon import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8)])
def test_singular_values_become_about_one_and_the_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    made = orthogonalised(matrix, torch.float32)
    values = torch.linalg.svdvals(made)
    assert 0.6 < values.min() < values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ made @ right.T
    assert (inner - torch.diag(inner.diag())).abs().max() < 1e-3


def test_steps_are_those_of_torch() -> None:
    start = torch.randn(16, 24, generator=torch.Generator().manual_seed(2))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = [
        Muon([ours], dtype=torch.bfloat16, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for seed in range(5):
        gradient = torch.randn(16, 24, generator=torch.Generator().manual_seed(10 + seed))
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = 0.01 * (seed + 1)
            optimizer.step()
    assert (ours - start).abs().max() > 0.02
    assert torch.allclose(ours, theirs, atol=1e-3)
