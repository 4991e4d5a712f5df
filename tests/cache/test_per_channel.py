"""Keys coded per channel over neighbouring tokens: bytes and numbers by hand, when they are coded, and what waits."""

from __future__ import annotations

import pytest
import torch

from attn_variants.cache import KVCache, cache_shapes
from attn_variants.cache.quantize import codec_named
from attn_variants.contract import CacheSpec, Entry, Record

K, V = Record.of(Entry("k", 2, 3)), Record.of(Entry("v", 2, 3))
SPEC = CacheSpec(records=(K, V))
LATENT = Record("kv", (Entry("latent", 1, 3, sharded=False), Entry("k_rope", 1, 2, sharded=False)))


def appended(cache, numbers):
    """Views of one layer after appending (B, heads, T, dim) as keys, and their negatives as values."""
    step = cache.step(numbers.shape[0], numbers.shape[2])
    view = cache.layers[0].append(step, k=numbers, v=-numbers)
    cache.advance(step)
    return view


def test_a_channel_has_one_scale_over_neighbouring_tokens():
    """Channel 0 goes from 0 to 255 in steps of 1, channel 1 is constant, channel 2 is an outlier a thousand wide."""
    row = torch.tensor([[0.0, 7.0, -500.0], [255.0, 7.0, 500.0]])
    codec = codec_named("int8-kivi:2")
    stored = codec.encode(K, row)
    assert {name: tuple(part.shape) for name, part in stored.items()} == {
        "": (2, 3),
        ".scale": (1, 3),
        ".middle": (1, 3),
    }
    assert stored[""][:, 0].tolist() == [-128, 127]
    assert stored[".scale"][0, 0].item() == pytest.approx(1.0, rel=2**-7)
    decoded = codec.decode(K, stored, torch.float32)
    assert ((decoded - row).abs() <= codec.bound(K, row)).all()
    assert decoded[:, 1].tolist() == [7.0, 7.0]
    by_token = codec_named("int8").encode(K, row)
    assert by_token[""][0].tolist() == [0, 2, -126]


@pytest.mark.parametrize("name", ["int8-kivi:4", "int4-kivi:4"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 6e4])
def test_decoded_numbers_keep_the_bound(name, scale):
    codec, generator = codec_named(name), torch.Generator().manual_seed(1)
    row = torch.randn(2, 8, 3, generator=generator) * scale
    row[0, 5, 1] *= 100
    for record in (K, V):
        decoded = codec.decode(record, codec.encode(record, row), torch.float32)
        assert ((decoded.double() - row.double()).abs() <= codec.bound(record, row)).all()


def test_values_have_a_scale_per_token_and_rope_keys_stay():
    parts = {
        part.suffix: (part.width, part.dtype, part.per) for part in codec_named("int4-kivi:8").parts(V, "bfloat16")
    }
    assert parts == {"": (2, "uint8", 1), ".scale": (1, "bfloat16", 1), ".middle": (1, "bfloat16", 1)}
    parts = {part.suffix: (part.width, part.per) for part in codec_named("int4-kivi:8").parts(LATENT, "bfloat16")}
    assert parts == {".latent": (2, 1), ".latent.scale": (3, 8), ".latent.middle": (3, 8), ".k_rope": (2, 1)}


def test_bytes_by_hand():
    """Capacity 9 in runs of 4: 12 slots, 3 rows of scales; 4 + 2 * 1 - 1 = 5 tokens wait."""
    shapes = cache_shapes([SPEC], batch=1, capacity=9, codec="int8-kivi:4", dtype="float32")
    assert shapes == {
        "layers.0.k": ((1, 2, 12, 3), "int8"),
        "layers.0.k.scale": ((1, 2, 3, 3), "bfloat16"),
        "layers.0.k.middle": ((1, 2, 3, 3), "bfloat16"),
        "layers.0.k.residual": ((1, 2, 5, 3), "float32"),
        "layers.0.v": ((1, 2, 12, 3), "int8"),
        "layers.0.v.scale": ((1, 2, 12, 1), "bfloat16"),
        "layers.0.v.middle": ((1, 2, 12, 1), "bfloat16"),
        "layers.0.v.residual": ((1, 2, 5, 3), "float32"),
    }


@pytest.mark.parametrize("store", ["full", "ring", "paged:2", "paged:6", "paged:8"])
@pytest.mark.parametrize(
    "spec", [SPEC, CacheSpec(records=(K, V), window=5), CacheSpec(records=(K, V), window=5, sinks=2)]
)
def test_the_formula_is_what_is_allocated(store, spec):
    cache = KVCache([spec, spec], batch=3, capacity=21, codec="int4-kivi:4", store=store, burst=2)
    assert cache.bytes.formula == cache.bytes.allocated == cache.nbytes


@pytest.mark.parametrize(
    ("store", "together"), [("full", 4), ("ring", 4), ("paged:8", 4), ("paged:2", 2), ("paged:3", 3), ("paged:6", 2)]
)
def test_tokens_that_can_be_taken_back_or_are_incomplete_are_exact_and_the_others_coded(store, together):
    cache = KVCache([SPEC], batch=1, capacity=24, codec="int8-kivi:4", store=store, burst=1)
    numbers = torch.randn(1, 2, 16, 3, generator=torch.Generator().manual_seed(0))
    appended(cache, numbers[:, :, :6])
    for token in range(6, 16):
        view = appended(cache, numbers[:, :, token : token + 1])
        keys, values = view.dense("k", "v")
        assert torch.equal(torch.cat([part for (part,), _ in view.blocks(3, "k")], dim=2), keys)
        order = torch.arange(token + 1) if view.plan.kv_positions is None else view.plan.kv_positions[0]
        held = (order >= 0) & (order <= token)
        keys, values, order = keys[0][:, held], values[0][:, held], order[held]
        # What was coded when the step began: the row held `token` tokens, of which the last stays within reach.
        sealed = (token - 1) // together * together
        exact = keys == numbers[0][:, order]
        # Slots in the order of positions need no second look where all of them are coded.
        assert view.plan.sealed == (None if "paged" in store else sealed)
        assert exact[:, order >= sealed].all()
        assert not exact[:, order < sealed].all()
        bound = codec_named("int8-kivi:4").over(together).bound(K, numbers[0][:, :sealed])
        coded = order < sealed
        error = (keys - numbers[0][:, order])[:, coded].abs()
        assert (error <= bound[:, order[coded]]).all()
        assert ((values + numbers[0][:, order])[:, coded].abs() < 0.05).all()


@pytest.mark.parametrize("sinks", [0, 5])
def test_of_a_long_prompt_on_pages_only_what_is_in_sight_is_coded(sinks):
    """Page 0 is nobody's: tokens whose pages were never taken must not be coded into it."""
    spec = CacheSpec(records=(K, V), window=5, sinks=sinks)
    cache = KVCache([spec], batch=1, capacity=40, codec="int8-kivi:4", store="paged:4")
    numbers = torch.randn(1, 2, 31, 3, generator=torch.Generator().manual_seed(3))
    appended(cache, numbers)
    (layout,) = cache._layouts.values()
    assert [page > 0 for page in layout.tables[0]] == [sinks > 0] * 2 + [False] * 4 + [True] * 2
    codes = cache.tensors["layers.0.k"]
    assert not codes[:, :4].any()
    # Tokens 24 to 27 are coded, and the sinks' two pages; 28 to 30 wait.
    coded = codes.unflatten(1, (-1, 4)).any(-1).any(-1).any(0)
    assert coded.sum() == 1 + 2 * (sinks > 0)
    view = appended(cache, numbers[:, :, :1])
    (keys,) = view.dense("k")
    positions = view.plan.kv_positions[0]
    seen = view.plan.mask[0, 0, 0] & (positions < 31)
    assert (keys[0][:, seen] - numbers[0][:, positions[seen]]).abs().max() < 0.05


def test_a_window_that_begins_within_a_run_is_read_with_the_run_s_own_scale():
    """Magnitudes grow with the position, so that another run's scale would show."""
    cache = KVCache([CacheSpec(records=(K, V), window=5)], batch=1, capacity=16, codec="int8-kivi:4")
    numbers = torch.tensor([10.0 ** (at // 4) for at in range(16)])[None, None, :, None].expand(1, 2, 16, 3)
    appended(cache, numbers[:, :, :9])
    for at in range(9, 16):
        view = appended(cache, numbers[:, :, at : at + 1])
        (keys,) = view.dense("k")
        wanted = numbers[0][:, view.plan.kv_positions[0]]
        assert ((keys[0] - wanted).abs() <= 0.01 * wanted).all()


def test_coded_tokens_cannot_be_taken_back():
    cache = KVCache([SPEC], batch=1, capacity=24, codec="int8-kivi:4", burst=2)
    appended(cache, torch.zeros(1, 2, 11, 3))
    assert cache.floor(0) == 8
    cache.rewind(3)
    with pytest.raises(ValueError, match="0 to 0 can be dropped, not 1: older ones are sealed, 4 coded together"):
        cache.rewind(1)


def test_more_tokens_than_may_wait_are_refused():
    cache = KVCache([SPEC], batch=1, capacity=24, codec="int8-kivi:4", burst=2)
    appended(cache, torch.zeros(1, 2, 11, 3))
    with pytest.raises(ValueError, match=r"3 more come in one step, beyond burst \(2\)"):
        cache.step(1, 3)
    assert cache.lengths.tolist() == [11]


def test_a_step_that_fails_leaves_what_waits():
    cache = KVCache([SPEC], batch=1, capacity=24, codec="int8-kivi:4", burst=2)
    numbers = torch.randn(1, 2, 13, 3, generator=torch.Generator().manual_seed(2))
    appended(cache, numbers[:, :, :11])
    lost = cache.step(1, 2)
    cache.layers[0].append(lost, k=torch.full((1, 2, 2, 3), 9.0), v=torch.full((1, 2, 2, 3), 9.0))
    (keys,) = appended(cache, numbers[:, :, 11:]).dense("k")
    assert torch.equal(keys[0, :, 8:], numbers[0, :, 8:])
