"""A draft model's proposals: what the decoder alone would go on with, whatever was taken of them and whenever."""

import random

import pytest
import torch

from attn_variants.generation.drafts import ModelDraft
from tests.generation.rounds import model_of, plain
from tests.tiny import decoder

PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]


def greedily(logits, rows, proposed):
    return logits.argmax(-1).tolist(), None


def opened(model, tokens=4, batch=3, capacity=48, **options):
    return ModelDraft(model, tokens, **options).open(batch=batch, capacity=capacity, vocab_size=50)


def alone(model, ids, count):
    return tuple(plain(model, ids, count))


@pytest.mark.parametrize("store", ["full", "ring", "paged:4"])
@pytest.mark.parametrize("variant", ["gqa", "gqa-windowed", "mla"])
def test_proposals_are_the_decoders_own_whatever_was_taken(variant, store):
    """Rows take 0 to all of their proposals, are not asked in some rounds, end, and begin again beside the others."""
    model, draws = model_of(variant), random.Random(1)
    drafting = opened(model, store=store)
    sequences = {row: list(prompt) for row, prompt in enumerate(PROMPTS)}
    for row, ids in sequences.items():
        drafting.begin(row, ids)
    for number in range(7):
        limits = {row: draws.randint(0, 5) for row in sequences if draws.random() < 0.7}
        proposals = drafting.propose(limits, greedily)
        assert proposals.keys() == limits.keys()
        for row, ids in sequences.items():
            if row in limits:
                assert proposals[row].ids == alone(model, ids, min(limits[row], 4))
            proposed = proposals[row].ids if row in limits else ()
            grown = [*proposed[: draws.randint(0, len(proposed))], draws.randrange(50)]
            ids += grown
            drafting.grow(row, grown)
        if number == 3:
            drafting.end(1)
            # Longer than the ring: 2 sinks, a window of 7 and 4 that may be taken back.
            sequences[1] = [5, 5, 6, 2, 8, 8, 3, 1, 6, 4, 4, 9, 2, 7, 3]
            drafting.begin(1, sequences[1])


def test_the_last_proposal_is_fed_when_the_block_was_taken_whole():
    """Pitfall L5: after 4 of 4 and the token that follows, of 10 tokens the cache holds 8 and is fed two."""
    model = decoder("gqa")
    drafting = opened(model, batch=1)
    drafting.begin(0, [3, 1, 4, 1, 5])
    ids = drafting.propose({0: 4}, greedily)[0].ids
    assert drafting.cache.lengths.tolist() == [8]
    drafting.grow(0, [*ids, 7])
    (proposal,) = drafting.propose({0: 1}, greedily).values()
    assert drafting.cache.lengths.tolist() == [10]
    assert proposal.ids == alone(model, [3, 1, 4, 1, 5, *ids, 7], 1)


def test_nothing_is_fed_twice():
    """Of a prompt of 5, a round of 4 taken whole and one of 4 taken not at all: 5 + 3, 2 + 3, and 1 for the next."""
    model, fed = decoder("gqa"), []
    drafting = opened(model, batch=1)
    feed = drafting._pass
    drafting._pass = lambda given, *, alone: fed.append(len(given[0])) or feed(given, alone=alone)
    drafting.begin(0, [3, 1, 4, 1, 5])
    drafting.grow(0, [*drafting.propose({0: 4}, greedily)[0].ids, 7])
    ids = drafting.propose({0: 4}, greedily)[0].ids
    drafting.grow(0, [(ids[0] + 1) % 50])
    drafting.propose({0: 1}, greedily)
    assert fed == [5, 1, 1, 1, 2, 1, 1, 1, 1]


def test_asking_again_gives_the_same():
    drafting = opened(decoder("gqa"), batch=1, store="paged:4")
    drafting.begin(0, [3, 1, 4])
    once = drafting.propose({0: 4}, greedily)
    assert drafting.propose({0: 4}, greedily) == once
    assert drafting.propose({0: 1}, greedily)[0].ids == once[0].ids[:1]


def test_proposals_come_with_what_they_were_drawn_from():
    model, seen = decoder("gqa"), []

    def second_best(logits, rows, proposed):
        seen.append((list(rows), [list(ids) for ids in proposed]))
        return logits.topk(2).indices[:, 1].tolist(), logits.softmax(-1)

    drafting = opened(model, batch=2)
    drafting.begin(0, PROMPTS[0])
    drafting.begin(1, PROMPTS[2])
    proposals = drafting.propose({0: 1, 1: 2}, second_best)
    assert seen == [([0, 1], [[], []]), ([1], [[proposals[1].ids[0]]])]
    with torch.no_grad():
        for row, prompt in ((0, PROMPTS[0]), (1, PROMPTS[2])):
            whole = model(torch.tensor([[*prompt, *proposals[row].ids]]))[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(proposals[row].probabilities, whole.softmax(-1), rtol=1e-6, atol=1e-9)
            assert proposals[row].ids == tuple(whole.topk(2).indices[:, 1].tolist())


def test_a_row_whose_token_cannot_be_picked_proposes_no_more_and_others_do():
    drafting = opened(decoder("gqa"))
    for row, prompt in enumerate(PROMPTS):
        drafting.begin(row, prompt)

    def pick(logits, rows, proposed):
        tokens, _ = greedily(logits, rows, proposed)
        ended = [row == 1 and len(ids) == 1 for row, ids in zip(rows, proposed, strict=True)]
        return [None if end else token for token, end in zip(tokens, ended, strict=True)], logits.softmax(-1)

    proposals = drafting.propose({0: 3, 1: 3, 2: 3}, pick)
    assert [len(proposals[row].ids) for row in range(3)] == [3, 1, 3]
    assert [len(proposals[row].probabilities) for row in range(3)] == [3, 1, 3]
    assert proposals[2].ids == alone(decoder("gqa"), PROMPTS[2], 3)


def test_no_proposal_goes_beyond_the_room_of_the_cache():
    """The last proposal is never fed, so that 8 slots take a sequence of 6 and three proposals."""
    drafting = opened(decoder("gqa"), batch=1, capacity=8)
    drafting.begin(0, PROMPTS[0])
    assert len(drafting.propose({0: 4}, greedily)[0].ids) == 3
    drafting.grow(0, [1, 1, 1])
    assert drafting.propose({0: 4}, greedily)[0].ids == ()


@pytest.mark.parametrize("codec", ["int8", "int4-kivi:4"])
@pytest.mark.parametrize("store", ["full", "ring", "paged:4"])
def test_every_store_and_codec_goes_back_as_far_as_it_must(store, codec):
    """Coded keys make other proposals than plain ones; what is held is asked of the cache, row by row."""
    model, draws = model_of("gqa-windowed"), random.Random(2)
    drafting = opened(model, tokens=3, store=store, codec=codec)
    lengths = [len(prompt) for prompt in PROMPTS]
    for row, prompt in enumerate(PROMPTS):
        drafting.begin(row, prompt)
    for _ in range(8):
        proposals = drafting.propose(dict.fromkeys(range(3), 3), greedily)
        assert drafting.cache.lengths.tolist() == [length + 2 for length in lengths]
        for row, proposal in proposals.items():
            assert len(proposal.ids) == 3
            grown = [*proposal.ids[: draws.randint(0, 3)], draws.randrange(50)]
            drafting.grow(row, grown)
            lengths[row] += len(grown)


def test_another_vocabulary_is_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"vocabulary of 50 tokens and the model one of 49152: give a draft with"):
        ModelDraft(decoder("gqa")).open(batch=1, capacity=8, vocab_size=49152)


def test_a_draft_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match=r"tokens \(0\) must be an integer of at least 1"):
        ModelDraft(decoder("gqa"), tokens=0)
