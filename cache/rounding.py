"""The arithmetic of codecs: numbers to codes with a scale per group, two int4 to a byte, and back, in plain torch.

A group is the last axis. Sums and products are float32 (float64 for float64 rows), so what is decoded is rounded to the
cache's dtype once. Symmetric codes stand for code * scale, asymmetric ones for code * scale + middle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_variants.dtypes import torch_dtype

SHORT = torch.bfloat16
"""Scales and middles of integer codes: two bytes like float16, but neither 1e30 nor 1e-30 leaves their range."""

INSIDE = 1 - 2.0**-6
"""What asymmetric codes reach of a dtype's largest number: rounded scales take them no further than that."""

FP8 = torch.float8_e4m3fn
FP8_TOP = 448
FP8_ROUNDING = 2.0**-4
"""Half of e4m3's spacing, relative to the number."""
FP8_LEAST = 2.0**-10
"""Half of the smallest e4m3 number above zero."""

SLACK = 2.0**-10
"""What float32 arithmetic may move a number by, in steps, before it is rounded to its code."""


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this one are coded."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped(row: Tensor, groups: int) -> Tensor:
    """(..., n) to (..., groups, n / groups), a view; one group is left as it is."""
    return row if groups == 1 else row.unflatten(-1, (groups, -1))


def ungrouped(numbers: Tensor, groups: int) -> Tensor:
    """(..., groups, m) to (..., groups * m), a view of what arithmetic made."""
    return numbers if groups == 1 else numbers.flatten(-2)


def per_group(stored: Tensor, groups: int) -> Tensor:
    """(..., groups) to what multiplies or is added to grouped numbers, (..., groups, 1)."""
    return stored if groups == 1 else stored[..., None]


def symmetric(row: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Codes of -top to top, still floats, and the scale (..., 1): the largest magnitude / top."""
    x = row.to(working(row.dtype))
    scale = _scale(x.abs().amax(-1, keepdim=True), top, _largest(row.dtype), SHORT)
    return (x / scale).round_().clamp_(-top, top), scale


def asymmetric(row: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of -top - 1 to top, still floats, the scale and the middle, (..., 1) each.

    The middle is what code 0 stands for, rounded; the scale is large enough for both ends in spite of that.
    """
    x, most = row.to(working(row.dtype)), _largest(row.dtype) * INSIDE
    low, high = (end.clamp_(-most, most) for end in (x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)))
    middle = (low * (top / (2 * top + 1))).add_(high, alpha=(top + 1) / (2 * top + 1)).to(SHORT)
    m = middle.to(x.dtype)
    scale = _scale(torch.maximum((high - m) / top, (m - low) / (top + 1)), 1, _largest(x.dtype) / (top + 1), SHORT)
    return ((x - m) / scale).round_().clamp_(-top - 1, top), scale, middle


def to_fp8(row: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and the float32 scale (..., 1): the largest magnitude / 448."""
    x = row.to(working(row.dtype))
    scale = _scale(x.abs().amax(-1, keepdim=True), FP8_TOP, _largest(row.dtype), torch.float32)
    return (x / scale).clamp_(-FP8_TOP, FP8_TOP).to(FP8), scale


def from_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes * scale in this dtype, float32 or float64.

    On a CPU torch converts e4m3 number by number; moved by hand into float16's bits, codes are 2 ** -8 of their value,
    in a fifth of the time. The code of NaN is finite there: it never comes without a NaN scale.
    """
    scale = scale.to(dtype)
    if codes.device.type != "cpu":
        return codes.to(dtype).mul_(scale)
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).to(dtype).mul_(scale * 2.0**8)


def saturated(numbers: Tensor, dtype: str) -> Tensor:
    """The numbers in another float dtype; what is too large for it, or too large to come back, is its largest."""
    kept = torch_dtype(dtype)
    if kept == numbers.dtype:
        return numbers
    most = min(torch.finfo(numbers.dtype).max, torch.finfo(kept).max) * (1 - _unit(kept))
    return numbers.clamp(-most, most).to(kept)


def pack(codes: Tensor) -> Tensor:
    """Codes of -8 to 7, two to a byte as two's complement: byte i holds code i low and code i + ceil(n / 2) high.

    (..., n) int8 to (..., ceil(n / 2)) uint8; where n is odd, the last high half is 0.
    """
    half = -(-codes.shape[-1] // 2)
    low, high = codes[..., :half], codes[..., half:]
    if codes.shape[-1] % 2:
        high = torch.nn.functional.pad(high, (0, 1))
    return (high << 4).bitwise_or_(low & 15).view(torch.uint8)


def unpack(packed: Tensor, n: int) -> Tensor:
    """What `pack` packed: (..., n) int8."""
    # Shifting to the right repeats the sign.
    low, high = (packed << 4).view(torch.int8).bitwise_right_shift_(4), packed.view(torch.int8) >> 4
    return torch.cat((low, high), dim=-1)[..., :n]


def integer_bound(row: Tensor, scale: Tensor, middle: Tensor | float, lowest: int, highest: int) -> Tensor:
    """The most by which integer codes miss the row, float64: half a step, and the rounding to the row's dtype.

    More only for numbers that lie outside the codes, at the end of the dtype's range.
    """
    x, step = row.double(), scale.double()
    away = x - (middle.double() if isinstance(middle, Tensor) else middle)
    outside = torch.maximum(away - highest * step, lowest * step - away)
    return torch.maximum((0.5 + SLACK) * step, outside + SLACK * step) + last_rounding(row, step)


def fp8_bound(row: Tensor, scale: Tensor) -> Tensor:
    """The most by which fp8 codes miss the row, float64: 2 ** -4 of a number, 2 ** -10 of the scale where that is more.

    More only for numbers that lie outside the codes, and float32's and the row's dtype's rounding.
    """
    x, step = row.double(), scale.double()
    within = torch.maximum(x.abs() * FP8_ROUNDING, FP8_LEAST * step) * (1 + SLACK)
    outside = x.abs() - FP8_TOP * step
    return torch.maximum(within, outside) + last_rounding(row, step)


def last_rounding(row: Tensor, step: Tensor) -> Tensor:
    """What rounding a decoded number to the row's dtype may add, float64."""
    info = torch.finfo(row.dtype)
    return _unit(row.dtype) * (row.double().abs() + step) + info.smallest_normal * info.eps


def _scale(reach: Tensor, top: int, most: float, dtype: torch.dtype) -> Tensor:
    """reach / top rounded up, so that no number lies outside the codes, but top * scale never above `most`.

    s * (1 + u), rounded to nearest, is never below s, nor s * (1 - u) above it. Zero would divide by itself.
    """
    unit, least = _unit(dtype), torch.finfo(torch.float32).smallest_normal
    return (reach * ((1 + unit) / top)).clamp_(least, most / top * (1 - unit)).to(dtype)


def _unit(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) / 2


def _largest(dtype: torch.dtype) -> float:
    """The largest number of a dtype that codes can stand for: a float64's is a bfloat16's."""
    return float(torch.finfo(SHORT if dtype == torch.float64 else dtype).max)
