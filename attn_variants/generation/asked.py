"""What a call of `generate` asks for, checked before anything is computed, and the rows and the cache it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from attn_variants.cache import KVCache
from attn_variants.decoder import Decoder

from .row import Row
from .sampling import Sampling
from .stopping import Stopping

Prompts = Sequence[Sequence[int]]
Decode = Callable[[Sequence[int]], str]
Option = TypeVar("Option")


def checked_prompts(prompts: Prompts, vocab_size: int) -> list[list[int]]:
    """The prompts as lists. Raises ValueError for none, for text, for an empty one and for ids that are no tokens."""
    if isinstance(prompts, str) or (texts := [prompt for prompt in prompts if isinstance(prompt, str)]):
        text = prompts if isinstance(prompts, str) else texts[0]
        raise ValueError(f"prompt {text!r:.40} is text; prompts are token ids, as a tokenizer's encode gives them")
    if single := [prompt for prompt in prompts if isinstance(prompt, int)]:
        raise ValueError(
            f"prompts is one sequence of ids ({single[0]}, ...); give a list of them: [[{single[0]}, ...]]"
        )
    found = [prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt) for prompt in prompts]
    if not found:
        raise ValueError("there is no prompt; give at least one")
    for row, prompt in enumerate(found):
        if not prompt:
            raise ValueError(f"prompt {row} is empty; generation needs at least one token to start from")
        if foreign := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ValueError(
                f"prompt {row} holds token {foreign[0]}, and the vocabulary has {vocab_size}: "
                "is this the model's own tokenizer?"
            )
    return found


def one_for_each(name: str, given: Option | Sequence[Option], kind: type[Option], count: int) -> list[Option]:
    """An option of every prompt: the same for all, or one each."""
    each = [given] * count if isinstance(given, kind) else list(given)  # type: ignore[arg-type]
    if wrong := [one for one in each if not isinstance(one, kind)]:
        raise ValueError(f"{name} ({wrong[0]!r}) must be a {kind.__name__}, or one for each prompt")
    if len(each) != count:
        raise ValueError(f"{name} holds {len(each)} for {count} prompts; give one, or as many as there are prompts")
    return each


def new_rows(
    prompts: Sequence[list[int]],
    samplings: Sequence[Sampling],
    stoppings: Sequence[Stopping],
    *,
    n: int,
    held: Sequence[int],
    eos: tuple[int, ...],
    decode: Decode | None,
) -> list[Row]:
    """n rows per prompt, side by side; held: what the first row of each prompt's holds already."""
    return [
        Row(
            number=which * n + sample,
            prompt=prompt,
            which=which,
            sample=sample,
            held=held[which],
            sampling=sampling,
            watch=stopping.watch(decode, model_eos=eos, prompt_tokens=len(prompt)),
        )
        for which, (prompt, sampling, stopping) in enumerate(zip(prompts, samplings, stoppings, strict=True))
        for sample in range(n)
    ]


def new_cache(
    decoder: Decoder, prompts: Sequence[list[int]], needed: Sequence[int], *, n: int, burst: int, store: str, codec: str
) -> KVCache:
    """A cache in which n rows of each prompt have `needed` slots, in a pool that counts on them to share the prompt."""
    options: dict[str, Any] = {"batch": n * len(prompts), "capacity": max(needed), "dtype": decoder.dtype}
    options |= {"store": store, "codec": codec, "burst": burst}
    if n > 1 and (pools := KVCache(decoder.cache_specs, **options, device="meta").pools):
        page = int(store.partition(":")[2])
        shared = sum(len(prompt) // page for prompt in prompts)
        own = sum(-(-slots // page) - len(prompt) // page for prompt, slots in zip(prompts, needed, strict=True))
        options["pages"] = min(shared + n * own, max(pool.total for pool in pools))
    return KVCache(decoder.cache_specs, **options, device=decoder.device)


def check_cache(cache: KVCache, rows: Sequence[Row], needed: Sequence[int], *, n: int, burst: int) -> None:
    """Refuse a cache that is given and does not hold what is asked for."""
    if cache.batch != len(rows):
        each = "" if n == 1 else f" of {n} samples each"
        raise ValueError(
            f"the cache has {cache.batch} rows for {len(rows) // n} prompts{each}; they must be as many as sequences"
        )
    if cache.burst < burst:
        raise ValueError(
            f"the draft proposes up to {burst - 1} tokens, for which the cache needs a burst of {burst}, not "
            f"{cache.burst}: make the KVCache with burst={burst}"
        )
    for row, slots in zip(rows, needed, strict=True):
        if row.sample and cache.length(row.number):
            raise ValueError(
                f"row {row.number} of the cache, for sample {row.sample} of prompt {row.which}, holds "
                f"{cache.length(row.number)} tokens; of a prompt's {n} rows only the first may: free the others"
            )
        if row.held + slots > cache.capacity:
            raise ValueError(
                f"row {row.number} needs {row.held + slots} slots ({row.held} held + {len(row.prompt)} of the prompt + "
                f"{slots - len(row.prompt) + 1} new - 1) and the cache has {cache.capacity}: "
                "make it larger, or lower max_new_tokens"
            )
