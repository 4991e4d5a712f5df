"""Root-mean-square norm (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight over the last axis, computed in at least float32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and dtype as x."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rms_normed(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x ** 2) + eps) over the last axis: `RMSNorm` without a weight."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)
