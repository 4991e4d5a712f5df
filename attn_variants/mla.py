"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a cached latent from which keys and values grow.

Keys and values of all heads are linear in one latent c of R numbers: k_h = [W_UK,h c | k_rope], v_h = W_UV,h c. So the
same weights can be used in two orders:

    expanded   make k_h and v_h of every token, then attend: cheaper for a prompt, where each key meets many queries
    absorbed   (q_h W_UK,h) . c is q_h . (W_UK,h c): fold W_UK into the query and W_UV into the output, and attend over
               the latents themselves as one shared key and value: cheaper for decoding

Absorption is why RoPE has to live in a key of its own. With a plain RoPE on expanded keys the product would be
q_h^T R(m)^T R(n) W_UK,h c_n: the rotation R(n - m) by each key's position stands between the query and W_UK,h, does not
commute with it, and no single query in the latent space serves all n. The rotation therefore acts on k_rope, P numbers
that all heads share, and the nope part stays free of positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from attn_variants.attend import attend
from attn_variants.backends.request import Expand
from attn_variants.config import MLAConfig
from attn_variants.contract import LayerCache, Step, View
from attn_variants.linear import per_head, project
from attn_variants.norm import RMSNorm
from attn_variants.rope import rotate, tempered
from attn_variants.transient import standing

MEASURED = 1.6
"""Query tokens at which absorbed and expanded took the same time, over those of the same multiplications.

The median of what `python -m attn_variants.bench.crossover` measured on a CPU (reports/crossover.md). It is later
because expanded keys and values also have to be written and read again.
"""


class MultiHeadLatentAttention(nn.Module):
    """MLA over a cache of R + P numbers per token: the normed latent and the rotated shared rope key.

    A layer that shares reads the latents of its owner and expands or absorbs them with weights of its own.

    absorbed_below: passes of fewer query tokens are absorbed, others expanded; 0 never absorbs, math.inf always does,
    None (the default) is `MEASURED` times the `crossover` for the keys of the pass.
    """

    # Absorption reads this weight head by head, which takes its rows to be contiguous.
    by_rows: tuple[str, ...] = ("kv_b_proj",)

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.config = config
        self.cache_spec = config.cache_spec()
        self.same_input: tuple[tuple[str, ...], ...] = ()
        self.absorbed_below: float | None = None
        heads, bias = config.num_attention_heads, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        if config.kv_shared_layer is None:
            self.same_input = (("q_proj" if config.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa"),)
            self.kv_a_proj_with_mqa = nn.Linear(
                config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=bias
            )
            self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=bias)
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.attention_sink else None

    def forward(self, x: Tensor, step: Step | None = None, cache: LayerCache | None = None) -> Tensor:
        """(B, T, hidden) to the same; alone it is causal self-attention over x."""
        step, cache = standing(x, step, cache, self.cache_spec)
        q_nope, q_rope, view = self._project(x, step, cache)
        if x.shape[1] < self._absorbed_below(view.plan.limit):
            w_uk, w_uv = self._up_projections()
            q = torch.cat([per_head(q_nope, w_uk), q_rope], dim=-1)  # (B, H, T, R + P)
            out = self._attend(q, view, ("kv", "latent"))  # (B, H, T, R)
            out = per_head(out, w_uv.transpose(1, 2))
        else:
            q = torch.cat([q_nope, q_rope], dim=-1)
            out = self._attend(q, view, ("latent", "k_rope"), expand=self.expand)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged

    def expand(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, H, S, N + P) and values (B, H, S, V) of every head from latents (B, 1, S, R) and rope keys."""
        config = self.config
        expanded: Tensor = self.kv_b_proj(latent[:, 0])
        k_nope, value = (
            expanded.unflatten(-1, (config.num_attention_heads, -1))
            .transpose(1, 2)
            .split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        )
        return torch.cat([k_nope, k_rope.expand(-1, config.num_attention_heads, -1, -1)], dim=-1), value

    def _project(self, x: Tensor, step: Step, cache: LayerCache) -> tuple[Tensor, Tensor, View]:
        """Queries (B, H, T, N) and (B, H, T, P), and the view to attend over, this step's tokens in it."""
        config = self.config
        first = self.q_proj if config.q_lora_rank is None else self.q_a_proj
        if config.kv_shared_layer is None:
            q, compressed = project(x, first, self.kv_a_proj_with_mqa)
            latent, k_rope = compressed[:, None].split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
            latent, k_rope = self.kv_a_layernorm(latent), rotate(k_rope, step, config.rope)
            view = cache.append(step, **self._entries(latent, k_rope))
        else:
            q, view = first(x), cache.view(step)
        if config.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = tempered(q.unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2), step, config)
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return q_nope, rotate(q_rope, step, config.rope), view

    def _entries(self, latent: Tensor, k_rope: Tensor) -> dict[str, Tensor]:
        """What is cached of the normed latent (B, 1, T, R) and the turned rope key (B, 1, T, P)."""
        return {"latent": latent, "k_rope": k_rope}

    def _attend(self, q: Tensor, view: View, names: tuple[str, ...], expand: Expand | None = None) -> Tensor:
        config = self.config
        return attend(
            q,
            view,
            names,
            expand=expand,
            scale=config.scale,
            sink=self.sinks,
            softcap=config.attn_logit_softcapping,
        )

    def _absorbed_below(self, keys: int) -> float:
        return MEASURED * crossover(self.config, keys) if self.absorbed_below is None else self.absorbed_below

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK (H, N, R) and W_UV (H, V, R), as views of kv_b_proj's weight."""
        config = self.config
        weight = self.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))
        w_uk, w_uv = weight.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return w_uk, w_uv


class ExpandedMultiHeadLatentAttention(MultiHeadLatentAttention):
    """MLA that caches what it expanded, H * (N + P + V) numbers per token: what a latent cache saves, made visible.

    A layer that shares reads its owner's expanded keys and values, so it has nothing to expand with.
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__(config)
        if config.kv_shared_layer is not None:
            del self.kv_b_proj
            self.by_rows = ()

    def forward(self, x: Tensor, step: Step | None = None, cache: LayerCache | None = None) -> Tensor:
        """(B, T, hidden) to the same."""
        step, cache = standing(x, step, cache, self.cache_spec)
        q_nope, q_rope, view = self._project(x, step, cache)
        out = self._attend(torch.cat([q_nope, q_rope], dim=-1), view, ("k", "v"))
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged

    def _entries(self, latent: Tensor, k_rope: Tensor) -> dict[str, Tensor]:
        k, v = self.expand(latent, k_rope)
        return {"k": k, "v": v}


def crossover(config: MLAConfig, keys: int) -> float:
    """Query tokens at which absorbed and expanded cost the same multiplications, each query meeting so many keys.

    Per head, absorbed multiplies 2 R + P numbers for each query and key, and R (N + V) for each query; expanded
    N + P + V for each query and key, and R (N + V) for each key. DeepSeek-V3's sizes give 171 for very many keys,
    131072 / (1088 - 320), 158 for 2048 and 128 for 512.
    """
    absorbed = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    expanded = config.qk_head_dim + config.v_head_dim
    once = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    per_query = keys * (absorbed - expanded) + once
    return keys * once / per_query if per_query > 0 else math.inf
