"""A model that is loaded and what `generate` asks of it: prompts to tokens, caches that fit, results to rows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_variants.cache import KVCache
from attn_variants.cache.accounting import cache_bytes
from attn_variants.checkpoints import Tokenizer
from attn_variants.config import DecoderConfig
from attn_variants.decoder import Decoder
from attn_variants.dtypes import canonical_dtype
from attn_variants.generation import Result, Sampling, Stopping, Token, stream
from attn_variants.generation.asked import new_cache
from attn_variants.generation.drafts import Draft

from .generate_flags import How
from .options import Stored
from .results import Row
from .speculated import Clocked, counts
from .tables import size
from .timed import Timed


@dataclass(frozen=True)
class Session:
    """One model, its draft if it has one, and how both are run."""

    model: str
    decoder: Decoder
    tokenizer: Tokenizer
    draft: Draft | None
    sampling: Sampling
    stopping: Stopping
    how: How
    stored: Stored

    def cache(self, ids: Sequence[int], *, slots: int, burst: int = 1) -> KVCache:
        """For the samples of this prompt, with so many slots each."""
        most = max(burst, 1 if self.draft is None else self.draft.tokens + 1)
        if self.how.prefill_chunk is not None:
            most = max(most, min(self.how.prefill_chunk, len(ids)))
        return new_cache(self.decoder, [list(ids)], [slots], n=self.how.n, burst=most, **vars(self.stored))

    def tokens(
        self,
        ids: Sequence[int],
        cache: KVCache | None,
        *,
        draft: Clocked | None = None,
        history: Sequence[int] | None = None,
    ) -> Iterator[Token]:
        """What follows these ids, and before them what the cache holds; without one all is computed for each token."""
        return stream(
            self.decoder,
            [list(ids)],
            sampling=self.sampling,
            stopping=self.stopping,
            cache=cache,
            history=None if history is None else [history],
            use_cache=cache is not None,
            n=self.how.n,
            draft=draft,
            decode=self.tokenizer.decode,
            prefill_chunk=None if cache is None else self.how.prefill_chunk,
            alternatives=self.how.alternatives,
        )

    def row(self, result: Result, timed: Timed, number: int, cache: KVCache) -> Row:
        """Everything about one sequence; the cache's bytes are those of all samples together."""
        row: Row = {
            "model": self.model,
            "dtype": canonical_dtype(self.decoder.dtype),
            "device": self.decoder.device.type,
            "turn": None,
            "sample": result.sample,
            "prompt_tokens": result.prompt_tokens,
            "fed_tokens": result.prompt_tokens,
            "new_tokens": result.new_tokens,
            "text": result.text,
            "ids": list(result.ids),
            "reason": result.reason,
            "matched": result.matched,
            "error": result.error,
            "ttft_ms": timed.ttft_ms(number),
            "tokens_per_s": timed.tokens_per_s(number),
            **vars(self.stored),
            "cache_bytes": cache.nbytes,
            "cache_bytes_used": cache.bytes_used,
            "logprobs": [_finite(logprob) for logprob in result.logprobs],
            "alternatives": [
                [{"id": id, "text": self.tokenizer.decode([id]), "logprob": _finite(value)} for id, value in place]
                for place in result.alternatives
                if place
            ],
        }
        if self.draft is not None:
            row |= {"speculative": self.how.speculative, "draft_tokens": self.draft.tokens} | counts(result.rounds)
        return row


def slots_for(stopping: Stopping, tokenizer: Tokenizer, prompt_tokens: int) -> int:
    """The most tokens that are fed of a prompt and what follows it: the last is not."""
    left = stopping.watch(tokenizer.decode, prompt_tokens=prompt_tokens).left
    return prompt_tokens + max(left, 1) - 1


def require_memory(
    config: DecoderConfig, slots: int, how: How, stored: Stored, *, dtype: str | None, device: str
) -> None:
    """Refuse, before weights are read, a cache that no memory of this machine holds, even in 2 bytes a number."""
    # Samples on pages share the prompt.
    batch = 1 if stored.store.startswith("paged") else how.n
    sizes: dict[str, Any] = {"batch": batch, "capacity": max(slots, 1), "dtype": dtype or "bfloat16"}
    needed, there = cache_bytes(config.cache_specs, **sizes, **vars(stored)), _memory(device)
    if there is not None and needed > there:
        raise ValueError(
            f"--max-new-tokens, --max-length and --n ask for a cache of {size(needed)} ({batch} x {slots} tokens), and "
            f"this machine has {size(there)} of memory; lower them, or give a --codec"
        )


def _memory(device: str) -> int | None:
    """Bytes of the device's memory; None where nobody says."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
