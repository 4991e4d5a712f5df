"""Grouped-query attention, and its two ends: multi-head (K = H) and multi-query (K = 1)."""

from __future__ import annotations

from torch import Tensor, nn

from attn_variants.attend import attend
from attn_variants.config import GQAConfig
from attn_variants.contract import LayerCache, Step
from attn_variants.linear import project
from attn_variants.norm import RMSNorm
from attn_variants.rope import rotate
from attn_variants.transient import standing


class GroupedQueryAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v with H query heads over K key/value heads (GQA, arXiv 2305.13245).

    Caches k after RoPE and v, (B, K, S, D) each: 2 * K * D numbers per token.
    """

    same_input = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: GQAConfig) -> None:
        super().__init__()
        self.config = config
        self.cache_spec = config.cache_spec()
        query, key_value = config.num_attention_heads * config.dim, config.kv_heads * config.dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value, bias=config.attention_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.scale = config.dim**-0.5

    def forward(self, x: Tensor, step: Step | None = None, cache: LayerCache | None = None) -> Tensor:
        """(B, T, hidden) to the same; alone it is causal self-attention over x."""
        step, cache = standing(x, step, cache, self.cache_spec)
        q, k, v = (self._heads(out) for out in project(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)  # (B, H, T, D), (B, K, T, D); v: (B, K, T, D)
        rope = self.config.rope
        view = cache.append(step, k=rotate(k, step, rope), v=v)
        out = attend(rotate(q, step, rope), view, ("k", "v"), scale=self.scale)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.config.dim)).transpose(1, 2)
        return heads


class MultiHeadAttention(GroupedQueryAttention):
    """Multi-head attention (arXiv 1706.03762): a key and a value per query head, 2 * H * D numbers per token."""

    def __init__(self, config: GQAConfig) -> None:
        if config.kv_heads != config.num_attention_heads:
            raise ValueError(
                f"multi-head attention needs num_key_value_heads ({config.kv_heads}) equal to "
                f"num_attention_heads ({config.num_attention_heads}); use GroupedQueryAttention for fewer"
            )
        super().__init__(config)


class MultiQueryAttention(GroupedQueryAttention):
    """Multi-query attention (arXiv 1911.02150): one key and one value for all heads, 2 * D numbers per token."""

    def __init__(self, config: GQAConfig) -> None:
        if config.kv_heads != 1:
            raise ValueError(
                f"multi-query attention needs num_key_value_heads ({config.kv_heads}) to be 1; "
                "use GroupedQueryAttention for more"
            )
        super().__init__(config)
