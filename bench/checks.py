"""The checks of parity: one decoder's logits computed in several ways, each with what they should equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_variants.cache import KVCache
from attn_variants.decoder import Decoder

from .case import Sight
from .reference import absorbed_below, absorbing_layers

BATCH, TOKENS = 2, 23
BURST = 8
"""The most tokens that a check brings to rows that hold some."""
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
    sight: Sight
    tolerance: float

    @property
    def page(self) -> int | None:
        """Tokens of a page, where the store has pages."""
        _, _, page = self.store.partition(":")
        return int(page) if page else None

    def cache(self, burst: int = BURST) -> KVCache:
        """An empty cache with a little room to spare; a pool has some for forks."""
        capacity = TOKENS + 5
        return KVCache(
            self.decoder.cache_specs,
            batch=BATCH,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
            store=self.store,
            codec=self.codec,
            burst=burst,
            pages=None if self.page is None else 3 * BATCH * -(-capacity // self.page),
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
        "forked": forked,
        "reused": reused,
    }
    if cell.sight.limited and cell.store != "full":
        checks["wrapped"] = wrapped
    if cell.page is not None and cell.page + 3 <= TOKENS:
        checks["page-boundary"] = page_boundary
    if absorbing_layers(cell.decoder):
        checks |= {"absorbed": absorbed, "expanded": expanded}
    if newest_that_looks_back(cell):
        checks[CONTROL] = negative_control
    return checks


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


def forked(cell: Cell) -> Compared:
    """Forks go on by other tokens and by the same ones while the original does."""
    cache = cell.cache()
    parts = [cell.decoder(cell.ids[:, :11], cache)]
    other, swapped = cache.fork([0, 1]), cache.fork([1, 0])
    parts.append(cell.decoder(cell.ids[:, 11:13], cache))
    cell.decoder(cell.ids[:, :3], other)
    parts.append(cell.decoder(cell.ids[:, 13:16], cache))
    parts.append(cell.decoder(cell.ids[[1, 0], 11:16], swapped)[[1, 0]])
    wanted = torch.cat([cell.truth[:, :16], cell.truth[:, 11:16]], dim=1)
    return torch.cat(parts, dim=1).flatten(0, 1), wanted.flatten(0, 1)


def reused(cell: Cell) -> Compared:
    """A row that was freed takes another sequence, in steps that a warm row takes no part in; then both go on."""
    cache = cell.cache()
    before = cell.decoder(cell.ids[:, :9], cache)
    cache.free([0])
    # The row's own sequence again, the first token apart: on a cold row a step reads nothing of the cache.
    first = cell.decoder(cell.ids[:1, :1], cache, rows=[0])
    again = cell.decoder(cell.ids[:1, 1:7], cache, rows=[0])
    ids = torch.stack([cell.ids[0, 7:10], cell.ids[1, 9:12]])
    after = cell.decoder(ids, cache)
    got = [before.flatten(0, 1), first[0], again[0], after.flatten(0, 1)]
    wanted = [cell.truth[:, :9].flatten(0, 1), cell.truth[0, :7], cell.truth[0, 7:10], cell.truth[1, 9:12]]
    return torch.cat(got), torch.cat(wanted)


def wrapped(cell: Cell) -> Compared:
    """Token by token past the end of the smallest memory that the window or chunk can do with."""
    return _in_chunks(cell, [3] + [1] * (TOKENS - 3), burst=1)


def page_boundary(cell: Cell) -> Compared:
    """One row ends before the end of its page, one at it; both go on into the next."""
    assert cell.page is not None
    return _in_counts(cell, [[max(cell.page - 1, 1), cell.page], [1, 1], [1, 1], [1, 1]])


def absorbed(cell: Cell) -> Compared:
    """Every pass, the prompt's too, attends over the latents themselves."""
    with absorbed_below(cell.decoder, math.inf):
        return chunked(cell)


def expanded(cell: Cell) -> Compared:
    """Every pass, a single token's too, makes the keys and values of all tokens."""
    with absorbed_below(cell.decoder, 0):
        return chunked(cell)


def negative_control(cell: Cell) -> Compared:
    """What is cached is another sequence's: a comparison that lets this pass sees nothing."""
    cache, at = cell.cache(), newest_that_looks_back(cell)
    other = (cell.ids[:, :at] + 1) % cell.decoder.config.vocab_size
    cell.decoder(other, cache)
    return cell.decoder(cell.ids[:, at : at + 1], cache).flatten(0, 1), cell.truth[:, at]


def newest_that_looks_back(cell: Cell) -> int:
    """The last position whose token sees the one before it; 0 where none does, and a store is never read."""
    window, chunk = cell.sight.window, cell.sight.chunk
    if window == 1:
        return 0
    return next((at for at in range(TOKENS - 1, 0, -1) if chunk is None or at % chunk), 0)


def _in_chunks(cell: Cell, sizes: Sequence[int], burst: int = BURST) -> Compared:
    cache = cell.cache(burst)
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
