"""The families by model_type. Class defaults are those of transformers 5.24, or of the model's own code on the hub.

Adding a model is adding one entry to the file it fits best: the defaults of its config class, and where its layers are
not all alike, the formula of a layer's kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import Family, Nested

from . import classic, convolutional, latent, linear, nested, plain, shared, sparse, state_spaces, windowed

FAMILIES: Mapping[str, Family | Nested] = {
    **plain.FAMILIES,
    **windowed.FAMILIES,
    **latent.FAMILIES,
    **state_spaces.FAMILIES,
    **linear.FAMILIES,
    **convolutional.FAMILIES,
    **sparse.FAMILIES,
    **shared.FAMILIES,
    **classic.FAMILIES,
    **nested.FAMILIES,
}

UNNAMED, UNEXPLAINED = plain.UNNAMED, plain.UNEXPLAINED

UNREAD: Mapping[str, str] = {
    "blt": "its patches have no fixed number of tokens",
    "gemma4_assistant": "it drafts from the cache of another model and keeps none",
    "gemma4_unified_assistant": "it drafts from the cache of another model and keeps none",
    "reformer": "its hash buckets have no fixed size",
    "unlimited_ocr": "what it keeps depends on where the prompt ends",
    "unlimited_ocr_text": "what it keeps depends on where the prompt ends",
}
"""Model types whose cache no entry describes, and why."""
