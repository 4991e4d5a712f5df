"""The checks of parity: one decoder's logits computed in several ways, each with what they should equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_variants.cache import KVCache
from attn_variants.decoder import Decoder

from .reference import absorbed_below, absorbing_layers

BATCH, TOKENS = 2, 23
CONTROL = "negative-control"


@dataclass(frozen=True)
class Peer:
    """Another implementation's class, our decoder of the same weights, and the logits (B, T, vocab) of that class."""

    name: str
    decoder: Decoder
    truth: Tensor


@dataclass(frozen=True)
class Cell:
    """One cell of the grid: a decoder, the store it writes, ids (B, T) and the logits (B, T, vocab) it should give."""

    decoder: Decoder
    variant: str
    store: str
    codec: str
    backend: str
    dtype: str
    device: str
    ids: Tensor
    truth: Tensor
    peers: tuple[Peer, ...]

    def cache(self) -> KVCache:
        """An empty cache with a little room to spare."""
        return KVCache(
            self.decoder.cache_specs,
            batch=BATCH,
            capacity=TOKENS + 5,
            dtype=self.dtype,
            device=self.device,
            store=self.store,
            codec=self.codec,
        )


Compared = tuple[Tensor, Tensor]
"""Logits that were computed and those they should equal, (N, vocab) each."""

Check = Callable[[Cell], Compared]


def checks_of(cell: Cell) -> dict[str, Check]:
    """What can be asked of this cell, by name."""
    checks: dict[str, Check] = {
        "uncached": uncached,
        "cached": cached,
        "chunked": chunked,
        "ragged": ragged,
        "padded": padded,
        "rewound": rewound,
    }
    if absorbing_layers(cell.decoder):
        checks |= {"absorbed": absorbed, "expanded": expanded}
    return checks | {CONTROL: negative_control}


def uncached(cell: Cell) -> Compared:
    """One pass over everything, without a cache."""
    return cell.decoder(cell.ids).flatten(0, 1), cell.truth.flatten(0, 1)


def cached(cell: Cell) -> Compared:
    """Token by token through the cache."""
    return _in_chunks(cell, [1] * TOKENS)


def chunked(cell: Cell) -> Compared:
    """A prompt in pieces, then single tokens."""
    return _in_chunks(cell, [9, 1, 6, 4, 1, 1, 1])


def ragged(cell: Cell) -> Compared:
    """Rows of different lengths, which grow by different numbers of tokens in one pass, none included."""
    return _in_counts(cell, [[9, 4], [1, 1], [0, 3], [5, 2], [1, 1]])


def padded(cell: Cell) -> Compared:
    """Padding at the left of one row and inside and at the right of the other; then a token for each."""
    cache = cell.cache()
    mask = torch.ones(BATCH, TOKENS - 1, dtype=torch.bool, device=cell.device)
    mask[0, :3] = mask[1, 5] = mask[1, -2:] = False
    ids = cell.ids[:, : TOKENS - 1].clone()
    lengths = mask.sum(1).tolist()
    for row, length in enumerate(lengths):
        ids[row, mask[row]] = cell.ids[row, :length]
    prompt = cell.decoder(ids, cache, mask=mask)
    following = torch.stack([cell.ids[row, length : length + 1] for row, length in enumerate(lengths)])
    answer = cell.decoder(following, cache)
    got = [torch.cat([prompt[row, mask[row]], answer[row]]) for row in range(BATCH)]
    wanted = [cell.truth[row, : length + 1] for row, length in enumerate(lengths)]
    return torch.cat(got), torch.cat(wanted)


def rewound(cell: Cell) -> Compared:
    """Other tokens written over the place and taken back leave nothing behind."""
    cache = cell.cache()
    before = cell.decoder(cell.ids[:, :11], cache)
    cell.decoder(cell.ids[:, :7].flip(1), cache)
    cache.rewind(7)
    after = [cell.decoder(cell.ids[:, at : at + 1], cache) for at in range(11, TOKENS)]
    return torch.cat([before, *after], dim=1).flatten(0, 1), cell.truth.flatten(0, 1)


def absorbed(cell: Cell) -> Compared:
    """Every pass, the prompt's too, attends over the latents themselves."""
    with absorbed_below(cell.decoder, math.inf):
        return chunked(cell)


def expanded(cell: Cell) -> Compared:
    """Every pass, a single token's too, makes the keys and values of all tokens."""
    with absorbed_below(cell.decoder, 0):
        return chunked(cell)


def negative_control(cell: Cell) -> Compared:
    """What is cached is another sequence's, but for its last token: a comparison that lets this pass sees nothing."""
    cache = cell.cache()
    other = (cell.ids[:, :-1] + 1) % cell.decoder.config.vocab_size
    other[:, -1] = cell.ids[:, -2]
    cell.decoder(other, cache)
    return cell.decoder(cell.ids[:, -1:], cache).flatten(0, 1), cell.truth[:, -1]


def _in_chunks(cell: Cell, sizes: Sequence[int]) -> Compared:
    cache = cell.cache()
    assert sum(sizes) == TOKENS
    logits = [cell.decoder(piece, cache) for piece in cell.ids.split(list(sizes), dim=1)]
    return torch.cat(logits, dim=1).flatten(0, 1), cell.truth.flatten(0, 1)


def _in_counts(cell: Cell, steps: Sequence[Sequence[int]]) -> Compared:
    """Feed each row its own number of tokens per step; the columns beyond a row's count hold other ids."""
    cache = cell.cache()
    got: list[Tensor] = []
    wanted: list[Tensor] = []
    at = [0] * BATCH
    for counts in steps:
        ids = torch.ones(BATCH, max(counts), dtype=torch.int64, device=cell.device)
        for row, count in enumerate(counts):
            ids[row, :count] = cell.ids[row, at[row] : at[row] + count]
        logits = cell.decoder(ids, cache, counts=counts)
        for row, count in enumerate(counts):
            got.append(logits[row, :count])
            wanted.append(cell.truth[row, at[row] : at[row] + count])
            at[row] += count
    return torch.cat(got), torch.cat(wanted)
