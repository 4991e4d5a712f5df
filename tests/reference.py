"""The tests' oracle: textbook attention and a small decoder in float64, written from the papers with loops.

It shares no code with `attn_variants`: it reads a config's sizes and the parameters by their checkpoint names, and
works out angles itself. One sequence at a time, no batch, no cache, no mask tensor: token t stands at position t.

Sources: attention arXiv 1706.03762, GQA 2305.13245, MLA 2405.04434 section 2.1, RoPE 2104.09864, position
interpolation 2306.15595, YaRN 2309.00071, RMSNorm 1910.07467, SwiGLU 2002.05202, tokens that stay 2309.17453,
soft-capping 2408.00118, learned sinks 2508.10925, shared caches 2405.12981, growing queries 2501.19399.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def weights_of(module) -> Weights:
    """The module's parameters in float64, by name."""
    return {name: tensor.detach().double() for name, tensor in module.state_dict().items()}


def part(weights: Weights, prefix: str) -> Weights:
    """The parameters below a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def sees(query, key, *, window=None, chunk=None, sinks=0) -> bool:
    """May the query at one position read the key at another?"""
    if key < 0 or key > query:
        return False
    if key < sinks:
        return True
    return (window is None or key > query - window) and (chunk is None or key // chunk == query // chunk)


def attention(q, k, v, *, scale, sink=None, softcap=None, q_positions=None, kv_positions=None, **limits) -> Tensor:
    """(H, T, V): the softmax of one query after another, in all heads, over the keys it sees.

    q (H, T, D), k (K, S, D), v (K, S, V); head h reads key head h // (H / K). sink: one more logit per head.
    """
    heads, tokens, _ = q.shape
    q_positions = range(tokens) if q_positions is None else q_positions
    kv_positions = range(k.shape[1]) if kv_positions is None else kv_positions
    group = [head // (heads // len(k)) for head in range(heads)]
    k, v = k[group], v[group]
    out = q.new_zeros(heads, tokens, v.shape[-1])
    for t, position in enumerate(q_positions):
        seen = [s for s, other in enumerate(kv_positions) if sees(position, other, **limits)]
        scores = (k[:, seen] * q[:, t, None]).sum(-1) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sink is not None:
            scores = torch.cat([scores, sink[:, None]], dim=-1)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights = weights / weights.sum(-1, keepdim=True)
        out[:, t] = (weights[:, : len(seen), None] * v[:, seen]).sum(1)
    return out


def mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature."""
    return 1.0 if factor <= 1 else 1.0 + 0.1 * mscale * math.log(factor)


def magnitude(rope) -> float:
    """What YaRN multiplies the rotated vectors by."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if not rope.mscale or not rope.mscale_all_dim:
        return mscale(rope.factor)
    return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)


def frequencies(rope, dim: int) -> list[float]:
    """Radians per position of each of dim / 2 pairs."""
    plain = [rope.rope_theta ** (-2 * pair / dim) for pair in range(dim // 2)]
    if rope.rope_type == "default":
        return plain
    if rope.rope_type == "linear":
        return [frequency / rope.factor for frequency in plain]
    if rope.rope_type == "llama3":
        return [_llama3(rope, frequency) for frequency in plain]
    assert rope.rope_type == "yarn"
    return [_yarn(rope, frequency, pair, dim) for pair, frequency in enumerate(plain)]


def _llama3(rope, frequency: float) -> float:
    context, wavelength = rope.original_max_position_embeddings, 2 * math.pi / frequency
    if wavelength < context / rope.high_freq_factor:
        return frequency
    if wavelength > context / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn(rope, frequency: float, pair: int, dim: int) -> float:
    def pair_with(rotations: float) -> float:
        # context * theta ** (-2 pair / dim) / (2 pi) = rotations, solved for the pair
        return dim / 2 * math.log(rope.original_max_position_embeddings / (2 * math.pi * rotations), rope.rope_theta)

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    share = min(max((pair - first) / (last - first), 0), 1)
    return share * frequency / rope.factor + (1 - share) * frequency


def rotated(x: Tensor, rope, positions=None) -> Tensor:
    """x (heads, T, D): each pair of the turning part, as a complex number, times e^(i * position * frequency)."""
    if rope is None:
        return x
    dim = int(x.shape[-1] * rope.partial_rotary_factor)
    out = x.clone()
    at = torch.as_tensor(range(x.shape[1]) if positions is None else positions, dtype=torch.float64)
    for pair, frequency in enumerate(frequencies(rope, dim)):
        a, b = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + dim // 2)
        turn = torch.polar(torch.full_like(at, magnitude(rope)), at * frequency)
        turned = torch.complex(x[..., a], x[..., b]) * turn
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square, times the weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    """x W^T + b."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """(T, heads * D) to (heads, T, D), head after head."""
    width = x.shape[-1] // heads
    return torch.stack([x[:, head * width : (head + 1) * width] for head in range(heads)])


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square."""
    return rms_norm(x, torch.ones_like(x), eps)


def asked(weights: Weights, config) -> dict:
    """What a config's options ask of `attention`; sinks are learned logits there and tokens here."""
    return {
        "sink": weights.get("sinks"),
        "softcap": config.attn_logit_softcapping,
        "window": config.sliding_window,
        "chunk": config.attention_chunk_size,
        "sinks": config.sink_tokens,
    }


def tempered(q: Tensor, config) -> Tensor:
    """Llama 4's longer queries at later positions."""
    if config.floor_scale is None:
        return q
    grown = [1 + config.attn_scale * math.log(1 + (t + 1) // config.floor_scale) for t in range(q.shape[1])]
    return q * torch.tensor(grown, dtype=q.dtype)[:, None]


def gqa_kept(weights: Weights, config, x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (K, T, D), as they are cached."""
    k = heads_of(linear(x, weights, "k_proj"), config.num_key_value_heads)
    v = heads_of(linear(x, weights, "v_proj"), config.num_key_value_heads)
    if config.qk_norm:
        k = rms_norm(k, weights["k_norm.weight"], config.rms_norm_eps)
    k = rotated(k, config.rope)
    if config.qk_norm_after_rope:
        k = unit_rms(k, config.rms_norm_eps)
    return k, unit_rms(v, config.rms_norm_eps) if config.v_norm else v


def gqa(weights: Weights, config, x: Tensor, kept=None) -> Tensor:
    """Grouped-query attention over one sequence x (T, hidden); multi-head and multi-query are its ends.

    kept: the keys and values of the layer whose cache this one shares.
    """
    q = heads_of(linear(x, weights, "q_proj"), config.num_attention_heads)
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm.weight"], config.rms_norm_eps)
    q = rotated(q, config.rope)
    if config.qk_norm_after_rope:
        q = unit_rms(q, config.rms_norm_eps)
    k, v = gqa_kept(weights, config, x) if kept is None else kept
    scale = config.softmax_scale or 1 / math.sqrt(config.head_dim)
    out = attention(tempered(q, config), k, v, scale=scale, **asked(weights, config))
    return linear(torch.cat(list(out), dim=-1), weights, "o_proj")


def mla_kept(weights: Weights, config, x: Tensor) -> tuple[Tensor, Tensor]:
    """The normed latents (T, R) and the turned rope keys (T, P), as they are cached."""
    compressed = linear(x, weights, "kv_a_proj_with_mqa")
    latent = rms_norm(compressed[:, : config.kv_lora_rank], weights["kv_a_layernorm.weight"], config.rms_norm_eps)
    return latent, rotated(compressed[None, :, config.kv_lora_rank :], config.rope)[0]


def expanded_kept(weights: Weights, config, x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (H, T, N + P) and values (H, T, V) of every head."""
    return expanded(weights, config, *mla_kept(weights, config, x))


def expanded(weights: Weights, config, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Every head's keys and values from latents and rope keys."""
    nope = config.qk_nope_head_dim
    grown = heads_of(linear(latent, weights, "kv_b_proj"), config.num_attention_heads)
    return torch.stack([torch.cat([head[:, :nope], shared], dim=-1) for head in grown]), grown[..., nope:]


def mla(weights: Weights, config, x: Tensor, kept=None) -> Tensor:
    """Multi-head latent attention over one sequence, every key and value expanded.

    kept: the latents and rope keys of the layer whose cache this one shares.
    """
    kept = mla_kept(weights, config, x) if kept is None else kept
    return expanded_mla(weights, config, x, expanded(weights, config, *kept))


def expanded_mla(weights: Weights, config, x: Tensor, kept=None) -> Tensor:
    """The same over keys and values that are cached expanded, so that a layer which shares has its owner's."""
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    if config.q_lora_rank is None:
        q = linear(x, weights, "q_proj")
    else:
        narrow = rms_norm(linear(x, weights, "q_a_proj"), weights["q_a_layernorm.weight"], config.rms_norm_eps)
        q = linear(narrow, weights, "q_b_proj")
    q = heads_of(q, heads)
    q = torch.cat([q[..., :nope], rotated(q[..., nope:], config.rope)], dim=-1)
    k, v = expanded_kept(weights, config, x) if kept is None else kept
    scale = 1 / math.sqrt(nope + rope)
    if config.rope is not None and config.rope.rope_type == "yarn" and config.rope.mscale_all_dim:
        scale *= mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    scale = config.softmax_scale or scale
    out = attention(tempered(q, config), k, v, scale=scale, **asked(weights, config))
    return linear(torch.cat(list(out), dim=-1), weights, "o_proj")


# The textbook of every variant in the registry: a new variant adds its own here.
class Textbooks(dict):
    """Equations by variant; one that nobody wrote is asked for by name."""

    def __missing__(self, variant: str):
        raise AssertionError(f"write the textbook of {variant} in tests/reference.py first")


VARIANTS = Textbooks({"mha": gqa, "mqa": gqa, "gqa": gqa, "mla": mla, "mla-expanded": expanded_mla})
KEPT = Textbooks({"mha": gqa_kept, "mqa": gqa_kept, "gqa": gqa_kept, "mla": mla_kept, "mla-expanded": expanded_kept})
"""What each remembers, for layers that share it: `VARIANTS[name](weights, config, x, kept)`."""


def decoder(variant: str, weights: Weights, config, ids) -> Tensor:
    """Logits (T, vocab) of one sequence of ids."""
    x = weights["model.embed_tokens.weight"][torch.as_tensor(ids)]
    caches = []
    for index, attends in enumerate(config.attentions):
        layer = part(weights, f"model.layers.{index}.")
        normed, own = rms_norm(x, layer["input_layernorm.weight"], config.rms_norm_eps), part(layer, "self_attn.")
        shared = attends.kv_shared_layer
        caches.append(KEPT[variant](own, attends, normed) if shared is None else caches[shared])
        x = x + VARIANTS[variant](own, attends, normed, caches[-1])
        normed = rms_norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = linear(normed, layer, "mlp.gate_proj"), linear(normed, layer, "mlp.up_proj")
        x = x + linear(gate / (1 + torch.exp(-gate)) * up, layer, "mlp.down_proj")
    return linear(rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps), weights, "lm_head")
