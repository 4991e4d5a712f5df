"""Attention as the textbook writes it; accepts everything, and the others are compared with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .request import Request, fold, unfold


def accepts_reference(request: Request) -> bool:
    """Everything."""
    return True


def reference(request: Request) -> Tensor:
    """The textbook's softmax in plain operators; reads the cache in place whatever the widths of key and value."""
    key, value = request.read()
    # Scaled before the product: float16 would overflow in it.
    q = fold(request.q * request.scale, key.shape[1])  # (B, K, G * T, Dk)
    scores = torch.matmul(q, key.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.unflatten(2, (-1, request.q.shape[2]))  # (B, K, G, T, S)
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    mask = request.mask()
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -math.inf)
    if request.sink is not None:
        sink = request.sink.to(scores.dtype).view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return unfold(torch.matmul(weights.to(value.dtype).flatten(2, 3), value), request.q)
