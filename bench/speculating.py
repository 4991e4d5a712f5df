"""Speculation against plain decoding: with a draft whose acceptance is set, and by lookup in the prompt."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from attn_variants.cache import KVCache
from attn_variants.checkpoints import load_tokenizer
from attn_variants.checkpoints.fetch import model_folder
from attn_variants.config import Geometry
from attn_variants.decoder import Decoder
from attn_variants.generation import GREEDY, Lookup, Result, Sampling, Stopping, stream
from attn_variants.generation.drafts import Draft
from attn_variants.generation.speedup import Rounds, expected_speedup, expected_tokens
from attn_variants.packed import pack_weights

from .case import decoder_config, random_decoder
from .loop_cost import after_first, filled, random_ids, ratio
from .measure import Quiet, Timings
from .mixture import MixedDraft, ScriptedDraft, draft_geometry
from .results import Row

SAMPLINGS = {"greedy": GREEDY, "temperature 1": Sampling()}
PROMPT = 64
SMOLLM2 = "smollm2-135m"

PASSAGE = (
    "The lighthouse keeper wrote down the weather every evening. On Monday the wind came from the north and brought "
    "sleet; on Tuesday a fog bank lay over the bay until noon, and three fishing boats waited behind the breakwater; "
    "on Wednesday the sky cleared, and from the gallery he could count eleven sails between the islands."
)
ORDINARY = (
    "What is the capital of France, and what is it known for?",
    "Explain in a few sentences why the sky is blue.",
)
REPEATING = (f"{PASSAGE}\n\n{PASSAGE}\n\n{PASSAGE[:40]}", f"Original: {PASSAGE}\nCopy: {PASSAGE}\nCopy: The")


def speculation_rows(
    variant: str, geometry: Geometry, *, acceptance: float, drafts: Sequence[int], new: int, turns: int, seed: int
) -> Iterator[Row]:
    """A row per sampling and draft length, in bfloat16: rehearsed with the mixture, then timed in turns."""
    model = random_decoder(decoder_config(variant, geometry), dtype="bfloat16", device="cpu", seed=seed)
    small = decoder_config(variant, draft_geometry(geometry))
    draft = random_decoder(small, dtype="bfloat16", device="cpu", seed=seed + 1)
    packed = [pack_weights(each) for each in (model, draft)]
    (prompt,) = random_ids(geometry.vocab_size, PROMPT, seed).tolist()
    for name, sampling in SAMPLINGS.items():
        for tokens in drafts:
            rehearsal = MixedDraft(draft, model, tokens=tokens, acceptance=acceptance, seed=seed)
            _timed(model, prompt, new, sampling, rehearsal)
            scripted = ScriptedDraft(draft, tokens, script=rehearsal.script)
            cost, block = _costs(model, draft, tokens, turns=turns, seed=seed)
            row = _compared(model, [prompt], new, sampling, scripted, turns)
            measured = row["acceptance"]
            yield {
                "section": "speculation",
                "sampling": name,
                "asked": acceptance,
                "drafts": tokens,
                "packed": sorted({shape for each in packed for shape, way in each.items() if way == "packed"}),
                "size": _weights(draft) / _weights(model),
                "cost": cost,
                "block": block,
                "expected": None if measured is None else expected_speedup(measured, tokens, cost),
                "expected_block": (
                    None if measured is None else expected_tokens(measured, tokens) / (tokens * cost + block)
                ),
            } | row


def lookup_rows(*, drafts: Sequence[int], dtypes: Sequence[str], new: int, turns: int) -> Iterator[Row]:
    """A row per dtype, text and draft length, greedy. Raises ValueError where SmolLM2 was not fetched."""
    folder = model_folder(SMOLLM2)
    tokenizer = load_tokenizer(folder)
    texts = {
        "ordinary": [tokenizer.chat([{"role": "user", "content": content}]) for content in ORDINARY],
        "repeating": [tokenizer.encode(text) for text in REPEATING],
    }
    for dtype in dtypes:
        model = Decoder.from_pretrained(folder, dtype=dtype).eval()
        pack_weights(model)
        for text, prompts in texts.items():
            for tokens in drafts:
                row = _compared(model, prompts, new, GREEDY, Lookup(tokens), turns)
                yield {"section": "lookup", "dtype": dtype, "text": text, "drafts": tokens} | row


def _compared(
    model: Decoder, prompts: Sequence[list[int]], new: int, sampling: Sampling, draft: Draft, turns: int
) -> Row:
    """Plain decoding and speculation in turns, a token's time each over all prompts; prompts themselves not timed."""
    quiet = Quiet()
    samples: dict[str, list[float]] = {"plain_ms": [], "speculative_ms": []}
    found: dict[str, list[Result]] = {}
    for _ in range(turns):
        for name, with_draft in (("plain_ms", None), ("speculative_ms", draft)):
            timed = [_timed(model, prompt, new, sampling, with_draft) for prompt in prompts]
            found[name] = [result for result, _ in timed]
            samples[name].append(statistics.fmean(seconds for _, seconds in timed) * 1e3)
        quiet.probe()
    rounds = Rounds()
    for one in (result.rounds for result in found["speculative_ms"]):
        # None where the first token ended the text.
        if one is not None:
            for field in vars(rounds):
                setattr(rounds, field, getattr(rounds, field) + getattr(one, field))
    same = all(one.ids == other.ids for one, other in zip(found["plain_ms"], found["speculative_ms"], strict=True))
    return {
        "new_tokens": sum(result.new_tokens for result in found["speculative_ms"]),
        **samples,
        "speedup": ratio(samples["plain_ms"], samples["speculative_ms"]),
        "acceptance": rounds.acceptance_rate,
        "tokens_per_call": rounds.tokens_per_call,
        "same": same if sampling.greedy else None,
        "unquiet": quiet.unquiet,
    }


def _timed(
    model: Decoder, prompt: list[int], new: int, sampling: Sampling, draft: Draft | None
) -> tuple[Result, float]:
    tokens = stream(model, [prompt], sampling=sampling, stopping=Stopping(new), draft=draft)
    last, seconds = after_first(tokens)
    assert last.result is not None
    return last.result, seconds


@torch.inference_mode()
def _costs(model: Decoder, draft: Decoder, tokens: int, *, turns: int, seed: int) -> tuple[float, float]:
    """A step of the draft and the model's pass over a block, both over the model's step: medians over turns."""
    caches = [filled(each, PROMPT, PROMPT + tokens + 1, seed, burst=tokens + 2) for each in (model, draft)]
    passes = ((model, caches[0], 1), (draft, caches[1], 1), (model, caches[0], tokens + 1))
    timings = [Timings() for _ in passes]
    for _ in range(2 * turns + 1):
        for one, (decoder, cache, count) in zip(timings, passes, strict=True):
            one.time("cpu", partial(_block, decoder, cache, count))
            cache.rewind(count)
    step, small, block = (one.wall[1:] for one in timings)
    return ratio(small, step), ratio(block, step)


def _block(decoder: Decoder, cache: KVCache, count: int) -> None:
    decoder(torch.zeros(1, count, dtype=torch.int64), cache)


def _weights(decoder: Decoder) -> int:
    return sum(parameter.numel() for parameter in decoder.parameters())
