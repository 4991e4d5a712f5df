"""The longest request that vLLM accepts by default, from the config's positions and how its rotation stretches them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attn_variants.architectures import Architecture

POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Fields that give positions; the smallest counts (derive_max_model_len_and_key)."""
WITHOUT_POSITIONS = frozenset({"bloom", "falcon_mamba", "mamba", "mamba2"})
"""Model types whose configs know no positions; vLLM takes 2048 tokens for them."""
STRETCHED_ALREADY = frozenset(
    {"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope"}
)
"""Kinds of rotation whose factor the positions hold already (_get_and_verify_max_len, config/model.py)."""


def default_model_length(architecture: Architecture) -> int:
    """The default of max_model_len; ValueError where config.json gives no positions."""
    assert architecture.fields is not None
    stated = architecture.fields.stated
    found = {name: stated(name) for name in POSITIONS}
    lengths = [value for value in found.values() if isinstance(value, int) and value > 0]
    if not lengths and architecture.model_type in WITHOUT_POSITIONS:
        return 2048
    if not lengths:
        raise ValueError("max_position_embeddings is missing: give it, or give max_model_len")
    length = found["model_max_length"] or min(lengths)
    rotations = [rope for name in ("rope_parameters", "rope_scaling") for rope in _rotations(stated(name))]
    if any(_kind(rope) == "longrope" for rope in rotations):
        return int(stated("original_max_position_embeddings") or length)
    if "gemma3" in architecture.model_type:
        return int(length)
    factors = [rope.get("factor") for rope in rotations if _kind(rope) not in STRETCHED_ALREADY]
    return int(length * next((factor for factor in reversed(factors) if factor), 1))


def _rotations(value: Any) -> Iterator[Mapping[str, Any]]:
    """One rotation, or one for each kind of layer."""
    if not isinstance(value, Mapping):
        return
    if value and all(isinstance(inner, Mapping) or inner is None for inner in value.values()):
        yield from (inner for inner in value.values() if inner is not None)
    else:
        yield value


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
