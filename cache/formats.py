"""What a cached number costs: plain dtypes, and formats that share a scale over a group. Imports no torch.

A format's scales and zero points count: int4 is not a quarter of float16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_variants.contract import Entry
from attn_variants.dtypes import DTYPE_BYTES, FLOATS, SHORT, dtype_bytes

from .spelling import ROPE_KEY, TOGETHER, VALUE, Takes, spelled


@dataclass(frozen=True)
class Format:
    """`bits` per number and `overhead` bytes per group of numbers of one head and token.

    group:    numbers that share the overhead; None is all of a head's.
    residual: newest tokens of a rank that stay in the model's dtype, as in KIVI.
    model:    the model's dtype, in which states and residuals stay.
    plain:    whether it is a dtype and nothing else.
    rope:     whether MLA's rope key is in the format too, or in the model's dtype, as the codec of that name has it.
    meaning:  what the overhead is, and whose format it is.
    """

    name: str
    bits: int
    overhead: int = 0
    group: int | None = None
    residual: int = 0
    model: str = "bfloat16"
    plain: bool = False
    rope: bool = True
    meaning: str = ""

    def tokens_bytes(self, entry: Entry, tokens: int) -> int:
        """Bytes of one head of an entry for so many tokens. An entry with a dtype of its own keeps it."""
        if entry.dtype is not None:
            return tokens * entry.dim * dtype_bytes(entry.dtype)
        plain = min(tokens, self.residual)
        return plain * entry.dim * dtype_bytes(self.model) + (tokens - plain) * self.token_bytes(entry)

    def token_bytes(self, entry: Entry) -> int:
        """Bytes of one head of an entry for one token in this format."""
        if entry.name == ROPE_KEY and not self.rope:
            return entry.dim * dtype_bytes(self.model)
        group = entry.dim if self.group is None else self.group
        if entry.dim % group:
            raise ValueError(
                f"kv_dtype {self.name!r} takes groups of {group}, which do not divide the {entry.dim} numbers of "
                f"{entry.name}; give another group or dtype"
            )
        return -(-entry.dim * self.bits // 8) + -(-entry.dim // group) * self.overhead


@dataclass(frozen=True)
class LatentRecord(Format):
    """MLA's latent in fp8 with a float32 scale per 128 numbers, its rope key in bfloat16: 656 bytes for 512 + 64."""

    def token_bytes(self, entry: Entry) -> int:
        """As above; an indexer's key is in fp8 too, 132 bytes for 128."""
        if entry.name == "k_rope":
            return 2 * entry.dim
        if entry.name in ("latent", "index_k"):
            return super().token_bytes(entry)
        raise ValueError(
            f"kv_dtype {self.name!r} is a format of MLA's latent, and this model caches {entry.name}: give fp8 or int8"
        )


@dataclass(frozen=True)
class PerChannelFormat(Format):
    """Keys with the overhead per channel and `together` tokens, values with it per token and head (KIVI).

    Tokens that wait to be coded together are counted as coded; what they wait in is the store's (policy `allocated`).
    """

    together: int = TOGETHER

    def tokens_bytes(self, entry: Entry, tokens: int) -> int:
        """As above; an incomplete run has its scales too."""
        if entry.dtype is not None or entry.name in (VALUE, ROPE_KEY):
            return super().tokens_bytes(entry, tokens)
        return tokens * -(-entry.dim * self.bits // 8) + -(-tokens // self.together) * entry.dim * self.overhead


FP32_SCALE, SCALE, SCALE_AND_ZERO = 4, 2, 4

FORMATS: dict[str, Format] = {
    "fp8": Format("fp8", 8, meaning="one scale per tensor, outside the cache"),
    "fp8-token-head": Format(
        "fp8-token-head", 8, FP32_SCALE, rope=False, meaning="a float32 scale per token and head; the codec fp8"
    ),
    "fp8-mla": LatentRecord("fp8-mla", 8, FP32_SCALE, 128, meaning="DeepSeek's record, FlashMLA and vLLM fp8_ds_mla"),
    "int8": Format("int8", 8, SCALE, rope=False, meaning="a 16-bit scale per group, by default per token and head"),
    "int4": Format(
        "int4",
        4,
        SCALE_AND_ZERO,
        rope=False,
        meaning="a 16-bit scale and zero per group, by default per token and head",
    ),
    **{
        f"int{bits}-kivi": PerChannelFormat(
            f"int{bits}-kivi",
            bits,
            SCALE_AND_ZERO,
            rope=False,
            meaning=f"keys with a 16-bit scale and zero per channel and {TOGETHER} tokens, values per token and head",
        )
        for bits in (8, 4)
    },
    **{
        name: Format(name, bits, overhead, 32, meaning="llama.cpp's blocks of 32")
        for name, bits, overhead in (
            ("q8_0", 8, 2),
            ("q5_1", 5, 4),
            ("q5_0", 5, 2),
            ("q4_1", 4, 4),
            ("q4_0", 4, 2),
            ("iq4_nl", 4, 2),
        )
    },
}
"""Formats by name; `int4:64` gives the size of a group, and `int4:64:128` a residual of 128 tokens too."""

_GROUPED, _WORDS = ("group", "residual"), ("sym", "asym", "rope")
TAKES = {
    **dict.fromkeys(FORMATS, Takes()),
    "int8": Takes(_GROUPED, _WORDS, sign="sym"),
    "int4": Takes(_GROUPED, _WORDS, sign="asym"),
    "int8-kivi": Takes(("group",)),
    "int4-kivi": Takes(("group",)),
    "fp8-token-head": Takes(words=("rope",)),
}
"""What may follow each name. As in a codec's, `sym` is a scale alone, `asym` a scale and a zero."""

SPELLINGS = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "fp8_ds_mla": "fp8-mla",
    "fp8_per_token_head": "fp8-token-head",
}


def format_named(name: object) -> Format:
    """The format called `name`, or the plain dtype; an unknown name is refused with the nearest, never priced at 0."""
    lower = str(name).removeprefix("torch.").lower()
    dtype = SHORT.get(lower, lower)
    if dtype in FLOATS:
        return Format(dtype, 8 * DTYPE_BYTES[dtype], model=dtype, plain=True)
    base, *rest = lower.split(":")
    said = spelled("kv_dtype", ":".join([SPELLINGS.get(base, base), *rest]), TAKES, others=FLOATS)
    found = FORMATS[said.base]
    group, residual, *_ = (*said.sizes, None, None)
    if isinstance(found, PerChannelFormat):
        return replace(found, name=said.name, together=group or found.together)
    return replace(
        found,
        name=said.name,
        overhead={"sym": SCALE, "asym": SCALE_AND_ZERO}.get(said.sign, found.overhead),
        group=group or found.group,
        residual=residual or 0,
        rope=said.rope or found.rope,
    )
