"""The variants by name. Adding one is its file and one line here; CONTRIBUTING.md shows it in five steps."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attn_variants.config import AttentionConfig
from attn_variants.names import unknown

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Variant:
    """One attention variant: its config and its module, each given as "package.module:Name".

    They are imported when asked for, so that listing variants and sizing their caches costs no torch.
    """

    name: str
    config_path: str
    module_path: str
    summary: str

    @property
    def config(self) -> type[AttentionConfig]:
        """The config class."""
        return _resolve(self.config_path)  # type: ignore[no-any-return]

    @property
    def module(self) -> type[nn.Module]:
        """The attention module class."""
        return _resolve(self.module_path)  # type: ignore[no-any-return]


_CONFIG, _GQA, _MLA = "attn_variants.config", "attn_variants.gqa", "attn_variants.mla"

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("mha", f"{_CONFIG}:MHAConfig", f"{_GQA}:MultiHeadAttention", "a key and a value per head"),
        Variant("gqa", f"{_CONFIG}:GQAConfig", f"{_GQA}:GroupedQueryAttention", "a key and a value per group of heads"),
        Variant("mqa", f"{_CONFIG}:MQAConfig", f"{_GQA}:MultiQueryAttention", "one key and one value for all heads"),
        Variant(
            "mla", f"{_CONFIG}:MLAConfig", f"{_MLA}:MultiHeadLatentAttention", "one latent and one shared rope key"
        ),
        Variant(
            "mla-expanded",
            f"{_CONFIG}:ExpandedMLAConfig",
            f"{_MLA}:ExpandedMultiHeadLatentAttention",
            "MLA that caches what it should recompute",
        ),
    )
}


def variant_named(name: str) -> Variant:
    """The variant called `name`; an unknown name is refused with the nearest ones."""
    if name not in VARIANTS:
        raise ValueError(unknown("variant", name, VARIANTS))
    return VARIANTS[name]


def variant_of(config: AttentionConfig) -> Variant:
    """The variant whose config this is."""
    for variant in VARIANTS.values():
        if type(config) is variant.config:
            return variant
    raise ValueError(
        f"{type(config).__name__} is no registered variant's config; add its line to attn_variants.registry"
    )


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
