"""Passes of a prompt: as many tokens at a time as the memory of activations and masks allows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

PASS_TOKENS = 16384
"""Most tokens, over all rows, that one pass of a prefill takes; it bounds the memory of activations."""
PASS_MASK = 2**26
"""Most entries, over all rows, of a pass's mask."""


def in_passes(forward: Callable[[Tensor], Tensor], ids: Tensor, capacity: int) -> Tensor:
    """The last logits of ids (B, T) that go through in passes of bounded size."""
    rows, tokens = ids.shape
    done = 0
    while done < tokens:
        piece = ids[:, done : done + (warm_pass(rows, capacity) if done else first_pass(rows))]
        logits = forward(piece)
        done += piece.shape[1]
    return logits


def first_pass(rows: int) -> int:
    """The most tokens of each row in the pass that comes first, which needs no mask."""
    return max(1, PASS_TOKENS // rows)


def warm_pass(rows: int, capacity: int) -> int:
    """The most of each row in a later pass, which has a mask of its tokens by all before them; 1 if there is none."""
    return max(1, min(PASS_TOKENS, PASS_MASK // capacity) // rows) if capacity > first_pass(rows) else 1
