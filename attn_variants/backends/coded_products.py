"""Products of bfloat16 queries with keys that are 8-bit codes, which are not decoded for it."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_CODES = 2**14
"""Codes that one call must be worth: torch's kernel takes one sequence and head at a time, in some 5 microseconds."""

WIDTH = 16
"""What must divide a vector's codes: the kernel reads whole vector registers, beyond the end of others."""


def takes(q: Tensor, codes: Tensor) -> bool:
    """Whether torch's CPU kernel for weights of 8 bits computes this: bfloat16 (B, K, M, D) with int8 (B, K, n, D)."""
    known = q.device.type == "cpu" and hasattr(torch, "_weight_int8pack_mm")
    fits = codes.shape[-1] % WIDTH == 0 and codes[0, 0].numel() >= LEAST_CODES
    return known and fits and q.dtype == torch.bfloat16 and codes.dtype == torch.int8


def coded_products(q: Tensor, codes: Tensor) -> Tensor:
    """q codes^T, (B, K, M, n) float32, of q (B, K, M, D) and codes (B, K, n, D).

    A product is rounded to bfloat16, by 2^-8 of itself: at most 127/256 of sum |q|, while codes that are wrong by half
    a step already move it by up to 1/2 of sum |q|.
    """
    batch, heads, slots = codes.shape[:3]
    ones = q.new_ones(slots)
    products = [
        torch._weight_int8pack_mm(q[row, head], codes[row, head].contiguous(), ones)
        for row in range(batch)
        for head in range(heads)
    ]
    joined: Tensor = torch.stack(products).unflatten(0, (batch, heads))
    return joined.float()
