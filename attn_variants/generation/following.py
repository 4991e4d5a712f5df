"""A decoder and a cache that follow sequences which others write, and guess at how they go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_variants.cache import KVCache
from attn_variants.decoder import Decoder


@dataclass
class _Row:
    """A sequence; of it, the cache holds the first `held` tokens, and then `tail`, which may be otherwise."""

    ids: list[int]
    held: int = 0
    tail: list[int] = field(default_factory=list)


class Follower:
    """Gives a decoder's logits after sequences and after guesses at their next tokens.

    A row's sequence `begin`s with a prompt, `grow`s and `end`s; nothing is computed until `after` asks for logits. Then
    the cache drops what turned out otherwise and is fed what it lacks: after a block that was taken whole, the last
    guess as well as the token that followed it.

    batch, capacity, store, codec: of its cache. burst: one more than the longest guess, so that rings and states can go
    back by one.
    """

    def __init__(
        self, decoder: Decoder, *, batch: int, capacity: int, burst: int, store: str = "full", codec: str = "plain"
    ) -> None:
        self.decoder = decoder
        self.cache = KVCache(
            decoder.cache_specs,
            batch=batch,
            capacity=capacity,
            dtype=decoder.dtype,
            device=decoder.device,
            store=store,
            codec=codec,
            burst=burst,
        )
        self._rows: dict[int, _Row] = {}

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """The row holds a new sequence."""
        assert row not in self._rows
        self._rows[row] = _Row(list(prompt))

    def grow(self, row: int, ids: Sequence[int]) -> None:
        """The row's sequence goes on with these."""
        self._rows[row].ids += ids

    def end(self, row: int) -> None:
        """The row is free for another sequence."""
        del self._rows[row]
        self.cache.free([row])

    def stands(self, row: int) -> tuple[int, int]:
        """The length and the last token of the row's sequence."""
        ids = self._rows[row].ids
        return len(ids), ids[-1]

    def most(self, row: int) -> int:
        """How many tokens can be guessed behind the row's sequence, the last of them never being fed."""
        return min(self.cache.burst - 1, self.cache.capacity - len(self._rows[row].ids) + 1)

    @torch.inference_mode()
    def after(self, guesses: Mapping[int, Sequence[int]]) -> Tensor:
        """(rows, V) the logits after each of these rows' sequence and guess, in their order."""
        missing: dict[int, list[int]] = {}
        drops = [0] * self.cache.batch
        for number, guess in guesses.items():
            row = self._rows[number]
            # Logits come only with a token that is fed.
            if row.held == len(row.ids) and not guess:
                row.held, row.tail = row.held - 1, [row.ids[-1], *row.tail]
            wanted = [*row.ids[row.held :], *guess]
            agreed = min(_agreed(row.tail, wanted), len(wanted) - 1)
            drops[number] = len(row.tail) - agreed
            missing[number] = wanted[agreed:]
            del row.tail[agreed:]
        if any(drops):
            self.cache.rewind(drops)
        logits = self._feed(missing)
        for number, guess in guesses.items():
            row = self._rows[number]
            row.held, row.tail = len(row.ids), list(guess)
        return torch.stack([logits[number] for number in guesses])

    def _feed(self, missing: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Append to each row what it lacks: empty rows whole, in a pass of their own, others a burst at a time."""
        held = self.cache.lengths.tolist()
        logits: dict[int, Tensor] = {}
        if empty := {number: ids for number, ids in missing.items() if not held[number]}:
            logits |= self._pass(empty, alone=any(held))
        rest = {number: ids for number, ids in missing.items() if held[number]}
        while rest:
            logits |= self._pass({number: ids[: self.cache.burst] for number, ids in rest.items()}, alone=False)
            rest = {number: ids[self.cache.burst :] for number, ids in rest.items() if len(ids) > self.cache.burst}
        return logits

    def _pass(self, given: Mapping[int, list[int]], *, alone: bool) -> dict[int, Tensor]:
        """One forward pass; alone: the cache is read as these rows only, which copies them on some stores."""
        rows = list(given) if alone else list(range(self.cache.batch))
        fed = [given.get(number, []) for number in rows]
        longest = max(map(len, fed))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in fed], device=self.decoder.device)
        counts = [len(row) for row in fed]
        logits = self.decoder(ids, self.cache, counts=counts, rows=rows if alone else None, last=True)[:, -1]
        # At once, so that an error in the next pass leaves the row as the cache has it.
        for number, new in given.items():
            self._rows[number].tail += new
        return {number: logits[index] for index, number in enumerate(rows) if number in given}


def _agreed(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
