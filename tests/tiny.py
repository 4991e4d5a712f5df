"""The tests' sizes, tiny and all different (equal ones hide transposed axes), and decoders with sharp weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from attn_variants import VARIANTS, Decoder, DecoderConfig, Geometry
from attn_variants.cache import KVCache
from tests import reference

GEOMETRY = Geometry(
    layers=2,
    hidden_size=32,
    heads=6,
    kv_heads=2,
    head_dim=8,
    kv_lora_rank=20,
    qk_rope_head_dim=4,
    qk_nope_head_dim=10,
    v_head_dim=12,
    intermediate_size=44,
    vocab_size=50,
)
LONG, SHORT = [3, 14, 15, 9, 26, 5, 35, 8, 47, 32], [27, 18, 28, 1, 41, 2, 12]
"""Two sequences of ids of different length."""

variants = pytest.mark.parametrize("variant", VARIANTS)
static = pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])

# Largest difference over largest magnitude. In float64 the rotary angles are what is left: they are float32.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def error(given: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest magnitude wanted."""
    assert given.shape == wanted.shape, f"{tuple(given.shape)} is not {tuple(wanted.shape)}"
    assert given.isfinite().all()
    wanted = wanted.double()
    return float((given.double() - wanted).abs().max() / wanted.abs().max())


def sharpen(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights that make attention choose: with a library's defaults it averages, which hides wrong keys."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            noise = 1 + 0.3 * noise
        elif parameter.ndim == 2 and "embed" not in name:
            noise = noise * 1.3 / parameter.shape[1] ** 0.5
        parameter.data.copy_(noise)
    return module


@cache
def decoder(variant: str, dtype: torch.dtype = torch.float64, layers: int = 2) -> Decoder:
    """A decoder of this variant; the same weights at every call."""
    config = DecoderConfig.from_geometry(GEOMETRY, VARIANTS[variant].config)
    made = Decoder(DecoderConfig(**{**vars(config), "num_hidden_layers": layers}))
    return sharpen(made.double()).to(dtype).eval()


@cache
def _expected(variant: str, ids: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    model = decoder(variant, dtype)
    return reference.decoder(variant, reference.weights_of(model), model.config, ids)


def expected(variant: str, ids: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """(T, vocab): the reference's logits of one sequence alone, with the weights of `decoder(variant, dtype)`."""
    return _expected(variant, tuple(ids), dtype)


def kv_cache(model: Decoder, batch: int = 2, capacity: int = 16, **options) -> KVCache:
    """A cache for that decoder."""
    return KVCache(model.cache_specs, batch=batch, capacity=capacity, **{"dtype": model.dtype, **options})


@torch.no_grad()
def append(model: Decoder, store: KVCache, sequences, rows=None) -> list[Tensor]:
    """Logits of every sequence's tokens, appended to its row; sequences may differ in length or be empty."""
    counts = [len(ids) for ids in sequences]
    ids = torch.full((len(counts), max(counts)), 7)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.long)
    ragged = None if len(set(counts)) == 1 else counts
    logits = model(ids, store, counts=ragged, rows=rows)
    return [row[:count] for row, count in zip(logits, counts, strict=True)]


def snapshot(store: KVCache) -> dict[str, Tensor]:
    """Every stored number and the clock, copied."""
    return {name: tensor.clone() for name, tensor in store.tensors.items()} | {"lengths": store.lengths.clone()}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Whether two snapshots are equal to the bit."""
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
