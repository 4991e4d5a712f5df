"""The rope fields of a config.json and `RopeConfig`, each from the other.

Two spellings are read: `rope_scaling` beside `rope_theta`, and transformers 5's `rope_parameters`, which holds both. In
either, the kind is `rope_type` or, in older files, `type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_variants.rope_config import ROPE_TYPES, RopeConfig

THETA = 10000.0
KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}
"""The parameters of each kind, as config.json and `RopeConfig` both name them."""
ANYWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings", "finetuned")
REQUIRED = ("factor", "low_freq_factor", "high_freq_factor")


def rope_config(config: Mapping[str, Any], *, max_position_embeddings: int, interleaved: bool) -> RopeConfig:
    """The rotary embedding a config.json describes.

    Raises ValueError naming the field: for another kind of rope, a parameter no kind here has, or a value that is no
    number. YaRN's factor may be null and is then the ratio of the context lengths; so says transformers.
    """
    spelled = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(spelled) or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{spelled} ({given!r:.40}) must be an object or null")
    kind = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{spelled}.rope_type {kind!r:.40} is not supported; supported are {', '.join(ROPE_TYPES)}")
    known = {name for names in KINDS.values() for name in names}.union(ANYWHERE)
    if stray := sorted(set(given) - known):
        raise ValueError(f"{spelled}.{stray[0]} ({given[stray[0]]!r:.40}) is not supported by rope of kind {kind!r}")
    if kind in ("linear", "llama3") and given.get("mscale_all_dim"):
        raise ValueError(
            f"{spelled}.mscale_all_dim ({given['mscale_all_dim']!r}) is supported by rope of kind 'yarn' only"
        )
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor ({partial!r:.40}) is not supported by this model_type; it must be 1")
    theta = given.get("rope_theta") or config.get("rope_theta") or THETA
    values: dict[str, Any] = {"rope_theta": float(_number("rope_theta", theta)), "rope_type": kind}
    for name in KINDS[kind]:
        value = given.get(name)
        if name == "original_max_position_embeddings":
            values[name] = _number(name, config.get(name) or value or max_position_embeddings)
        elif name == "truncate":
            values[name] = value is not False
        elif value:
            values[name] = float(_number(f"{spelled}.{name}", value))
        elif name in REQUIRED and not (kind == "yarn" and name in given):
            raise ValueError(f"{spelled}.{name} is missing; rope of kind {kind!r} needs it")
    if kind == "yarn":
        values.setdefault("factor", max_position_embeddings / values["original_max_position_embeddings"])
    return RopeConfig(interleaved=interleaved, **values)


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_parameters` of a config.json; what is unset or at its default is left out where readers allow that."""
    optional = ("mscale", "mscale_all_dim", "attention_factor")
    values: dict[str, Any] = {"rope_theta": rope.rope_theta, "rope_type": rope.rope_type}
    for name in KINDS[rope.rope_type]:
        value = getattr(rope, name)
        left_out = value is True if name == "truncate" else value is None and name in optional
        if not left_out:
            values[name] = value
    return values


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} ({value!r:.40}) must be a positive number")
    return value
