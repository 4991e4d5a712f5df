"""Where a pass's tokens stand, and the cache of a pass that keeps only its own tensors."""

import pytest
import torch

from attn_variants import CacheSpec, Entry, GQAConfig, GroupedQueryAttention, Record, fresh_step
from attn_variants.cache import KVCache
from attn_variants.transient import Transient, place
from tests.tiny import decoder

SPEC = CacheSpec(records=(Record("kv", (Entry("latent", 1, 5), Entry("k_rope", 1, 2))),))


def test_every_row_counts_on_from_its_own_length():
    placement = place([0, 4, 7], 2)
    assert placement.positions.tolist() == [[0, 1], [4, 5], [7, 8]]
    assert placement.positions.dtype == torch.int64
    assert (placement.counts, placement.padded, placement.left, placement.last) == ((2, 2, 2), False, True, (0, 1))


def test_counts_pad_at_the_right():
    placement = place([5, 0, 2], 3, counts=[0, 3, 2])
    assert placement.positions.tolist() == [[-1, -1, -1], [0, 1, 2], [2, 3, -1]]
    assert (placement.counts, placement.padded, placement.left, placement.last) == ((0, 3, 2), True, True, (1, 2))


def test_a_mask_pads_anywhere():
    placement = place([0, 5], 4, mask=torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0]]))
    assert placement.positions.tolist() == [[-1, -1, 0, 1], [5, -1, 6, -1]]
    assert (placement.counts, placement.padded, placement.left, placement.last) == ((2, 2), True, False, (0, 3))


def test_a_mask_with_its_padding_at_the_right_is_known_to_be_left_aligned():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    by_mask, by_counts = place([0, 1], 3, mask=mask), place([0, 1], 3, counts=[2, 0])
    assert torch.equal(by_mask.positions, by_counts.positions)
    assert (by_mask.counts, by_mask.padded, by_mask.left, by_mask.last) == ((2, 0), True, True, (0, 1))
    assert not place([0], 2, mask=torch.ones(1, 2)).padded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": [1]}, r"counts has 1 rows, the tokens have 2"),
        ({"counts": [1, 4]}, r"counts \[1, 4\] must lie between 0 and the 3 tokens"),
        ({"counts": [-1, 2]}, r"counts \[-1, 2\] must lie between 0 and the 3 tokens"),
        ({"counts": [0, 0]}, r"at least one real token, got counts \[0, 0\]"),
        ({"mask": torch.ones(2, 4)}, r"mask has shape \(2, 4\), the tokens have \(2, 3\)"),
        ({"mask": torch.ones(3)}, r"mask has shape \(3,\), the tokens have \(2, 3\)"),
        ({"mask": torch.zeros(2, 3)}, r"at least one real token, got a mask of \(2, 3\) without any"),
        ({"mask": torch.ones(2, 3), "counts": [1, 1]}, r"not both"),
    ],
)
def test_what_cannot_be_placed_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        place([0, 2], 3, **arguments)


def test_a_step_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one real token"):
        fresh_step(2, 0)


def test_a_fresh_step_is_fresh_unless_padding_comes_before_a_token():
    assert fresh_step(2, 3).fresh
    assert fresh_step(2, 3, counts=[1, 3]).fresh
    assert fresh_step(2, 3, counts=[1, 3]).padded
    left = fresh_step(1, 3, mask=torch.tensor([[0, 1, 1]]))
    assert (left.fresh, left.padded, left.lengths.tolist()) == (False, True, [2])


def test_a_transient_gives_back_what_it_was_given():
    latent, k_rope = torch.randn(2, 1, 3, 5), torch.randn(2, 1, 3, 2)
    view = Transient(SPEC).append(fresh_step(2, 3), latent=latent, k_rope=k_rope)
    row, front, back = view.dense("kv", "latent", "k_rope")
    assert torch.equal(row, torch.cat([latent, k_rope], -1))
    assert front is latent
    assert back is k_rope
    runs = list(view.blocks(2, "latent", "k_rope"))
    assert [slots for _, slots in runs] == [slice(0, 2), slice(2, 3)]
    assert torch.equal(torch.cat([tensors[0] for tensors, _ in runs], 2), latent)
    with pytest.raises(KeyError, match="no entry or record 'v' in this layer's cache; it holds kv"):
        view.dense("v")


@pytest.mark.parametrize(
    ("window", "chunk", "causal"),
    [(None, None, True), (3, None, True), (2, None, False), (None, 3, True), (None, 2, False)],
)
def test_a_pass_is_plainly_causal_where_no_limit_bites(window, chunk, causal):
    spec = CacheSpec(records=SPEC.records, window=window, chunk=chunk)
    plan = Transient(spec).append(fresh_step(1, 3), latent=torch.zeros(1, 1, 3, 5), k_rope=torch.zeros(1, 1, 3, 2)).plan
    assert plan.causal == causal
    assert (plan.mask is None) == causal


def test_layers_of_one_kind_share_one_mask():
    step = fresh_step(1, 3, mask=torch.tensor([[0, 1, 1]]))
    entries = {"latent": torch.zeros(1, 1, 3, 5), "k_rope": torch.zeros(1, 1, 3, 2)}
    one, other = (Transient(SPEC).append(step, **entries) for _ in range(2))
    windowed = Transient(CacheSpec(records=SPEC.records, window=1)).append(step, **entries)
    assert one.plan is other.plan
    assert windowed.plan is not one.plan


def test_a_module_refuses_a_step_for_other_tokens_and_a_cache_without_its_step():
    module = GroupedQueryAttention(GQAConfig(32, 6, 2, 8))
    x = torch.zeros(2, 3, 32)
    with pytest.raises(ValueError, match=r"the step stands for \(2, 4\) tokens, x has \(2, 3\)"):
        module(x, fresh_step(2, 4))
    with pytest.raises(ValueError, match=r"the step that KVCache\.step made; got a cache and no step"):
        module(x, None, Transient(module.cache_spec))


def test_a_module_refuses_a_warm_step_without_the_cache_it_continues():
    """Over this pass alone the answer would be wrong, and nobody would know."""
    module = GroupedQueryAttention(GQAConfig(32, 6, 2, 8))
    cache = KVCache([module.cache_spec], batch=2, capacity=9)
    x = torch.zeros(2, 3, 32)
    step = cache.step(2, 3)
    module(x, step, cache.layers[0])
    cache.advance(step)
    with pytest.raises(ValueError, match="cache"):
        module(x, cache.step(2, 3))


def test_counts_are_whole_numbers():
    assert place([0, 0], 3, counts=torch.tensor([1, 2])).counts == (1, 2)
    with pytest.raises((TypeError, ValueError)):
        place([0, 0], 3, counts=[1.5, 2])


def test_what_is_no_step_or_layer_is_refused_by_name():
    module = decoder("gqa", torch.float32).model.layers[0].self_attn
    x, store = torch.ones(2, 5, 32), KVCache([module.cache_spec], batch=2, capacity=9)
    for given, message in (
        ((x[0],), r"attention takes x as \(B, T, hidden\), got \(5, 32\)"),
        ((x, torch.ones(2, 5)), "step must be a Step, got Tensor; for padding make one with fresh_step"),
        ((x, store.step(2, 5), store), r"one layer's cache, got a whole KVCache: give its layers\[i\]"),
    ):
        with pytest.raises(ValueError, match=message):
            module(*given)


def test_one_spec_is_no_sequence_of_them():
    with pytest.raises(ValueError, match="a sequence with one CacheSpec per layer, got a single CacheSpec"):
        KVCache(decoder("gqa").cache_specs[0], batch=1, capacity=4)
