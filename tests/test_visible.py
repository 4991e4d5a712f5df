"""Masks, written out as matrices of 0 and 1."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_variants import CacheSpec, fresh_step, visible
from attn_variants.transient import step_mask
from tests import reference


def seen(queries, keys, **limits):
    return visible(torch.tensor([queries]), torch.tensor([keys]), **limits)[0].int().tolist()


def test_a_prompt_sees_its_triangle():
    assert seen([0, 1, 2, 3], [0, 1, 2, 3]) == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]


def test_a_chunk_after_cached_tokens_is_aligned_at_its_end():
    assert seen([3, 4], range(5)) == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert seen([7], range(8)) == [[1] * 8]
    assert [sum(row) for row in seen([4, 5], range(6))] == [5, 6]


def test_a_window_of_four_holds_the_token_and_three_before_it():
    mask = seen(range(10), range(10), window=4)
    assert mask[9] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert mask[2] == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert [sum(row) for row in mask] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


def test_three_new_tokens_in_a_window_reach_back_further_than_the_window():
    assert seen([6, 7, 8], range(9), window=4) == [
        [0, 0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 1],
    ]


def test_a_window_of_one_is_the_token_itself_and_a_wide_one_is_no_window():
    assert seen(range(3), range(3), window=1) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert seen(range(5), range(5), window=1000) == seen(range(5), range(5))


def test_sinks_stay_visible_outside_the_window_and_never_from_the_future():
    assert seen([0, 1, 4, 5], range(6), window=2, sinks=2) == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def test_chunked_attention_begins_anew_at_every_chunk():
    assert seen(range(7), range(7), chunk=3) == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    assert seen([4], range(6), chunk=3, sinks=1) == [[1, 0, 0, 1, 1, 0]]


def test_empty_slots_and_padding_are_never_seen_and_padding_sees_nothing():
    assert seen([-1, 0, 1], [-1, 0, 1, -1]) == [
        [0, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
    ]
    for limits in ({"window": 3}, {"chunk": 2}, {"window": 2, "sinks": 2}, {"chunk": 2, "sinks": 1}):
        assert seen([-1], [-1, 0, 1], **limits) == [[0, 0, 0]]
        assert [row[0] for row in seen([0, 1, 2], [-1, 0, 1], **limits)] == [0, 0, 0]


def test_slots_may_hold_positions_in_any_order():
    # A ring of four after six tokens: position p lies in slot p % 4.
    assert seen([5], [4, 5, 2, 3], window=3) == [[1, 1, 0, 1]]


def test_rows_of_a_batch_are_masked_by_their_own_positions():
    mask = visible(torch.tensor([[2], [0]]), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    assert mask.int().tolist() == [[[1, 1, 1]], [[1, 0, 0]]]


@settings(max_examples=200, deadline=None, database=None)
@given(
    queries=st.lists(st.integers(-1, 12), min_size=1, max_size=6),
    keys=st.lists(st.integers(-1, 12), min_size=1, max_size=9),
    window=st.none() | st.integers(1, 14),
    chunk=st.none() | st.integers(1, 14),
    sinks=st.integers(0, 4),
)
def test_every_mask_is_the_textbooks(queries, keys, window, chunk, sinks):
    limits = {"window": window, "chunk": chunk, "sinks": sinks}
    assert seen(queries, keys, **limits) == [[int(reference.sees(q, k, **limits)) for k in keys] for q in queries]


@pytest.mark.parametrize(("batch", "tokens", "slots"), [(1, 1, 8), (2, 3, 5), (3, 4, 4)])
def test_a_step_s_mask_has_a_column_for_every_slot(batch, tokens, slots):
    mask = step_mask(fresh_step(batch, tokens), torch.arange(slots).expand(batch, slots), CacheSpec())
    assert mask.shape == (batch, 1, tokens, slots)
    assert mask.dtype == torch.bool


def test_in_a_step_s_mask_no_row_is_empty():
    step = fresh_step(2, 3, counts=[1, 3])
    mask = step_mask(step, step.positions, CacheSpec(window=2))
    assert mask[:, 0].int().tolist() == [
        [[1, 0, 0], [1, 1, 1], [1, 1, 1]],
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]],
    ]
