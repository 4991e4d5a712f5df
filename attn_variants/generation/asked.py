"""What a call of `generate` asks for, checked before anything is computed, and the rows and the cache it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, TypeVar

from attn_variants.cache import KVCache
from attn_variants.decoder import Decoder

from .drafts import Draft, ModelDraft
from .row import Row
from .sampling import Sampling
from .stopping import Stopping

Prompts = Sequence[Sequence[int]]
Decode = Callable[[Sequence[int]], str]
Option = TypeVar("Option")


def checked_prompts(prompts: Prompts, vocab_size: int) -> list[list[int]]:
    """The prompts as lists. Raises ValueError for none, for text, for an empty one and for ids that are no tokens."""
    if isinstance(prompts, str | bytes):
        raise ValueError(_is_text(prompts))
    found = [_ids("prompts", row, prompt, vocab_size) for row, prompt in enumerate(_several("prompts", prompts))]
    if not found:
        raise ValueError("there is no prompt; give at least one")
    if not all(found):
        raise ValueError(f"prompt {found.index([])} is empty; generation needs at least one token to start from")
    return found


def checked_history(
    history: Prompts | None, held: Sequence[int], samplings: Sequence[Sampling], vocab_size: int
) -> list[list[int]]:
    """The tokens that a cache holds before each prompt, nothing where they are not said.

    held: how many these are. Raises ValueError for others than so many, and where a penalty would have to know them.
    """
    if history is None:
        for row, (tokens, sampling) in enumerate(zip(held, samplings, strict=True)):
            if tokens and sampling.repetition_penalty != 1 and sampling.penalise_prompt:
                raise ValueError(
                    f"the repetition penalty counts the {tokens} tokens that the cache holds before prompt {row}: give "
                    "them as history, or penalise_prompt=False"
                )
        return [[] for _ in held]
    found = [_ids("history", row, ids, vocab_size) for row, ids in enumerate(_several("history", history))]
    if len(found) != len(held):
        raise ValueError(f"history holds {len(found)} sequences for {len(held)} prompts; give one for each")
    for row, (ids, tokens) in enumerate(zip(found, held, strict=True)):
        if len(ids) != tokens:
            raise ValueError(
                f"history {row} holds {len(ids)} tokens and the cache {tokens} before that prompt; give those it holds"
            )
    return found


def _ids(name: str, row: int, given: Any, vocab_size: int) -> list[int]:
    """One sequence. Raises ValueError for what are no tokens of this vocabulary."""
    if isinstance(given, str | bytes):
        raise ValueError(_is_text(given))
    one = f"{name.removesuffix('s')} {row}"
    listed = given.tolist() if hasattr(given, "tolist") else given  # of torch and numpy
    if isinstance(listed, int | float):
        raise ValueError(f"{name} is one sequence of ids ({listed}, ...); give a list of them: [[{listed}, ...]]")
    ids = []
    for token in _several(one, listed):
        try:
            ids.append(index(token))
        except TypeError:
            raise ValueError(f"{one} holds {token!r:.40}, which is no token id but must be an integer") from None
        if isinstance(token, bool):
            raise ValueError(f"{one} holds {token}, which is no token id; is it a mask?")
    if foreign := [token for token in ids if not 0 <= token < vocab_size]:
        raise ValueError(
            f"{one} holds token {foreign[0]}, and the vocabulary has {vocab_size}: is this the model's own tokenizer?"
        )
    return ids


def _is_text(given: str | bytes) -> str:
    return f"prompt {given!r:.40} is text; prompts are token ids, as a tokenizer's encode gives them"


def _several(name: str, given: Any) -> list[Any]:
    try:
        return list(given)
    except TypeError:
        raise ValueError(f"{name} ({given!r:.40}) must be token ids, as a tokenizer's encode gives them") from None


def one_for_each(name: str, given: Option | Sequence[Option], kind: type[Option], count: int) -> list[Option]:
    """An option of every prompt: the same for all, or one each."""
    if isinstance(given, kind):
        return [given] * count
    each: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if wrong := [one for one in each if not isinstance(one, kind)]:
        raise ValueError(f"{name} ({wrong[0]!r:.40}) must be a {kind.__name__}, or one for each prompt")
    if len(each) != count:
        raise ValueError(f"{name} holds {len(each)} for {count} prompts; give one, or as many as there are prompts")
    return each


def checked_draft(draft: Draft | Decoder | None) -> Draft | None:
    """What proposes; a decoder proposes as many tokens as a `ModelDraft` does by default."""
    proposing = ModelDraft(draft) if isinstance(draft, Decoder) else draft
    proposes = hasattr(proposing, "open") and hasattr(proposing, "tokens") and not isinstance(proposing, type)
    if proposing is not None and not proposes:
        raise ValueError(f"draft ({draft!r:.40}) must be a ModelDraft, a Lookup or a smaller decoder")
    return proposing


def check_alone(
    *, cache: object, history: object, draft: object, store: str, codec: str, prefill_chunk: int | None
) -> None:
    """Refuse what has nothing to do where nothing is cached."""
    given = {
        "cache": cache is not None,
        "history": history is not None,
        "draft": draft is not None,
        "store": store != "full",
        "codec": codec != "plain",
        "prefill_chunk": prefill_chunk is not None,
    }
    if idle := [name for name, has in given.items() if has]:
        raise ValueError(f"use_cache=False leaves nothing to do for {' and '.join(idle)}; leave it out")


def new_rows(
    prompts: Sequence[list[int]],
    samplings: Sequence[Sampling],
    stoppings: Sequence[Stopping],
    *,
    n: int,
    held: Sequence[int],
    history: Sequence[list[int]],
    eos: tuple[int, ...],
    decode: Decode | None,
) -> list[Row]:
    """n rows per prompt, side by side; held: tokens that the first of them holds already; history: which they are."""
    return [
        Row(
            number=which * n + sample,
            prompt=prompt,
            which=which,
            sample=sample,
            held=held[which],
            history=history[which],
            sampling=sampling,
            watch=stopping.watch(decode, model_eos=eos, prompt_tokens=held[which] + len(prompt)),
        )
        for which, (prompt, sampling, stopping) in enumerate(zip(prompts, samplings, stoppings, strict=True))
        for sample in range(n)
    ]


def new_cache(
    decoder: Decoder, prompts: Sequence[list[int]], needed: Sequence[int], *, n: int, burst: int, store: str, codec: str
) -> KVCache:
    """A cache in which n rows of each prompt have `needed` slots, in a pool that counts on them to share the prompt.

    A pool's size holds for each kind of layer: beside windows, which leave most of a long prompt behind, it may be more
    than rows that share nothing need, and then is not given.
    """
    options: dict[str, Any] = {"batch": n * len(prompts), "capacity": max(needed), "dtype": decoder.dtype}
    options |= {"store": store, "codec": codec, "burst": burst}
    apart = KVCache(decoder.cache_specs, **options, device="meta")
    if n > 1 and apart.pools:
        page = int(store.partition(":")[2])
        shared = sum(len(prompt) // page for prompt in prompts)
        own = sum(-(-slots // page) - len(prompt) // page for prompt, slots in zip(prompts, needed, strict=True))
        together = {**options, "pages": shared + n * own}
        if KVCache(decoder.cache_specs, **together, device="meta").nbytes < apart.nbytes:
            options = together
    return KVCache(decoder.cache_specs, **options, device=decoder.device)


def check_cache(
    cache: KVCache, decoder: Decoder, rows: Sequence[Row], needed: Sequence[int], *, n: int, burst: int
) -> None:
    """Refuse a cache that is given and does not hold what is asked for."""
    if cache.specs != decoder.cache_specs:
        raise ValueError("the cache is another decoder's: make the KVCache from this decoder's own cache_specs")
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
