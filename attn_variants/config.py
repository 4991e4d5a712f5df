"""Configs of the variants and of the decoder: frozen, torch-free, named as published config.json files name them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self

from attn_variants.contract import LARGEST_SIZE, CacheSpec, Entry, Record, require_size
from attn_variants.options import AttentionOptions
from attn_variants.rope_config import RopeConfig

MOST_LAYERS = 10_000
"""Published models have a few hundred at most."""


def require_positive(owner: object, *names: str) -> None:
    """Refuse a size that is zero, negative or no integer, naming the field and its value."""
    for name in names:
        require_size(name, getattr(owner, name), most=LARGEST_SIZE)


def _size(default: int | None, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Geometry:
    """One set of sizes from which every variant can be made, so that a comparison changes the variant and nothing else.

    The defaults are Llama-3-8B's, with DeepSeek-V3's head sizes for MLA.
    """

    layers: int = _size(32, "Decoder layers.")
    hidden_size: int = _size(4096, "Width of the residual stream.")
    heads: int = _size(32, "Query heads.")
    kv_heads: int = _size(8, "Key/value heads of GQA.")
    head_dim: int = _size(128, "Width of a head of MHA, GQA and MQA.")
    kv_lora_rank: int = _size(512, "MLA: numbers of the cached latent.")
    q_lora_rank: int | None = _size(None, "MLA: rank of the queries; unset is full rank.")
    qk_rope_head_dim: int = _size(64, "MLA: numbers of the cached rope key.")
    qk_nope_head_dim: int = _size(128, "MLA: width of a head's key without positions.")
    v_head_dim: int = _size(128, "MLA: width of a head's value.")
    intermediate_size: int = _size(14336, "Width of the MLP.")
    vocab_size: int = _size(128256, "Token ids.")

    def __post_init__(self) -> None:
        require_size("layers", self.layers, most=MOST_LAYERS)
        require_positive(self, *(item.name for item in fields(self) if item.name != "q_lora_rank"))


class AttentionConfig(Protocol):
    """What the decoder, the accounting and the command ask of a variant's config."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @classmethod
    def from_geometry(cls, geometry: Geometry) -> Self:
        """This variant at a common set of sizes."""
        ...

    def cache_spec(self) -> CacheSpec:
        """What one layer remembers."""
        ...


@dataclass(frozen=True)
class GQAConfig(AttentionOptions):
    """Grouped-query attention: K key/value heads, each shared by H / K query heads (arXiv 2305.13245).

    Caches k and v, 2 * K * D numbers per token and layer. `num_key_value_heads` None means H; `head_dim` None means
    hidden_size / H. `attention_bias` is a bias on q, k and v; `output_bias` one on o. `rope` None leaves positions out.

    Norms of every head, by its root mean square: `qk_norm` of q and k before RoPE, with weights (Qwen3, Gemma 3);
    `qk_norm_after_rope` of both after it, and `v_norm` of v, without weights (Llama 4; Gemma 3n).
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    rms_norm_eps: float = 1e-6
    qk_norm_after_rope: bool = False
    v_norm: bool = False

    def __post_init__(self) -> None:
        self._require_options()
        require_positive(self, "hidden_size", "num_attention_heads")
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                    f"({self.num_attention_heads}) when head_dim is not given"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        require_positive(self, "num_key_value_heads", "head_dim")
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.rope is not None:
            self.rope.rotary_dim(self.dim)

    @property
    def kv_heads(self) -> int:
        """K, resolved."""
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def dim(self) -> int:
        """D, resolved."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def scale(self) -> float:
        """What a query-key product is multiplied by before the softmax: 1 / sqrt(D), unless the options say."""
        return float(self.dim**-0.5) if self.softmax_scale is None else self.softmax_scale

    @classmethod
    def from_geometry(cls, geometry: Geometry) -> Self:
        """GQA with the geometry's K."""
        return cls(geometry.hidden_size, geometry.heads, geometry.kv_heads, geometry.head_dim)

    def cache_spec(self) -> CacheSpec:
        """k and v, K heads of D numbers each."""
        k, v = (Record.of(Entry(name, self.kv_heads, self.dim)) for name in ("k", "v"))
        return self._spec(k, v)


@dataclass(frozen=True)
class MHAConfig(GQAConfig):
    """Multi-head attention: K = H (arXiv 1706.03762). Caches 2 * H * D numbers per token and layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads != self.num_attention_heads:
            raise ValueError(
                f"multi-head attention has num_key_value_heads = num_attention_heads "
                f"({self.num_attention_heads}), got {self.num_key_value_heads}; use GQAConfig for fewer"
            )

    @classmethod
    def from_geometry(cls, geometry: Geometry) -> Self:
        """K = H, whatever the geometry's K."""
        return cls(geometry.hidden_size, geometry.heads, geometry.heads, geometry.head_dim)


@dataclass(frozen=True)
class MQAConfig(GQAConfig):
    """Multi-query attention: K = 1 (arXiv 1911.02150). Caches 2 * D numbers per token and layer."""

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", 1)
        super().__post_init__()
        if self.kv_heads != 1:
            raise ValueError(
                f"multi-query attention has num_key_value_heads = 1, got {self.num_key_value_heads}; "
                "use GQAConfig for more"
            )

    @classmethod
    def from_geometry(cls, geometry: Geometry) -> Self:
        """K = 1, whatever the geometry's K."""
        return cls(geometry.hidden_size, geometry.heads, 1, geometry.head_dim)


@dataclass(frozen=True)
class MLAConfig(AttentionOptions):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Caches one record `kv` per token: the normed latent (R = kv_lora_rank) and one rotated key that all heads share
    (P = qk_rope_head_dim), R + P numbers per layer. `q_lora_rank` None projects queries at full rank. `rope` None
    leaves positions out (Kimi Linear).
    """

    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int | None = None
    rope: RopeConfig | None = field(default_factory=lambda: RopeConfig(interleaved=True))
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        self._require_options()
        require_positive(
            self,
            "hidden_size",
            "num_attention_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        if self.q_lora_rank is not None:
            require_positive(self, "q_lora_rank")
        if self.rope is not None:
            self.rope.rotary_dim(self.qk_rope_head_dim, "qk_rope_head_dim")

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a query or an expanded key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """What a query-key product is multiplied by before the softmax, unless the options say.

        (N + P) ** -0.5, times YaRN's mscale squared: what an expanded key has, whatever the latent's rank.
        """
        if self.softmax_scale is not None:
            return self.softmax_scale
        return float(self.qk_head_dim**-0.5 * (1.0 if self.rope is None else self.rope.softmax_mscale()))

    @classmethod
    def from_geometry(cls, geometry: Geometry) -> Self:
        """MLA with the geometry's ranks and head sizes."""
        return cls(
            hidden_size=geometry.hidden_size,
            num_attention_heads=geometry.heads,
            kv_lora_rank=geometry.kv_lora_rank,
            qk_nope_head_dim=geometry.qk_nope_head_dim,
            qk_rope_head_dim=geometry.qk_rope_head_dim,
            v_head_dim=geometry.v_head_dim,
            q_lora_rank=geometry.q_lora_rank,
        )

    def cache_spec(self) -> CacheSpec:
        """One row of R + P numbers; every tensor-parallel rank keeps it whole."""
        latent = Entry("latent", 1, self.kv_lora_rank, sharded=False)
        k_rope = Entry("k_rope", 1, self.qk_rope_head_dim, sharded=False)
        return self._spec(Record("kv", (latent, k_rope)))


@dataclass(frozen=True)
class ExpandedMLAConfig(MLAConfig):
    """MLA that caches expanded keys and values, H * (nope + rope + v) numbers per token and layer: for comparison."""

    def cache_spec(self) -> CacheSpec:
        """k and v of every head."""
        k = Entry("k", self.num_attention_heads, self.qk_head_dim)
        v = Entry("v", self.num_attention_heads, self.v_head_dim)
        return self._spec(Record.of(k), Record.of(v))


@dataclass(frozen=True)
class DecoderConfig:
    """A pre-norm decoder with RMSNorm and SwiGLU; `attention` is the variant, and the only thing a variant changes.

    `attention` is one config for all layers, or a tuple of one per layer where they differ: windows that alternate with
    full attention, layers without positions, layers that read another's cache.
    """

    vocab_size: int
    num_hidden_layers: int
    intermediate_size: int
    attention: AttentionConfig | tuple[AttentionConfig, ...]
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 131072
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_positive(self, "vocab_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")
        if isinstance(self.attention, list):
            object.__setattr__(self, "attention", tuple(self.attention))
        if len(self.attentions) != self.num_hidden_layers:
            raise ValueError(
                f"attention has {len(self.attentions)} configs, num_hidden_layers is {self.num_hidden_layers}: "
                "give one config, or one for each layer"
            )
        if len(widths := {attention.hidden_size for attention in self.attentions}) > 1:
            raise ValueError(f"the layers' attention must agree on hidden_size, got {sorted(widths)}")
        for layer, attention in enumerate(self.attentions):
            _require_owner(layer, attention, self.attentions)

    @classmethod
    def from_geometry(cls, geometry: Geometry, attention: type[AttentionConfig], **changes: Any) -> Self:
        """A decoder of these sizes around that variant."""
        return cls(
            vocab_size=geometry.vocab_size,
            num_hidden_layers=geometry.layers,
            intermediate_size=geometry.intermediate_size,
            attention=attention.from_geometry(geometry),
            **changes,
        )

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """One config per layer."""
        if isinstance(self.attention, tuple):
            return self.attention
        return (self.attention,) * self.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.attentions[0].hidden_size

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer remembers."""
        return tuple(attention.cache_spec() for attention in self.attentions)


def _require_owner(layer: int, attention: AttentionConfig, attentions: tuple[AttentionConfig, ...]) -> None:
    """Refuse a layer that shares a cache which it cannot read: its own, a later one, none, or one of other entries."""
    if not isinstance(attention, AttentionOptions) or attention.kv_shared_layer is None:
        return
    shared = attention.kv_shared_layer
    if shared >= layer:
        raise ValueError(f"layer {layer}: kv_shared_layer ({shared}) must be an earlier layer")
    owner, own = attentions[shared].cache_spec(), replace(attention, kv_shared_layer=None).cache_spec()
    if owner.shares is not None:
        raise ValueError(
            f"layer {layer}: kv_shared_layer ({shared}) reads the cache of layer {owner.shares} itself; name that one"
        )
    if owner != own:
        raise ValueError(
            f"layer {layer}: kv_shared_layer ({shared}) has another cache than this layer would read; both need the "
            "same variant, heads, window, chunk and sinks"
        )
