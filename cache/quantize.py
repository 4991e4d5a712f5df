"""Codecs: how a record's row is stored, and its bytes. Imports no torch: accounting and store use the same class.

(A codecs.py here would shadow the standard library's module of that name for a script run from this folder.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from attn_variants.contract import Record
from attn_variants.names import unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One stored tensor of a record: `width` numbers of `dtype` per head and token; `suffix` completes its name."""

    suffix: str
    width: int
    dtype: str


class Codec(Protocol):
    """A record's row to stored tensors and back."""

    @property
    def aliases(self) -> bool:
        """Whether `decode` gives the stored memory itself, without a copy."""
        ...

    def parts(self, record: Record, dtype: str) -> tuple[Part, ...]:
        """The stored tensors of a record in a cache of this dtype."""
        ...

    def encode(self, record: Record, row: Tensor) -> Mapping[str, Tensor]:
        """(..., width) to one tensor per part, by suffix."""
        ...

    def decode(self, record: Record, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Back to (..., width)."""
        ...


@dataclass(frozen=True)
class Plain:
    """The numbers as they are, in the record's own dtype or the cache's: width * itemsize bytes per head and token."""

    aliases: bool = True

    def parts(self, record: Record, dtype: str) -> tuple[Part, ...]:
        """One tensor, of the whole row."""
        return (Part("", record.width, record.dtype or dtype),)

    def encode(self, record: Record, row: Tensor) -> Mapping[str, Tensor]:
        """The row itself."""
        return {"": row}

    def decode(self, record: Record, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The stored tensor itself."""
        return stored[""]


CODECS: dict[str, Codec] = {"plain": Plain()}


def codec_named(name: str) -> Codec:
    """The codec called `name`; an unknown name is refused with what there is."""
    if name not in CODECS:
        raise ValueError(unknown("codec", name, CODECS))
    return CODECS[name]
