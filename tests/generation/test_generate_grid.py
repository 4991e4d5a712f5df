"""Any sampler, stop, precision and store together: against a slow loop of our own that computes with no batch."""

import contextlib
import math
from dataclasses import replace
from itertools import cycle, islice

import pytest
import regex
import torch

from attn_variants import VARIANTS
from attn_variants.generation import Sampling, Stopping, generate, score, stream
from attn_variants.generation.draws import uniform
from tests.generation.rounds import model_of
from tests.tiny import kv_cache

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [7, 1, 8, 7]]
SAMPLERS = {
    "greedy": Sampling(temperature=0),
    "temperature": Sampling(temperature=0.7, seed=1),
    "top-k": Sampling(top_k=5, seed=2),
    "top-p": Sampling(top_p=0.7, seed=3),
    "min-p": Sampling(min_p=0.1, seed=4),
    "penalty": Sampling(repetition_penalty=1.4, seed=5),
    "all": Sampling(1.2, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, penalise_prompt=False, seed=6),
}
STOPS = {
    "length": Stopping(9, eos=()),
    "eos": Stopping(12, eos=(4, 14, 24, 34, 44)),
    "string": Stopping(12, eos=(), strings=("ab", "e)", "c")),
    "regex": Stopping(12, eos=(), regex=r"[b-d]{2}|\]"),
    "unit": Stopping(12, eos=(), unit="bracket"),
    "max_length": Stopping(12, max_length=14, eos=()),
}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "autocast": torch.float32}
STORES = [(store, codec) for store in ("full", "ring", "paged:4") for codec in ("plain", "int8", "int4-kivi:4")]
# Every pair of a stop with a sampler, and with each all precisions, stores and codecs in turn.
CELLS = [
    (sampler, stop, precision, *store)
    for (sampler, stop), precision, store in zip(
        [(sampler, stop) for sampler in SAMPLERS for stop in STOPS],
        islice(cycle(PRECISIONS), 42),
        islice(cycle(STORES), 42),
        strict=True,
    )
]


def characters(ids):
    """A tokenizer's decode: letters and brackets, some of which several ids write."""
    return "".join("abcde()[]{} "[token % 12] for token in ids)


def slow(model, prompt, sampling, stopping, *, sample=0, store=None):
    """One sequence, all written out in Python; store: options of a cache, or None to compute everything every time."""
    held = None if store is None else kv_cache(model, batch=1, capacity=40, **store)
    ids, fed = [], 0
    ends = set() if stopping.eos is None else set(stopping.eos)
    most = min(stopping.max_new_tokens, (stopping.max_length or 99) - len(prompt))
    while len(ids) < most:
        sequence = [*prompt, *ids]
        logits = model(torch.tensor([sequence[fed:]]), held)[0, -1].float()
        fed = 0 if held is None else len(sequence)
        ids.append(
            chosen(logits.tolist(), sequence, ids, sampling, uniform(sampling.seed, sample, len(sequence), "draw"))
        )
        if ids[-1] in ends:
            return ids, characters(ids[:-1]), "eos"
        text = characters(ids)
        cuts = [(text.find(string), "string") for string in stopping.strings if string in text]
        cuts += [(found.start(), "regex") for pattern in stopping.regex if (found := regex.search(pattern, text))]
        cuts += [(end, "unit") for end in bracketed(text) if stopping.unit]
        if cuts:
            return ids, text[: min(cuts)[0]], min(cuts)[1]
    return ids, characters(ids), "length"


def bracketed(text):
    """Where the bracket that was opened first is closed."""
    for start, opening in enumerate(text):
        if opening in "([{":
            closing, depth = ")]}"["([{".index(opening)], 0
            for end in range(start, len(text)):
                depth += (text[end] == opening) - (text[end] == closing)
                if not depth:
                    return [end + 1]
            return []
    return []


def chosen(scores, sequence, ids, sampling, u):
    """In Python's own floats."""
    for token in set(sequence if sampling.penalise_prompt else ids):
        scores[token] *= sampling.repetition_penalty ** (1 if scores[token] < 0 else -1)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if sampling.temperature == 0:
        return order[0]
    weights = [math.exp((one - max(scores)) / sampling.temperature) for one in scores]
    order = order[: sampling.top_k]
    if sampling.top_p:
        total, reached, kept = sum(weights[token] for token in order), 0.0, []
        for token in order:
            if reached < sampling.top_p * total:
                kept.append(token)
            reached += weights[token]
        order = kept
    if sampling.min_p:
        order = [token for token in order if weights[token] >= sampling.min_p * weights[order[0]]]
    wanted = u * sum(weights[token] for token in order)
    for token in sorted(order):
        wanted -= weights[token]
        if wanted < 0:
            return token
    raise AssertionError


def computing(precision):
    model = model_of("gqa-windowed")
    model = type(model)(model.config).to(PRECISIONS[precision]).eval().requires_grad_(False)
    model.load_state_dict(model_of("gqa-windowed").state_dict())
    context = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    return model, context


@pytest.mark.parametrize(("sampler", "stop", "precision", "store", "codec"), CELLS)
def test_a_batch_over_any_store_is_each_sequence_as_the_slow_loop_has_it(sampler, stop, precision, store, codec):
    (model, context), sampling, stopping = computing(precision), SAMPLERS[sampler], STOPS[stop]
    options, given = (
        {"store": store, "codec": codec},
        {"sampling": sampling, "stopping": stopping, "decode": characters},
    )
    with context:
        results = generate(model, PROMPTS, n=2, **options, **given)
        wanted = [
            slow(model, prompt, sampling, stopping, sample=sample, store=options)
            for prompt in PROMPTS
            for sample in range(2)
        ]
        if precision in ("bfloat16", "float16", "autocast"):
            # Rounded sums differ with the shape of a pass: each row alone is the oracle's, a batch may not be.
            results = [generate(model, [prompt], n=1, **options, **given)[0] for prompt in PROMPTS]
            wanted = wanted[::2]
        assert [(list(result.ids), result.text, result.reason) for result in results] == wanted
        pieces = ["", "", ""]
        for token in stream(model, PROMPTS, **options, **given):
            pieces[token.row] += token.text
            if token.result:
                assert pieces[token.row] == token.result.text


@pytest.mark.parametrize(("sampler", "stop"), list(zip(SAMPLERS, cycle(STOPS), strict=False)))
def test_with_a_cache_or_without_in_chunks_or_at_once_alone_or_not(sampler, stop):
    model, sampling, stopping = model_of("gqa-windowed"), SAMPLERS[sampler], STOPS[stop]
    given = {"sampling": sampling, "stopping": stopping, "decode": characters}
    results = generate(model, PROMPTS, n=2, use_cache=False, **given)
    wanted = [slow(model, prompt, sampling, stopping, sample=sample) for prompt in PROMPTS for sample in range(2)]
    assert [(list(result.ids), result.text, result.reason) for result in results] == wanted
    for store in ("full", "ring", "paged:4"):
        for chunk in (1, 4, 99):
            cached = generate(model, PROMPTS, n=2, store=store, prefill_chunk=chunk, **given)
            assert [(list(one.ids), one.text, one.reason) for one in cached] == wanted
    if not sampling.greedy:
        assert results[0].ids != results[1].ids


def test_one_seed_gives_one_output_whatever_shares_the_batch():
    """Pitfall J11, in float32: the order of prompts, others with other sampling, and again."""
    model, _ = computing("float32")
    samplings, stopping = [SAMPLERS["all"], SAMPLERS["greedy"], SAMPLERS["top-p"]], Stopping(8, eos=())
    together = generate(model, PROMPTS, sampling=samplings, stopping=stopping)
    assert generate(model, PROMPTS, sampling=samplings, stopping=stopping) == together
    turned = generate(model, PROMPTS[::-1], sampling=samplings[::-1], stopping=stopping)[::-1]
    alone = [
        generate(model, [prompt], sampling=one, stopping=stopping)[0]
        for prompt, one in zip(PROMPTS, samplings, strict=True)
    ]
    assert [result.ids for result in together] == [result.ids for result in turned] == [result.ids for result in alone]
    (first, *_) = generate(model, PROMPTS[:1], sampling=replace(samplings[0], seed=99), stopping=stopping)
    assert first.ids != together[0].ids


@pytest.mark.parametrize("store", ["full", "ring", "paged:4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_are_those_that_score_gives(variant, store):
    model = model_of(variant)
    results = generate(
        model, PROMPTS, sampling=SAMPLERS["all"], stopping=Stopping(6, eos=()), store=store, alternatives=60
    )
    rows = [[*prompt, *result.ids] for prompt, result in zip(PROMPTS, results, strict=True)]
    held = kv_cache(model, batch=3, capacity=20, store=store)
    for scored in (score(model, rows), score(model, rows, cache=held)):
        for row, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
            own = scored[row, len(prompt) - 1 :][: result.new_tokens].tolist()
            assert result.logprobs == pytest.approx(own, abs=1e-5)
            assert result.logprob == pytest.approx(sum(own), abs=1e-4)
    for result in results:
        for token, logprob, named in zip(result.ids, result.logprobs, result.alternatives, strict=True):
            assert dict(named)[token] == logprob
            assert len(named) == 50
            assert sum(math.exp(value) for _, value in named) == pytest.approx(1)
