"""Generation by transformers' own loop: what it adds to prompts of any lengths, each cut behind its end token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch


def theirs(
    peer: Any, prompts: Sequence[Sequence[int]], *, eos: int | Sequence[int] | None = None, **options: Any
) -> list[list[int]]:
    """The new ids for every prompt, padded at the left. Greedy unless `options` say otherwise; eos None is no end."""
    ids, mask = left_padded(prompts)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": eos, **options}
    said = peer.generate(ids, attention_mask=mask, **options)
    ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return [cut(row, ends) for row in said[:, ids.shape[1] :].tolist()]


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, longest) ids, and 1 where they are of the prompt."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def cut(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """The ids up to the first of these, which stays; behind it are pads."""
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
    return list(ids[: last + 1])
