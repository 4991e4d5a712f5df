"""The ring: its size, which slot a token has, what a step reads and what is left of a row, worked by hand."""

import pytest
import torch

from attn_variants.cache import KVCache, cache_shapes
from attn_variants.contract import CacheSpec, Entry, Record

K = Record.of(Entry("k", 1, 1))


def grown(steps, *, rows=1, **options):
    """The cache, the last step's plan and view after steps of so many tokens, whose keys are their positions."""
    limits = {name: options.pop(name) for name in ("window", "chunk", "sinks") if name in options}
    cache = KVCache(
        [CacheSpec(records=(K,), **limits)], batch=rows, dtype="float32", store="ring", **{"capacity": 20, **options}
    )
    for tokens in steps:
        counts = tokens if isinstance(tokens, list) else None
        step = cache.step(rows, max(counts) if counts else tokens, counts=counts)
        view = cache.layers[0].append(step, k=step.positions[:, None, :, None].float())
        cache.advance(step)
    return cache, view.plan, view


def slots(cache):
    return cache.tensors["layers.0.k"][:, 0, :, 0].int().tolist()


@pytest.mark.parametrize(
    ("limits", "burst", "size"),
    [
        ({"window": 4}, 1, 4),
        ({"window": 4}, 3, 6),
        ({"window": 4, "sinks": 2}, 1, 6),
        ({"chunk": 5, "sinks": 1}, 2, 7),
        ({"window": 18}, 9, 20),
        ({"window": 4, "sinks": 30}, 1, 20),
    ],
)
def test_a_ring_has_sinks_and_window_and_burst_less_one_slots_and_no_more_than_the_capacity(limits, burst, size):
    spec = CacheSpec(records=(K,), **limits)
    shapes = cache_shapes([spec], batch=3, capacity=20, store="ring", dtype="float32", burst=burst)
    assert shapes == {"layers.0.k": ((3, 1, size, 1), "float32")}


def test_the_newest_tokens_overwrite_the_oldest_and_sinks_stay():
    cache, plan, _ = grown([5, 1, 1, 1], window=3, sinks=2)
    # Slots 2 to 4 go around: 5 lies where 2 lay, 6 where 3 lay, 7 where 4 lay.
    assert slots(cache) == [[0, 1, 5, 6, 7]]
    assert plan.kv_positions is None or plan.kv_positions.tolist() == [[0, 1, 5, 6, 7]]
    assert plan.mask is None
    assert cache.floor(0) == 7
    assert cache.bytes.used == 5 * 4


def test_a_prompt_longer_than_the_ring_leaves_its_end():
    cache, *_ = grown([9], window=3)
    assert slots(cache) == [[6, 7, 8]]
    assert cache.floor(0) == 8


def test_before_it_is_full_a_ring_is_read_as_far_as_it_was_written():
    _, plan, view = grown([2, 1], window=4)
    assert plan.limit == 3
    assert view.dense("k")[0].flatten().tolist() == [0, 1, 2]


def test_neighbouring_slots_are_written_as_one_run_up_to_the_last_of_them():
    assert grown([3, 1], window=3, burst=2)[1].start == 3
    # Four slots: token 4 and 5 lie in 0 and 1, tokens 6 and 7 in 2 and 3, the last; 7 and 8 would go around.
    assert grown([4, 2, 2], window=3, burst=2)[1].start == 2
    around = grown([4, 2, 1, 2], window=3, burst=2)[1]
    assert around.start is None
    assert around.offsets.tolist() == [3, 0]


def test_rows_of_a_ring_stand_where_they_stand():
    cache, plan, _ = grown([[4, 1], [1, 1], [1, 1]], rows=2, window=2)
    assert slots(cache) == [[4, 5], [2, 1]]
    assert plan.kv_positions.tolist() == [[4, 5], [2, 1]]
    assert plan.mask[:, 0, 0].tolist() == [[True, True], [True, True]]


def test_a_rewound_token_is_read_and_hidden():
    cache, *_ = grown([5, 1], window=3, burst=2)
    cache.rewind(1)
    step = cache.step(1, 1)
    view = cache.layers[0].append(step, k=torch.full((1, 1, 1, 1), 50.0))
    assert view.dense("k")[0].flatten().tolist() == [4, 50, 2, 3]
    assert view.plan.mask[0, 0, 0].tolist() == [True, True, False, True]


def test_a_row_that_another_follows_after_is_empty():
    cache, *_ = grown([5, 1], window=3)
    cache.free([0])
    step = cache.step(1, 2)
    cache.layers[0].append(step, k=torch.ones(1, 1, 2, 1))
    cache.advance(step)
    step = cache.step(1, 1)
    view = cache.layers[0].append(step, k=torch.ones(1, 1, 1, 1))
    assert view.plan.limit == 3
    assert cache.floor(0) == 0


@pytest.mark.parametrize(
    ("held", "counts", "message"),
    [
        (
            [3, 3],
            [3, 3],
            r"row 0 holds 3 tokens and 3 more come in one step, beyond burst \(2\): make the KVCache with",
        ),
        ([3, 0], [1, 6], r"row 1 is empty and 6 tokens come beside rows .* at most 5 \(window and burst\)"),
    ],
)
def test_steps_that_would_overwrite_what_they_need_are_refused(held, counts, message):
    cache, *_ = grown([held], rows=2, window=4, burst=2)
    with pytest.raises(ValueError, match=message):
        cache.step(2, max(counts), counts=counts)
    assert cache.lengths.tolist() == held
