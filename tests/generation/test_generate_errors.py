"""A row whose logits are no distribution, or whose stop takes too long, ends alone with what it has said so far."""

import copy

import pytest
import torch

from attn_variants.generation import GREEDY, Lookup, ModelDraft, Sampling, Stopping, generate, matches
from tests.generation.rounds import model_of
from tests.tiny import kv_cache

PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1, 8]]
BAD = {"NaN": float("nan"), "-inf": float("-inf"), "+inf": float("inf")}


def letters(ids):
    return "".join(chr(0x100 + token) for token in ids)


def breaking(model, token, value):
    """A copy whose logits behind this token are all that value (one of them, where it is +inf)."""
    broken = copy.deepcopy(model)
    fed = []

    def remember(module, given):
        ids, step = given[:2]
        fed.append((ids, step.positions))

    def spoil(module, given, logits):
        ids, positions = fed.pop()
        if logits.shape[1] < ids.shape[1]:  # those of each row's last real token
            ids = ids.gather(1, positions.argmax(1, True))
        spoiled = logits.clone()
        spoiled[ids == token] = 0.5 if value == float("inf") else value
        spoiled[..., 5] = torch.where(ids == token, value, spoiled[..., 5])
        return spoiled

    broken.model.register_forward_pre_hook(remember)
    broken.lm_head.register_forward_hook(spoil)
    return broken


def told(model, **options):
    return generate(model, PROMPTS, stopping=Stopping(10, eos=()), decode=letters, **options)


def fields(result):
    return (result.ids, result.reason, result.text)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=4, top_p=0.95)])
@pytest.mark.parametrize("way", ["cached", "recomputed", "self", "wrong", "lookup"])
@pytest.mark.parametrize("store", ["full", "ring", "paged:4"])
def test_a_row_without_a_distribution_ends_alone(value, sampling, way, store):
    if way == "recomputed" and store != "full":
        pytest.skip("nothing is stored")
    model = model_of("gqa-windowed")
    drafts = {
        "self": ModelDraft(model, 4, store=store),
        "wrong": ModelDraft(model_of("mla", layers=1, seed=5), 4),
        "lookup": Lookup(4),
    }
    options = {"sampling": sampling, "draft": drafts.get(way)}
    options |= {"use_cache": False} if way == "recomputed" else {"store": store}
    sound = told(model, **options)
    said = [result.ids for result in sound]
    # A token that row 0 alone says, somewhere in the middle.
    elsewhere = {token for ids in (*PROMPTS, *said[1:]) for token in ids}
    at = next(place for place in range(3, 9) if said[0][place] not in {*elsewhere, *said[0][:place]})
    token = said[0][at]
    first, *others = told(breaking(model, token, BAD[value]), **options)
    if sampling.greedy or way in ("cached", "recomputed"):
        assert first.ids == said[0][: at + 1]
        assert first.logprobs == pytest.approx(sound[0].logprobs[: at + 1])
    # A block that breaks off is drawn otherwise, but as the model would.
    assert (first.reason == "error") == (token in first.ids)
    if first.reason == "error":
        assert first.ids.index(token) == len(first.ids) - 1
        assert first.text == letters(first.ids)
        assert f"row 0: the logits for position {5 + len(first.ids)} hold NaN or +inf, or -inf alone" in first.error
    assert [fields(result) for result in others] == [fields(result) for result in sound[1:]]
    assert {result.error for result in others} == {None}


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=4)])
def test_a_draft_without_a_distribution_proposes_nothing(sampling):
    model = model_of("gqa")
    sound = told(model, sampling=sampling, draft=ModelDraft(model, 3))
    token = sound[0].ids[4]
    results = told(model, sampling=sampling, draft=ModelDraft(breaking(model, token, float("nan")), 3))
    assert {result.error for result in results} == {None}
    assert [result.new_tokens for result in results] == [10] * 3
    if sampling.greedy:
        assert results[0].rounds.proposed < sound[0].rounds.proposed
        assert [result.ids for result in results] == [result.ids for result in sound]


@pytest.mark.parametrize("draft", [None, Lookup(3)])
def test_a_prompt_without_a_distribution_ends_before_its_first_token(draft):
    model = model_of("gqa")
    sound = told(model)
    results = told(breaking(model, 2, float("nan")), draft=draft)
    assert (results[1].ids, results[1].reason, results[1].text, results[1].new_tokens) == ((), "error", "", 0)
    assert [result.ids for result in results[::2]] == [result.ids for result in sound[::2]]


@pytest.mark.parametrize("draft", [None, Lookup(3)])
def test_a_regular_expression_that_takes_too_long_ends_its_row(draft, monkeypatch):
    monkeypatch.setattr(matches, "REGEX_SECONDS", 0.02)
    model = model_of("gqa")
    sound = told(model)
    slow = Stopping(10, eos=(), regex=r"(?:.|.)*(?:.|.)*(?:.|.)*\d")
    slow_decode = lambda ids: "x" * 4000 if list(ids) == list(sound[1].ids[: len(ids)]) else letters(ids)  # noqa: E731
    stopping = [Stopping(10, eos=()), slow, Stopping(10, eos=())]
    results = generate(model, PROMPTS, stopping=stopping, decode=slow_decode, draft=draft)
    assert results[1].reason == "error"
    assert "took longer than 0.02 s" in results[1].error
    assert results[1].text == "x" * 4000
    assert [result.ids for result in results[::2]] == [result.ids for result in sound[::2]]


@pytest.mark.parametrize("store", ["full", "ring", "paged:4"])
@pytest.mark.parametrize("draft", [None, Lookup(3)])
def test_an_interrupt_leaves_the_cache_as_after_the_last_token(store, draft):
    model = model_of("gqa-windowed")
    held = kv_cache(model, batch=1, capacity=40, store=store, burst=4)
    interrupted, passes = copy.deepcopy(model), []

    def interrupt(module, given):
        passes.append(1)
        if len(passes) == 5:
            raise KeyboardInterrupt

    interrupted.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(interrupted, PROMPTS[:1], stopping=Stopping(20, eos=()), cache=held, draft=draft)
    (whole,) = generate(model, PROMPTS[:1], stopping=Stopping(20, eos=()))
    there = held.length(0)
    assert there >= 5 + 3
    rest = [*PROMPTS[0], *whole.ids][there]
    (result,) = generate(model, [[rest]], stopping=Stopping(4, eos=()), cache=held)
    assert result.ids == whole.ids[there - 5 + 1 : there - 5 + 5]
