"""Pages: who holds them, where tokens lie on them, what a step reads and what goes back, worked by hand."""

import pytest
import torch

from attn_variants.cache import KVCache, assert_cache_shapes, cache_shapes
from attn_variants.cache.paged import most_pages
from attn_variants.cache.pages import OutOfPagesError, Pages
from attn_variants.contract import CacheSpec, Entry, Record

K = Record.of(Entry("k", 1, 1))


def made(page=4, rows=1, capacity=20, **options):
    limits = {name: options.pop(name) for name in ("window", "chunk", "sinks") if name in options}
    spec = CacheSpec(records=(K,), **limits)
    cache = KVCache([spec], batch=rows, capacity=capacity, dtype="float32", store=f"paged:{page}", **options)
    (layout,) = cache._layouts.values()
    return cache, layout


def grow(cache, tokens, rows=None):
    """Append tokens whose keys are their positions; the view."""
    step = cache.step(cache.batch if rows is None else len(rows), tokens, rows=rows)
    view = cache.layers[0].append(step, k=step.positions[:, None, :, None].float())
    cache.advance(step)
    return view


def test_pages_are_handed_out_lowest_first_and_come_back_with_their_last_holder():
    pool = Pages(4)
    assert [pool.take() for _ in range(3)] == [1, 2, 3]
    pool.share([2, 0])
    pool.release([1, 2, 0])
    assert (pool.free, pool.holders(1), pool.holders(2)) == (2, 0, 1)
    assert pool.take() == 1
    pool.release([2])
    assert pool.take() == 2
    pool.check([[1, 2], [3]])
    with pytest.raises(AssertionError, match="held by other tables"):
        pool.check([[1, 2]])
    with pytest.raises(AssertionError, match="page 4 is free already"):
        pool.release([4])
    with pytest.raises(AssertionError, match="page 4 is free"):
        pool.share([4])
    assert pool.take() == 4
    with pytest.raises(OutOfPagesError, match="the step needs 1 pages and 0 of 4 are free: free or rewind rows"):
        pool.take()


def test_a_shuffled_pool_hands_out_every_page_once_in_another_order():
    pool = Pages(30)
    held = [pool.take() for _ in range(3)]
    pool.shuffle(0)
    rest = [pool.take() for _ in range(27)]
    assert rest != sorted(rest)
    assert sorted(held + rest) == list(range(1, 31))
    pool.release(rest[:2])
    assert {pool.take(), pool.take()} == set(rest[:2])
    pool.check([held, rest])


@pytest.mark.parametrize(
    ("limits", "page", "burst", "pages"),
    [
        ({}, 4, 1, 5),
        ({}, 1, 1, 20),
        ({}, 256, 1, 1),
        # Six tokens, five and one of a burst that may be taken back, from the end of a page: 1 + 4 + 1.
        ({"window": 5}, 4, 1, 3),
        ({"window": 5}, 1, 1, 6),
        ({"window": 5}, 4, 3, 4),
        ({"window": 5, "sinks": 3}, 2, 1, 6),
        ({"chunk": 5, "sinks": 5}, 4, 1, 5),
    ],
)
def test_the_most_pages_of_a_row(limits, page, burst, pages):
    spec = CacheSpec(records=(K,), **limits)
    assert most_pages(spec, 20, page, burst) == pages
    shapes = cache_shapes([spec], batch=2, capacity=20, store=f"paged:{page}", dtype="float32", burst=burst)
    assert shapes == {"layers.0.k": ((1, (2 * pages + 1) * page, 1), "float32")}
    cache, layout = made(page, rows=2, burst=burst, **limits)
    grow(cache, burst)
    for _ in range((20 - burst) // burst):
        grow(cache, burst)
    assert layout.pool.total == 2 * pages


def test_tokens_lie_where_the_table_says_behind_page_0():
    cache, layout = made(4)
    grow(cache, 6)
    assert layout.tables == [[1, 2]]
    assert cache.tensors["layers.0.k"].flatten().tolist()[:12] == [0] * 4 + [0, 1, 2, 3] + [4, 5, 0, 0]
    assert cache.bytes.used == 6 * 4
    assert cache.bytes.bookkeeping == 2 * 8


def test_a_page_is_written_as_one_run_where_its_row_stands_alone_and_is_read_no_further_than_the_newest():
    cache, _ = made(4)
    grow(cache, 6)
    view = grow(cache, 1)
    assert view.plan.start == 4 + 6
    assert (view.plan.limit, view.plan.mask) == (7, None)
    assert view.dense("k")[0].flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_pages_are_read_in_the_order_of_memory_but_for_the_newest():
    cache, layout = made(2, rows=2)
    grow(cache, 2, rows=[1])
    grow(cache, 4, rows=[0])
    cache.free([1])
    grow(cache, 2, rows=[0])
    assert layout.tables[0] == [2, 3, 1]
    view = grow(cache, 1, rows=[0])
    assert view.plan.table.pages.tolist() == [[1, 2, 3, 4]]
    assert view.plan.table.runs == (((1, 4),),)
    assert view.dense("k")[0].flatten().tolist() == [4, 5, 0, 1, 2, 3, 6]
    ((keys,), _), *others = view.blocks(64, "k")
    assert not others
    assert keys.untyped_storage().data_ptr() == cache.tensors["layers.0.k"].untyped_storage().data_ptr()


def test_runs_of_pages_are_read_in_place_and_what_lies_scattered_in_one_copy():
    cache, layout = made(1, capacity=40, rows=2, pages=60)
    grow(cache, 1)
    for _ in range(4):
        grow(cache, 1)
    grow(cache, 20, rows=[0])
    # Row 0 holds 1, 3, 5, 7, 9, then 11 to 30.
    view = grow(cache, 1, rows=[0])
    assert layout.tables[0] == [1, 3, 5, 7, 9, *range(11, 32)]
    assert [(slots.start, slots.stop) for _, slots in view.blocks(8, "k")] == [(0, 5), (5, 13), (13, 21), (21, 26)]
    memory = cache.tensors["layers.0.k"].untyped_storage().data_ptr()
    in_place = [keys.untyped_storage().data_ptr() == memory for (keys,), _ in view.blocks(8, "k")]
    assert in_place == [False, True, True, True]
    assert torch.cat([keys for (keys,), _ in view.blocks(8, "k")], 2).flatten().tolist() == list(range(26))


def test_a_page_that_others_hold_is_copied_before_it_is_written_to():
    cache, layout = made(4, rows=2, pages=6)
    grow(cache, 6, rows=[0])
    cache.share(0, [1])
    assert layout.tables == [[1, 2], [1, 2]]
    assert (layout.pool.free, cache.bytes.used) == (4, 6 * 4)
    grow(cache, 1, rows=[1])
    assert layout.tables == [[1, 2], [1, 3]]
    assert cache.tensors["layers.0.k"].flatten().tolist()[8:16] == [4, 5, 0, 0, 4, 5, 6, 0]
    grow(cache, 1, rows=[0])
    assert layout.tables == [[1, 2], [1, 3]]
    # Four on the page of both, three more on each one's own.
    assert cache.bytes.used == (4 + 3 + 3) * 4


def test_a_step_of_both_holders_copies_once():
    cache, layout = made(4, rows=2, pages=3)
    grow(cache, 6, rows=[0])
    cache.share(0, [1])
    grow(cache, 1)
    assert layout.tables == [[3, 2], [1, 2]] or layout.tables == [[1, 3], [1, 2]]
    assert layout.pool.free == 0


def test_pages_out_of_sight_go_back_and_what_is_left_says_how_far_a_row_goes_back():
    cache, layout = made(2, window=3, sinks=1)
    grow(cache, 4)
    for _ in range(4):
        grow(cache, 1)
    # Eight tokens: 5 to 7 are in sight, on the third page and the fourth, and the sink on the first.
    assert [page > 0 for page in layout.tables[0]] == [True, False, True, True]
    assert layout.pool.total - layout.pool.free == 3
    assert cache.floor(0) == 4 + 3 - 1


def test_a_long_prompt_takes_the_pages_of_what_is_in_sight():
    cache, layout = made(2, capacity=40, window=3)
    grow(cache, 31)
    assert layout.tables[0][:14] == [0] * 14
    assert layout.pool.total - layout.pool.free == 2
    assert cache.floor(0) == 28 + 3 - 1


def test_a_fork_s_bytes_are_those_of_the_pool_it_lives_on():
    cache, _ = made(4, rows=3)
    grow(cache, 6)
    twin = cache.fork([1])
    assert twin.bytes.formula == twin.bytes.allocated == cache.bytes.allocated == (3 * 5 + 1) * 4 * 4
    assert_cache_shapes(twin, twin.specs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page": 0}, r"store 'paged:0': give pages of 1 to 256 tokens, as in paged:16"),
        ({"page": 257}, r"store 'paged:257': give pages of 1 to 256"),
        ({"page": ""}, r"store 'paged:': give pages"),
        ({"page": "x"}, r"store 'paged:x': give pages"),
        ({"pages": 0}, r"pages \(0\) must be an integer of at least 1"),
        ({"static": True}, r"store 'paged:4' has no fixed shapes \(static=True\); give full or ring"),
    ],
)
def test_pools_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_pages_belong_to_a_paged_store():
    with pytest.raises(ValueError, match=r"pages \(3\) belong to a paged store, not to 'ring'"):
        KVCache([CacheSpec(records=(K,), window=3)], batch=1, capacity=4, store="ring", pages=3)


def test_copies_that_the_pool_has_no_room_for_are_refused_before_any_is_made():
    cache, layout = made(4, rows=3, pages=3)
    grow(cache, 6, rows=[0])
    cache.share(0, [1, 2])
    with pytest.raises(OutOfPagesError, match="the step needs 2 pages and 1 of 3 are free"):
        cache.step(2, 1, rows=[1, 2])
    assert (layout.tables, layout.pool.free) == ([[1, 2]] * 3, 1)
