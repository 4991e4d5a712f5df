"""Scoring: the product of the conditionals, the same in one pass and step by step over every variant and store."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from attn_variants import VARIANTS, Decoder
from attn_variants.cache.pages import OutOfPagesError
from attn_variants.generation import perplexity, score, scoring
from attn_variants.generation.scoring import mean_nll
from tests.tiny import LONG, SHORT, decoder, error, expected, kv_cache, sharpen

RAGGED = [LONG, SHORT, [4, 4]]
COUNTS = [9, 6, 1]
STORES = ["full", "ring", "paged:3"]


def textbook(variant, ids):
    """Each conditional from the reference's logits of the sequence alone."""
    chances = expected(variant, ids).log_softmax(-1)
    return torch.stack([chances[at, token] for at, token in enumerate(ids[1:])])


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_are_the_conditionals_of_the_textbook(variant):
    model = decoder(variant)
    got = score(model, RAGGED)
    assert got.dtype == torch.float64
    assert got.shape == (3, 9)
    for row, ids, count in zip(got, RAGGED, COUNTS, strict=True):
        assert error(row[:count], textbook(variant, ids)) < 1e-6
        assert row[count:].tolist() == [0] * (9 - count), "the sum of a row is that of its sequence"
    assert torch.equal(score(model, torch.tensor([LONG])), score(model, [torch.tensor(LONG)]))


def test_the_joint_probabilities_of_all_sequences_add_up_to_one():
    """By exhaustion: after a first token, the 50 x 50 pairs that can follow."""
    model = decoder("gqa")
    pairs = torch.cartesian_prod(torch.tensor([7]), torch.arange(50), torch.arange(50))
    assert float(score(model, pairs).sum(-1).exp().sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("chunk", [None, 1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_through_a_cache_they_are_the_same(variant, store, chunk):
    model = decoder(variant, torch.float32)
    cache = kv_cache(model, batch=3, capacity=9, store=store)
    got = score(model, RAGGED, cache=cache, chunk=chunk)
    assert got.dtype == torch.float32
    assert (got - score(model, RAGGED)).abs().max() < 2e-5
    assert cache.lengths.tolist() == COUNTS


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    "limits", [{"sliding_window": 3}, {"attention_chunk_size": 4}, {"sliding_window": 3, "sink_tokens": 2}]
)
def test_and_where_tokens_pass_out_of_sight(store, limits):
    config = decoder("gqa").config
    model = Decoder(replace(config, attention=replace(config.attention, **limits)))
    sharpen(model.double()).eval()
    whole = score(model, RAGGED)
    assert (whole - score(decoder("gqa"), RAGGED)).abs().max() > 0.1
    for chunk, burst in ((None, 1), (1, 1), (2, 2)):
        cache = kv_cache(model, batch=3, capacity=9, store=store, burst=burst)
        assert (score(model, RAGGED, cache=cache, chunk=chunk) - whole).abs().max() < 1e-6


def test_what_a_cache_holds_comes_before():
    model = decoder("mla")
    whole = score(model, [LONG])
    cache = kv_cache(model, batch=1)
    score(model, [LONG[:6]], cache=cache)
    got = score(model, [LONG[5:]], cache=cache, chunk=2)
    assert (got - whole[:, 5:]).abs().max() < 1e-6


def test_a_codec_shows_step_by_step_and_not_in_one_fresh_step():
    model = decoder("gqa", torch.float32)
    exact = score(model, [LONG])
    losses = {
        chunk: float(
            (score(model, [LONG], cache=kv_cache(model, batch=1, codec="int4"), chunk=chunk) - exact).abs().max()
        )
        for chunk in (None, 4, 1)
    }
    assert losses[None] < 2e-5 < 1e-2 < losses[4]
    assert losses[1] > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_come_in_float32(dtype):
    got, wanted = score(decoder("gqa", dtype), [LONG]), score(decoder("gqa"), [LONG])
    assert got.dtype == torch.float32
    assert (got - wanted).abs().mean() < 0.1
    # A softmax in half precision would give logarithms of 8 or 11 bits.
    assert not torch.equal(got, got.to(dtype).float())


def test_logits_are_made_in_pieces_that_change_nothing(monkeypatch):
    model = decoder("gqa")
    whole = score(model, RAGGED)
    made = []
    monkeypatch.setattr(scoring, "PIECE", 4 * 50 + 3)
    hook = model.lm_head.register_forward_hook(lambda module, given, logits: made.append(tuple(logits.shape)))
    got = score(model, RAGGED)
    hook.remove()
    assert torch.equal(got, whole)
    assert made == [(4, 50)] * 6 + [(3, 50)]


def test_perplexity_by_hand():
    scores = torch.tensor([[0.5, 0.25, 0.125], [0.5, 1, 1]]).log()
    assert perplexity(scores[:1]) == pytest.approx(4)
    # Bits: 1 + 2 + 3 + 1 over four tokens; what stands behind the second row's end does not count.
    scores[1, 1:] = math.nan
    assert perplexity(scores, counts=[3, 1]) == pytest.approx(2 ** (7 / 4))
    assert mean_nll(scores, counts=[3, 1]) == pytest.approx(7 / 4 * math.log(2))
    assert perplexity(torch.zeros(1, 2)) == 1
    assert perplexity(torch.full((1, 2), -math.inf)) == math.inf
    assert perplexity(torch.full((1, 2), -1e5)) == math.inf
    assert perplexity(score(decoder("gqa"), RAGGED), COUNTS) == pytest.approx(
        math.exp(-sum(float(textbook("gqa", ids).sum()) for ids in RAGGED) / 16)
    )


@pytest.mark.parametrize(
    ("scores", "counts", "message"),
    [
        (torch.zeros(3), None, r"log-probabilities are \(B, T - 1\), got \(3,\)"),
        (torch.zeros(2, 3), [3], r"counts \[3\] must be one per row of 2, each of 0 to 3"),
        (torch.zeros(2, 3), [3, 4], "each of 0 to 3"),
        (torch.zeros(2, 3), [0, 0], "there is no score to average"),
    ],
)
def test_a_perplexity_of_nothing_is_refused(scores, counts, message):
    with pytest.raises(ValueError, match=message):
        perplexity(scores, counts)


@pytest.mark.parametrize(
    ("ids", "cache", "options", "message"),
    [
        ([], {}, {}, "there is no sequence to score"),
        ([[1, 2], [3]], {"batch": 2}, {}, "row 1 has 1 tokens; a score needs at least 2"),
        ([[]], {}, {}, "row 0 has 0 tokens"),
        ([[1, 50]], {}, {}, "row 0 holds token 50, and the vocabulary has 50"),
        ([[-1, 2]], {}, {}, "row 0 holds token -1"),
        (["text"], {}, {}, "'text' is text"),
        ([1, 2, 3], {}, {}, "got the single id 1"),
        (torch.zeros(1, 3), {}, {}, r"ids must be integers of shape \(B, T\), got torch.float32 of shape \(1, 3\)"),
        (torch.tensor([1, 2]), {}, {}, "ids must be integers of shape"),
        ([[1, 2, 3]], {}, {"chunk": 0}, r"chunk \(0\) must be an integer of at least 1"),
        ([[1, 2, 3]], None, {"chunk": 2}, r"chunk \(2\) is for a cache, and there is none"),
        ([[1, 2]], {"batch": 2}, {}, "the cache has 2 rows for 1 sequences"),
        ([[1] * 6], {"capacity": 4}, {"chunk": 1}, r"row 0 needs 5 slots \(0 held \+ 5 fed, all but its last token\)"),
        ([[1] * 6], {"codec": "int8-kivi"}, {"chunk": 2}, r"steps of 2 tokens are beyond the cache's burst \(1\)"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_is_computed(ids, cache, options, message, monkeypatch):
    model = copy.deepcopy(decoder("gqa"))
    monkeypatch.setattr(model.model, "forward", lambda *given: pytest.fail("something was computed"))
    store = None if cache is None else kv_cache(model, **{"batch": 1, "dtype": torch.float32, **cache})
    with pytest.raises(ValueError, match=message):
        score(model, ids, cache=store, **options)


def test_a_burst_is_asked_for_only_where_a_store_needs_it():
    config = decoder("gqa").config
    model = Decoder(replace(config, attention=replace(config.attention, sliding_window=3)))
    sharpen(model.double()).eval()
    whole = score(model, [LONG])
    for store, capacity, refused in (("full", 9, False), ("ring", 9, True), ("paged:3", 9, True)):
        cache = kv_cache(model, batch=1, capacity=capacity, store=store)
        if refused:
            with pytest.raises(ValueError, match="make the KVCache with burst=2, or give chunk=1"):
                score(model, [LONG], cache=cache, chunk=2)
            assert cache.lengths.tolist() == [0]
        else:
            assert (score(model, [LONG], cache=cache, chunk=2) - whole).abs().max() < 1e-6
    # A ring of 3 + 7 - 1 slots holds all 9 that are fed.
    wide = Decoder(replace(config, attention=replace(config.attention, sliding_window=9)))
    sharpen(wide.double()).eval()
    cache = kv_cache(wide, batch=1, capacity=9, store="ring")
    assert (score(wide, [LONG], cache=cache, chunk=2) - score(wide, [LONG])).abs().max() < 1e-6


def test_another_decoder_s_cache_and_a_spent_pool_are_refused():
    model = decoder("gqa")
    with pytest.raises(ValueError, match="the cache has 1 layers, the decoder 2"):
        score(model, [LONG], cache=kv_cache(decoder("gqa", layers=1), batch=1))
    with pytest.raises(OutOfPagesError, match="pages"):
        score(model, [LONG], cache=kv_cache(model, batch=1, store="paged:3", pages=2), chunk=3)
