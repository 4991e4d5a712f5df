"""How the numbers of one entry are coded: which tensors hold them, and how to them and back. Imports no torch.

Of the same bytes as the formats of that name in `formats.py`. The arithmetic stands in `rounding.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CODES, SCALE, MIDDLE = "", ".scale", ".middle"


@dataclass(frozen=True)
class Part:
    """One stored tensor of a record: `width` numbers of `dtype` per head and `per` tokens.

    suffix completes its name.
    """

    suffix: str
    width: int
    dtype: str
    per: int = 1


class NumberCode(Protocol):
    """Codes for the n numbers of an entry, in `groups` equal groups with a scale each."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of its parts."""
        ...

    def parts(self, n: int, groups: int) -> tuple[Part, ...]:
        """The tensors that hold them, per head and token."""
        ...

    def encode(self, row: Tensor, groups: int) -> dict[str, Tensor]:
        """(..., n) to one tensor per part, by suffix."""
        ...

    def decode(self, stored: Mapping[str, Tensor], n: int, groups: int, dtype: torch.dtype) -> Tensor:
        """Back to (..., n) in this dtype."""
        ...

    def bound(self, row: Tensor, groups: int) -> Tensor:
        """(..., n) float64: the most by which what is decoded, in the row's dtype, differs from the row."""
        ...


@dataclass(frozen=True)
class Integers:
    """Integer codes with a bfloat16 scale per group, asymmetric ones with a bfloat16 middle too.

    symmetric:  x = code * scale, codes of -127 to 127 (4 bits: -7 to 7), scale = max |x| / 127
    asymmetric: x = code * scale + middle, codes of -128 to 127 (-8 to 7), scale = (max x - min x) / 255

    Bytes: n * bits / 8 rounded up, 2 per group, asymmetric 4. Bound: half the stored scale, which is rounded up by at
    most 2 ** -7 of itself, and the rounding to the cache's dtype. Asymmetric codes cut what lies beyond 63/64 of the
    dtype's largest number, from where rounding up could leave the dtype.

    Scales are bfloat16 because float16 has no 1e30 and no 1e-30. 4-bit codes lie two to a byte (`pack`).
    """

    bits: int
    symmetric: bool = True

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Codes, scales and, asymmetric, middles."""
        return (CODES, SCALE) if self.symmetric else (CODES, SCALE, MIDDLE)

    @property
    def top(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def lowest(self) -> int:
        """The smallest code."""
        return -self.top if self.symmetric else -self.top - 1

    def parts(self, n: int, groups: int) -> tuple[Part, ...]:
        """Two codes to a byte where they have 4 bits."""
        codes = Part(CODES, n, "int8") if self.bits == 8 else Part(CODES, -(-n // 2), "uint8")
        scale, middle = Part(SCALE, groups, "bfloat16"), Part(MIDDLE, groups, "bfloat16")
        return (codes, scale) if self.symmetric else (codes, scale, middle)

    def encode(self, row: Tensor, groups: int) -> dict[str, Tensor]:
        """Rounded to nearest with the scale as it is stored."""
        import torch

        from . import rounding

        code = rounding.symmetric if self.symmetric else rounding.asymmetric
        codes, *rest = (rounding.ungrouped(made, groups) for made in code(rounding.grouped(row, groups), self.top))
        codes = codes.to(torch.int8)
        return dict(zip(self.suffixes, (codes if self.bits == 8 else rounding.pack(codes), *rest), strict=True))

    def decode(self, stored: Mapping[str, Tensor], n: int, groups: int, dtype: torch.dtype) -> Tensor:
        """Converted, multiplied and, where there is a middle, added to."""
        from . import rounding

        work = rounding.working(dtype)
        codes = stored[CODES] if self.bits == 8 else rounding.unpack(stored[CODES], n)
        scale = rounding.per_group(stored[SCALE].to(work), groups)
        numbers = rounding.grouped(codes.to(work), groups).mul_(scale)
        if not self.symmetric:
            numbers.add_(rounding.per_group(stored[MIDDLE].to(work), groups))
        return rounding.ungrouped(numbers, groups).to(dtype)

    def bound(self, row: Tensor, groups: int) -> Tensor:
        """Half a step."""
        from . import rounding

        numbers = rounding.grouped(row, groups)
        if self.symmetric:
            _, scale = rounding.symmetric(numbers, self.top)
            bound = rounding.integer_bound(numbers, scale, 0.0, self.lowest, self.top)
        else:
            _, scale, middle = rounding.asymmetric(numbers, self.top)
            bound = rounding.integer_bound(numbers, scale, middle, self.lowest, self.top)
        return rounding.ungrouped(bound, groups)


@dataclass(frozen=True)
class Float8:
    """float8_e4m3fn codes with a float32 scale per group, max |x| / 448: x = code * scale; n + 4 bytes per group.

    Bound: 2 ** -4 of the number itself (e4m3 keeps 3 bits of a number's fraction), but 2 ** -10 of the scale where that
    is more, and the rounding to the cache's dtype.
    """

    suffixes: ClassVar[tuple[str, ...]] = (CODES, SCALE)

    def parts(self, n: int, groups: int) -> tuple[Part, ...]:
        """A byte per code."""
        return Part(CODES, n, "float8_e4m3fn"), Part(SCALE, groups, "float32")

    def encode(self, row: Tensor, groups: int) -> dict[str, Tensor]:
        """Rounded to nearest even."""
        from . import rounding

        codes, scale = rounding.to_fp8(rounding.grouped(row, groups))
        return {CODES: rounding.ungrouped(codes, groups), SCALE: rounding.ungrouped(scale, groups)}

    def decode(self, stored: Mapping[str, Tensor], n: int, groups: int, dtype: torch.dtype) -> Tensor:
        """Converted and multiplied."""
        from . import rounding

        codes, scale = rounding.grouped(stored[CODES], groups), rounding.per_group(stored[SCALE], groups)
        return rounding.ungrouped(rounding.from_fp8(codes, scale, rounding.working(dtype)), groups).to(dtype)

    def bound(self, row: Tensor, groups: int) -> Tensor:
        """Half of e4m3's spacing."""
        from . import rounding

        numbers = rounding.grouped(row, groups)
        return rounding.ungrouped(rounding.fp8_bound(numbers, rounding.to_fp8(numbers)[1]), groups)
