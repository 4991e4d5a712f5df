"""What is measured: a set of sizes, the variants made from it, and published models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attn_variants.architectures import Architecture
from attn_variants.cache import ModelCache, model_cache
from attn_variants.config import DecoderConfig, Geometry
from attn_variants.contract import CacheSpec, Entry, Record
from attn_variants.names import unknown
from attn_variants.options import AttentionOptions
from attn_variants.registry import VARIANTS, variant_named

if TYPE_CHECKING:
    from attn_variants.decoder import Decoder

LLAMA_3_8B = Geometry()
"""The sizes `memory` and the tour start from."""

SMALL = Geometry(
    layers=4,
    hidden_size=256,
    heads=8,
    kv_heads=2,
    head_dim=32,
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    intermediate_size=688,
    vocab_size=4096,
)
"""A decoder small enough to be checked and timed anywhere."""

PRESET_GEOMETRIES: dict[str, tuple[str, Geometry]] = {
    "llama-100m": (
        "gqa",
        Geometry(
            layers=12,
            hidden_size=768,
            heads=12,
            kv_heads=4,
            head_dim=64,
            intermediate_size=2048,
            vocab_size=32000,
        ),
    ),
    "mla-130m": (
        "mla",
        Geometry(
            layers=8,
            hidden_size=1024,
            heads=16,
            kv_heads=4,
            head_dim=64,
            intermediate_size=2816,
            vocab_size=32000,
        ),
    ),
}
"""Decoders of about 100 million parameters, each with the variant it is known for."""


def _limit(default: int | None, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Sight:
    """How far back the layers of a decoder see; by default to the first token."""

    window: int | None = _limit(None, "Newest tokens that are seen.")
    chunk: int | None = _limit(None, "Tokens of a chunk, of which none sees another's.")
    sinks: int = _limit(0, "First tokens that stay visible in spite of a window or chunk.")

    @property
    def limited(self) -> bool:
        """Whether tokens pass out of sight."""
        return self.window is not None or self.chunk is not None

    def __str__(self) -> str:
        """As in "window 7, sinks 2"; "all" without limits."""
        given = {name: value for name, value in vars(self).items() if value}
        return ", ".join(f"{name} {value}" for name, value in given.items()) or "all"


SEES_ALL = Sight()


@dataclass(frozen=True)
class Subject:
    """Something whose cache is sized: its name, its cache, and that of MHA at its sizes."""

    name: str
    variant: str | None
    cache: ModelCache
    mha: ModelCache | None = None


def variant_subject(name: str, geometry: Geometry) -> Subject:
    """A variant at these sizes; an unknown name is refused with the nearest."""
    spec = variant_named(name).config.from_geometry(geometry).cache_spec()
    head = geometry.heads, geometry.head_dim
    mha = CacheSpec(records=(Record.of(Entry("k", *head)), Record.of(Entry("v", *head))))
    return Subject(name, name, *(_repeated(name, geometry, layer) for layer in (spec, mha)))


def _repeated(name: str, geometry: Geometry, spec: CacheSpec) -> ModelCache:
    count = geometry.layers
    return ModelCache(
        Architecture(
            name,
            count,
            layers=(spec,) * count,
            kinds=("full_attention",) * count,
            query_heads=(geometry.heads,) * count,
            slots=tuple(range(count)),
        )
    )


def model_subject(model: str) -> Subject:
    """A published model: a preset's name, a config.json or the folder that holds one."""
    if not model:
        raise ValueError("--model is empty; give a preset, a config.json or its folder")
    return Subject(model, None, model_cache(model))


def named_subject(name: str, geometry: Geometry) -> Subject:
    """A variant at these sizes, or a published model."""
    return variant_subject(name, geometry) if name in VARIANTS else model_subject(name)


def decoder_config(variant: str, geometry: Geometry, sight: Sight | None = None) -> DecoderConfig:
    """The decoder of these sizes around that variant. Raises ValueError for limits that the variant does not have."""
    kind = variant_named(variant).config
    config = DecoderConfig.from_geometry(geometry, kind)
    if sight is None or sight == SEES_ALL:
        return config
    if not has_limits(variant):
        raise ValueError(f"{variant} has no windows, chunks or sinks, and {sight} was asked for; leave them out")
    limits: dict[str, Any] = {
        "sliding_window": sight.window,
        "attention_chunk_size": sight.chunk,
        "sink_tokens": sight.sinks,
    }
    attention: Any = config.attention
    return replace(config, attention=replace(attention, **limits))


def has_limits(variant: str) -> bool:
    """Whether windows, chunks and sinks are options of this variant."""
    return issubclass(variant_named(variant).config, AttentionOptions)


def preset_geometry(name: str) -> tuple[str, Geometry]:
    """A named set of sizes and its variant."""
    if name not in PRESET_GEOMETRIES:
        raise ValueError(unknown("preset geometry", name, PRESET_GEOMETRIES))
    return PRESET_GEOMETRIES[name]


def random_decoder(config: DecoderConfig, *, dtype: str, device: str, seed: int) -> Decoder:
    """A decoder of random weights, scaled so that attention matters: queries meet keys with scores of about one.

    Weights are drawn in float32 and then rounded, so that every dtype and device gets the same ones.
    """
    import torch

    from attn_variants.decoder import Decoder
    from attn_variants.dtypes import torch_dtype

    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config)
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    torch.nn.init.normal_(decoder.model.embed_tokens.weight, generator=generator)
    return decoder.requires_grad_(False).eval().to(device=device, dtype=torch_dtype(dtype))
