"""Dtype names: torch's own, the short spellings people type, and the bytes of one number. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_variants.names import unknown

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
}
FLOATS = ("float64", "float32", "bfloat16", "float16")
"""What keys and values can be in as they are."""

SHORT = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
}
"""The short spellings, and what each stands for."""


def canonical_dtype(dtype: str | torch.dtype) -> str:
    """torch's name of a dtype, from that name, a short one (`bf16`) or the dtype itself; unknown names are refused."""
    name = str(dtype).removeprefix("torch.")
    name = SHORT.get(name.lower(), name.lower())
    if name not in DTYPE_BYTES:
        raise ValueError(unknown("dtype", str(dtype), DTYPE_BYTES))
    return name


def float_dtype(dtype: str | torch.dtype) -> str:
    """torch's name of a dtype that keys and values can have: a float of at least 16 bits."""
    name = canonical_dtype(dtype)
    if name not in FLOATS:
        raise ValueError(f"dtype {name} holds no keys and values as they are; give one of {', '.join(FLOATS)}")
    return name


def dtype_bytes(dtype: str | torch.dtype) -> int:
    """Bytes of one number."""
    return DTYPE_BYTES[canonical_dtype(dtype)]


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of that name."""
    import torch

    found = getattr(torch, canonical_dtype(dtype))
    assert isinstance(found, torch.dtype)
    return found
