"""How codecs and formats are spelled: `name[:SIZE...][:WORD...]`. One parser, so that one name has one meaning.

A size is a whole number of at least 1: of a group, and for formats of a residual. The words:

    sym, asym   a scale alone, or a scale and a zero point
    rope        MLA's rope key is coded like the rest; without the word it stays as it is
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attn_variants.names import unknown

ROPE_KEY = "k_rope"
"""The entry that is a rope key of its own, as in MLA."""

VALUE = "v"
"""The entry whose numbers are coded token by token where those of keys are not."""

TOGETHER = 32
"""Tokens that share a channel's scale in KIVI, as in the paper's default."""

SIGNS = ("sym", "asym")


@dataclass(frozen=True)
class Takes:
    """What may follow a name: sizes, by what they are the size of, and words. `sign` is meant where none is said."""

    sizes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    sign: str = ""


@dataclass(frozen=True)
class Spelled:
    """A name's parts; `name` puts them together again, without what is meant anyway."""

    name: str
    base: str
    sizes: tuple[int, ...] = ()
    sign: str = ""
    rope: bool = False


def spelled(kind: str, name: str, known: Mapping[str, Takes], others: Iterable[str] = ()) -> Spelled:
    """The parts of a name. Raises ValueError for what is unknown, out of place, said twice or contradicts itself.

    kind: `codec` or `kv_dtype`, and others: names that are parsed elsewhere, both for messages.
    """
    base, *rest = name.split(":")
    if base not in known:
        raise ValueError(unknown(kind, name, [*others, *known]))
    takes = known[base]
    sizes = [int(part) for part in rest if part.isdecimal()]
    words = [part for part in rest if not part.isdecimal()]
    if sizes and not takes.sizes:
        grouped = ", ".join(other for other, may in known.items() if may.sizes)
        raise ValueError(f"{kind} {name!r}: only {grouped} take a group; give {base}")
    if len(sizes) > len(takes.sizes) or 0 in sizes or not set(words) <= set(takes.words):
        raise ValueError(f"{kind} {name!r}: {_advice(base, takes)}")
    if len(set(words)) < len(words) or set(SIGNS) <= set(words):
        raise ValueError(f"{kind} {name!r}: say each word once, and sym or asym")
    sign = next((word for word in words if word in SIGNS), takes.sign)
    told = [sign] if sign != takes.sign else []
    ropes = ["rope"] if "rope" in words else []
    return Spelled(":".join([base, *map(str, sizes), *told, *ropes]), base, tuple(sizes), sign, bool(ropes))


def _advice(base: str, takes: Takes) -> str:
    if not takes.sizes and not takes.words:
        return f"nothing follows {base}; give {base}"
    sizes = [f"the size of a {' and then of the '.join(takes.sizes)}"] if takes.sizes else []
    example = ":".join([base, *("64", "128")[: len(takes.sizes)], *takes.words[-1:]])
    return f"give {', '.join([*sizes, *takes.words])} or nothing, as in {example}"
