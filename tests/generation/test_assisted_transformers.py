"""Speculation beside transformers' assisted generation: greedy ids, ends inside of blocks, the sampled distribution."""

import copy
from collections import Counter
from itertools import product

import pytest
import torch

from attn_variants.generation import GREEDY, Lookup, ModelDraft, Sampling, Stopping, generate
from tests.generation.chi_square import chi_square
from tests.generation.rounds import model_of

transformers = pytest.importorskip("transformers", reason="parity with transformers is checked where it is installed")

from attn_variants.bench.peers import transformers_twin  # noqa: E402
from tests.generation.theirs import cut, theirs  # noqa: E402

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [9], [5, 6, 7, 31, 8]]
NEW = 12


def twins(variant="gqa", **sizes):
    model = copy.deepcopy(model_of(variant, **sizes)).float()
    return transformers_twin(model), model


def assistants(tokens, **sizes):
    """A smaller model on both sides; theirs proposes as many whatever it is sure of."""
    peer, model = twins(layers=1, seed=3, **sizes)
    peer.generation_config.update(
        num_assistant_tokens=tokens, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0
    )
    return peer, ModelDraft(model, tokens)


@pytest.fixture(scope="module")
def target():
    return twins()


@pytest.fixture(scope="module")
def whole(target):
    """Plain greedy decoding, theirs."""
    return [theirs(target[0], [prompt], max_new_tokens=NEW)[0] for prompt in PROMPTS]


def ours(model, draft, eos=(), sampling=GREEDY):
    results = generate(model, PROMPTS, sampling=sampling, stopping=Stopping(NEW, eos=eos), draft=draft)
    return [list(result.ids) for result in results]


@pytest.mark.parametrize(("tokens", "penalty"), [(4, 1.0), (3, 3.0)])
def test_with_an_assistant_greedy_ids_are_theirs(target, whole, tokens, penalty):
    peer, model = target
    small, draft = assistants(tokens)
    given = {"max_new_tokens": NEW, "repetition_penalty": penalty}
    wanted = [theirs(peer, [prompt], assistant_model=small, **given)[0] for prompt in PROMPTS]
    said = ours(model, draft, sampling=Sampling(0, repetition_penalty=penalty))
    assert said == wanted
    assert (said == whole) == (penalty == 1)


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 1.0), (10, 1.0), (4, 3.0)])
def test_with_lookup_greedy_ids_are_theirs(target, whole, tokens, penalty):
    peer, model = target
    given = {"max_new_tokens": NEW, "repetition_penalty": penalty}
    wanted = [theirs(peer, [prompt], prompt_lookup_num_tokens=tokens, **given)[0] for prompt in PROMPTS]
    said = ours(model, Lookup(tokens), sampling=Sampling(0, repetition_penalty=penalty))
    assert said == wanted
    assert (said == whole) == (penalty == 1)


@pytest.mark.parametrize("place", range(6))
def test_an_end_inside_an_accepted_block_is_theirs(target, whole, place):
    """A model that drafts for itself is always accepted, so that the end lies at each place of a block in turn."""
    peer, model = target
    ends = list(dict.fromkeys(row[place] for row in whole))
    (wanted,) = theirs(peer, PROMPTS[:1], eos=ends, max_new_tokens=NEW, assistant_model=peer)
    assert wanted == cut(whole[0], ends)
    for draft in (ModelDraft(model, 4), Lookup(5)):
        assert ours(model, draft, eos=ends) == [cut(row, ends) for row in whole]


# Sampled: over three tokens, every text of four is enumerated.

SETTINGS = {"temperature": 2.0, "top_p": 0.97, "repetition_penalty": 3.0}
START = [0, 2]
COUNT = 4


def enumerated(peer):
    """The probability of every text by theirs: its logits, its processors, one token after another."""
    process = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(SETTINGS["repetition_penalty"]),
            transformers.TemperatureLogitsWarper(SETTINGS["temperature"]),
            transformers.TopPLogitsWarper(SETTINGS["top_p"]),
        ]
    )
    texts = torch.tensor([[*START, *text] for text in product(range(3), repeat=COUNT)])
    logits = peer(texts).logits
    found = torch.ones(len(texts), dtype=torch.float64)
    for place in range(len(START), texts.shape[1]):
        scores = process(texts[:, :place], logits[:, place - 1].clone())
        found *= scores.softmax(-1).double().gather(1, texts[:, place : place + 1])[:, 0]
    return {tuple(text[len(START) :]): p for text, p in zip(texts.tolist(), found.tolist(), strict=True)}


@torch.no_grad()
def test_sampled_with_an_assistant_ours_and_theirs_are_distributed_as_the_target():
    peer, model = twins(vocab_size=3)
    small, draft = assistants(2, vocab_size=3)
    wanted = enumerated(peer)
    assert sum(wanted.values()) == pytest.approx(1, abs=1e-6)
    results = generate(
        model, [START], sampling=Sampling(**SETTINGS, seed=11), stopping=Stopping(COUNT, eos=()), draft=draft, n=600
    )
    statistic, limit = chi_square(Counter(result.ids for result in results), wanted)
    assert statistic < limit
    assert 0 < sum(result.rounds.accepted for result in results) < sum(result.rounds.proposed for result in results)
    torch.manual_seed(1)
    given = {"do_sample": True, "top_k": 0, "max_new_tokens": COUNT, "assistant_model": small, **SETTINGS}
    drawn = Counter(tuple(theirs(peer, [START], **given)[0]) for _ in range(50))
    statistic, limit = chi_square(drawn, wanted)
    assert statistic < limit
