"""Generation as transformers does it: greedy ids of left-padded batches, penalties, ends, lengths and lookup."""

import pytest
import torch

from attn_variants.generation import GREEDY, Lookup, Sampling, Stopping, generate
from attn_variants.generation.draws import draw, uniform

transformers = pytest.importorskip("transformers", reason="parity with transformers is checked where it is installed")

from tests.test_transformers import GROUPS, grouped, pair  # noqa: E402

PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5], [9]]


@pytest.fixture(scope="module")
def models():
    return pair("Llama", GROUPS, grouped(rms_norm_eps=1e-5))


def theirs(peer, *, prompts=PROMPTS, eos=None, **options):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    said = peer.generate(ids, attention_mask=mask, pad_token_id=0, eos_token_id=eos, do_sample=False, **options)
    return said[:, longest:].tolist()


def ours(model, penalty=1.0, **stops):
    sampling = Sampling(temperature=0, repetition_penalty=penalty) if penalty != 1 else GREEDY
    return [list(one.ids) for one in generate(model, PROMPTS, sampling=sampling, stopping=Stopping(**stops))]


def test_greedy_ids_of_a_ragged_batch_are_theirs(models):
    peer, model = models
    assert ours(model, max_new_tokens=12, eos=()) == theirs(peer, max_new_tokens=12)


def test_a_repetition_penalty_is_theirs(models):
    peer, model = models
    # In a padded batch theirs counts the padding as seen.
    wanted = [theirs(peer, prompts=[prompt], max_new_tokens=12, repetition_penalty=1.3)[0] for prompt in PROMPTS]
    assert ours(model, 1.3, max_new_tokens=12, eos=()) == wanted


def test_several_end_tokens_and_a_whole_length_are_theirs(models):
    peer, model = models
    whole = theirs(peer, max_new_tokens=12)
    ends = [whole[0][3], whole[1][5]]
    for said, wanted in zip(
        ours(model, max_new_tokens=12, eos=ends), theirs(peer, eos=ends, max_new_tokens=12), strict=True
    ):
        assert said == wanted[: len(said)]
        assert not any(wanted[len(said) :])
    wanted = [theirs(peer, prompts=[prompt], max_length=9)[0] for prompt in PROMPTS]
    assert ours(model, max_length=9, eos=()) == wanted


def test_lookup_is_theirs(models):
    peer, model = models
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    (wanted,) = theirs(peer, prompts=[prompt], max_new_tokens=20, prompt_lookup_num_tokens=4)
    (said,) = generate(model, [prompt], stopping=Stopping(20, eos=()), draft=Lookup(4))
    assert list(said.ids) == wanted


@torch.no_grad()
def test_the_same_numbers_draw_the_same_tokens_from_their_distribution(models):
    peer, model = models
    sampling = Sampling(0.8, top_k=12, top_p=0.9, seed=5)
    warpers = [
        transformers.TemperatureLogitsWarper(0.8),
        transformers.TopKLogitsWarper(12),
        transformers.TopPLogitsWarper(0.9),
    ]
    for result, prompt in zip(
        generate(model, PROMPTS, sampling=sampling, stopping=Stopping(10, eos=())), PROMPTS, strict=True
    ):
        ids = torch.tensor([prompt])
        for token in result.ids:
            scores = peer(ids).logits[:, -1]
            for warper in warpers:
                scores = warper(ids, scores)
            assert draw(scores.softmax(-1)[0], uniform(5, 0, ids.shape[1], "draw")) == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
