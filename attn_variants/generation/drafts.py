"""Drafts propose how sequences may go on; the model then verifies all of a proposal in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attn_variants.contract import require_size
from attn_variants.decoder import Decoder

from .following import Follower

Pick = Callable[[Tensor, Sequence[int], Sequence[Sequence[int]]], tuple[Sequence[int | None], Tensor | None]]
"""How a draft's tokens are chosen: as the model's are, so that both distributions are processed alike.

Given logits (n, V), the n rows they are of and what was proposed for each of them so far: n tokens and the (n, V)
probabilities they were drawn from, or None where they are no draws. A token None ends the proposal of its row.
"""


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow, and the (k, V) probabilities each was drawn from; None if they are no draws."""

    ids: tuple[int, ...] = ()
    probabilities: Tensor | None = None


class Drafting(Protocol):
    """A draft at work on the rows of one batch, which begin, grow and end each at its own time."""

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """A row that is free takes a new sequence."""
        ...

    def grow(self, row: int, ids: Sequence[int]) -> None:
        """The row's sequence goes on with these, whatever was proposed."""
        ...

    def end(self, row: int) -> None:
        """The row is free again."""
        ...

    def propose(self, limits: Mapping[int, int], pick: Pick) -> dict[int, Proposal]:
        """For each of these rows at most so many tokens, fewer or none where the draft has none to give."""
        ...


class Draft(Protocol):
    """What proposes, before it is at work; serves any number of batches."""

    @property
    def tokens(self) -> int:
        """The most that are proposed at once: the model's cache needs a burst of one more."""
        ...

    def open(self, *, batch: int, capacity: int, vocab_size: int) -> Drafting:
        """For `batch` rows of sequences of up to `capacity` tokens, of a model with this vocabulary."""
        ...


@dataclass(frozen=True)
class ModelDraft:
    """A smaller decoder with the model's vocabulary (and, for proposals to be any good, its tokenizer).

    tokens: the most it proposes at once.     store, codec: of its cache.
    """

    decoder: Decoder
    tokens: int = 4
    store: str = "full"
    codec: str = "plain"

    def __post_init__(self) -> None:
        require_size("tokens", self.tokens)

    def open(self, *, batch: int, capacity: int, vocab_size: int) -> ModelDrafting:
        """With a cache of its own. Raises ValueError for another vocabulary."""
        require_vocabulary(self.decoder, vocab_size)
        return ModelDrafting(
            self.decoder,
            batch=batch,
            capacity=capacity,
            burst=self.tokens + 1,
            store=self.store,
            codec=self.codec,
        )


class ModelDrafting(Follower):
    """Proposes what a decoder would go on with, token after token, for all rows in one pass each. A `Drafting`."""

    def propose(self, limits: Mapping[int, int], pick: Pick) -> dict[int, Proposal]:
        """Tokens that `pick` chooses from the decoder's logits; none where the cache has no more room."""
        ids: dict[int, list[int]] = {row: [] for row in limits}
        drawn_from: dict[int, list[Tensor]] = {row: [] for row in limits}
        going = {row: min(limit, self.most(row)) for row, limit in limits.items()}
        while rows := [row for row, limit in going.items() if len(ids[row]) < limit]:
            logits = self.after({row: ids[row] for row in rows})
            picked, probabilities = pick(logits, rows, [ids[row] for row in rows])
            for index, (row, token) in enumerate(zip(rows, picked, strict=True)):
                if token is None:
                    del going[row]
                    continue
                ids[row].append(token)
                if probabilities is not None:
                    drawn_from[row].append(probabilities[index])
        return {row: proposal(ids[row], drawn_from[row]) for row in limits}


def proposal(ids: Sequence[int], drawn_from: Sequence[Tensor]) -> Proposal:
    """The tokens, with what each was drawn from side by side."""
    return Proposal(tuple(ids), torch.stack(list(drawn_from)) if drawn_from else None)


def require_vocabulary(decoder: Decoder, vocab_size: int) -> None:
    """Refuse a draft whose ids mean other tokens than the model's."""
    if decoder.config.vocab_size != vocab_size:
        raise ValueError(
            f"the draft has a vocabulary of {decoder.config.vocab_size} tokens and the model one of {vocab_size}: "
            "give a draft with the model's tokenizer, or lookup, which needs none"
        )
