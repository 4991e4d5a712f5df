"""Every variant in every backend and dtype, autocast included."""

import pytest
import torch

from attn_variants.attend import BACKENDS, backend
from attn_variants.cache import KVCache
from tests import reference
from tests.tiny import GEOMETRY, LONG, SHORT, TOLERANCE, append, decoder, error, expected, kv_cache, static, variants

FLOAT64 = TOLERANCE[torch.float64]


@variants
@pytest.mark.parametrize("name", BACKENDS)
def test_backends_agree(variant, name):
    model = decoder(variant)
    store, static_store = kv_cache(model), kv_cache(model, static=True)
    with backend(name):
        for step in ([LONG, SHORT], [[11], [12]], [[13, 14], [15]], [[16], [17]]):
            logits, fixed = append(model, store, step), append(model, static_store, step)
            assert all(error(a, b) < 1e-9 for a, b in zip(logits, fixed, strict=True))
    assert error(logits[0], expected(variant, [*LONG, 11, 13, 14, 16])[-1:]) < FLOAT64
    assert error(logits[1], expected(variant, [*SHORT, 12, 15, 17])[-1:]) < FLOAT64


@variants
@static
@pytest.mark.parametrize("name", [None, "reference"], ids=["chosen", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_in_a_narrow_dtype_is_within_tolerance(variant, static, name, dtype):
    module = decoder(variant, dtype).model.layers[0].self_attn
    store = KVCache([module.cache_spec], batch=2, capacity=12, dtype=dtype, static=static)
    x = torch.randn(2, 10, GEOMETRY.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = []
    with backend(name), torch.no_grad():
        for at in (slice(0, 6), slice(6, 9), slice(9, 10)):
            step = store.step(2, at.stop - at.start)
            out.append(module(x[:, at], step, store.layers[0]))
            store.advance(step)
    weights = reference.weights_of(module)
    for row, given in enumerate(torch.cat(out, 1)):
        assert given.dtype == dtype
        assert error(given, reference.VARIANTS[variant](weights, module.config, x[row].double())) < TOLERANCE[dtype]


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_decoder_decodes_like_itself_in_one_pass(variant, dtype):
    """A decoder adds its MLPs' rounding, which is not attention's: it is allowed twice the tolerance."""
    model = decoder(variant, dtype)
    store = kv_cache(model, batch=1)
    logits = torch.cat([append(model, store, [LONG[at]])[0] for at in (slice(0, 6), slice(6, 9), slice(9, 10))])
    assert error(logits, expected(variant, LONG, dtype)) < 2 * TOLERANCE[dtype]


@variants
@pytest.mark.parametrize("name", [None, *BACKENDS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_runs_a_float32_decoder_on_a_cache_of_either_dtype(variant, name, dtype):
    model = decoder(variant, torch.float32)
    store = kv_cache(model, batch=1, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16), backend(name):
        logits = torch.cat([append(model, store, [LONG[at]])[0] for at in (slice(0, 6), slice(6, 9), slice(9, 10))])
    assert {tensor.dtype for tensor in store.tensors.values()} == {dtype}
    assert error(logits, expected(variant, LONG, torch.float32)) < 2 * TOLERANCE[torch.bfloat16]
