"""The families by model_type. Class defaults are those of transformers 5.24, or of the model's own code on the hub.

Adding a model is adding one entry to the file it fits best: the defaults of its config class, and where its layers are
not all alike, the formula of a layer's kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import Family, Nested

from . import classic, latent, nested, other, plain, states, windowed

FAMILIES: Mapping[str, Family | Nested] = {
    **plain.FAMILIES,
    **windowed.FAMILIES,
    **latent.FAMILIES,
    **states.FAMILIES,
    **other.FAMILIES,
    **classic.FAMILIES,
    **nested.FAMILIES,
}

UNNAMED, UNEXPLAINED = plain.UNNAMED, plain.UNEXPLAINED
