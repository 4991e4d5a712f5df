"""The schema of the family data: what one model_type's config.json says about what its layers remember.

A family is data. Its fields say what a missing or a null field means, its formulas (see `formula`) say the kind of each
layer and the sizes of what a kind keeps. The reader interprets it; no family has code of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Value = int | float | bool | str | None
"""A number, a flag, null, or the text of a formula."""


@dataclass(frozen=True)
class Default:
    """A field that may be null: what it means when it is missing, and what when it is null."""

    missing: Value
    null: Value = None


@dataclass(frozen=True)
class Computed:
    """A size that the model computes whatever config.json says."""

    formula: str


@dataclass(frozen=True)
class Free:
    """A field that is no size but a list, a name or an object; missing and null are the same, None."""

    kinds: tuple[type, ...]


Rule = Value | Default | Computed | Free
"""What a field means. A plain value is the class's default, and null is then refused."""

LIST, NAME, OBJECT = Free((list,)), Free((str,)), Free((dict,))
FALSE, TRUE = Default(False, False), Default(True, True)
"""Switches that may be null, which is as good as missing."""
HEADS = "num_attention_heads"
SPLIT = "hidden_size / num_attention_heads"
OR_HEADS = Default(HEADS, HEADS)
OR_SPLIT = Default(SPLIT, SPLIT)


def sizes(
    layers: int, hidden: int, heads: int, kv: Rule = OR_HEADS, head_dim: Rule = OR_SPLIT, **more: Rule
) -> dict[str, Rule]:
    """The five fields of an ordinary decoder, and more by name; K is by default H, and D hidden / H."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        **more,
    }


def multi_head(layers: int, hidden: int, heads: int, **more: Rule) -> dict[str, Rule]:
    """The fields of a decoder that knows multi-head attention alone: K and D follow, whatever config.json says."""
    return sizes(layers, hidden, heads, Computed(HEADS), Computed(SPLIT), **more)


def latent_sizes(
    layers: int, hidden: int, heads: int, rank: int = 512, rope: int = 64, **more: Rule
) -> dict[str, Rule]:
    """The fields of a decoder with multi-head latent attention, whose cache knows no heads."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        **more,
    }


@dataclass(frozen=True)
class Kept:
    """One entry a kind of layer keeps per token: `heads` vectors of `dim` numbers, each a number or a formula.

    `when` is a formula that says whether this layer keeps it; None is always.
    """

    name: str
    heads: int | str
    dim: int | str
    dtype: str | None = None
    sharded: bool = True
    when: str | None = None


@dataclass(frozen=True)
class KeptState:
    """One thing a kind of layer keeps per sequence, its axes numbers or formulas.

    sharded: the runs of its first axis that tensor parallelism splits, each with the heads it splits them by.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str | None = None
    when: str | None = None
    sharded: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class KeptStride:
    """What a kind of layer keeps of every `every` tokens, which it pools into one; see `strided.StridedSpec`."""

    every: str
    pooled: tuple[Kept, ...]
    pending: tuple[Kept, ...]
    overlap: tuple[Kept, ...] = ()


@dataclass(frozen=True)
class Layer:
    """What a kind of layer keeps. Each record is a tuple of entries that lie side by side.

    window and chunk are formulas; a kind that has one refuses a config in which it is null.
    """

    records: tuple[tuple[Kept, ...], ...] = ()
    states: tuple[KeptState, ...] = ()
    window: str | None = None
    chunk: str | None = None
    stride: KeptStride | None = None

    def with_states(self, *states: KeptState) -> Layer:
        """This kind, with states besides."""
        return replace(self, states=(*self.states, *states))


def grouped(
    heads: str = "num_key_value_heads",
    dim: str = "head_dim",
    *,
    v_dim: str | None = None,
    window: str | None = None,
    chunk: str | None = None,
) -> Layer:
    """Keys and values of `heads` heads, of one width unless values have their own."""
    return Layer(((Kept("k", heads, dim),), (Kept("v", heads, v_dim or dim),)), window=window, chunk=chunk)


FULL = grouped()
SLIDING = grouped(window="sliding_window")
CHUNKED = grouped(chunk="attention_chunk_size")
NONE = Layer()


def latent_layer(
    rank: str = "kv_lora_rank",
    rope: str = "qk_rope_head_dim",
    *,
    rope_when: str | None = None,
    index: Kept | None = None,
    window: str | None = None,
) -> Layer:
    """MLA: the latent and the rotated key side by side, and where there is a sparse-attention indexer, its key."""
    kv = (Kept("latent", 1, rank, sharded=False), Kept("k_rope", 1, rope, sharded=False, when=rope_when))
    return Layer((kv,) if index is None else (kv, (index,)), window=window)


LATENT = latent_layer()

KINDS: Mapping[str, Layer] = {
    "full_attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "none": NONE,
}
"""What the kinds of layer keep that most families share, by the names that `layer_types` gives them."""

COMMON: Mapping[str, Rule] = {
    "layer_types": LIST,
    "sliding_window": Default(None),
    "attention_chunk_size": Default(None),
    "per_layer_config": OBJECT,
}
"""Fields that any config may hold, though its class does not."""

BY_WINDOW = (
    "'sliding_attention' if sliding_window is not None else "
    "'chunked_attention' if attention_chunk_size is not None else 'full_attention'"
)
"""Without layer types every layer slides when there is a window, and is chunked when there is a chunk."""


@dataclass(frozen=True)
class Held:
    """What transformers' own cache keeps otherwise: rules of fields, kinds of layer, bytes once per cache."""

    fields: Mapping[str, Rule] = field(default_factory=dict)
    layer: str | None = None
    kinds: Mapping[str, Layer] = field(default_factory=dict)
    once: int = 0


@dataclass(frozen=True)
class Family:
    """One model_type. Formulas may name any field; those of a layer may also name `i`, `layers` and `kinds`.

    fields:   what each field means when it is missing or null.
    aliases:  other names config.json gives to fields, each with the field it stands for; a dot leads into an object.
    requires: formulas that must hold, each with what to say when it does not.
    count:    how many layers there are.
    layer:    kind of layer `i` in a config without layer types.
    listed:   kind of layer `i` in a config with them.
    trailing: whether listed layer types may go on past the last layer.
    kinds:    what a kind keeps, where that differs from `KINDS`.
    query_heads: H of layer `i`.
    shares:   the layer whose cache layer `i` reads instead of keeping one, or None.
    slots:    the layers that keep a cache, in order; a layer run twice per token comes twice.
    once:     bytes that a cache keeps besides, whatever the batch.
    transformers: what that library's own cache keeps otherwise.
    """

    fields: Mapping[str, Rule]
    aliases: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, str] = field(default_factory=dict)
    count: str = "num_hidden_layers"
    layer: str = BY_WINDOW
    listed: str = "layer_types[i]"
    trailing: bool = False
    kinds: Mapping[str, Layer] = field(default_factory=dict)
    query_heads: str = HEADS
    shares: str | None = None
    slots: str = "layers"
    once: int = 0
    transformers: Held = field(default_factory=Held)

    def as_held(self) -> Family:
        """The family as transformers' own cache has it."""
        held = self.transformers
        return replace(
            self,
            fields={**self.fields, **held.fields},
            layer=held.layer or self.layer,
            kinds={**self.kinds, **held.kinds},
            once=held.once,
        )


@dataclass(frozen=True)
class Nested:
    """A config whose decoder's fields lie under a key of their own; `model_type` is theirs when they do not say.

    It may be another nested one's: a key in a key.
    """

    model_type: str
    key: str = "text_config"
