"""Tokens into the decoder: each once, over a cache, or all of them again for every new one, without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from attn_variants.cache import KVCache
from attn_variants.decoder import Decoder

Given = Mapping[int, Sequence[int]]
"""The ids that each of some rows goes on with."""


class Feed(Protocol):
    """What answers with the logits of the tokens that follow."""

    def begin(self, prompts: Given) -> Tensor:
        """The logits (n, vocab) behind the prompts of these n rows."""
        ...

    def share(self, row: int, others: Sequence[int]) -> None:
        """Other rows begin with all that this one was given."""
        ...

    def go_on(self, given: Given) -> Tensor:
        """The logits (n, vocab) behind the next tokens of these n rows."""
        ...


class Cached:
    """Over a cache: what was fed stays there. A `Feed`.

    chunk: the most tokens of a prompt that are fed at once; None is all of them.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, chunk: int | None = None) -> None:
        self._decoder = decoder
        self.cache = cache
        self._chunk = chunk

    def begin(self, prompts: Given) -> Tensor:
        """In as many passes as the cache and `chunk` ask for."""
        left = {row: list(ids) for row, ids in prompts.items()}
        logits: dict[int, Tensor] = {}
        while left:
            # Empty rows first: beside others a ring takes no more of a prompt than it can hold.
            now = [row for row in left if not self.cache.length(row)] or list(left)
            given = {row: left[row][: self._most(row, len(left[row]))] for row in now}
            logits |= dict(zip(given, self.go_on(given), strict=True))
            left |= {row: left[row][len(ids) :] for row, ids in given.items()}
            left = {row: ids for row, ids in left.items() if ids}
        return torch.stack([logits[row] for row in prompts])

    def share(self, row: int, others: Sequence[int]) -> None:
        """On pages without a copy."""
        self.cache.share(row, others)

    def go_on(self, given: Given) -> Tensor:
        """One pass that appends them."""
        return self._pass(given, last=True)[:, -1]

    def block(self, given: Given) -> Tensor:
        """One pass too, and the logits (n, longest, vocab) behind each of the tokens."""
        return self._pass(given, last=False)

    def drop(self, tokens: Mapping[int, int]) -> None:
        """Forget the last so many tokens of these rows."""
        if any(tokens.values()):
            self.cache.rewind([tokens.get(row, 0) for row in range(self.cache.batch)])

    def _most(self, row: int, asked: int) -> int:
        limits = [asked, self._chunk, self.cache.most_at_once if self.cache.length(row) else None]
        return min(limit for limit in limits if limit is not None)

    def _alone(self, given: Given) -> bool:
        """Whether these rows are computed without the others: but on pages, a copy is made then of what they hold."""
        held = {row for row in range(self.cache.batch) if self.cache.length(row)}
        more_of_a_prompt = held <= given.keys() and max(map(len, given.values())) > 1
        return bool(self.cache.pools) or held.isdisjoint(given) or more_of_a_prompt

    def _pass(self, given: Given, *, last: bool) -> Tensor:
        batch = range(self.cache.batch)
        rows = list(given) if self._alone(given) else list(batch)
        ids, counts = padded([given.get(row, ()) for row in rows], self._decoder.device)
        logits: Tensor = self._decoder(
            ids,
            self.cache,
            counts=None if min(counts) == max(counts) else counts,
            rows=None if rows == list(batch) else rows,
            last=last,
        )
        return logits if list(given) == rows else logits[[rows.index(row) for row in given]]


class Recomputed:
    """Without a cache: the whole sequence goes through again for every token. A `Feed`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: dict[int, list[int]] = {}

    def begin(self, prompts: Given) -> Tensor:
        """Whole prompts."""
        return self.go_on(prompts)

    def share(self, row: int, others: Sequence[int]) -> None:
        """Of ids alone."""
        for other in others:
            self._ids[other] = list(self._ids[row])

    def go_on(self, given: Given) -> Tensor:
        """One pass over all there is of these rows."""
        for row, new in given.items():
            self._ids.setdefault(row, []).extend(new)
        ids, counts = padded([self._ids[row] for row in given], self._decoder.device)
        logits: Tensor = self._decoder(ids, counts=counts, last=True)
        return logits[:, -1]


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """(n, longest) ids, filled up at the right, and how many of each are real."""
    counts = [len(ids) for ids in sequences]
    longest = max(counts)
    filled = [[*ids, *[0] * (longest - count)] for ids, count in zip(sequences, counts, strict=True)]
    return torch.tensor(filled, device=device), counts
