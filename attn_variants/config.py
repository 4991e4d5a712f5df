"""Configs of the variants and of the decoder: frozen, torch-free, named as published config.json files name them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

from attn_variants.contract import LARGEST_SIZE, CacheSpec, Entry, Record, require_size

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


MOST_LAYERS = 10_000
"""Published models have a few hundred at most."""


def require_positive(owner: object, *names: str) -> None:
    """Refuse a size that is zero, negative or no integer, naming the field and its value."""
    for name in names:
        require_size(name, getattr(owner, name), most=LARGEST_SIZE)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency, pairing, the part of the head that turns, and how it is stretched.

    interleaved: pairs are (x0, x1), (x2, x3), ... (DeepSeek); else the halves pair up, (x0, x[n/2]) (Llama).
    partial_rotary_factor: the leading share of the head dim that turns; the rest passes through.
    rope_type: `default`, `linear`, `llama3` or `yarn`; the remaining fields are the parameters of those kinds, with the
    names and defaults of published configs. `attention_factor` None lets YaRN compute it from the mscales.
    """

    rope_theta: float = 10000.0
    interleaved: bool = False
    partial_rotary_factor: float = 1.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {self.rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta ({self.rope_theta}) must be positive")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor ({self.partial_rotary_factor}) must be above 0 and at most 1")
        if self.rope_type != "default" and not self.factor >= 1:
            raise ValueError(f"factor ({self.factor}) of rope_type {self.rope_type!r} must be at least 1")
        if self.rope_type in ("llama3", "yarn"):
            require_size("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor ({self.low_freq_factor}), "
                "and both above 0"
            )
        if self.rope_type == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_fast ({self.beta_fast}) must be at least beta_slow ({self.beta_slow}), and both above 0"
            )

    def rotary_dim(self, head_dim: int, name: str = "head_dim") -> int:
        """Leading numbers of a head that turn; they come in pairs."""
        dim = int(head_dim * self.partial_rotary_factor)
        if dim < 2 or dim % 2:
            part = f" * partial_rotary_factor ({self.partial_rotary_factor})" if self.partial_rotary_factor != 1 else ""
            raise ValueError(
                f"the rope dim, {name} ({head_dim}){part} = {dim}, must be even and at least 2, since rotary numbers "
                f"turn in pairs: give another {name}"
            )
        return dim

    def softmax_mscale(self) -> float:
        """The factor by which YaRN's `mscale_all_dim` multiplies MLA's softmax scale; DeepSeek-V3's `mscale ** 2`."""
        if self.rope_type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature, 0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


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
class GQAConfig:
    """Grouped-query attention: K key/value heads, each shared by H / K query heads (arXiv 2305.13245).

    Caches k and v, 2 * K * D numbers per token and layer. `num_key_value_heads` None means H; `head_dim` None means
    hidden_size / H. `attention_bias` is a bias on q, k and v; `output_bias` one on o. `qk_norm` normalises every head
    of q and k before RoPE (Qwen3). `rope` None leaves positions out.
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

    def __post_init__(self) -> None:
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

    @classmethod
    def from_geometry(cls, geometry: Geometry) -> Self:
        """GQA with the geometry's K."""
        return cls(geometry.hidden_size, geometry.heads, geometry.kv_heads, geometry.head_dim)

    def cache_spec(self) -> CacheSpec:
        """k and v, K heads of D numbers each."""
        k, v = (Record.of(Entry(name, self.kv_heads, self.dim)) for name in ("k", "v"))
        return CacheSpec(records=(k, v))


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
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Caches one record `kv` per token: the normed latent (R = kv_lora_rank) and one rotated key that all heads share
    (P = qk_rope_head_dim), R + P numbers per layer. `q_lora_rank` None projects queries at full rank. The softmax scale
    is (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, times YaRN's mscale squared.
    """

    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int | None = None
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(interleaved=True))
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
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
        self.rope.rotary_dim(self.qk_rope_head_dim, "qk_rope_head_dim")

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a query or an expanded key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """What a query-key product is multiplied by before the softmax."""
        return float(self.qk_head_dim**-0.5 * self.rope.softmax_mscale())

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
        return CacheSpec(records=(Record("kv", (latent, k_rope)),))


@dataclass(frozen=True)
class ExpandedMLAConfig(MLAConfig):
    """MLA that caches expanded keys and values, H * (nope + rope + v) numbers per token and layer: for comparison."""

    def cache_spec(self) -> CacheSpec:
        """k and v of every head."""
        k = Entry("k", self.num_attention_heads, self.qk_head_dim)
        v = Entry("v", self.num_attention_heads, self.v_head_dim)
        return CacheSpec(records=(Record.of(k), Record.of(v)))


@dataclass(frozen=True)
class DecoderConfig:
    """A pre-norm decoder with RMSNorm and SwiGLU; `attention` is the variant, and the only thing a variant changes."""

    vocab_size: int
    num_hidden_layers: int
    intermediate_size: int
    attention: AttentionConfig
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 131072
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_positive(self, "vocab_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")

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
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.attention.hidden_size

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer remembers."""
        return (self.attention.cache_spec(),) * self.num_hidden_layers
