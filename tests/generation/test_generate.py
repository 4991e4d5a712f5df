"""Generation over the library: each row as if it were alone, every stop exact, nothing computed for a refused call."""

import copy
from dataclasses import replace

import pytest
import torch

from attn_variants import VARIANTS
from attn_variants.generation import Stopping, generate, stream
from tests.tiny import append, decoder, kv_cache

PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]


def letters(ids):
    """A tokenizer's decode: a character for each id."""
    return "".join(chr(0x100 + token) for token in ids)


def greedy(model, prompt, count):
    """Without a cache: everything again for every token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_batch_continue_as_each_would_alone(variant):
    model = decoder(variant)
    results = generate(model, PROMPTS, stopping=Stopping(7, eos=()))
    assert [list(result.ids) for result in results] == [greedy(model, prompt, 7) for prompt in PROMPTS]
    assert [result.prompt_tokens for result in results] == [6, 1, 3]
    assert {(result.reason, result.new_tokens, result.text) for result in results} == {("length", 7, None)}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_number_of_new_tokens_is_exact(count):
    model = decoder("gqa")
    results = generate(model, PROMPTS, stopping=Stopping(count, eos=()))
    assert [list(result.ids) for result in results] == [greedy(model, prompt, count) for prompt in PROMPTS]
    assert {result.reason for result in results} == {"length"}


def test_each_row_ends_with_its_own_end_token_and_the_others_go_on():
    model = decoder("mla")
    whole = [greedy(model, prompt, 9) for prompt in PROMPTS]
    end = whole[0][2]
    assert any(end not in row[:9] for row in whole[1:])
    for result, row in zip(generate(model, PROMPTS, stopping=Stopping(9, eos=end)), whole, strict=True):
        stop = row.index(end) + 1 if end in row else 9
        assert list(result.ids) == row[:stop]
        assert result.reason == ("eos" if end in row else "length")


def test_the_end_tokens_of_the_model_are_the_default():
    model = copy.deepcopy(decoder("gqa"))
    end = greedy(model, PROMPTS[0], 3)[2]
    model.config = replace(model.config, eos_token_ids=(end, 49))
    (result,) = generate(model, PROMPTS[:1])
    assert (result.ids[-1], result.reason) == (end, "eos")


def test_a_warm_cache_goes_on_where_it_stands():
    model = decoder("gqa")
    store = kv_cache(model, batch=1)
    append(model, store, [PROMPTS[0]])
    (result,) = generate(model, [[7, 7]], stopping=Stopping(4, eos=()), cache=store)
    assert list(result.ids) == greedy(model, [*PROMPTS[0], 7, 7], 4)
    assert store.lengths.tolist() == [6 + 2 + 4 - 1]


def test_prompts_may_be_tensors_and_texts_come_from_the_tokenizer():
    model = decoder("gqa")
    results = generate(
        model, [torch.tensor(prompt) for prompt in PROMPTS], stopping=Stopping(2, eos=()), decode=letters
    )
    assert [result.text for result in results] == [letters(greedy(model, prompt, 2)) for prompt in PROMPTS]


def test_tokens_come_one_by_one_row_by_row():
    model = decoder("gqa")
    tokens = list(stream(model, PROMPTS[:2], stopping=Stopping(2, eos=())))
    assert [(token.row, token.reason) for token in tokens] == [(0, None), (1, None), (0, "length"), (1, "length")]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        (["The capital"], {}, "prompt 'The capital' is text; prompts are token ids"),
        ([[1], [3, 50]], {}, "prompt 1 holds token 50, and the vocabulary has 50"),
        ([[-1]], {}, "prompt 0 holds token -1"),
        ([[1] * 12], {"stopping": Stopping(6)}, r"row 0 needs 17 slots \(0 held \+ 12 of the prompt \+ 6 new - 1\)"),
        ([[1], [1]], {}, "the cache has 1 rows for 2 prompts"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_computed(prompts, options, message, monkeypatch):
    model = copy.deepcopy(decoder("gqa"))
    monkeypatch.setattr(model, "forward", lambda *given, **more: pytest.fail("something was computed"))
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, cache=kv_cache(model, batch=1), **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": -1}, r"max_new_tokens \(-1\)"),
        ({"max_new_tokens": 1.5}, r"max_new_tokens \(1\.5\)"),
        ({"eos": ("</s>",)}, r"eos \('</s>'\) must be token ids"),
        ({"eos": True}, r"eos \(True\) must be token ids"),
    ],
)
def test_stops_that_are_none_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Stopping(**fields)
