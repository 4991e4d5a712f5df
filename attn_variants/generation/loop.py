"""The loop: feed the prompt, choose the next token from what comes back, feed that, until a stop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from attn_variants.cache import KVCache
from attn_variants.contract import require_size
from attn_variants.decoder import Decoder

from .asked import (
    Decode,
    Prompts,
    check_alone,
    check_cache,
    checked_draft,
    checked_history,
    checked_prompts,
    new_cache,
    new_rows,
    one_for_each,
)
from .drafts import Draft
from .feeding import Cached, Feed, Recomputed
from .picking import log_probabilities, picked
from .row import Result, Row, Token
from .sampling import GREEDY, Sampling, broken_message
from .speculative import Speculation
from .stopping import Stopping


def generate(
    decoder: Decoder,
    prompts: Prompts,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stopping: Stopping | Sequence[Stopping] | None = None,
    cache: KVCache | None = None,
    history: Prompts | None = None,
    n: int = 1,
    draft: Draft | Decoder | None = None,
    decode: Decode | None = None,
    store: str = "full",
    codec: str = "plain",
    use_cache: bool = True,
    prefill_chunk: int | None = None,
    alternatives: int = 0,
) -> list[Result]:
    """Continuations of prompts (token ids or tensors of them, any lengths), batched over one cache's rows.

    sampling: how tokens are chosen, for all prompts or one for each; None is greedy.     stopping: when they end.
    n: samples per prompt, which share its memory where the store can; results come prompt by prompt, n of each.
    draft: what proposes tokens that the model then verifies together: a `ModelDraft`, a `Lookup` or a smaller decoder.
    decode: a tokenizer's, for texts, and for stops that look at them.
    cache: appended to when given, n rows per prompt, of which the first alone may hold something already; else one is
    made to fit, with this store and codec.     use_cache: without, all is computed again for every token.
    history: what the cache that is given holds already, for each prompt the tokens before it (nothing is fed of them):
    drafts read them, and the penalty counts them; a draft goes without where they are left out.
    prefill_chunk: the most tokens of a prompt that are fed at once; None is all.
    alternatives: how many of the likeliest tokens a result names at each place.

    A row whose logits are no distribution ends with reason "error"; the others go on. Raises ValueError, before
    anything is computed, for an empty prompt, for tokens that the vocabulary lacks, for more tokens than the cache can
    hold, for a draft with another vocabulary, and for options that exclude each other; OutOfPagesError from the step
    for which the pool of a cache that is given has no page.
    """
    tokens = stream(
        decoder,
        prompts,
        sampling=sampling,
        stopping=stopping,
        cache=cache,
        history=history,
        n=n,
        draft=draft,
        decode=decode,
        store=store,
        codec=codec,
        use_cache=use_cache,
        prefill_chunk=prefill_chunk,
        alternatives=alternatives,
    )
    ended = {token.row: token.result for token in tokens if token.result is not None}
    return [ended[row] for row in sorted(ended)]


def stream(
    decoder: Decoder,
    prompts: Prompts,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stopping: Stopping | Sequence[Stopping] | None = None,
    cache: KVCache | None = None,
    history: Prompts | None = None,
    n: int = 1,
    draft: Draft | Decoder | None = None,
    decode: Decode | None = None,
    store: str = "full",
    codec: str = "plain",
    use_cache: bool = True,
    prefill_chunk: int | None = None,
    alternatives: int = 0,
) -> Iterator[Token]:
    """The tokens of `generate` as they come; arguments are checked at the call, not at the first token.

    A row's last token carries its `result`. Rows end each at its own time.
    """
    require_size("n", n)
    require_size("alternatives", alternatives, 0)
    if prefill_chunk is not None:
        require_size("prefill_chunk", prefill_chunk)
    asked = checked_prompts(prompts, decoder.config.vocab_size)
    samplings = one_for_each("sampling", GREEDY if sampling is None else sampling, Sampling, len(asked))
    stoppings = one_for_each("stopping", Stopping() if stopping is None else stopping, Stopping, len(asked))
    if cache is not None and not isinstance(cache, KVCache):
        raise ValueError(f"cache ({cache!r:.40}) must be a KVCache, made from the decoder's cache_specs")
    if decode is not None and not callable(decode):
        raise ValueError(f"decode ({decode!r:.40}) must be a function from token ids to text, as a tokenizer's is")
    if not use_cache:
        check_alone(cache=cache, history=history, draft=draft, store=store, codec=codec, prefill_chunk=prefill_chunk)
    held = [cache.length(row) if cache and row < cache.batch else 0 for row in range(0, n * len(asked), n)]
    before = checked_history(history, held, samplings, decoder.config.vocab_size)
    rows = new_rows(
        asked,
        samplings,
        stoppings,
        n=n,
        held=held,
        history=before,
        eos=decoder.config.eos_token_ids,
        decode=decode,
    )
    if not use_cache:
        return _steps(Recomputed(decoder), rows, alternatives, None)
    proposing = checked_draft(draft)
    burst = 1 if proposing is None else proposing.tokens + 1
    # The last token is never fed.
    needed = [len(row.prompt) + max(row.left, 1) - 1 for row in rows]
    if cache is None:
        # A prompt that is fed at once needs no burst.
        longest = max(map(len, asked))
        burst = max(burst, prefill_chunk if prefill_chunk and prefill_chunk < longest else 1)
        cache = new_cache(decoder, asked, needed[::n], n=n, burst=burst, store=store, codec=codec)
    else:
        if (store, codec) != ("full", "plain"):
            raise ValueError(
                f"store {store!r} and codec {codec!r} are those of the cache that is given; leave them out"
            )
        check_cache(cache, decoder, rows, needed, n=n, burst=burst)
    feed = Cached(decoder, cache, prefill_chunk)
    speculation = None
    if proposing is not None:
        speculation = Speculation(proposing, feed, decoder.config.vocab_size, alternatives)
    return _steps(feed, rows, alternatives, speculation)


@torch.inference_mode()
def _steps(feed: Feed, rows: Sequence[Row], alternatives: int, speculation: Speculation | None) -> Iterator[Token]:
    """Every token of these rows, n of which stand side by side for each prompt."""
    for row in rows:
        if not row.left:
            yield row.end()
    rows = [row for row in rows if row.reason is None]
    if not rows:
        return
    logits = _begun(feed, rows)
    yield from _chosen(rows, logits, alternatives)
    while rows := [row for row in rows if row.reason is None]:
        if speculation is not None:
            yield from speculation.round(rows)
        else:
            logits = feed.go_on({row.number: [row.newest] for row in rows})
            yield from _chosen(rows, logits, alternatives)


def _begun(feed: Feed, rows: Sequence[Row]) -> torch.Tensor:
    """(n, vocab) the logits behind each row's prompt, which is fed once for all of its samples."""
    samples: dict[int, list[int]] = {}
    for row in rows:
        samples.setdefault(row.which, []).append(row.number)
    logits = feed.begin({row.number: row.prompt for row in rows if not row.sample})
    for first, *others in samples.values():
        if others:
            feed.share(first, others)
    return logits.repeat_interleave(torch.tensor([len(of) for of in samples.values()], device=logits.device), 0)


def _chosen(rows: Sequence[Row], logits: torch.Tensor, alternatives: int) -> Iterator[Token]:
    """Each row goes on with a token that is drawn from its logits, (n, vocab) in all."""
    logits = logits.float()
    tokens = picked(logits, rows)
    known = log_probabilities(logits, tokens, alternatives)
    for row, token, (logprob, likeliest) in zip(rows, tokens, known, strict=True):
        if math.isnan(logprob):
            yield row.fail(broken_message(row.number, row.position))
        else:
            yield row.push(token, logprob, likeliest)
