"""What the hardware allows, measured in the same run: the rate at which memory is read, and that of matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_variants.dtypes import torch_dtype

from .measure import Timings

READ_SHAPE = (16384, 16640)
"""A float32 matrix of 1.09 GB: far larger than any cache between the cores and memory."""

SIZES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192)}
"""Rows of the square matrices that are multiplied, smallest first."""

LONG_SECONDS = 0.1
"""A product that takes longer is the last."""

ROUNDS = 5


def read_bandwidth(device: str) -> float:
    """Bytes per second at which memory is read: the larger of a float32 matrix-vector product and a sum over 1.09 GB.

    The best of five each, on random numbers. Never of 16 bits: what a CPU does to such numbers besides may be slower
    than reading them.
    """
    matrix = torch.rand(READ_SHAPE, device=device)
    vector = torch.rand(READ_SHAPE[1], device=device)
    fastest = min(_best(device, lambda: matrix @ vector), _best(device, matrix.sum))
    return matrix.nbytes / fastest


def matmul_rates(device: str, dtype: str) -> dict[str, float]:
    """FLOP/s of square matrix products of random numbers, in this dtype and in float32.

    Both, since numbers may be widened and multiplied in float32, which is far faster on a CPU without instructions for
    16 bits: what is possible in a dtype is the larger.
    """
    return {name: _matmul_rate(device, name) for name in dict.fromkeys((dtype, "float32"))}


def _matmul_rate(device: str, dtype: str) -> float:
    best = 0.0
    for size in SIZES[device]:
        generator = torch.Generator().manual_seed(size)
        left, right = (
            torch.randn(size, size, generator=generator).to(device=device, dtype=torch_dtype(dtype)) for _ in range(2)
        )
        first = Timings().time(device, lambda: left @ right)  # noqa: B023
        seconds = first if first > LONG_SECONDS else _best(device, lambda: left @ right)  # noqa: B023
        best = max(best, 2 * size**3 / seconds)
        if seconds > LONG_SECONDS:
            break
    return best


def _best(device: str, work: Callable[[], object]) -> float:
    """Seconds of the fastest of some rounds, after one to warm up."""
    timings = Timings()
    for _ in range(ROUNDS + 1):
        timings.time(device, work)
    return min(timings.wall[1:])
