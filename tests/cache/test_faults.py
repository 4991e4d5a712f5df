"""What breaks in the middle leaves every sequence as it was: the same step again gives what it would have given."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from attn_variants import VARIANTS, Decoder, DecoderConfig
from attn_variants.cache import KVCache
from attn_variants.cache.pages import OutOfPagesError
from attn_variants.cache.quantize import CODECS
from tests import reference
from tests.cache.test_grid import NAMES, PAIRS
from tests.cache.test_saved import Summing
from tests.tiny import GEOMETRY, LONG, SHORT, append, error, same, sharpen, snapshot


class BrokenError(Exception):
    pass


@lru_cache
def hybrid(variant: str, rank: int = GEOMETRY.kv_lora_rank):
    """Three layers of two kinds: what a window has passed over, the full one still sees."""
    config = DecoderConfig.from_geometry(replace(GEOMETRY, kv_lora_rank=rank), VARIANTS[variant].config)
    near = replace(config.attention, sliding_window=4)
    config = replace(config, attention=(near, config.attention, near), num_hidden_layers=3)
    return sharpen(Decoder(config).double()).float().eval()


def made(model, store, codec="plain", **options):
    return KVCache(
        model.cache_specs, batch=3, capacity=24, dtype="float32", store=store, codec=codec, burst=3, **options
    )


def breaking(model, cache, step, layer):
    """The step, with an exception before this layer."""

    def broken(*given):
        raise BrokenError

    handle = model.model.layers[layer].register_forward_pre_hook(broken)
    try:
        with pytest.raises(BrokenError):
            append(model, cache, step)
    finally:
        handle.remove()


@pytest.mark.parametrize("store", NAMES)
@pytest.mark.parametrize(("variant", "codec"), PAIRS)
def test_after_an_exception_the_same_step_gives_the_same(variant, codec, store):
    """Every step breaks before each layer, once with the same tokens and once with others."""
    model = hybrid(variant, 128 if codec == "fp8-mla" else GEOMETRY.kv_lora_rank)
    whole, broken = made(model, store, codec), made(model, store, codec)
    for step in (
        [LONG[:9], SHORT[:3], [4]],
        [[1], [2], [3]],
        [[5, 6, 7], [], [8]],
        [[9], [10], [11]],
        [[12], [13], [14]],
    ):
        wanted = append(model, whole, step)
        for layer in range(3):
            lengths = broken.lengths
            breaking(model, broken, step, layer)
            breaking(model, broken, [[20] * len(ids) for ids in step], layer)
            assert torch.equal(broken.lengths, lengths)
        for got, want in zip(append(model, broken, step), wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("store", NAMES)
def test_after_an_exception_another_step_is_right_and_pages_are_back(store, layer):
    model = hybrid("gqa")
    store = made(model, store)
    weights = reference.weights_of(model)
    said = [LONG[:9], SHORT[:3], [4]]
    append(model, store, said)
    for step in ([[1], [], [2]], [[3], [4, 5], []], [[6], [7], [8]]):
        held = [layout.pool.free for layout in store._layouts.values() if layout.pooled]
        breaking(model, store, [[20, 21, 22]] * 3, layer)
        store.rewind(0)
        assert held == [layout.pool.free for layout in store._layouts.values() if layout.pooled]
        said = [row + ids for row, ids in zip(said, step, strict=True)]
        for row, logits in enumerate(append(model, store, step)):
            if step[row]:
                wanted = reference.decoder("gqa", weights, model.config, said[row])[-len(step[row]) :]
                assert error(logits, wanted) < 1e-5


@pytest.mark.parametrize("codec", ["plain", "int4"])
@pytest.mark.parametrize("page", [1, 4])
def test_out_of_pages_in_the_middle_of_a_batch_leaves_every_row_going_on(page, codec):
    """The first kind of layer has room for the step and the second has not: nothing of it is taken."""
    model = hybrid("gqa")
    tight, wide = made(model, f"paged:{page}", codec, pages=28 // page), made(model, "full", codec)
    said = [LONG, SHORT, [4, 5]]
    for store in (tight, wide):
        append(model, store, said)
    # The full layer's pool is spent in the second step; the windows' would have had room.
    step = [[1, 2, 3], [4], [5, 6]]
    for one, other in zip(append(model, tight, step), append(model, wide, step), strict=True):
        assert error(one, other) < 1e-5
    before = snapshot(tight), [layout.pool.free for layout in tight._layouts.values()]
    with pytest.raises(OutOfPagesError, match="the step needs"):
        append(model, tight, [[1, 2, 3]] * 3)
    assert same(snapshot(tight), before[0])
    assert [layout.pool.free for layout in tight._layouts.values()] == before[1]
    for layout in tight._layouts.values():
        layout.pool.check(layout.tables)
    tight.free([0])
    wide.free([0])
    for _ in range(2):
        for one, other in zip(append(model, tight, [[], [7], [8]]), append(model, wide, [[], [7], [8]]), strict=True):
            assert not other.numel() or error(one, other) < 1e-5


@pytest.mark.parametrize("store", NAMES)
@pytest.mark.parametrize("burst", [1, 3])
def test_states_of_a_step_that_broke_are_not_kept(store, burst):
    model = Summing()
    cache = KVCache(model.cache_specs, batch=2, capacity=9, dtype="float32", burst=burst, store=store)
    model.feed(cache, torch.tensor([[1], [2]]))
    for _ in range(3):
        advance, cache.advance = cache.advance, lambda step: (_ for _ in ()).throw(BrokenError)
        with pytest.raises(BrokenError):
            model.feed(cache, torch.tensor([[100], [200]]))
        cache.advance = advance
    assert [int(total) for total in model.feed(cache, torch.tensor([[10], [20]]))] == [11, 22]


def test_every_codec_is_broken():
    assert {codec.partition(":")[0] for _, codec in PAIRS} == set(CODECS)
