"""Keys coded channel by channel over neighbouring tokens, values token by token (KIVI, arXiv 2402.02750).

Outliers of keys sit in few channels and stay there from token to token, so that a scale per channel takes them apart;
those of values do not. Tokens that are coded together have to be complete first: the newest wait in a residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attn_variants.contract import Entry, Record
from attn_variants.dtypes import float_dtype

from .number_codes import Integers, Part
from .quantize import columns_of
from .spelling import ROPE_KEY, VALUE

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class PerChannel:
    """Codes of keys with a scale and middle per channel and `together` tokens; of values with one per token and head.

    A key's number takes `bits` and 32 bits / `together` of scale and middle. MLA's latent counts as a key; its rope key
    stays as it is. Bound: that of `Integers`, over the numbers that share a scale.
    """

    name: str
    code: Integers
    together: int
    aliases: bool = False

    def over(self, tokens: int) -> PerChannel:
        """The same for so many tokens."""
        return replace(self, together=tokens)

    def parts(self, record: Record, dtype: str) -> tuple[Part, ...]:
        """Codes per token; scales and middles per token for values, else of every channel per `together` tokens."""
        found: list[Part] = []
        for entry, prefix, _ in columns_of(record):
            if self._kept(entry):
                found.append(Part(prefix, entry.dim, entry.dtype or float_dtype(dtype)))
                continue
            by_token = entry.name == VALUE
            codes, *scales = self.code.parts(entry.dim, 1 if by_token else entry.dim)
            found.append(Part(prefix + codes.suffix, codes.width, codes.dtype))
            found += [Part(prefix + s.suffix, s.width, s.dtype, 1 if by_token else self.together) for s in scales]
        return tuple(found)

    def encode(self, record: Record, row: Tensor) -> Mapping[str, Tensor]:
        """(..., n, width), n a multiple of `together`; scales per channel come as (..., n / together, dim)."""
        from . import rounding

        stored: dict[str, Tensor] = {}
        for entry, prefix, columns in columns_of(record):
            numbers = row[..., columns]
            if self._kept(entry):
                stored[prefix] = numbers
            elif entry.name == VALUE:
                stored |= {prefix + suffix: part for suffix, part in self.code.encode(numbers, 1).items()}
            else:
                codes, scale, middle = rounding.asymmetric(self._channels(numbers), self.code.top)
                made = (self._packed(self._tokens(codes)), scale[..., 0], middle[..., 0])
                stored |= {prefix + suffix: part for suffix, part in zip(self.code.suffixes, made, strict=True)}
        return stored

    def decode(self, record: Record, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Back to (..., n, width); n may end within tokens that were coded together."""
        import torch

        from . import rounding

        work, found = rounding.working(dtype), []
        for entry, prefix, _ in columns_of(record):
            if self._kept(entry):
                found.append(stored[prefix].to(dtype))
                continue
            parts = [stored[prefix + suffix] for suffix in self.code.suffixes]
            if entry.name == VALUE:
                found.append(self.code.decode(dict(zip(self.code.suffixes, parts, strict=True)), entry.dim, 1, dtype))
                continue
            codes = parts[0] if self.code.bits == 8 else rounding.unpack(parts[0], entry.dim)
            scale, middle = (self._each(part.to(work), codes.shape[-2]) for part in parts[1:])
            found.append(codes.to(work).mul_(scale).add_(middle).to(dtype))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def factored(self, record: Record) -> bool:
        """No: codes have a middle too."""
        return False

    def bound(self, record: Record, row: Tensor) -> Tensor:
        """(..., n, width) float64; n a multiple of `together`."""
        import torch

        found = []
        for entry, _, columns in columns_of(record):
            numbers = row[..., columns]
            if self._kept(entry):
                found.append(numbers.new_zeros(numbers.shape).double())
            elif entry.name == VALUE:
                found.append(self.code.bound(numbers, 1))
            else:
                found.append(self._tokens(self.code.bound(self._channels(numbers), 1)))
        return torch.cat(found, dim=-1)

    def _kept(self, entry: Entry) -> bool:
        return entry.name == ROPE_KEY or entry.dtype is not None

    def _channels(self, numbers: Tensor) -> Tensor:
        """(..., n, dim) to (..., n / together, dim, together): what shares a scale is the last axis."""
        channels: Tensor = numbers.unflatten(-2, (-1, self.together)).transpose(-1, -2)
        return channels

    def _tokens(self, numbers: Tensor) -> Tensor:
        """Back to (..., n, dim)."""
        tokens: Tensor = numbers.transpose(-1, -2).flatten(-3, -2)
        return tokens

    def _packed(self, codes: Tensor) -> Tensor:
        import torch

        from . import rounding

        whole = codes.to(torch.int8)
        return whole if self.code.bits == 8 else rounding.pack(whole)

    def _each(self, per_run: Tensor, tokens: int) -> Tensor:
        """(..., runs, dim) to one row for each of the tokens."""
        rows: Tensor = per_run.repeat_interleave(self.together, dim=-2)[..., :tokens, :]
        return rows
