"""Products with 8-bit codes: as right as bfloat16 allows, which is better than the codes themselves."""

import pytest
import torch

from attn_variants.attend import attend
from attn_variants.backends import coded_products
from attn_variants.cache import KVCache
from tests import reference
from tests.test_attend import random, spec_of


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 32), (2, 3, 5, 70, 64), (1, 4, 3, 4099, 80), (3, 1, 130, 33, 48)])
@pytest.mark.parametrize("gaps", [False, True])
def test_a_product_is_rounded_once(sizes, gaps):
    batch, heads, queries, slots, width = sizes
    q = random(batch, heads, queries, width).bfloat16()
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (batch, heads, 2 * slots, width), generator=generator, dtype=torch.int8)
    codes = codes[:, :, :: 2 if gaps else 1][:, :, :slots]
    wanted = q.double() @ codes.double().mT
    found = coded_products.coded_products(q, codes)
    assert found.shape == (batch, heads, queries, slots)
    assert found.dtype == torch.float32
    # Half a unit in the last of bfloat16's places, and what float32 loses while it adds up.
    sums = q.double().abs() @ codes.double().abs().mT
    assert ((found - wanted).abs() <= 2**-8 * wanted.abs() + 2**-20 * sums).all()


def test_few_codes_and_other_dtypes_are_for_other_products():
    codes = torch.zeros(1, 1, 256, 64, dtype=torch.int8)
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    assert coded_products.takes(q, codes)
    assert not coded_products.takes(q, codes[:, :, 1:])
    assert not coded_products.takes(q.float(), codes)
    assert not coded_products.takes(q, codes.to(torch.uint8))


@pytest.mark.parametrize("width", [1, 3, 8, 20, 100])
def test_the_kernel_is_not_given_what_it_would_read_beyond(width):
    q = torch.zeros(1, 1, 1, width, dtype=torch.bfloat16)
    assert not coded_products.takes(q, torch.zeros(1, 1, 2**15, width, dtype=torch.int8))


@pytest.mark.parametrize("store", ["full", "paged:4"])
@pytest.mark.parametrize("least", [0, 2**30], ids=["coded", "decoded"])
def test_attention_over_codes_is_within_the_error_of_its_scores(store, least, monkeypatch):
    monkeypatch.setattr(coded_products, "LEAST_CODES", least)
    q, k, v = (random(2, heads, tokens, 32, seed=heads).bfloat16() for heads, tokens in ((6, 1), (2, 19), (2, 19)))
    cache = KVCache([spec_of(2, 32, 32)], batch=2, capacity=24, dtype="bfloat16", store=store, codec="int8")
    for pool in cache.pools:
        pool.shuffle(1)
    step = cache.step(2, 18)
    cache.layers[0].append(step, k=k[:, :, :18], v=v[:, :, :18])
    cache.advance(step)
    step = cache.step(2, 1)
    view = cache.layers[0].append(step, k=k[:, :, 18:], v=v[:, :, 18:])
    out = attend(q, view, ("k", "v"), scale=2.0)
    ((codes, scales, _),) = view.factors(64, "k", "v")
    key, value = (code.double() * scale.double() for code, scale in zip(codes, scales, strict=True))
    rows = zip(q.double(), key, value, strict=True)
    wanted = torch.stack([reference.attention(*row, scale=2.0, q_positions=[18]) for row in rows])
    # Scores wrong by at most e make weights wrong by 2e of themselves; they add up to 1. Then the output is rounded.
    largest = (2.0 * q.double().unflatten(1, (2, 3)).flatten(2, 3) @ key.mT).abs().max()
    error = 2 * 2**-8 * largest if least == 0 else 0
    assert (out.double() - wanted).abs().max() <= (error + 2**-8) * value.abs().max()
