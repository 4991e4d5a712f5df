"""Grouped-query attention, and its two ends: multi-head (K = H) and multi-query (K = 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_variants.attend import attend
from attn_variants.config import GQAConfig
from attn_variants.contract import LayerCache, Step
from attn_variants.linear import project
from attn_variants.norm import RMSNorm, rms_normed
from attn_variants.rope import rotate, tempered
from attn_variants.transient import standing


class GroupedQueryAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v with H query heads over K key/value heads (GQA, arXiv 2305.13245).

    Caches k after RoPE and v, (B, K, S, D) each: 2 * K * D numbers per token. A layer that shares has neither
    projection and reads those of its owner.
    """

    def __init__(self, config: GQAConfig) -> None:
        super().__init__()
        self.config = config
        self.cache_spec = config.cache_spec()
        query, key_value = config.num_attention_heads * config.dim, config.kv_heads * config.dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.same_input: tuple[tuple[str, ...], ...] = ()
        if config.kv_shared_layer is None:
            self.same_input = (("q_proj", "k_proj", "v_proj"),)
            self.k_proj = nn.Linear(config.hidden_size, key_value, bias=config.attention_bias)
            self.v_proj = nn.Linear(config.hidden_size, key_value, bias=config.attention_bias)
            self.k_norm = RMSNorm(config.dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.output_bias)
        self.scale = config.scale
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sink else None

    def forward(self, x: Tensor, step: Step | None = None, cache: LayerCache | None = None) -> Tensor:
        """(B, T, hidden) to the same; alone it is causal self-attention over x."""
        step, cache = standing(x, step, cache, self.cache_spec)
        config = self.config
        if config.kv_shared_layer is None:
            q, k, v = (self._heads(out) for out in project(x, self.q_proj, self.k_proj, self.v_proj))
            k = self._placed(self.k_norm(k), step)  # (B, K, T, D)
            view = cache.append(step, k=k, v=rms_normed(v, config.rms_norm_eps) if config.v_norm else v)
        else:
            q, view = self._heads(self.q_proj(x)), cache.view(step)
        q = tempered(self._placed(self.q_norm(q), step), step, config)  # (B, H, T, D)
        out = attend(q, view, ("k", "v"), scale=self.scale, sink=self.sinks, softcap=config.attn_logit_softcapping)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.config.dim)).transpose(1, 2)
        return heads

    def _placed(self, x: Tensor, step: Step) -> Tensor:
        """Queries or keys at the step's positions."""
        x = rotate(x, step, self.config.rope)
        return rms_normed(x, self.config.rms_norm_eps) if self.config.qk_norm_after_rope else x


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
