"""Scoring: a sequence's log-probability as the sum of its conditionals, in one pass or step by step through a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_variants.cache import KVCache
from attn_variants.contract import LARGEST_SIZE, require_size
from attn_variants.decoder import Decoder
from attn_variants.transient import fresh_step, transients

PIECE = 2**22
"""Logits that are made at a time: 16 MiB of float32, and as much again for their exponentials."""


@torch.no_grad()
def score(
    decoder: Decoder,
    ids: Tensor | Sequence[Sequence[int]],
    *,
    cache: KVCache | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Log-probabilities (B, T - 1) of all tokens but the first: [b, t] is log p(ids[b, t + 1] | ids[b, : t + 1]).

    In float32, or the decoder's float64. ids: a (B, T) tensor, or rows of token ids that may differ in length; behind
    the end of a shorter row stands 0, so that a row's sum is the log-probability of its sequence.

    Without a cache it is one teacher-forced pass. With one, which takes a row per sequence, the tokens go through it in
    steps of `chunk` (None is all at once, 1 is as in decoding), after what its rows hold already, on which all is then
    conditioned: what a store or a codec loses shows. A row's last token is not fed. A step onto an empty cache reads
    its own keys and values, so the first `chunk` tokens are exact whatever the codec.

    Logits are made `PIECE` at a time, tokens x vocabulary; hidden states (B, tokens of the step, hidden) are whole.
    Raises ValueError, before anything is computed, for fewer than two tokens, tokens outside the vocabulary, and more
    than the cache can hold or take in one step; and OutOfPagesError from the step for which a pool has no page.
    """
    rows = _rows(ids)
    _require_scorable(rows, decoder.config.vocab_size)
    if chunk is not None:
        require_size("chunk", chunk, most=LARGEST_SIZE)
        if cache is None:
            raise ValueError(f"chunk ({chunk}) is for a cache, and there is none; give one, or leave chunk out")
    fed = [len(row) - 1 for row in rows]
    size = min(chunk or max(fed), max(fed))
    if cache is not None:
        _require_room(fed, size, cache, decoder.config.num_hidden_layers)
    longest = max(fed) + 1
    padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=decoder.device)
    scored = []
    for start in range(0, longest - 1, size):
        stop = min(start + size, longest - 1)
        counts = [min(max(count - start, 0), stop - start) for count in fed]
        hidden = _hidden(decoder, padded[:, start:stop], cache, counts)
        scored.append(_of_targets(decoder, hidden, padded[:, start + 1 : stop + 1]))
    behind = torch.arange(longest - 1) >= torch.tensor(fed)[:, None]
    return torch.cat(scored, dim=1).masked_fill(behind.to(decoder.device), 0)


def perplexity(log_probabilities: Tensor, counts: Sequence[int] | None = None) -> float:
    """exp(-mean) of the log-probabilities (B, T - 1) of `score`, over all tokens of all rows.

    counts: how many of each row are scores, one fewer than it has tokens; None is all. Raises ValueError for counts
    that are not such, and where there is nothing to average.
    """
    return float(torch.tensor(mean_nll(log_probabilities, counts), dtype=torch.float64).exp())


def mean_nll(log_probabilities: Tensor, counts: Sequence[int] | None = None) -> float:
    """The mean negative log-likelihood per token, in nats; arguments as in `perplexity`, whose logarithm it is."""
    if log_probabilities.ndim != 2:
        raise ValueError(f"log-probabilities are (B, T - 1), got {tuple(log_probabilities.shape)}")
    batch, most = log_probabilities.shape
    counts = [most] * batch if counts is None else list(counts)
    if len(counts) != batch or any(not 0 <= count <= most for count in counts):
        raise ValueError(f"counts {counts} must be one per row of {batch}, each of 0 to {most}")
    if not sum(counts):
        raise ValueError("there is no score to average; give a row of at least two tokens")
    total = sum(float(row[:count].double().sum()) for row, count in zip(log_probabilities, counts, strict=True))
    return -total / sum(counts)


def _hidden(decoder: Decoder, ids: Tensor, cache: KVCache | None, counts: Sequence[int]) -> Tensor:
    """(B, t, hidden): what the decoder makes of these tokens before its head, whose logits are the larger by far."""
    batch, tokens = ids.shape
    ragged = None if all(count == tokens for count in counts) else counts
    if cache is None:
        step = fresh_step(batch, tokens, counts=ragged, device=ids.device)
    else:
        step = cache.step(batch, tokens, counts=ragged)
    hidden: Tensor = decoder.model(ids, step, transients(decoder.cache_specs) if cache is None else cache.layers)
    if cache is not None:
        cache.advance(step)
    return hidden


def _of_targets(decoder: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    """(B, t): the log-probability of each target, with the logits of a piece of tokens at a time."""
    at_a_time = max(PIECE // decoder.config.vocab_size, 1)
    found = []
    for piece, wanted in zip(hidden.flatten(0, 1).split(at_a_time), targets.flatten().split(at_a_time), strict=True):
        logits: Tensor = decoder.lm_head(piece)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.append(-F.cross_entropy(wide, wanted, reduction="none"))
    return torch.cat(found).reshape(targets.shape)


def _rows(ids: Tensor | Sequence[Sequence[int]]) -> list[list[int]]:
    if isinstance(ids, Tensor):
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"ids must be integers of shape (B, T), got {ids.dtype} of shape {tuple(ids.shape)}")
        return [list(row) for row in ids.tolist()]
    if isinstance(ids, str) or (texts := [row for row in ids if isinstance(row, str)]):
        text = ids if isinstance(ids, str) else texts[0]
        raise ValueError(f"{text!r:.40} is text; rows are token ids, as a tokenizer's encode gives them")
    if flat := [row for row in ids if isinstance(row, int)]:
        raise ValueError(f"ids are rows of token ids, got the single id {flat[0]}; put one sequence into a list")
    return [row.tolist() if isinstance(row, Tensor) else list(row) for row in ids]


def _require_scorable(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    if not rows:
        raise ValueError("there is no sequence to score; give at least one")
    for number, row in enumerate(rows):
        if len(row) < 2:
            raise ValueError(
                f"row {number} has {len(row)} tokens; a score needs at least 2, as the first has none before it"
            )
        if foreign := [token for token in row if not 0 <= token < vocab_size]:
            raise ValueError(
                f"row {number} holds token {foreign[0]}, and the vocabulary has {vocab_size}: "
                "is this the model's own tokenizer?"
            )


def _require_room(fed: Sequence[int], size: int, cache: KVCache, layers: int) -> None:
    """Refuse what a later step would be refused for, when the cache holds the tokens of the earlier ones."""
    if len(cache.layers) != layers:
        raise ValueError(
            f"the cache has {len(cache.layers)} layers, the decoder {layers}: make the KVCache from this decoder's own "
            "cache_specs"
        )
    if cache.batch != len(fed):
        raise ValueError(f"the cache has {cache.batch} rows for {len(fed)} sequences; they must be as many")
    for row, (count, held) in enumerate(zip(fed, cache.lengths.tolist(), strict=True)):
        if held + count > cache.capacity:
            raise ValueError(
                f"row {row} needs {held + count} slots ({held} held + {count} fed, all but its last token) and the "
                f"cache has {cache.capacity}: make it larger, or give fewer tokens"
            )
    warm = size < max(fed) or bool(cache.lengths.any())
    if warm and size > cache.burst and _takes_bursts(cache):
        raise ValueError(
            f"steps of {size} tokens are beyond the cache's burst ({cache.burst}), where tokens pass out of sight or "
            f"are coded together: make the KVCache with burst={size}, or give chunk={cache.burst}"
        )


def _takes_bursts(cache: KVCache) -> bool:
    """Whether rows that hold tokens take at most `burst` in a step."""
    if cache.together > 1:
        return True
    for spec in cache.specs if cache.store != "full" else ():
        spans = [limit for limit in (spec.window, spec.chunk) if limit is not None]
        # A ring of the whole capacity overwrites nothing.
        whole = cache.store == "ring" and spec.sinks + min(spans, default=0) + cache.burst - 1 >= cache.capacity
        if spans and not whole:
            return True
    return False
