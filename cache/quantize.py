"""Codecs: how a record's row is stored, and its bytes. Imports no torch: accounting and store use the same class.

    plain                        the numbers as they are
    int8[:GROUP][:asym][:rope]   a byte per number and a 16-bit scale per group; asym: a 16-bit middle too
    int4[:GROUP][:sym][:rope]    half a byte per number, a 16-bit scale and middle per group; sym: the scale alone
    int8-kivi[:GROUP], int4-kivi[:GROUP]   keys with a scale and middle per channel and GROUP tokens (`per_channel.py`)
    fp8[:rope]                   float8_e4m3fn and a float32 scale per token and head
    fp8-mla                      MLA's latent in fp8 with a float32 scale per 128, its rope key in bfloat16

A group is all of an entry's numbers of one token and head unless GROUP says how many. An entry with a dtype of its own
keeps it. A rope key of its own, MLA's `k_rope`, stays as it is unless `rope` is said: a ninth of DeepSeek's row, it
alone says where a token stood.

Every finite row stays finite, within `bound`. A NaN makes all of its group NaN and nothing else; an infinity becomes
the largest number its group can hold, and the others of the group lose all precision.

(A codecs.py here would shadow the standard library's module of that name for a script run from this folder.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from attn_variants.contract import Entry, Record, require_size
from attn_variants.dtypes import float_dtype

from .number_codes import Float8, Integers, NumberCode, Part
from .spelling import ROPE_KEY, TOGETHER, Spelled, Takes, spelled

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Codec(Protocol):
    """A record's row, entries side by side, to stored tensors and back."""

    @property
    def name(self) -> str:
        """What `codec_named` takes."""
        ...

    @property
    def aliases(self) -> bool:
        """Whether `decode` gives the stored memory itself, without a copy."""
        ...

    @property
    def together(self) -> int:
        """How many neighbouring tokens are coded together; their newest wait in a residual until they are complete."""
        ...

    def over(self, tokens: int) -> Codec:
        """The same for so many tokens coded together, where a layout needs it."""
        ...

    def parts(self, record: Record, dtype: str) -> tuple[Part, ...]:
        """The stored tensors of a record in a cache of this dtype. Raises ValueError for a record it cannot hold."""
        ...

    def encode(self, record: Record, row: Tensor) -> Mapping[str, Tensor]:
        """(..., width) to one tensor (..., part's width) per part, by suffix."""
        ...

    def decode(self, record: Record, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Back to (..., width) in this dtype."""
        ...

    def factored(self, record: Record) -> bool:
        """Whether a row is int8 `CODES` times one `SCALE` (..., 1), so that products may be taken of the codes."""
        ...

    def bound(self, record: Record, row: Tensor) -> Tensor:
        """(..., width) float64: the most by which what is decoded, in the row's dtype, differs from the row."""
        ...


@dataclass(frozen=True)
class Plain:
    """The numbers as they are, in the record's own dtype or the cache's: width * itemsize bytes per head and token."""

    name: str = "plain"
    aliases: bool = True
    together: int = 1

    def over(self, tokens: int) -> Codec:
        """Itself: every token stands alone."""
        return self

    def parts(self, record: Record, dtype: str) -> tuple[Part, ...]:
        """One tensor, of the whole row."""
        return (Part("", record.width, record.dtype or dtype),)

    def encode(self, record: Record, row: Tensor) -> Mapping[str, Tensor]:
        """The row itself."""
        return {"": row}

    def decode(self, record: Record, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The stored tensor itself."""
        return stored[""].to(dtype)

    def factored(self, record: Record) -> bool:
        """No: there is no scale."""
        return False

    def bound(self, record: Record, row: Tensor) -> Tensor:
        """Zero."""
        return row.new_zeros(row.shape).double()


@dataclass(frozen=True)
class ByEntry:
    """A record stored entry by entry, in codes.

    An entry's tensors are its codes (their name is the record's), `.scale` and, asymmetric, `.middle`. In a record of
    several entries they bear the entry's name in front: `.latent`, `.latent.scale`, `.k_rope`.

    code:  how numbers are coded.             group: numbers that share a scale; None is all of an entry's.
    rope:  whether rope keys are coded too.   kept:  the dtype of rope keys that are not; None is the cache's.
    holds: the entries of the only record the codec is for; none is any record.
    """

    name: str
    code: NumberCode
    group: int | None = None
    rope: bool = False
    kept: str | None = None
    holds: tuple[str, ...] = ()
    aliases: bool = False
    together: int = 1

    def __post_init__(self) -> None:
        if self.group is not None:
            require_size(f"codec {self.name}: group", self.group)

    def over(self, tokens: int) -> Codec:
        """Itself: every token stands alone."""
        return self

    def parts(self, record: Record, dtype: str) -> tuple[Part, ...]:
        """The tensors of each entry.

        Raises ValueError for a group that does not divide an entry's numbers, and for a record the codec is not for.
        """
        if record.dtype is not None:
            return PLAIN.parts(record, dtype)
        names = tuple(entry.name for entry in record.entries)
        if self.holds and names != self.holds:
            raise ValueError(
                f"codec {self.name} is for a record of {' and '.join(self.holds)}, and record {record.name} holds "
                f"{' and '.join(names)}; give fp8 or int8"
            )
        found: list[Part] = []
        for entry, prefix, _ in columns_of(record):
            if self._coded(entry):
                parts = self.code.parts(entry.dim, self._groups(entry))
                found += [Part(prefix + part.suffix, part.width, part.dtype) for part in parts]
            else:
                found.append(Part(prefix, entry.dim, self.kept or float_dtype(dtype)))
        return tuple(found)

    def encode(self, record: Record, row: Tensor) -> Mapping[str, Tensor]:
        """Each entry's tensors; codes are made with the scale as it is stored."""
        if record.dtype is not None:
            return PLAIN.encode(record, row)
        stored: dict[str, Tensor] = {}
        for entry, prefix, columns in columns_of(record):
            numbers = row[..., columns]
            if self._coded(entry):
                made = self.code.encode(numbers, self._groups(entry))
                stored |= {prefix + suffix: tensor for suffix, tensor in made.items()}
            else:
                stored[prefix] = self._as_kept(numbers)
        return stored

    def decode(self, record: Record, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The entries side by side again."""
        if record.dtype is not None:
            return PLAIN.decode(record, stored, dtype)
        if len(record.entries) == 1:
            return self._decoded(record.entries[0], "", stored, dtype)
        from .rounding import working

        first = next(iter(stored.values()))
        # Written once, in the dtype wanted, instead of decoded, converted and put side by side.
        row = first.new_empty((*first.shape[:-1], record.width), dtype=dtype)
        for entry, prefix, columns in columns_of(record):
            row[..., columns] = self._decoded(entry, prefix, stored, working(dtype))
        return row

    def factored(self, record: Record) -> bool:
        """Where all of the row is symmetric 8-bit codes with a single scale."""
        one_scale = self.group is None and len(record.entries) == 1 and record.dtype is None
        byte = isinstance(self.code, Integers) and self.code.symmetric and self.code.bits == 8
        return one_scale and byte and self._coded(record.entries[0])

    def bound(self, record: Record, row: Tensor) -> Tensor:
        """Of what is coded from its step; of a rope key that is not, what its dtype cannot hold."""
        if record.dtype is not None:
            return PLAIN.bound(record, row)
        found = []
        for entry, _, columns in columns_of(record):
            numbers = row[..., columns]
            if self._coded(entry):
                found.append(self.code.bound(numbers, self._groups(entry)))
            else:
                found.append((self._as_kept(numbers).to(numbers.dtype).double() - numbers.double()).abs())
        import torch

        return torch.cat(found, dim=-1)

    def _decoded(self, entry: Entry, prefix: str, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if not self._coded(entry):
            return stored[prefix].to(dtype)
        parts = {suffix: stored[prefix + suffix] for suffix in self.code.suffixes}
        return self.code.decode(parts, entry.dim, self._groups(entry), dtype)

    def _coded(self, entry: Entry) -> bool:
        return self.rope or entry.name != ROPE_KEY

    def _as_kept(self, numbers: Tensor) -> Tensor:
        if self.kept is None:
            return numbers
        from .rounding import saturated

        return saturated(numbers, self.kept)

    def _groups(self, entry: Entry) -> int:
        if self.group is None:
            return 1
        if entry.dim % self.group:
            remedy = "give fp8 or int8" if self.holds else f"give a group that divides {entry.dim}, or none"
            raise ValueError(
                f"codec {self.name} takes groups of {self.group}, which do not divide the {entry.dim} numbers of "
                f"{entry.name}; {remedy}"
            )
        return entry.dim // self.group


def columns_of(record: Record) -> Iterator[tuple[Entry, str, slice]]:
    """Each entry with the front of its tensors' suffixes and its columns of the row."""
    single = len(record.entries) == 1
    for entry in record.entries:
        yield entry, "" if single else f".{entry.name}", record.columns(entry.name)


def _integers(bits: int) -> Callable[[Spelled], Codec]:
    def made(said: Spelled) -> Codec:
        group = said.sizes[0] if said.sizes else None
        return ByEntry(said.name, Integers(bits, said.sign == "sym"), group=group, rope=said.rope)

    return made


def _fp8(said: Spelled) -> Codec:
    return ByEntry(said.name, Float8(), rope=said.rope)


def _fp8_mla(said: Spelled) -> Codec:
    return ByEntry(said.name, Float8(), group=128, kept="bfloat16", holds=("latent", ROPE_KEY))


def _kivi(bits: int) -> Callable[[Spelled], Codec]:
    def made(said: Spelled) -> Codec:
        from .per_channel import PerChannel

        return PerChannel(said.name, Integers(bits, symmetric=False), said.sizes[0] if said.sizes else TOGETHER)

    return made


PLAIN = Plain()

CODECS: dict[str, tuple[Takes, Callable[[Spelled], Codec]]] = {
    "plain": (Takes(), lambda said: PLAIN),
    "int8": (Takes(("group",), ("sym", "asym", "rope"), sign="sym"), _integers(8)),
    "int4": (Takes(("group",), ("sym", "asym", "rope"), sign="asym"), _integers(4)),
    "int8-kivi": (Takes(("group",)), _kivi(8)),
    "int4-kivi": (Takes(("group",)), _kivi(4)),
    "fp8": (Takes(words=("rope",)), _fp8),
    "fp8-mla": (Takes(), _fp8_mla),
}
"""What may follow each name, and what makes the codec."""

SPELLINGS = {"fp8-token-head": "fp8"}


def codec_named(name: str) -> Codec:
    """The codec called `name`; an unknown name is refused with what there is.

    `fp8-token-head`, accounting's name of fp8, is taken too (`format_of`).
    """
    base, *rest = name.split(":")
    said = spelled(
        "codec", ":".join([SPELLINGS.get(base, base), *rest]), {base: takes for base, (takes, _) in CODECS.items()}
    )
    return CODECS[said.base][1](said)


def format_of(codec: str, dtype: str) -> str:
    """The `kv_dtype` of accounting (`formats.py`) that costs what this codec stores in a cache of this dtype.

    They share their names but for fp8, which as a format has one scale per tensor, outside the cache.
    """
    name = codec_named(codec).name
    if name == "plain":
        return dtype
    base, *words = name.split(":")
    return ":".join(["fp8-token-head" if base == "fp8" else base, *words])
