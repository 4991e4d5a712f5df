"""From a config.json to what every layer of its decoder remembers, by way of the family data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_variants.config import MOST_LAYERS
from attn_variants.contract import CacheSpec
from attn_variants.names import nearest

from .config_file import Source, load
from .families import FAMILIES, UNEXPLAINED, UNNAMED, UNREAD
from .family import KINDS, Family, Layer, Nested
from .fields import Fields
from .formula import evaluate
from .layer_spec import depends_on_index, layer_spec

OLDER_KINDS = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Older names in lists of layer types, with the present ones."""
DECISIVE = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "sliding_window",
)
"""Fields that a config and the text config in it must not say differently."""
CAUSAL = ("ForCausalLM", "LMHeadModel", "LMModel")


@dataclass(frozen=True)
class Architecture:
    """What the layers of a published decoder remember, as its config.json says.

    layers: one `CacheSpec` per cache slot; a model that runs a layer several times per token has more than layers.
    kinds:  the kind of each slot, by the name that `layer_types` or the family gives it.
    query_heads: H of each slot, 0 where it has no attention.
    slots: the layer that each cache slot is of.
    bytes_once: what a cache keeps besides, once, whatever the batch.
    fields: the decoder's fields, for those who need more of the config than its layers.
    config: the whole config.json, of which the decoder's fields may be a part.
    """

    model_type: str
    num_hidden_layers: int
    layers: tuple[CacheSpec, ...]
    kinds: tuple[str, ...]
    query_heads: tuple[int, ...]
    slots: tuple[int, ...]
    bytes_once: int = 0
    fields: Fields | None = field(default=None, repr=False, compare=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def architecture(source: Source, *, held_by: str | None = None) -> Architecture:
    """The architecture of a config.json, given as a file, a folder, a dict or a preset's name.

    held_by: "transformers" gives what that library's cache keeps where it keeps more than the model needs.
    Raises ValueError in one line that names the source, the field, its value and the remedy: for a model_type or a kind
    of layer that is not known, and for fields that are missing, null, out of range or at odds with each other.
    """
    if held_by not in (None, "transformers"):
        raise ValueError(f"held_by ({held_by!r}) must be None or 'transformers'")
    config, name = load(source)
    try:
        return read_architecture(config, held_by=held_by)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_architecture(config: Mapping[str, Any], *, held_by: str | None = None) -> Architecture:
    """The `architecture` of a config that is loaded already; what it raises names no source."""
    model_type, fields = decoder_fields(config)
    if held_by == "transformers":
        fields = fields.of(fields.family.as_held())
    return _read(model_type, fields, config)


def decoder_fields(config: Mapping[str, Any]) -> tuple[str, Fields]:
    """The model_type that decides how a config is read, and the fields of its decoder."""
    if config.get("model_type") is None:
        _refuse_unexplained(config)
        return "", Fields(config, UNNAMED)
    model_type = config["model_type"]
    found = _known("model_type", model_type)
    if isinstance(found, Nested):
        return _nested(model_type, found, config)
    if config.get("is_encoder_decoder") is True and not _runs_as_decoder(config):
        raise ValueError(
            f"architectures {config['architectures']} of model_type {model_type!r} is an encoder and a decoder; "
            "only decoders are read"
        )
    return model_type, Fields(config, found)


def _nested(model_type: str, nested: Nested, config: Mapping[str, Any], prefix: str = "") -> tuple[str, Fields]:
    inner, key, usual = config.get(nested.key), prefix + nested.key, FAMILIES[nested.model_type]
    if inner is None:
        # Files from before the text config had a place of its own hold its fields beside the others.
        if isinstance(usual, Family) and (fields := Fields(config, usual, prefix)).given("num_hidden_layers"):
            return nested.model_type, fields
        raise ValueError(f"{key} is missing, which model_type {model_type!r} keeps its decoder's fields in")
    if not isinstance(inner, dict):
        raise ValueError(f"{key} of model_type {model_type!r} must be an object, not {inner!r:.40}")
    for name in DECISIVE:
        if None not in (config.get(name), inner.get(name)) and config[name] != inner[name]:
            raise ValueError(
                f"{prefix}{name} ({config[name]!r}) and {key}.{name} ({inner[name]!r}) contradict each other: keep one"
            )
    inner_type = inner.get("model_type") or nested.model_type
    found = _known(f"{key}.model_type", inner_type)
    if isinstance(found, Nested) and isinstance(usual, Nested):
        return _nested(inner_type, found, inner, f"{key}.")
    if not isinstance(found, Family):
        raise ValueError(f"{key}.model_type {inner_type!r} is not a decoder's")
    return inner_type, Fields(inner, found, prefix=f"{key}.")


def _known(field: str, model_type: Any) -> Family | Nested:
    if not isinstance(model_type, str):
        raise ValueError(f"{field} ({model_type!r:.40}) must be a string")
    if model_type in UNREAD:
        raise ValueError(f"{field} {model_type!r} is not read: {UNREAD[model_type]}")
    if model_type not in FAMILIES:
        raise ValueError(
            f"{field} {model_type!r:.60} is not known{nearest(model_type[:60], FAMILIES)}; its attention could be of "
            "any kind, so no size is given"
        )
    return FAMILIES[model_type]


def _runs_as_decoder(config: Mapping[str, Any]) -> bool:
    """Translation models have a decoder-only class too; their configs do not say which one is meant, unless by name."""
    names = config.get("architectures")
    return not isinstance(names, list) or any(str(name).endswith(CAUSAL) for name in names)


def _refuse_unexplained(config: Mapping[str, Any]) -> None:
    """Without a model_type nothing explains a sign of windows, states, indexers or sharing."""
    for name, value in config.items():
        if name not in UNNAMED.fields and value not in (None, False, 0) and name.startswith(UNEXPLAINED):
            raise ValueError(
                f"{name} ({value!r:.40}) says something of the cache that only a model_type explains: give model_type"
            )


def layer_fields(fields: Fields) -> list[Fields]:
    """The fields of every layer, which know `layers` and `kinds`; most layers share one, so set its `i` before use.

    Raises ValueError for what the family requires and the config does not fulfil.
    """
    family = fields.family
    for formula, remedy in family.requires.items():
        if not evaluate(formula, fields):
            raise ValueError(f"{remedy} ({fields.values_in(formula)})")
    count = fields.whole(family.count)
    if count > MOST_LAYERS:
        raise ValueError(f"{fields.spelled('num_hidden_layers')} ({count}) must be at most {MOST_LAYERS}")
    fields["layers"] = list(range(count))
    fields["kinds"] = _kinds(fields, count)
    own = _own_fields(fields, count)
    return [own.get(index, fields) for index in range(count)]


def _read(model_type: str, fields: Fields, config: Mapping[str, Any]) -> Architecture:
    family = fields.family
    by_layer = layer_fields(fields)
    kinds = fields["kinds"]
    layers = {kind: _layer(kind, kinds, fields) for kind in dict.fromkeys(kinds)}
    varying = {kind for kind, layer in layers.items() if depends_on_index(layer)}
    specs, heads = [], []
    made: dict[tuple[Any, ...], CacheSpec] = {}
    for index, (kind, of_layer) in enumerate(zip(kinds, by_layer, strict=True)):
        of_layer["i"] = index
        query = of_layer.whole(family.query_heads) if layers[kind].records else 0
        shares = _shared(family, of_layer, index)
        key = (kind, query, shares, index if of_layer is not fields or kind in varying else None)
        if key not in made:
            made[key] = layer_spec(layers[kind], kind, query, shares, of_layer)
        specs.append(made[key])
        heads.append(query)
    slots = evaluate(family.slots, fields)
    if len(slots) > MOST_LAYERS:
        raise ValueError(f"{len(slots)} caches ({fields.values_in(family.slots)}) are more than {MOST_LAYERS}")
    return Architecture(
        model_type=model_type,
        num_hidden_layers=len(kinds),
        layers=tuple(specs[slot] for slot in slots),
        kinds=tuple(kinds[slot] for slot in slots),
        query_heads=tuple(heads[slot] for slot in slots),
        slots=tuple(slots),
        bytes_once=family.once,
        fields=fields,
        config=config,
    )


def _kinds(fields: Fields, count: int) -> list[str]:
    """The kind of every layer: as listed, else by the family's rule."""
    family, listed = fields.family, fields["layer_types"]
    if listed is not None:
        spelled = fields.spelled("layer_types")
        if not all(isinstance(kind, str) for kind in listed):
            raise ValueError(f"{spelled} ({listed!r:.40}) must be a list of names")
        if not family.trailing and len(listed) != count:
            raise ValueError(
                f"{spelled} names {len(listed)} layers, but {fields.spelled('num_hidden_layers')} is {count}: "
                "they must agree"
            )
    kinds = []
    for index in range(count):
        fields["i"] = index
        kind = evaluate(family.listed if listed is not None else family.layer, fields)
        kinds.append(OLDER_KINDS.get(kind, kind))
    return kinds


def _shared(family: Family, fields: Fields, index: int) -> int | None:
    if family.shares is None:
        return None
    try:
        if evaluate(family.shares, fields) is None:
            return None
    except ValueError as error:
        raise ValueError(f"{error} ({fields.values_in(family.shares)})") from None
    shares = fields.whole(family.shares, least=0)
    if shares >= index:
        raise ValueError(f"layer {index} cannot share the cache of layer {shares}, which comes no earlier")
    return shares


def _own_fields(fields: Fields, count: int) -> dict[int, Fields]:
    """The fields of the layers that `per_layer_config` gives some of their own."""
    own: dict[int, Fields] = {}
    for key, changes in (fields["per_layer_config"] or {}).items():
        if not str(key).isdecimal() or int(key) >= count or not isinstance(changes, dict):
            raise ValueError(
                f"{fields.spelled('per_layer_config')} must be an object of layers 0 to {count - 1} and their fields, "
                f"not {key!r:.40}: {changes!r:.40}"
            )
        own[int(key)] = fields.with_changes(changes)
        own[int(key)].update(layers=fields["layers"], kinds=fields["kinds"])
    return own


def _layer(kind: str, kinds: list[str], fields: Fields) -> Layer:
    known = {**KINDS, **fields.family.kinds}
    if kind in known:
        return known[kind]
    raise ValueError(
        f"{fields.spelled('layer_types')}[{kinds.index(kind)}] is {kind!r}, a kind of layer that this model_type is "
        f"not known to have{nearest(kind, known)}"
    )
