"""Muon for the matrices of the blocks: momentum whose singular values are all made about one.

torch has the same rule, but multiplies in bfloat16 on every processor; one without instructions for it takes ten times
as long, so here the caller says the format.
"""

import torch
from torch import Tensor

# Of the quintic Newton-Schulz iteration, chosen for the steepest rise at 0 (Jordan et al., 2024,
# https://kellerjordan.github.io/posts/muon/).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised in `dtype`; a step is as large as AdamW's (Liu et al., 2025, 2502.16982)."""

    def __init__(
        self, matrices: list[torch.nn.Parameter], *, dtype: torch.dtype, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix from its gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                self._update(matrix, **{name: group[name] for name in ("lr", "weight_decay", "momentum")})

    def _update(self, matrix: Tensor, lr: float, weight_decay: float, momentum: float) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(matrix.grad, 1 - momentum)
        direction = orthogonalised(matrix.grad.lerp(state["momentum"], momentum), self._dtype)  # type: ignore[union-attr]
        matrix.mul_(1 - lr * weight_decay)
        matrix.add_(direction, alpha=-lr * 0.2 * max(matrix.shape) ** 0.5)


def orthogonalised(matrix_NM: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with the same singular vectors and singular values between about 0.7 and 1.2."""
    if matrix_NM.shape[0] > matrix_NM.shape[1]:
        return orthogonalised(matrix_NM.T, dtype).T
    a, b, c = _COEFFICIENTS
    x_NM = matrix_NM.to(dtype)
    x_NM = x_NM / x_NM.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram_NN = x_NM @ x_NM.T
        x_NM = torch.addmm(x_NM, torch.addmm(gram_NN, gram_NN, gram_NN, beta=b, alpha=c), x_NM, beta=a)
    return x_NM
