"""The benchmark's draft: accepted as often as asked, exact all the same, and timed with no pass but a draft's."""

import random

import pytest
import torch

from attn_variants import Decoder, DecoderConfig
from attn_variants.bench.case import PRESET_GEOMETRIES
from attn_variants.bench.mixture import MixedDraft, ScriptedDraft, draft_geometry, mixed
from attn_variants.generation.verification import acceptance
from attn_variants.registry import VARIANTS
from tests.generation.rounds import argmax, model_of, plain, softmax, speculate

PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
NEW = [60, 30, 40]


def uniform(row, position, purpose):
    return random.Random(f"{row} {position} {purpose}").random()


def run(draft, probabilities=softmax, prompts=PROMPTS):
    return speculate(model_of("gqa"), draft, prompts, new=NEW, probabilities=probabilities, uniform=uniform)


def rehearsed(**options):
    return MixedDraft(model_of("mla", layers=1, seed=5), model_of("gqa"), tokens=4, **options)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_a_mixture_is_accepted_as_often_as_asked(rate):
    generator = torch.Generator().manual_seed(0)
    p, r = torch.rand(2, 100, 9, generator=generator, dtype=torch.float64).pow(6).unbind()
    p, r = p / p.sum(-1, keepdim=True), r / r.sum(-1, keepdim=True)
    for model, draft in zip(p, r, strict=True):
        q = mixed(model, draft, rate)
        least = float(torch.minimum(model, draft).sum())
        assert float(q.sum()) == pytest.approx(1, abs=1e-12)
        assert float((q * acceptance(model, q)).sum()) == pytest.approx(max(rate, least), abs=1e-12)


def test_a_mixture_by_hand():
    """Half apart: with .8 asked, w = 1 - .2 / .5 = .6."""
    p, r = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.5, 0.25, 0.25])
    assert mixed(p, r, 0.8).tolist() == pytest.approx([0.8, 0.1, 0.1])
    assert mixed(p, r, 0.4).tolist() == [0.5, 0.25, 0.25]
    assert mixed(p, p, 0.8).tolist() == p.tolist()


@pytest.mark.parametrize(("rate", "probabilities"), [(0.8, argmax), (0.5, softmax)])
def test_a_run_accepts_as_often_as_asked(rate, probabilities):
    done = run(rehearsed(acceptance=rate), probabilities)
    tested = sum(rounds.tested for rounds in done.rounds)
    # Four standard deviations of that many tosses.
    spread = 4 * (rate * (1 - rate) / tested) ** 0.5
    assert sum(rounds.accepted for rounds in done.rounds) / tested == pytest.approx(rate, abs=spread)
    if probabilities is argmax:
        assert done.ids == [plain(model_of("gqa"), prompt, count) for prompt, count in zip(PROMPTS, NEW, strict=True)]


@pytest.mark.parametrize("probabilities", [argmax, softmax])
def test_the_timed_run_is_the_rehearsed_one_with_the_passes_of_an_honest_draft(probabilities, monkeypatch):
    draft = rehearsed()
    before = run(draft, probabilities)
    passes = []
    forward = Decoder.forward

    def counted(self, ids, *given, **more):
        passes.append((self is model_of("gqa"), ids.shape[1]))
        return forward(self, ids, *given, **more)

    monkeypatch.setattr(Decoder, "forward", counted)
    after = run(ScriptedDraft(draft.decoder, draft.tokens, script=draft.script), probabilities)
    assert after.ids == before.ids
    assert after.rounds == before.rounds
    # Of the model: the prompt, and one for each round. Of the draft: one for each place of a round's longest proposal.
    assert sum(of_model for of_model, _ in passes) == 1 + len(after.proposals)
    longest = [max(len(found.ids) for found in proposals.values()) for proposals in after.proposals]
    assert sum(not of_model for of_model, _ in passes) == sum(longest)


def test_a_run_that_leaves_the_rehearsed_path_is_refused():
    draft = rehearsed()
    run(draft)
    with pytest.raises(RuntimeError, match=r"\(0, 7, .*where its rehearsal was at \(\(0, 7, .*rehearse with the same"):
        run(ScriptedDraft(draft.decoder, draft.tokens, script=draft.script), prompts=[[3] * 6, [2], [7, 1, 8]])
    with pytest.raises(RuntimeError, match="where its rehearsal was at None"):
        run(ScriptedDraft(draft.decoder, draft.tokens))


@pytest.mark.parametrize("name", PRESET_GEOMETRIES)
def test_the_draft_is_about_a_tenth_of_the_model(name):
    variant, geometry = PRESET_GEOMETRIES[name]
    sizes = []
    with torch.device("meta"):
        for each in (geometry, draft_geometry(geometry)):
            decoder = Decoder(DecoderConfig.from_geometry(each, VARIANTS[variant].config))
            sizes.append(sum(parameter.numel() for parameter in decoder.parameters()))
    assert draft_geometry(geometry).layers == 2
    assert sizes[1] / sizes[0] == pytest.approx(0.1, abs=0.03)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"acceptance \(1.5\) must lie between 0 and 1"):
        rehearsed(acceptance=1.5)
    with pytest.raises(ValueError, match="vocabulary of 50 tokens and the model one of 7"):
        rehearsed().open(batch=1, capacity=8, vocab_size=7)
