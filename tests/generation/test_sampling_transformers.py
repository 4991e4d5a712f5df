"""Sampling as transformers does it: what the loop draws from is what its processors leave, and its draws are its."""

from itertools import product

import pytest
import torch

from attn_variants.generation import ModelDraft, Sampling, Stopping, generate, picking
from attn_variants.generation.draws import draw, uniform

transformers = pytest.importorskip("transformers", reason="parity with transformers is checked where it is installed")

from tests.generation.theirs import left_padded  # noqa: E402
from tests.test_transformers import GROUPS, grouped, pair  # noqa: E402

PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 5, 5], [9]]
SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": penalty}
    for temperature, top_k, top_p, min_p, penalty in product(
        [1.0, 0.6], [None, 7], [None, 0.9], [None, 0.08], [1.0, 1.4]
    )
]
CORNERS = [
    {"temperature": 0.05},
    {"top_k": 1},
    {"top_k": 500},
    {"top_p": 1.0, "min_p": 0.0},
    {"top_p": 1e-6},
    {"min_p": 1.0},
    {"top_p": 0.9999999, "repetition_penalty": 0.6},
]


@pytest.fixture(scope="module")
def models():
    return pair("Llama", GROUPS, grouped(rms_norm_eps=1e-5))


def asked(settings):
    """The same in theirs, which reads 50 where top_k is not said, and 0 as none."""
    return {**settings, "do_sample": True, "top_k": settings.get("top_k") or 0}


@pytest.fixture
def seen_draws(monkeypatch):
    """Every (logits, distribution) that the loop draws from, in order."""
    found = []

    def watched(sampling, logits, seen=None):
        found.append((logits.clone(), probabilities(sampling, logits, seen)))
        return found[-1][1]

    probabilities = picking.probabilities
    monkeypatch.setattr(picking, "probabilities", watched)
    return found


def processors(peer, settings, prompt):
    """As its `generate` makes them of a GenerationConfig, for one prompt."""
    config = transformers.GenerationConfig(**asked(settings), max_length=99)
    peer._prepare_special_tokens(config)
    return peer._get_logits_processor(config, input_ids_seq_length=len(prompt), device=torch.device("cpu"))


def test_what_is_drawn_from_is_what_their_processors_leave_to_the_bit(models, seen_draws):
    """Theirs are given our logits and the ids before them: so what counts as seen is compared as well."""
    peer, model = models
    for settings in SETTINGS + CORNERS:
        seen_draws.clear()
        results = generate(model, PROMPTS, sampling=Sampling(**settings, seed=3), stopping=Stopping(5, eos=()))
        assert len(seen_draws) == 5
        for row, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
            process = processors(peer, settings, prompt)
            for place, (logits, distribution) in enumerate(seen_draws):
                before = torch.tensor([[*prompt, *result.ids[:place]]])
                wanted = process(before, logits[row : row + 1].clone()).softmax(-1)
                assert torch.equal(distribution[row : row + 1], wanted), settings


def drawn_with_ours(monkeypatch, seed):
    """Their loop draws with our numbers: `torch.multinomial` becomes the inversion of each row's own."""
    state = {"position": 0, "lengths": []}

    def multinomial(probabilities, num_samples):
        assert num_samples == 1
        places = [length + state["position"] for length in state["lengths"]]
        state["position"] += 1
        tokens = [draw(row, uniform(seed, 0, place, "draw")) for row, place in zip(probabilities, places, strict=True)]
        return torch.tensor(tokens)[:, None]

    monkeypatch.setattr(torch, "multinomial", multinomial)
    return state


@pytest.mark.parametrize("settings", SETTINGS[::4] + CORNERS, ids=str)
def test_their_loop_draws_the_same_tokens_with_the_same_numbers(models, monkeypatch, seen_draws, settings):
    """Their whole `generate`, over a left-padded batch; at every step it scores the tokens that ours does."""
    peer, model = models
    ids, mask = left_padded(PROMPTS)
    state = drawn_with_ours(monkeypatch, seed=5)
    state["lengths"] = [len(prompt) for prompt in PROMPTS]
    out = peer.generate(
        ids,
        attention_mask=mask,
        pad_token_id=0,
        eos_token_id=None,
        max_new_tokens=8,
        output_scores=True,
        return_dict_in_generate=True,
        **asked(settings),
    )
    results = generate(model, PROMPTS, sampling=Sampling(**settings, seed=5), stopping=Stopping(8, eos=()))
    assert [list(result.ids) for result in results] == out.sequences[:, ids.shape[1] :].tolist()
    assert len(seen_draws) == len(out.scores) == 8
    for (_, distribution), scores in zip(seen_draws, out.scores, strict=True):
        wanted = scores.softmax(-1)
        assert torch.equal(distribution > 0, wanted > 0)
        torch.testing.assert_close(distribution, wanted, rtol=1e-3, atol=1e-5)


def test_a_draft_models_tokens_are_drawn_from_the_same(models, seen_draws):
    """What the draft proposes and what verifies it are both processed, each behind the tokens it would follow."""
    peer, model = models
    settings = SETTINGS[-1]
    (result,) = generate(
        model,
        PROMPTS[:1],
        sampling=Sampling(**settings, seed=3),
        stopping=Stopping(6, eos=()),
        draft=ModelDraft(model, 2),
    )
    ids = [*PROMPTS[0], *result.ids]
    # A model that drafts for itself is always accepted: one token of the prompt, then two drafted, and three verified.
    assert [len(logits) for logits, _ in seen_draws] == [1, 1, 1, 3, 1, 2]
    places = [[3], [4], [5], [4, 5, 6], [7], [7, 8]]
    for (logits, distribution), at in zip(seen_draws, places, strict=True):
        for row, place in enumerate(at):
            process = processors(peer, settings, PROMPTS[0])
            wanted = process(torch.tensor([ids[:place]]), logits[row : row + 1].clone()).softmax(-1)
            assert torch.equal(distribution[row : row + 1], wanted)
