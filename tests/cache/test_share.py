"""Rows that begin with another's tokens: the same as if each had been given them, on pages without a copy."""

import pytest
import torch

from attn_variants.cache import KVCache
from tests.cache.test_saved import STORES, Summing, windowed
from tests.tiny import LONG, SHORT, append, decoder, error, kv_cache, same, snapshot, variants

stores = pytest.mark.parametrize("store", STORES)


@stores
@variants
def test_rows_that_share_a_prompt_go_on_as_though_each_had_been_given_it(variant, store):
    model = decoder(variant)
    cache, alone = kv_cache(model, batch=4, store=store), kv_cache(model, batch=4)
    append(model, cache, [LONG], rows=[2])
    cache.share(2, [0, 3])
    cache.share(2, [1], tokens=7)
    append(model, alone, [LONG, LONG[:7], LONG, LONG])
    assert cache.lengths.tolist() == alone.lengths.tolist() == [10, 7, 10, 10]
    for step in ([SHORT[:1], SHORT[:3], SHORT[3:6], []], [[1], [2], [3], [4]], [[], [9, 8], [7], [6, 5]]):
        for got, wanted in zip(append(model, cache, step), append(model, alone, step), strict=True):
            assert got.shape == wanted.shape
            assert not got.numel() or error(got, wanted) < 1e-6


def test_pages_are_shared_until_one_row_writes():
    model = decoder("gqa")
    cache = kv_cache(model, batch=4, store="paged:4")
    append(model, cache, [LONG], rows=[0])
    (pool,) = {id(layout.pool): layout.pool for layout in cache._layouts.values()}.values()
    free, used = pool.free, cache.bytes_used
    cache.share(0, [1, 2])
    cache.share(0, [3], tokens=6)
    assert pool.free == free
    assert cache.bytes_used == used
    append(model, cache, [[1]], rows=[1])
    assert pool.free == free - 1
    append(model, cache, [[2]], rows=[0])
    append(model, cache, [[2]], rows=[2])
    assert pool.free == free - 2
    pool.check([table for layout in cache._layouts.values() for table in layout.tables])
    cache.free()
    assert pool.free == pool.total


@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("tokens", [1, 8, 9, 10, 11, 12])
@stores
def test_a_window_is_shared_as_far_as_it_is_still_there(store, tokens, burst):
    model = windowed()
    ids = (LONG + SHORT)[:12]
    cache = kv_cache(model, batch=3, capacity=24, store=store, burst=burst)
    append(model, cache, [ids[:6]], rows=[1])
    for token in ids[6:]:
        append(model, cache, [[token]], rows=[1])
    if tokens < cache.floor(1):
        before = snapshot(cache)
        with pytest.raises(ValueError, match=f"first {cache.floor(1)} to 12 can be shared, not {tokens}: fewer would"):
            cache.share(1, [0], tokens)
        assert same(snapshot(cache), before)
        return
    cache.share(1, [0], tokens)
    assert cache.floor(0) <= tokens
    for back in (0, tokens - max(1, cache.floor(0))):
        cache.rewind([back, 0, 0])
        whole = kv_cache(model, batch=1, capacity=24)
        append(model, whole, [ids[: tokens - back]])
        twin = cache.fork([0])
        for token in LONG[:7]:
            assert error(append(model, twin, [[token]])[0], append(model, whole, [[token]])[0]) < 1e-6


@pytest.mark.parametrize("store", ["full", "paged:2"])
@pytest.mark.parametrize("burst", [1, 3])
def test_states_are_shared_where_the_snapshot_of_that_length_is_there(store, burst):
    model = Summing()
    cache = KVCache(model.cache_specs, batch=2, capacity=9, dtype="float32", burst=burst, store=store)
    for at in range(6):
        model.feed(cache, torch.tensor([[10**at], [0]]))
    cache.free([1])
    for tokens in range(1, 7):
        if tokens < 7 - burst:
            with pytest.raises(ValueError, match=f"the first {7 - burst} to 6 can be shared, not {tokens}"):
                cache.share(0, [1], tokens)
            continue
        cache.share(0, [1], tokens)
        assert cache.floor(1) == 7 - burst
        twin = cache.fork([1])
        assert model.feed(twin, torch.tensor([[5]]))[0] == 5 + sum(10**at for at in range(tokens))
        cache.free([1])


@stores
def test_what_cannot_be_shared_is_refused_and_changes_nothing(store):
    model = decoder("gqa")
    cache = kv_cache(model, batch=4, store=store)
    append(model, cache, [LONG, SHORT], rows=[0, 1])
    before = snapshot(cache)
    for source, rows, tokens, message in [
        (0, [2], 11, "row 0 holds 10 tokens, of which the first 1 to 10 can be shared, not 11"),
        (0, [2], 0, "can be shared, not 0"),
        (0, [2], -1, "can be shared, not -1"),
        (0, [2, 1], None, "row 1 holds 7 tokens already: name an empty one, or free it"),
        (0, [0], 3, "row 0 holds 10 tokens already"),
        (2, [3], None, "row 2 holds nothing to share"),
        (0, [4], None, r"rows \[4\] must be some of 0 to 3"),
        (4, [2], None, r"rows \[4\] must be some of 0 to 3"),
        (0, [2, 2], None, "must be distinct"),
        (0, [], None, "must be some of"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.share(source, rows, tokens)
        assert same(snapshot(cache), before)
