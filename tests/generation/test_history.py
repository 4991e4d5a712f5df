"""Generation over a warm cache: told what it holds, everything is as though all of it were the prompt."""

import pytest
import torch

from attn_variants.generation import Lookup, ModelDraft, Sampling, Stopping, generate
from tests.generation.rounds import model_of
from tests.tiny import append, kv_cache

BEFORE = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2], []]
PROMPTS = [[5, 3, 1], [7, 1, 8, 7, 1], [4, 4]]
WHOLE = [[*before, *prompt] for before, prompt in zip(BEFORE, PROMPTS, strict=True)]


def warm(model, before=BEFORE, n=1, **options):
    held = kv_cache(model, batch=n * len(before), capacity=40, **options)
    append(model, held, [ids if sample == 0 else [] for ids in before for sample in range(n)])
    return held


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0, repetition_penalty=1.9),
        Sampling(0.9, top_k=20, repetition_penalty=3.0, seed=4),
        Sampling(0.9, repetition_penalty=3.0, penalise_prompt=False, seed=4),
        Sampling(1.3, top_p=0.9, seed=2),
    ],
)
@pytest.mark.parametrize("draft", [None, Lookup(3), ModelDraft(model_of("gqa", layers=1, seed=5), 3)])
def test_it_goes_on_as_after_the_whole_prompt(sampling, draft):
    model, given = model_of("gqa"), {"sampling": sampling, "stopping": Stopping(12, eos=()), "draft": draft, "n": 2}
    held = warm(model, n=2, store="paged:4", burst=4)
    results = generate(model, PROMPTS, cache=held, history=BEFORE, **given)
    wanted = generate(model, WHOLE, **given)
    assert [result.ids for result in results] == [result.ids for result in wanted]
    assert [result.rounds for result in results] == [result.rounds for result in wanted]
    assert [result.prompt_tokens for result in results[::2]] == [3, 5, 2]


def test_what_is_held_can_change_what_is_chosen():
    """Or the test above could not fail."""
    model, given = model_of("gqa"), {"stopping": Stopping(12, eos=())}
    penalised = [
        generate(model, WHOLE, sampling=Sampling(0, repetition_penalty=1.9, penalise_prompt=counted), **given)
        for counted in (True, False)
    ]
    assert penalised[0] != penalised[1]
    without = generate(model, PROMPTS, cache=warm(model, burst=4), draft=Lookup(3), **given)
    assert [result.rounds for result in without] != [
        result.rounds for result in generate(model, WHOLE, draft=Lookup(3), **given)
    ]


@pytest.mark.parametrize("history", [None, BEFORE])
def test_the_longest_length_counts_what_is_held(history):
    """10 + 3, 1 + 5 and 0 + 2 tokens."""
    model = model_of("gqa")
    results = generate(model, PROMPTS, cache=warm(model), history=history, stopping=Stopping(max_length=9, eos=()))
    assert [result.new_tokens for result in results] == [0, 3, 7]


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (BEFORE[:2], "history holds 2 sequences for 3 prompts; give one for each"),
        ([BEFORE[0][1:], *BEFORE[1:]], "history 0 holds 9 tokens and the cache 10 before that prompt"),
        ([*BEFORE[:2], [1]], "history 2 holds 1 tokens and the cache 0"),
        ([[99, *BEFORE[0][1:]], *BEFORE[1:]], "history 0 holds token 99, and the vocabulary has 50"),
        (["abc", *BEFORE[1:]], "'abc' is text"),
        (BEFORE[0], "history is one sequence of ids"),
        (None, "the repetition penalty counts the 10 tokens that the cache holds before prompt 0"),
    ],
)
def test_what_the_cache_does_not_hold_is_refused(history, message):
    model = model_of("gqa")
    held = warm(model)
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, cache=held, history=history, sampling=Sampling(repetition_penalty=1.1))
    assert held.lengths.tolist() == [10, 1, 0]


def test_without_a_cache_there_is_nothing_before_a_prompt():
    model = model_of("gqa")
    with pytest.raises(ValueError, match="history 0 holds 10 tokens and the cache 0"):
        generate(model, PROMPTS, history=BEFORE)
    with pytest.raises(ValueError, match="use_cache=False leaves nothing to do for history"):
        generate(model, PROMPTS, history=BEFORE, use_cache=False)


@pytest.mark.parametrize("store", ["full", "ring", "paged:4"])
def test_a_prompt_in_chunks_is_computed_once_for_its_samples(store):
    """11 tokens in chunks of 4 are 4 + 4 + 3, of one row; then 3 steps of 3 rows, the last token never being fed."""
    model = model_of("gqa-windowed")
    shapes = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _, given, out: shapes.append(tuple(given[0].shape)))
    try:
        prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])
        generate(model, prompt, n=3, prefill_chunk=4, store=store, stopping=Stopping(4, eos=()))
    finally:
        hook.remove()
    assert shapes == [(1, 4), (1, 4), (1, 3), *[(3, 1)] * 3]
