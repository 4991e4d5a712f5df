"""Rotary position embedding (RoPE, arXiv 2104.09864): pairs of numbers turn by an angle that grows with the position.

Angles are float32 whatever the model's dtype: bfloat16 cannot tell position 257 from 256. Only the finished cos and sin
are cast. Frequencies are worked out in float32 as checkpoints' own code does, so that long contexts turn by the same
angle to the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_variants.contract import Step
from attn_variants.options import AttentionOptions
from attn_variants.rope_config import RopeConfig, yarn_mscale


def inverse_frequencies(config: RopeConfig, dim: int, device: torch.device | str | None = None) -> Tensor:
    """(dim / 2,) float32: radians per position of each pair, for heads of which `dim` numbers turn."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequencies: Tensor = 1.0 / config.rope_theta**exponents
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, frequencies)
    if config.rope_type == "yarn":
        return _yarn(config, config.rope_theta**exponents, dim)
    return frequencies


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between blended."""
    assert config.original_max_position_embeddings is not None
    turns = config.original_max_position_embeddings / (2 * math.pi / frequencies)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = (turns - low) / (high - low)
    blended = (1 - kept) * frequencies / config.factor + kept * frequencies
    stretched = torch.where(turns < low, frequencies / config.factor, frequencies)
    return torch.where((turns >= low) & (turns <= high), blended, stretched)


def _yarn(config: RopeConfig, periods: Tensor, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over pairs from kept to stretched frequencies."""
    assert config.original_max_position_embeddings is not None

    def pair_turning(rotations: float) -> float:
        """The (fractional) pair that turns this often within the original context."""
        span = config.original_max_position_embeddings / (rotations * 2 * math.pi)  # type: ignore[operator]
        return dim * math.log(span) / (2 * math.log(config.rope_theta))

    low, high = pair_turning(config.beta_fast), pair_turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A ramp of no width would divide by zero.
    high = high + 0.001 if high == low else high
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=periods.device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (config.factor * periods) * (1 - kept) + 1.0 / periods * kept


def attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by: YaRN's temperature, 1 for the other kinds."""
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor)


def rotary_table(config: RopeConfig, dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every pair at (B, T) positions, (B, T, dim / 2) float32 each."""
    angles = positions[..., None].float() * inverse_frequencies(config, dim, positions.device)
    factor = attention_factor(config)
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, step: Step, config: RopeConfig | None) -> Tensor:
    """x (B, heads, T, D) with the leading pairs of every head turned to the step's positions; None turns nothing."""
    if config is None:
        return x
    dim = config.rotary_dim(x.shape[-1])
    cos, sin = _step_table(step, config, dim, x.dtype)
    if dim == x.shape[-1]:
        return torch.addcmul(x * cos, _partner(x, config.interleaved), sin)
    turning, rest = x.split([dim, x.shape[-1] - dim], dim=-1)
    return torch.cat([torch.addcmul(turning * cos, _partner(turning, config.interleaved), sin), rest], dim=-1)


def tempered(q: Tensor, step: Step, options: AttentionOptions) -> Tensor:
    """q (B, H, T, D), grown with the logarithm of its position as `floor_scale` says (arXiv 2501.19399)."""
    if options.floor_scale is None:
        return q
    steps = torch.floor((step.positions[:, None, :, None].float() + 1) / options.floor_scale)
    return q * (1 + options.attn_scale * torch.log1p(steps)).to(q.dtype)


def _partner(x: Tensor, interleaved: bool) -> Tensor:
    """Each number's pair mate: its neighbour, or the one half a head away."""
    pairs = (-1, 2) if interleaved else (2, -1)
    mates: Tensor = x.unflatten(-1, pairs).flip(-1 if interleaved else -2).flatten(-2)
    return mates


def _step_table(step: Step, config: RopeConfig, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B, 1, T, dim) cos and signed sin in the pairs' own order, made once per step and read by all layers."""
    key = (config, dim, dtype)
    if key not in step.tables:
        cos, sin = (half[:, None] for half in rotary_table(config, dim, step.positions))
        if config.interleaved:
            cos, sin = torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
        else:
            cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        step.tables[key] = cos.to(dtype), sin.to(dtype)
    return step.tables[key]
