"""A layer's memory: where tokens land, what a view reads, and what is refused before anything is written."""

import weakref

import pytest
import torch

from attn_variants import CacheSpec, Entry, Record, fresh_step
from attn_variants.attend import BACKENDS, attend, backend
from attn_variants.cache import KVCache
from attn_variants.cache.views import StoreView
from tests import reference
from tests.tiny import error, same, snapshot

K, V = Record.of(Entry("k", 2, 8)), Record.of(Entry("v", 2, 12))
KV = Record("kv", (Entry("latent", 1, 20), Entry("k_rope", 1, 4)))
SPEC = CacheSpec(records=(K, V))


def made(spec=SPEC, batch=2, capacity=9, **options):
    return KVCache([spec], batch=batch, capacity=capacity, **{"dtype": "float64", **options})


def entries(spec, batch, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        entry.name: torch.randn(batch, entry.heads, tokens, entry.dim, dtype=torch.float64, generator=generator)
        for entry in spec.entries
    }


def append(cache, tokens, seed=0, **options):
    """What was given, and the view it gave."""
    batch = len(options["rows"]) if options.get("rows") else cache.batch
    step = cache.step(batch, tokens, **options)
    given = entries(cache.specs[0], batch, tokens, seed)
    view = cache.layers[0].append(step, **given)
    cache.advance(step)
    return given, view


def test_a_token_s_slot_is_its_position():
    cache = made()
    first, _ = append(cache, 3, counts=[3, 1], seed=1)
    second, _ = append(cache, 2, seed=2)
    stored = cache.tensors["layers.0.k"]
    assert torch.equal(stored[0, :, :5], torch.cat([first["k"][0], second["k"][0]], 1))
    assert torch.equal(stored[1, :, :3], torch.cat([first["k"][1, :, :1], second["k"][1]], 1))
    assert not stored[0, :, 5:].any()
    assert not stored[1, :, 3:].any()


def test_padding_in_the_middle_leaves_no_hole():
    cache = made()
    given, _ = append(cache, 4, mask=torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]]))
    stored = cache.tensors["layers.0.v"]
    assert torch.equal(stored[0, :, :3], given["v"][0, :, [0, 2, 3]])
    assert torch.equal(stored[1, :, :1], given["v"][1, :, [1]])
    assert not stored[0, :, 3:].any()
    assert not stored[1, :, 1:].any()


def test_a_record_lies_side_by_side_in_one_row():
    cache = made(CacheSpec(records=(KV,)))
    given, _ = append(cache, 3)
    _, view = append(cache, 1, seed=1)
    row = cache.tensors["layers.0.kv"]
    assert row.shape == (2, 1, 9, 24)
    assert torch.equal(row[:, :, :3], torch.cat([given["latent"], given["k_rope"]], -1))
    whole, latent, k_rope = view.dense("kv", "latent", "k_rope")
    assert torch.equal(torch.cat([latent, k_rope], -1), whole)
    assert whole.shape == (2, 1, 4, 24)


def test_a_warm_view_is_the_memory_itself():
    cache = made()
    append(cache, 3)
    _, view = append(cache, 1, seed=1)
    assert view.aliased
    k, v = view.dense("k", "v")
    for tensor, name in ((k, "layers.0.k"), (v, "layers.0.v")):
        assert tensor.untyped_storage().data_ptr() == cache.tensors[name].untyped_storage().data_ptr()
        assert tensor.shape[2] == 4


def test_a_view_of_some_rows_is_a_copy_and_says_so():
    cache = made(batch=3)
    append(cache, 3)
    given, view = append(cache, 1, seed=1, rows=[2, 0])
    assert not view.aliased
    assert torch.equal(view.dense("k")[0], cache.tensors["layers.0.k"][[2, 0], :, :4])
    assert torch.equal(view.dense("k")[0][:, :, 3:], given["k"])


def test_a_fresh_view_is_what_was_given():
    cache = made()
    given, view = append(cache, 3, counts=[3, 2])
    assert view.dense("k")[0] is given["k"]
    assert view.plan.causal


@pytest.mark.parametrize("rows", [None, [1, 0]])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 99])
def test_blocks_are_the_dense_view_in_runs(rows, size):
    cache = made()
    append(cache, 4)
    _, view = append(cache, 1, seed=1, rows=rows)
    runs = list(view.blocks(size, "k", "v"))
    for index, whole in enumerate(view.dense("k", "v")):
        assert torch.equal(torch.cat([tensors[index] for tensors, _ in runs], 2), whole)
    for tensors, slots in runs:
        assert tensors[0].shape[2] == slots.stop - slots.start <= size
    assert [slots.start for _, slots in runs] == list(range(0, 5, size))


def test_a_static_view_reads_every_slot_and_a_growing_one_those_in_use():
    growing, static = made(), made(static=True)
    for cache, limit in ((growing, 5), (static, 9)):
        append(cache, 4)
        _, view = append(cache, 1, seed=1)
        assert view.plan.limit == limit
        assert view.dense("k")[0].shape[2] == view.plan.kv_positions.shape[1] == limit


def test_a_decode_step_of_equal_rows_needs_no_mask_and_one_of_unequal_rows_does():
    even, ragged = made(), made()
    append(even, 3)
    append(ragged, 3, counts=[3, 2])
    assert append(even, 1)[1].plan.mask is None
    assert append(ragged, 1)[1].plan.mask[:, 0].int().tolist() == [[[1, 1, 1, 1]], [[1, 1, 1, 0]]]
    assert append(even, 2)[1].plan.mask[0, 0].int().tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]


LIMITS = [{}, {"window": 5}, {"window": 1}, {"window": 3, "sinks": 2}, {"chunk": 4}, {"chunk": 3, "sinks": 1}]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_kind_of_layer_attends_over_what_it_may_see(limits, static, name):
    """Six tokens, then three together, then one at a time: windows reach back further than themselves in the middle."""
    spec = CacheSpec(records=(Record.of(Entry("k", 2, 8)), Record.of(Entry("v", 2, 8))), **limits)
    cache, told = made(spec, capacity=12, static=static), []
    generator = torch.Generator().manual_seed(5)
    queries, outs = [], []
    for seed, tokens in enumerate((6, 3, 1, 1)):
        given, view = append(cache, tokens, seed=seed)
        q = torch.randn(2, 6, tokens, 8, dtype=torch.float64, generator=generator)
        with backend(name):
            outs.append(attend(q, view, ("k", "v"), scale=0.4))
        queries.append(q)
        told.append(given)
    q, out = torch.cat(queries, 2), torch.cat(outs, 2)
    k, v = (torch.cat([given[name] for given in told], 2) for name in ("k", "v"))
    for row in range(2):
        assert error(out[row], reference.attention(q[row], k[row], v[row], scale=0.4, **limits)) < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": None}, r"the store holds entries k, v, the layer gives k: make the KVCache from this decoder"),
        ({"w": torch.zeros(2, 2, 3, 8)}, r"the store holds entries k, v, the layer gives k, v, w"),
        (
            {"k": torch.zeros(2, 2, 3, 9)},
            r"holds k as \(B, heads, T, dim\) \(2, 2, 3, 8\), the layer gives \(2, 2, 3, 9\)",
        ),
        ({"k": torch.zeros(2, 1, 3, 8)}, r"\(2, 2, 3, 8\), the layer gives \(2, 1, 3, 8\)"),
        ({"v": torch.zeros(2, 2, 4, 12)}, r"holds v .* \(2, 2, 3, 12\), the layer gives \(2, 2, 4, 12\)"),
        ({"v": torch.zeros(1, 2, 3, 12)}, r"\(2, 2, 3, 12\), the layer gives \(1, 2, 3, 12\)"),
        (
            {"v": torch.zeros(2, 2, 3, 12)},
            r"holds v in float64, the layer gives float32: make the KVCache with dtype=torch.fl",
        ),
    ],
)
def test_entries_other_than_declared_are_refused_before_any_is_written(change, message):
    cache = made()
    before = snapshot(cache)
    given = {name: tensor for name, tensor in (entries(SPEC, 2, 3) | change).items() if tensor is not None}
    if "w" in change or "v" not in given or given["v"].dtype != torch.float32 or given["v"].shape != (2, 2, 3, 12):
        given = {name: tensor.double() for name, tensor in given.items()}
    with pytest.raises(ValueError, match=message):
        cache.layers[0].append(cache.step(2, 3), **given)
    assert same(before, snapshot(cache))


def test_a_step_of_no_cache_or_of_another_is_refused():
    cache, other = made(), made()
    append(cache, 5)
    before = snapshot(cache)
    for step in (fresh_step(2, 3), other.step(2, 3), made(CacheSpec(records=(K, V), window=3)).step(2, 3)):
        with pytest.raises(ValueError, match="this step was made by another cache"):
            cache.layers[0].append(step, **entries(SPEC, 2, 3))
    assert same(before, snapshot(cache))


def test_a_step_of_a_cache_that_was_forked_is_not_its_fork_s():
    cache = made()
    append(cache, 2)
    twin = cache.fork([0, 1])
    step = cache.step(2, 1)
    with pytest.raises(ValueError, match="this step was made by another cache"):
        twin.layers[0].append(step, **entries(SPEC, 2, 1))


def test_layers_of_one_kind_share_a_plan_and_layers_of_two_do_not():
    windowed = CacheSpec(records=(K, V), window=3)
    cache = KVCache([SPEC, windowed, SPEC], batch=1, capacity=9, dtype="float64")
    for tokens in (2, 3):
        step = cache.step(1, tokens)
        views = [layer.append(step, **entries(SPEC, 1, tokens)) for layer in cache.layers]
        cache.advance(step)
    assert views[0].plan is views[2].plan
    assert views[0].plan is not views[1].plan
    assert views[0].plan.mask[0, 0, 2].int().tolist() == [1, 1, 1, 1, 1]
    assert views[1].plan.mask[0, 0, 2].int().tolist() == [0, 0, 1, 1, 1]


def test_half_written_tokens_of_a_pass_that_failed_are_not_there():
    cache = made()
    given, _ = append(cache, 2)
    step = cache.step(2, 3)
    cache.layers[0].append(step, **{name: tensor + 1e4 for name, tensor in entries(SPEC, 2, 3).items()})
    # The pass broke off here: no advance.
    later, view = append(cache, 1, seed=3)
    assert cache.lengths.tolist() == [3, 3]
    assert torch.equal(view.dense("k")[0], torch.cat([given["k"], later["k"]], 2))


def test_a_subset_of_rows_copies_no_slot_that_is_not_read():
    cache = made(batch=3, capacity=90)
    append(cache, 3)
    _, view = append(cache, 1, rows=[2, 0])
    (keys,) = view.dense("k")
    assert keys.shape == (2, 2, 4, 8)
    assert keys.untyped_storage().nbytes() == 2 * 2 * 4 * 8 * 8


@pytest.mark.parametrize("read", ["blocks", "factors"])
def test_a_block_is_let_go_of_before_the_next_is_made(read, monkeypatch):
    cache, alive = made(codec="int8"), []
    append(cache, 8)
    _, view = append(cache, 1)
    stored = StoreView._stored

    def none_alive(*given):
        assert [tensor() for tensor in alive] == [None] * len(alive)
        return stored(*given)

    monkeypatch.setattr(StoreView, "_stored", none_alive)
    for block in getattr(view, read)(4, "k", "v"):
        alive = [weakref.ref(tensor) for tensor in block[0]]
        del block
    assert alive


def test_codes_times_their_scales_are_what_is_decoded():
    cache = made(codec="int8", dtype="float32")
    given = {name: tensor.float() for name, tensor in entries(SPEC, 2, 9).items()}
    for start, stop in [(0, 8), (8, 9)]:
        step = cache.step(2, stop - start)
        view = cache.layers[0].append(step, **{name: tensor[:, :, start:stop] for name, tensor in given.items()})
        cache.advance(step)
    assert view.factored("k", "v")
    for (codes, scales, slots), (decoded, same_slots) in zip(
        view.factors(4, "k", "v"), view.blocks(4, "k", "v"), strict=True
    ):
        assert slots == same_slots
        for code, scale, numbers in zip(codes, scales, decoded, strict=True):
            assert torch.equal(code.float() * scale.float(), numbers)


@pytest.mark.parametrize("codec", ["plain", "int8:4", "int8:asym", "int4", "fp8", "int8-kivi:4"])
def test_only_codes_with_one_scale_are_factored(codec):
    cache = made(codec=codec)
    append(cache, 3)
    _, view = append(cache, 1)
    assert not view.factored("k", "v")


def test_kernels_are_given_the_stored_tensors_and_the_columns_of_an_entry():
    spec = CacheSpec(records=(Record("kv", (Entry("latent", 1, 6), Entry("k_rope", 1, 2))),))
    cache = KVCache([spec], batch=2, capacity=8, codec="int8", dtype="float32")
    for tokens in (3, 1):
        step = cache.step(2, tokens)
        view = cache.layers[0].append(step, latent=torch.randn(2, 1, tokens, 6), k_rope=torch.randn(2, 1, tokens, 2))
        cache.advance(step)
    stored, columns = view.storage("k_rope")
    assert columns == slice(6, 8)
    assert {f"layers.0.kv{part}": tensor.data_ptr() for part, tensor in stored.items()} == {
        name: tensor.data_ptr() for name, tensor in cache.tensors.items()
    }
