"""The loop: feed the prompt, pick the next token, feed it back, until a stop. Each token is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attn_variants.cache import KVCache
from attn_variants.decoder import Decoder

from .stopping import Stopping


@dataclass(frozen=True)
class Token:
    """One step of one row: the id, and, when it was the last, the reason."""

    row: int
    id: int
    reason: str | None


@dataclass(frozen=True)
class Result:
    """What one prompt became. ids and text are the new tokens alone; text is None where no `decode` was given."""

    ids: tuple[int, ...]
    text: str | None
    reason: str
    prompt_tokens: int
    new_tokens: int


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    stopping: Stopping | None = None,
    cache: KVCache | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> list[Result]:
    """Greedy continuations of prompts (token ids or tensors of them, any lengths), batched over one cache's rows.

    cache: appended to when given, one row per prompt; else made to fit. decode: a tokenizer's, to fill in the texts.
    Raises ValueError, before anything is computed, for an empty prompt, for tokens that the vocabulary lacks and for
    more tokens than the cache can hold.
    """
    ids: list[list[int]] = [[] for _ in prompts]
    reasons = ["length"] * len(prompts)
    for token in stream(decoder, prompts, stopping=stopping, cache=cache):
        ids[token.row].append(token.id)
        reasons[token.row] = token.reason or reasons[token.row]
    return [
        Result(tuple(new), decode(new) if decode else None, reason, len(prompt), len(new))
        for prompt, new, reason in zip(prompts, ids, reasons, strict=True)
    ]


def stream(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    stopping: Stopping | None = None,
    cache: KVCache | None = None,
) -> Iterator[Token]:
    """The tokens of `generate` as they come; arguments are checked at the call, not at the first token."""
    stopping = stopping or Stopping()
    if texts := [prompt for prompt in prompts if isinstance(prompt, str)]:
        raise ValueError(f"prompt {texts[0]!r:.40} is text; prompts are token ids, as a tokenizer's encode gives them")
    prompts = [prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt) for prompt in prompts]
    _check_prompts(prompts, decoder.config.vocab_size)
    if cache is None:
        capacity = max(len(prompt) for prompt in prompts) + max(stopping.max_new_tokens, 1) - 1
        cache = KVCache(
            decoder.cache_specs, batch=len(prompts), capacity=capacity, dtype=decoder.dtype, device=decoder.device
        )
    _check_capacity(prompts, stopping, cache)
    return _steps(decoder, prompts, stopping, cache) if stopping.max_new_tokens else iter(())


@torch.inference_mode()
def _steps(decoder: Decoder, prompts: Sequence[Sequence[int]], stopping: Stopping, cache: KVCache) -> Iterator[Token]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=decoder.device)
    counts = [len(prompt) for prompt in prompts]
    new_tokens = 0
    while any(counts):
        picked = decoder(ids, cache, counts=counts, last=True)[:, -1].argmax(-1)
        new_tokens += 1
        for row, token in enumerate(picked.tolist()):
            if not counts[row]:
                continue
            reason = stopping.reason(token, new_tokens, decoder.config.eos_token_ids)
            counts[row] = 0 if reason else 1
            yield Token(row, token, reason)
        ids = picked[:, None]


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    if not prompts:
        raise ValueError("there is no prompt; give at least one")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty; generation needs at least one token to start from")
        if foreign := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ValueError(
                f"prompt {row} holds token {foreign[0]}, and the vocabulary has {vocab_size}: "
                "is this the model's own tokenizer?"
            )


def _check_capacity(prompts: Sequence[Sequence[int]], stopping: Stopping, cache: KVCache) -> None:
    """The last token picked is never fed, so a prompt of p and n new tokens take p + n - 1 slots."""
    if cache.batch != len(prompts):
        raise ValueError(f"the cache has {cache.batch} rows for {len(prompts)} prompts; they must be as many")
    for row, (prompt, held) in enumerate(zip(prompts, cache.lengths.tolist(), strict=True)):
        needed = held + len(prompt) + max(stopping.max_new_tokens, 1) - 1
        if needed > cache.capacity:
            raise ValueError(
                f"row {row} needs {needed} slots ({held} held + {len(prompt)} of the prompt + "
                f"{stopping.max_new_tokens} new - 1) and the cache has {cache.capacity}: "
                "make it larger, or lower max_new_tokens"
            )
