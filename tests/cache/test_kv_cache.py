"""The clock: what it counts, what it refuses, and that a refusal changes nothing."""

import pytest
import torch

from attn_variants import CacheSpec, Entry, Record
from attn_variants.cache import KVCache
from tests.tiny import append, decoder, kv_cache, same, snapshot

SPEC = CacheSpec(records=(Record.of(Entry("k", 2, 8)), Record.of(Entry("v", 2, 12))))


def made(batch=3, capacity=7, specs=(SPEC,), **options):
    return KVCache(specs, batch=batch, capacity=capacity, **{"dtype": "float32", **options})


def written(cache, step):
    """The layer's view after random entries for this step."""
    batch, tokens = step.positions.shape
    return cache.layers[0].append(step, k=torch.randn(batch, 2, tokens, 8), v=torch.randn(batch, 2, tokens, 12))


def holding(lengths, **options):
    """A cache whose rows hold that many random tokens."""
    cache = made(len(lengths), **options)
    step = cache.step(len(lengths), max(lengths), counts=lengths)
    written(cache, step)
    cache.advance(step)
    return cache


def test_a_new_cache_is_empty_zero_and_as_large_as_asked():
    cache = made()
    assert cache.lengths.tolist() == [0, 0, 0]
    assert cache.lengths.dtype == torch.int64
    assert {name: tuple(tensor.shape) for name, tensor in cache.tensors.items()} == {
        "layers.0.k": (3, 2, 7, 8),
        "layers.0.v": (3, 2, 7, 12),
    }
    assert not any(tensor.any() for tensor in cache.tensors.values())
    assert (cache.batch, cache.capacity, cache.dtype, cache.store, cache.codec) == (3, 7, "float32", "full", "plain")


def test_a_step_says_where_tokens_stand_and_only_advance_moves_the_clock():
    cache = holding([2, 0, 5])
    step = cache.step(3, 2, counts=[2, 1, 0])
    assert step.positions.tolist() == [[2, 3], [0, -1], [-1, -1]]
    assert step.lengths.tolist() == [4, 1, 5]
    assert (step.fresh, step.padded, step.rows) == (False, True, None)
    written(cache, step)
    assert cache.lengths.tolist() == [2, 0, 5]
    cache.advance(step)
    assert cache.lengths.tolist() == [4, 1, 5]


def test_a_step_of_some_rows_names_them():
    cache = holding([2, 0, 5])
    step = cache.step(2, 1, rows=[2, 0])
    assert step.positions.tolist() == [[5], [2]]
    assert step.rows.tolist() == [2, 0]
    written(cache, step)
    cache.advance(step)
    assert cache.lengths.tolist() == [3, 0, 6]


@pytest.mark.parametrize(
    ("lengths", "options", "fresh"),
    [
        ([0, 0], {}, True),
        ([0, 0], {"counts": [3, 1]}, True),
        ([0, 0], {"counts": [3, 0]}, True),
        ([0, 0], {"mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, True),
        ([0, 0], {"mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, False),
        ([0, 0], {"mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, False),
        ([0, 2], {}, False),
        ([2, 2], {}, False),
    ],
)
def test_a_step_is_fresh_where_its_own_tokens_are_all_there_is(lengths, options, fresh):
    cache = holding(lengths) if any(lengths) else made(2)
    assert cache.step(2, 3, **options).fresh == fresh


def test_rows_that_are_empty_make_a_fresh_step_beside_rows_that_are_not():
    cache = holding([2, 0, 5])
    assert cache.step(1, 3, rows=[1]).fresh
    assert not cache.step(2, 2, rows=[1, 0]).fresh


def test_a_step_is_advanced_once_and_only_while_it_is_the_newest():
    cache = made()
    first, second = cache.step(3, 2), cache.step(3, 1)
    with pytest.raises(ValueError, match="advance takes the step that this cache made last, once"):
        cache.advance(first)
    written(cache, second)
    cache.advance(second)
    with pytest.raises(ValueError, match="once"):
        cache.advance(second)
    assert cache.lengths.tolist() == [1, 1, 1]


@pytest.mark.parametrize("change", ["rewind", "reorder", "free"])
def test_a_step_made_before_the_rows_changed_is_stale(change):
    cache = holding([2, 1, 5])
    step = cache.step(3, 1)
    {"rewind": lambda: cache.rewind(1), "reorder": lambda: cache.reorder([2, 1, 0]), "free": cache.free}[change]()
    lengths = cache.lengths.tolist()
    with pytest.raises(ValueError, match="made last"):
        cache.advance(step)
    assert cache.lengths.tolist() == lengths


def test_a_row_is_filled_to_the_last_slot_and_no_further():
    cache = holding([7, 6, 0])
    before = snapshot(cache)
    with pytest.raises(
        ValueError, match=r"row 0 holds 7 tokens and 1 more make 8, beyond the cache's capacity of 7: make"
    ):
        cache.step(3, 1)
    with pytest.raises(ValueError, match=r"row 1 holds 6 tokens and 2 more make 8"):
        cache.step(3, 2, counts=[0, 2, 2])
    with pytest.raises(ValueError, match=r"row 2 holds 0 tokens and 8 more make 8"):
        cache.step(1, 8, rows=[2])
    assert same(before, snapshot(cache))
    cache.step(3, 7, counts=[0, 1, 7])


def test_padding_needs_no_room():
    cache = holding([6, 0])
    step = cache.step(2, 7, counts=[1, 7])
    written(cache, step)
    cache.advance(step)
    assert cache.lengths.tolist() == [7, 7]


def test_padding_writes_nothing_of_its_own():
    cache = holding([3, 2, 0])
    before = snapshot(cache)
    step = cache.step(3, 3, mask=torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]]))
    k = torch.randn(3, 2, 3, 8)
    cache.layers[0].append(step, k=k, v=torch.randn(3, 2, 3, 12))
    changed = (cache.tensors["layers.0.k"] != before["layers.0.k"]).any(-1).any(1)
    assert changed.nonzero().tolist() == [[1, 2]]
    assert torch.equal(cache.tensors["layers.0.k"][1, :, 2], k[1, :, 1])


@pytest.mark.parametrize(
    ("drop", "left"),
    [
        (0, [2, 1, 5]),
        (1, [1, 0, 4]),
        ([0, 0, 5], [2, 1, 0]),
        ([2, 1, 3], [0, 0, 2]),
        (torch.tensor([1, 0, 2]), [1, 1, 3]),
    ],
)
def test_rewind_drops_the_newest_tokens(drop, left):
    cache = holding([2, 1, 5])
    cache.rewind(drop)
    assert cache.lengths.tolist() == left


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (2, r"row 1 holds 1 tokens, of which 0 to 1 can be dropped, not 2"),
        (-1, r"row 0 holds 2 tokens, of which 0 to 2 can be dropped, not -1"),
        ([0, 0, 6], r"row 2 holds 5 tokens, of which 0 to 5 can be dropped, not 6"),
        ([1, 1], r"rewind was given 2 numbers for a cache of 3 rows"),
        ([0, -1, 0], r"row 1 .* not -1"),
    ],
)
def test_a_rewind_too_far_is_refused(drop, message):
    cache = holding([2, 1, 5])
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        cache.rewind(drop)
    assert same(before, snapshot(cache))


def test_a_reordered_row_is_what_that_row_was_and_no_alias_of_it():
    cache = holding([2, 1, 5])
    before = snapshot(cache)
    cache.reorder([1, 1, 0])
    assert cache.lengths.tolist() == [1, 1, 2]
    for name, tensor in cache.tensors.items():
        for row, source in enumerate([1, 1, 0]):
            assert torch.equal(tensor[row], before[name][source])
    step = cache.step(1, 1, rows=[0])
    written(cache, step)
    cache.advance(step)
    assert torch.equal(cache.tensors["layers.0.k"][1], before["layers.0.k"][1])
    assert cache.lengths.tolist() == [2, 1, 2]


def test_a_fork_is_a_cache_of_its_own():
    cache = holding([2, 1, 5])
    before = snapshot(cache)
    twin = cache.fork([2, 2, 0, 1, 2])
    assert (twin.batch, twin.capacity, twin.lengths.tolist()) == (5, 7, [5, 5, 2, 1, 5])
    assert (twin.dtype, twin.store, twin.codec, twin.static) == ("float32", "full", "plain", False)
    assert torch.equal(twin.tensors["layers.0.v"], before["layers.0.v"][[2, 2, 0, 1, 2]])
    step = twin.step(5, 2)
    written(twin, step)
    twin.advance(step)
    assert same(before, snapshot(cache))
    cache.free()
    assert twin.lengths.tolist() == [7, 7, 4, 3, 7]
    assert twin.tensors["layers.0.k"].any()


def test_a_freed_row_is_empty_and_zero_and_the_others_are_as_they_were():
    cache = holding([2, 1, 5])
    before = snapshot(cache)
    cache.free([0, 2])
    assert cache.lengths.tolist() == [0, 1, 0]
    for name, tensor in cache.tensors.items():
        assert not tensor[[0, 2]].any()
        assert torch.equal(tensor[1], before[name][1])
    cache.free()
    assert cache.lengths.tolist() == [0, 0, 0]
    assert not any(tensor.any() for tensor in cache.tensors.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.reorder([0, 1]), r"reorder was given 2 rows for a cache of 3"),
        (lambda cache: cache.reorder([0, 1, 3]), r"rows \[0, 1, 3\] must be some of 0 to 2"),
        (lambda cache: cache.fork([]), r"rows \[\] must be some of 0 to 2"),
        (lambda cache: cache.fork([-1]), r"rows \[-1\] must be some of 0 to 2"),
        (lambda cache: cache.free([1, 1]), r"rows \[1, 1\] must be distinct"),
        (lambda cache: cache.free([5]), r"rows \[5\] must be some of 0 to 2"),
        (lambda cache: cache.step(2, 1), r"the tokens have 2 rows, the cache.* 3.*rows="),
        (lambda cache: cache.step(3, 0), r"at least one real token"),
        (lambda cache: cache.step(3, 2, counts=[0, 0, 0]), r"at least one real token"),
        (lambda cache: cache.step(3, 2, counts=[0, 3, 0]), r"counts \[0, 3, 0\] must lie between 0 and the 2 tokens"),
    ],
)
def test_calls_that_do_not_fit_are_refused(call, message):
    cache = holding([2, 1, 5])
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        call(cache)
    assert same(before, snapshot(cache))


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.rewind([1.7, 0, 0]),
        lambda cache: cache.reorder([0.9, 1, 2]),
        lambda cache: cache.fork([1.5]),
        lambda cache: cache.step(1, 1, rows=[0.9]),
        lambda cache: cache.step(3, 1, counts=[0.5, 1, 1]),
    ],
)
def test_rows_and_counts_are_whole_numbers(call):
    cache = holding([2, 1, 5])
    before = snapshot(cache)
    with pytest.raises((TypeError, ValueError)):
        call(cache)
    assert same(before, snapshot(cache))


def test_rows_and_counts_may_be_tensors():
    cache = holding([2, 1, 5])
    cache.reorder(torch.tensor([2, 1, 0]))
    assert cache.lengths.tolist() == [5, 1, 2]
    assert cache.step(2, 2, rows=torch.tensor([1, 2]), counts=torch.tensor([2, 1])).positions.tolist() == [
        [1, 2],
        [2, -1],
    ]


@pytest.mark.parametrize("field", ["batch", "capacity"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
def test_sizes_are_positive_integers(field, value):
    with pytest.raises(ValueError, match=rf"{field} \({value!r}\) must be a"):
        made(**{field: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "fulll"}, r"unknown store 'fulll'; did you mean full\?"),
        ({"codec": "plane"}, r"unknown codec 'plane'; did you mean plain"),
        ({"dtype": "bf61"}, r"unknown dtype 'bf61'; did you mean"),
        ({"specs": ()}, r"a cache needs the specs of at least one layer, got none"),
        ({"specs": (CacheSpec(),)}, r"layer 0 declares no records and no states, so there is nothing to store"),
        ({"specs": (SPEC, CacheSpec(shares=1))}, r"layer 1 shares the cache of layer 1; it must be an earlier one"),
    ],
)
def test_what_cannot_be_stored_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), (torch.float16, "float16"), ("float64", "float64")])
def test_a_dtype_goes_by_any_of_its_names(dtype, name):
    cache = made(dtype=dtype)
    assert cache.dtype == name
    assert {str(tensor.dtype) for tensor in cache.tensors.values()} == {f"torch.{name}"}


def test_the_default_dtype_is_torchs():
    assert KVCache([SPEC], batch=1, capacity=2).dtype == "float32"
    torch.set_default_dtype(torch.float64)
    try:
        assert KVCache([SPEC], batch=1, capacity=2).dtype == "float64"
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_entry_may_have_a_dtype_of_its_own():
    spec = CacheSpec(records=(Record.of(Entry("k", 2, 8)), Record.of(Entry("v", 2, 12, dtype="float32"))))
    cache = KVCache([spec], batch=1, capacity=3, dtype="bfloat16")
    assert [tensor.dtype for tensor in cache.tensors.values()] == [torch.bfloat16, torch.float32]
    step = cache.step(1, 2)
    cache.layers[0].append(step, k=torch.randn(1, 2, 2, 8).bfloat16(), v=torch.randn(1, 2, 2, 12))
    cache.advance(step)
    assert cache.nbytes == 3 * (2 * 8 * 2 + 2 * 12 * 4)
    assert cache.bytes_used == 2 * (2 * 8 * 2 + 2 * 12 * 4)


def test_bytes_are_what_is_allocated_and_what_is_held():
    cache = holding([2, 1, 5], specs=(SPEC, SPEC))
    assert cache.nbytes == 2 * 3 * 7 * (2 * 8 + 2 * 12) * 4
    assert cache.bytes_used == 2 * (2 + 1 + 5) * (2 * 8 + 2 * 12) * 4
    assert cache.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in cache.tensors.values())


def test_a_cache_may_be_sized_where_there_is_no_memory_for_it():
    cache = KVCache([SPEC] * 64, batch=256, capacity=131072, dtype="bfloat16", device="meta")
    assert cache.nbytes == 64 * 256 * 131072 * (2 * 8 + 2 * 12) * 2


def test_no_tensor_is_allocated_for_a_step_that_is_as_long_as_the_cache():
    model = decoder("mla")
    store = kv_cache(model, capacity=16)
    pointers = {name: tensor.data_ptr() for name, tensor in store.tensors.items()}
    append(model, store, [[1, 2, 3]] * 2)
    append(model, store, [[4]] * 2)
    store.rewind(2)
    store.reorder([1, 0])
    store.free([0])
    assert {name: tensor.data_ptr() for name, tensor in store.tensors.items()} == pointers


def test_the_cached_tokens_of_a_generation_are_the_prompt_and_all_but_the_last():
    model = decoder("gqa")
    store = kv_cache(model, batch=1, capacity=16)
    ids = [3, 14, 15, 9, 26, 5, 35, 8, 47, 32]
    token = int(append(model, store, [ids])[0][-1].argmax())
    for _ in range(6):
        token = int(append(model, store, [[token]])[0][-1].argmax())
    # Ten and seven new ones need sixteen slots: the last one sampled is never fed.
    assert store.lengths.tolist() == [16]
    with pytest.raises(ValueError, match="make 17, beyond the cache's capacity of 16"):
        append(model, store, [[token]])
