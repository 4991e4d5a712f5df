"""Arguments that cannot be meant: one ValueError before anything is computed, and the cache as it was."""

import copy

import numpy as np
import pytest
import torch

from attn_variants.generation import Lookup, ModelDraft, Sampling, Stopping, generate, stream
from tests.generation.rounds import model_of
from tests.tiny import append, decoder, kv_cache, same, snapshot

PROMPTS = [[3, 1, 4], [2]]


def refused(monkeypatch, message, prompts=PROMPTS, *, cache=None, **options):
    model = copy.deepcopy(decoder("gqa"))
    monkeypatch.setattr(model, "forward", lambda *given, **more: pytest.fail("something was computed"))
    before = None if cache is None else snapshot(cache)
    for call in (generate, stream):
        with pytest.raises(ValueError, match=message):
            call(model, prompts, **({} if cache is None else {"cache": cache}), **options)
    assert cache is None or same(before, snapshot(cache))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there is no prompt"),
        (iter(()), "there is no prompt"),
        (5, r"prompts \(5\) must be token ids"),
        (None, r"prompts \(None\) must be token ids"),
        ([None], r"prompt 0 \(None\) must be token ids"),
        ([3, 1, 4], r"prompts is one sequence of ids \(3, \.\.\.\); give a list of them: \[\[3, \.\.\.\]\]"),
        (torch.tensor([3, 1, 4]), r"prompts is one sequence of ids \(3, "),
        (np.array([3, 1, 4]), r"prompts is one sequence of ids \(3, "),
        ([3.0, 1.0], r"prompts is one sequence of ids \(3\.0, "),
        ("text", "prompt 'text' is text"),
        (b"text", "prompt b'text' is text"),
        ([[1], "text"], "prompt 'text' is text"),
        ([[1], []], "prompt 1 is empty"),
        (torch.zeros(2, 0, dtype=torch.int64), "prompt 0 is empty"),
        ([[1], [2, 3.0]], r"prompt 1 holds 3\.0, which is no token id"),
        ([[1, None]], "prompt 0 holds None, which is no token id"),
        ([[1, "2"]], "prompt 0 holds '2', which is no token id"),
        ([[True]], "prompt 0 holds True, which is no token id"),
        (torch.ones(1, 2, dtype=torch.bool), "prompt 0 holds True, which is no token id"),
        (torch.ones(1, 2), r"prompt 0 holds 1\.0, which is no token id"),
        (torch.ones(1, 2, 2, dtype=torch.int64), r"prompt 0 holds \[1, 1\], which is no token id"),
        ([[1, 50]], "prompt 0 holds token 50, and the vocabulary has 50"),
        ([[-1]], "prompt 0 holds token -1"),
    ],
)
def test_prompts_that_are_none_are_refused(prompts, message, monkeypatch):
    refused(monkeypatch, message, prompts)


@pytest.mark.parametrize(
    "prompts",
    [
        torch.tensor([[3, 1, 4], [2, 7, 1]]),
        np.array([[3, 1, 4], [2, 7, 1]]),
        [np.array([3, 1, 4]), torch.tensor([2, 7, 1], dtype=torch.int32)],
        (
            (3, np.int64(1), torch.tensor(4)),
            range(2, 3),
        ),
        (row for row in [[3, 1, 4], [2, 7, 1]]),
    ],
)
def test_prompts_may_be_any_integers_in_sequence(prompts):
    model = decoder("gqa")
    wanted = [[3, 1, 4], [2]] if isinstance(prompts, tuple) else [[3, 1, 4], [2, 7, 1]]
    assert generate(model, prompts, stopping=Stopping(3)) == generate(model, wanted, stopping=Stopping(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": []}, "sampling holds 0 for 2 prompts"),
        ({"sampling": [Sampling()] * 3}, "sampling holds 3 for 2 prompts"),
        ({"sampling": 0.7}, r"sampling \(0\.7\) must be a Sampling"),
        ({"sampling": "greedy"}, r"sampling \('greedy'\) must be a Sampling"),
        ({"sampling": [Sampling(), None]}, r"sampling \(None\) must be a Sampling"),
        ({"stopping": [Stopping()]}, "stopping holds 1 for 2 prompts"),
        ({"stopping": 12}, r"stopping \(12\) must be a Stopping"),
        ({"stopping": Stopping(strings="a")}, "give decode"),
        ({"stopping": Stopping(regex="a")}, "give decode"),
        ({"stopping": Stopping(unit="json")}, "give decode"),
        ({"decode": "gpt2"}, r"decode \('gpt2'\) must be a function"),
        ({"n": 0}, r"n \(0\) must be an integer of at least 1"),
        ({"n": True}, r"n \(True\)"),
        ({"n": 1.0}, r"n \(1\.0\)"),
        ({"alternatives": -1}, r"alternatives \(-1\)"),
        ({"prefill_chunk": 0}, r"prefill_chunk \(0\)"),
        ({"prefill_chunk": 2.0}, r"prefill_chunk \(2\.0\)"),
        ({"store": "heap"}, "heap"),
        ({"codec": "int3"}, "int3"),
        ({"cache": [1]}, r"cache \(\[1\]\) must be a KVCache"),
        ({"draft": "lookup"}, r"draft \('lookup'\) must be a ModelDraft, a Lookup or a smaller decoder"),
        ({"draft": ModelDraft}, "draft .* must be a ModelDraft"),
        ({"draft": ModelDraft(model_of("gqa", vocab_size=5))}, "the draft has a vocabulary of 5 tokens and the model"),
        ({"draft": model_of("gqa", vocab_size=51)}, "the draft has a vocabulary of 51"),
        ({"draft": Lookup(), "use_cache": False}, "use_cache=False leaves nothing to do for draft"),
        ({"store": "ring", "use_cache": False}, "use_cache=False leaves nothing to do for store"),
        ({"codec": "int8", "use_cache": False}, "use_cache=False leaves nothing to do for codec"),
        ({"prefill_chunk": 4, "use_cache": False}, "use_cache=False leaves nothing to do for prefill_chunk"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message, monkeypatch):
    if "cache" in options:
        model = copy.deepcopy(decoder("gqa"))
        with pytest.raises(ValueError, match=message):
            generate(model, PROMPTS, **options)
    else:
        refused(monkeypatch, message, **options)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        ({"batch": 3}, {}, "the cache has 3 rows for 2 prompts"),
        ({"batch": 2}, {"n": 2}, "the cache has 2 rows for 2 prompts of 2 samples each"),
        ({"batch": 2}, {"store": "ring"}, "store 'ring' and codec 'plain' are those of the cache that is given"),
        ({"batch": 2}, {"use_cache": False}, "use_cache=False leaves nothing to do for cache"),
        ({"batch": 2, "burst": 4}, {"draft": Lookup(4)}, "the cache needs a burst of 5, not 4"),
        ({"batch": 2, "capacity": 11}, {}, r"row 0 needs 12 slots \(2 held \+ 3 of the prompt \+ 8 new - 1\)"),
        ({"batch": 4, "capacity": 99}, {"n": 2}, "row 1 of the cache, for sample 1 of prompt 0, holds 2 tokens"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_and_stays_as_it_is(made, options, message, monkeypatch):
    model = decoder("gqa")
    cache = kv_cache(model, **made)
    append(model, cache, [[5, 6]] * made["batch"])
    refused(monkeypatch, message, cache=cache, stopping=Stopping(8), **options)


def test_the_cache_of_another_decoder_is_refused(monkeypatch):
    refused(
        monkeypatch, "the cache is another decoder's", cache=kv_cache(decoder("mla"), capacity=50), stopping=Stopping(2)
    )
