"""Muon for matrices (Jordan, 2024) and AdamW for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

# Coefficients of the published quintic iteration: they drive singular values to about 1 in five
# steps rather than converge exactly.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5


class Optimizer:
    """Muon for a model's stacked matrices ``[n, rows, columns]``, AdamW for its other weights.

    Args:
        matrix_rate, other_rate: learning rates at their peak.
        decay: of the matrices, per step and unit of learning rate.
    """

    def __init__(
        self, model: nn.Module, matrix_rate: float, other_rate: float, decay: float = 0.2
    ) -> None:
        parameters = list(model.parameters())
        self._matrices = [p for p in parameters if p.dim() == 3]
        self._momenta = [torch.zeros_like(p) for p in self._matrices]
        self._rate, self._decay, self._other_rate = matrix_rate, decay, other_rate
        others = [p for p in parameters if p.dim() != 3]
        self._adam = torch.optim.AdamW(
            others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=others[0].is_cuda
        )

    @torch.no_grad()
    def step(self, scale: float, momentum: float = 0.95) -> None:
        """Apply and forget the gradients, learning rates multiplied by ``scale``."""
        rate = self._rate * scale
        for weight, average in zip(self._matrices, self._momenta, strict=True):
            gradient = weight.grad
            assert gradient is not None, "every matrix takes part in the forward pass"
            average.lerp_(gradient, 1 - momentum)
            update = orthogonalize(gradient.lerp(average, momentum))
            rows, columns = weight.shape[1:]
            weight.mul_(1 - rate * self._decay)
            weight.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)
            weight.grad = None
        for group in self._adam.param_groups:
            group["lr"] = self._other_rate * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return the nearest matrices with singular values of about 1, ``[n, rows, columns]`` in
    float32."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * (square @ square)) @ x
    return (x.mT if tall else x).float()
