"""Drafts, verification and rewinding together: the target's own output, for every draft, length, store and codec."""

import random
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch

from attn_variants.generation.drafts import ModelDraft
from attn_variants.generation.lookup import Lookup
from tests.generation.chi_square import chi_square
from tests.generation.rounds import argmax, model_of, plain, softmax, speculate

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [7, 1, 8, 7, 1, 8, 7]]
NEW = [12, 5, 9]
variants = pytest.mark.parametrize("variant", ["gqa", "gqa-windowed", "mla"])
stores = pytest.mark.parametrize("store", ["full", "ring", "paged:4"])


def uniform(row, position, purpose):
    """A pure function of its arguments."""
    return random.Random(f"{row} {position} {purpose}").random()


def mistaken(row, position, token):
    """Rows accept different lengths: each is wrong at places of its own."""
    return (token + 1) % 50 if position % (row + 2) == 0 else token


@cache
def expected(variant):
    return [plain(model_of(variant), prompt, count) for prompt, count in zip(PROMPTS, NEW, strict=True)]


def other(**options):
    return ModelDraft(model_of("mla", layers=1, seed=5), **options)


@pytest.mark.parametrize("tokens", range(1, 7))
@variants
def test_greedy_output_is_the_targets_for_every_draft_length(variant, tokens):
    model = model_of(variant)
    draft = Lookup(tokens) if tokens % 2 else other(tokens=tokens)
    assert speculate(model, draft, PROMPTS, new=NEW).ids == expected(variant)
    done = speculate(model, ModelDraft(model, tokens), PROMPTS, new=NEW, mistaken=mistaken)
    assert done.ids == expected(variant)
    taken = [rounds.accepted for rounds in done.rounds]
    assert all(taken)
    assert taken != [rounds.proposed for rounds in done.rounds]


@stores
@variants
def test_both_caches_are_rewound_right_on_every_store(variant, store):
    model = model_of(variant)
    draft = ModelDraft(model, 3, store=store)
    assert speculate(model, draft, PROMPTS, new=NEW, mistaken=mistaken, store=store).ids == expected(variant)


@pytest.mark.parametrize("codec", ["int8", "int4-kivi:4"])
@stores
def test_a_draft_with_any_codec_leaves_the_output_as_it_is(store, codec):
    draft = ModelDraft(model_of("gqa-windowed"), 3, store=store, codec=codec)
    assert speculate(model_of("gqa-windowed"), draft, PROMPTS, new=NEW).ids == expected("gqa-windowed")


@stores
def test_a_target_with_a_codec_decodes_as_it_does_without_a_draft(store):
    model = model_of("gqa-windowed")
    without = speculate(model, Lookup(3, longest=9, shortest=9), PROMPTS, new=NEW, store=store, codec="int8")
    assert sum(rounds.proposed for rounds in without.rounds) == 0
    done = speculate(model, ModelDraft(model, 3), PROMPTS, new=NEW, mistaken=mistaken, store=store, codec="int8")
    assert done.ids == without.ids


@pytest.mark.parametrize("tokens", range(1, 7))
@variants
def test_a_model_that_drafts_for_itself_is_always_accepted(variant, tokens):
    """Pitfall L5: for every length, ragged rows, and rows that end at different times."""
    model = model_of(variant)
    store = ("full", "ring", "paged:4")[tokens // 2 % 3]
    draft = ModelDraft(model, tokens, store=store)
    probabilities = softmax if tokens % 2 else argmax
    done = speculate(model, draft, PROMPTS, new=NEW, probabilities=probabilities, uniform=uniform)
    assert [rounds.acceptance_rate for rounds in done.rounds] == [1.0] * 3
    # All but the first come in rounds of tokens + 1, the last of them as long as is left.
    assert [rounds.rounds for rounds in done.rounds] == [-(-(count - 1) // (tokens + 1)) for count in NEW]


def test_tokens_counted_are_tokens_given():
    """Pitfall L7: the sum over rounds is the output's length, but for the first token, which the prompt's pass gave."""
    done = speculate(model_of("mla"), Lookup(5), PROMPTS, new=NEW)
    assert [len(ids) - 1 for ids in done.ids] == [rounds.emitted for rounds in done.rounds]
    assert [rounds.proposed for rounds in done.rounds] == [
        sum(len(proposals[row].ids) for proposals in done.proposals if row in proposals) for row in range(3)
    ]


@pytest.mark.parametrize("draft", ["model", "lookup", "argmax"])
def test_sampled_output_has_the_targets_distribution(draft):
    """Of many rows the second and third token, which come from rounds, against all that the target can say."""
    target, small = model_of("gqa", vocab_size=5), model_of("mla", layers=1, vocab_size=5, seed=5)
    prompt, rows = [0, 1, 2, 0, 1, 2, 0], 4000 if draft == "model" else 1500
    with torch.no_grad():
        paths = torch.tensor([[*prompt, *ids] for ids in product(range(5), repeat=3)])
        p = softmax(target(paths))[:, len(prompt) - 1 : -1]
    share = p.gather(-1, paths[:, len(prompt) :, None]).prod(1).view(5, 5, 5).sum(0)
    draws = random.Random(1)
    done = speculate(
        target,
        Lookup(2) if draft == "lookup" else ModelDraft(small, 2),
        [prompt] * rows,
        new=[4] * rows,
        probabilities=softmax,
        uniform=lambda row, position, purpose: draws.random(),
        mistaken=(lambda row, position, token: 3) if draft == "argmax" else None,
    )
    accepted = sum(rounds.accepted for rounds in done.rounds)
    assert 0 < accepted < sum(rounds.proposed for rounds in done.rounds)
    pairs = Counter((ids[1], ids[2]) for ids in done.ids)
    statistic, limit = chi_square(pairs, {pair: float(share[pair]) for pair in product(range(5), repeat=2)})
    assert statistic < limit
