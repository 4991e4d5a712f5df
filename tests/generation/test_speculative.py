"""Generation with a draft: the model's own output for every draft, length, store and codec, and caches left right."""

import copy
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch

from attn_variants.generation import Lookup, ModelDraft, Sampling, Stopping, generate, stream
from attn_variants.generation.sampling import probabilities
from tests.generation.chi_square import chi_square
from tests.generation.rounds import model_of, plain
from tests.tiny import append, kv_cache

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [7, 1, 8, 7, 1, 8, 7]]
NEW = [12, 5, 9]
LENGTHS = [Stopping(count, eos=()) for count in NEW]
SAMPLED = Sampling(temperature=0.8, top_k=9, repetition_penalty=1.3, seed=3)
variants = pytest.mark.parametrize("variant", ["gqa", "gqa-windowed", "mla"])
stores = pytest.mark.parametrize("store", ["full", "ring", "paged:4"])


def letters(ids):
    """A tokenizer's decode: a character for each id."""
    return "".join(chr(0x100 + token) for token in ids)


@cache
def expected(variant):
    return [plain(model_of(variant), prompt, count) for prompt, count in zip(PROMPTS, NEW, strict=True)]


def near(variant, tokens, **options):
    """A draft that is right now and then: the model with other logits for some tokens."""
    model = copy.deepcopy(model_of(variant))
    noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model.lm_head.weight.data += 0.12 * noise
    return ModelDraft(model, tokens, **options)


def ids(results):
    return [list(result.ids) for result in results]


@pytest.mark.parametrize("tokens", range(1, 7))
@variants
def test_greedy_output_is_the_models_for_every_draft_length(variant, tokens):
    model = model_of(variant)
    rates = set()
    for draft in (near(variant, tokens), Lookup(tokens), ModelDraft(model_of("mla", layers=1, seed=5), tokens)):
        results = generate(model, PROMPTS, stopping=LENGTHS, draft=draft)
        assert ids(results) == expected(variant)
        # Pitfall L7: all tokens but the first come from rounds.
        assert [result.rounds.emitted for result in results] == [count - 1 for count in NEW]
        rates |= {result.rounds.acceptance_rate for result in results}
    assert len(rates) > 1


@pytest.mark.parametrize("codec", ["plain", "int8", "int4-kivi:4"])
@stores
@variants
def test_on_every_store_and_codec_it_is_what_plain_decoding_gives_there(variant, store, codec):
    if variant == "mla" and codec == "int4-kivi:4":
        codec = "int4"
    model, options = model_of(variant), {"store": store, "codec": codec}
    caches = [kv_cache(model, batch=3, capacity=22, burst=4, **options) for _ in range(2)]
    without = generate(model, PROMPTS, stopping=LENGTHS, cache=caches[0])
    results = generate(model, PROMPTS, stopping=LENGTHS, cache=caches[1], draft=near(variant, 3, **options))
    assert ids(results) == ids(without)
    if codec == "plain":
        assert ids(results) == expected(variant)
    assert len({result.rounds.acceptance_rate for result in results}) > 1
    wanted = [len(prompt) + count - 1 for prompt, count in zip(PROMPTS, NEW, strict=True)]
    assert [held.lengths.tolist() for held in caches] == [wanted, wanted]
    # When tokens are coded together hangs on how far the row has been, and so on the rounds.
    for result, plainly in zip(results, without, strict=True) if codec != "int4-kivi:4" else ():
        assert result.logprobs == pytest.approx(plainly.logprobs, abs=1e-4)


@pytest.mark.parametrize("tokens", range(1, 7))
@pytest.mark.parametrize("sampling", [None, SAMPLED])
@variants
def test_a_model_that_drafts_for_itself_is_always_accepted(variant, sampling, tokens):
    """Pitfall L5: for every length, samples, ragged rows, and rows that end at different times."""
    model = model_of(variant)
    store = ("full", "ring", "paged:4")[tokens % 3]
    draft = ModelDraft(model, tokens, store=store)
    results = generate(model, PROMPTS, sampling=sampling, stopping=LENGTHS, n=2, store=store, draft=draft)
    assert {result.rounds.acceptance_rate for result in results} == {1.0}
    # All but the first come in rounds of tokens + 1, the last of them as long as is left.
    assert [result.rounds.rounds for result in results[::2]] == [-(-(count - 1) // (tokens + 1)) for count in NEW]


@pytest.mark.parametrize("kind", ["eos", "string", "regex"])
@pytest.mark.parametrize("place", [1, 2, 4, 7, 8])
def test_a_stop_inside_an_accepted_block_ends_there(kind, place):
    """A block of seven is taken whole, and the stop lies at each of its places and behind it."""
    model, prompt = model_of("gqa-windowed"), PROMPTS[0]
    told = expected("gqa-windowed")[0]
    end = told.index(told[place])
    text = letters(told)
    stops = {"eos": {"eos": told[place]}, "string": {"strings": text[place]}, "regex": {"regex": text[place]}}
    held = kv_cache(model, batch=1, capacity=len(prompt) + 19, store="ring", burst=8)
    drafting = ModelDraft(model, 7, store="ring")
    given = {"stopping": Stopping(20, **{"eos": (), **stops[kind]}), "decode": letters, "draft": drafting}
    (result,) = generate(model, [prompt], cache=held, **given)
    assert list(result.ids) == told[: end + 1]
    assert (result.reason, result.text) == (kind, text[:end])
    assert held.lengths.tolist() == [len(prompt) + end]
    if end:
        assert result.rounds.emitted == end


@pytest.mark.parametrize("most", [0, 1, 2, 5])
@pytest.mark.parametrize("store", ["full", "ring", "paged:4"])
def test_new_tokens_are_exact_in_a_cache_that_is_just_large_enough(most, store):
    model = model_of("gqa-windowed")
    for draft in (near("gqa-windowed", 4), Lookup(4)):
        held = kv_cache(model, batch=3, capacity=11 + max(most, 1) - 1, store=store, burst=5)
        results = generate(model, PROMPTS, stopping=Stopping(most, eos=()), cache=held, draft=draft)
        assert ids(results) == ids(generate(model, PROMPTS, stopping=Stopping(most, eos=())))
        assert held.lengths.tolist() == [len(prompt) + most - 1 if most else 0 for prompt in PROMPTS]


@stores
def test_a_warm_cache_goes_on_where_it_stands(store):
    model = model_of("gqa-windowed")
    held = kv_cache(model, batch=2, capacity=40, store=store, burst=5)
    append(model, held, [PROMPTS[0], []])
    results = generate(model, [[7, 7], PROMPTS[0] * 2], stopping=Stopping(9, eos=()), cache=held, draft=Lookup(4))
    assert ids(results) == [plain(model, [*PROMPTS[0], 7, 7], 9), plain(model, PROMPTS[0] * 2, 9)]
    assert held.lengths.tolist() == [11 + 2 + 8, 22 + 8]


@pytest.mark.parametrize("taken", [1, 2, 3, 5, 6, 9, 12])
@stores
def test_who_takes_no_more_tokens_finds_in_the_cache_only_those_taken(store, taken):
    model = model_of("gqa-windowed")
    held = kv_cache(model, batch=2, capacity=30, store=store, burst=6)
    tokens = stream(model, PROMPTS[:2], stopping=Stopping(9, eos=()), cache=held, draft=near("gqa-windowed", 5))
    said = [[], []]
    for _ in range(taken):
        token = next(tokens)
        said[token.row].append(token.id)
    tokens.close()
    for row, prompt in enumerate(PROMPTS[:2]):
        assert len(prompt) <= held.length(row) <= len(prompt) + len(said[row])
    rest = [[*PROMPTS[row], *said[row], 7][held.length(row) :] for row in range(2)]
    results = generate(model, rest, stopping=Stopping(4, eos=()), cache=held)
    assert ids(results) == [plain(model, [*PROMPTS[row], *said[row], 7], 4) for row in range(2)]


@pytest.mark.parametrize("draft", ["wrong", "near", "lookup"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.4, "top_k": 3}, {"top_p": 0.8, "repetition_penalty": 1.5}])
def test_sampled_output_has_the_models_distribution(draft, sampling):
    """Of 800 samples the second and third token, which come from rounds, against all that the model can say."""
    target, prompt, rows = model_of("gqa", vocab_size=5), [0, 1, 2, 0, 1, 2, 0], 800
    chosen = Sampling(seed=11, **sampling)
    with torch.no_grad():
        paths = torch.tensor([[*prompt, *ids] for ids in product(range(5), repeat=3)])
        logits = target(paths)[:, len(prompt) - 1 : -1]
    share = torch.ones(len(paths), dtype=torch.float64)
    for place in range(3):
        seen = torch.zeros(len(paths), 5, dtype=torch.bool).scatter_(1, paths[:, : len(prompt) + place], True)
        p = probabilities(chosen, logits[:, place], seen).double()
        share *= p.gather(1, paths[:, len(prompt) + place, None])[:, 0]
    share = share.view(5, 5, 5).sum(0)
    small = copy.deepcopy(target if draft == "near" else model_of("mla", layers=1, vocab_size=5, seed=5))
    small.lm_head.weight.data *= 0.7
    given = Lookup(2) if draft == "lookup" else ModelDraft(small, 2)
    results = generate(target, [prompt], n=rows, sampling=chosen, stopping=Stopping(4, eos=()), draft=given)
    assert 0 < sum(result.rounds.accepted for result in results) < sum(result.rounds.proposed for result in results)
    pairs = Counter(result.ids[1:3] for result in results)
    statistic, limit = chi_square(pairs, {pair: float(share[pair]) for pair in product(range(5), repeat=2)})
    assert statistic < limit


def test_a_row_with_a_draft_is_the_same_whatever_shares_the_batch():
    """Pitfall J11: for samples too, other prompts' sampling and the order of prompts."""
    model, draft = model_of("gqa"), near("gqa", 3)
    others = [Sampling(temperature=0), SAMPLED, Sampling(top_p=0.9, seed=8)]
    given = {"stopping": Stopping(8, eos=()), "draft": draft, "n": 2}
    together = generate(model, PROMPTS, sampling=others, **given)
    turned = generate(model, PROMPTS[::-1], sampling=others[::-1], **given)
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, others, strict=True)):
        alone = ids(generate(model, [prompt], sampling=sampling, **given))
        assert alone == ids(together[2 * index : 2 * index + 2]) == ids(turned[4 - 2 * index : 6 - 2 * index])
        assert (alone[0] == alone[1]) == sampling.greedy
