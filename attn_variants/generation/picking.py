"""From the logits of some rows to their next tokens, each by its own sampling and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .draws import draw_rows
from .row import Alternatives, Row
from .sampling import Sampling, penalised, probabilities

Proposed = Sequence[Sequence[int]]
"""What is taken to follow each row's tokens so far."""


def picked(
    logits: Tensor, rows: Sequence[Row], proposed: Proposed | None = None, *, purpose: str = "draw"
) -> list[int]:
    """The next token of each row, logits (n, vocab) being theirs; behind what is proposed for it."""
    proposed = [()] * len(rows) if proposed is None else proposed
    tokens = [0] * len(rows)
    for sampling, members in _alike(rows):
        some = logits[members] if len(members) < len(rows) else logits
        seen = _seen(some, [rows[index] for index in members], [proposed[index] for index in members])
        if sampling.greedy:
            chosen = penalised(sampling, some, seen).argmax(-1).tolist()
        else:
            numbers = [rows[index].uniform(len(proposed[index]), purpose) for index in members]
            chosen = draw_rows(probabilities(sampling, some, seen), numbers)
        for index, token in zip(members, chosen, strict=True):
            tokens[index] = token
    return tokens


def distributions(logits: Tensor, rows: Sequence[Row], proposed: Proposed) -> Tensor:
    """(n, vocab) what the next token of each row is drawn from."""
    return torch.stack(
        [
            probabilities(row.sampling, one[None], _seen(one[None], [row], [ids]))[0]
            for one, row, ids in zip(logits, rows, proposed, strict=True)
        ]
    )


def log_probabilities(logits: Tensor, tokens: Sequence[int], count: int) -> list[tuple[float, Alternatives]]:
    """For each row of logits (n, vocab) the log-probability of its token and of its `count` likeliest, by the model."""
    scores = logits.float()
    totals = scores.logsumexp(-1)
    chosen = scores[range(len(tokens)), list(tokens)] - totals
    if not count:
        return [(logprob, ()) for logprob in chosen.tolist()]
    likeliest = scores.topk(min(count, scores.shape[-1]), -1)
    alternatives = zip(likeliest.indices.tolist(), (likeliest.values - totals[:, None]).tolist(), strict=True)
    return [
        (logprob, tuple(zip(ids, values, strict=True)))
        for logprob, (ids, values) in zip(chosen.tolist(), alternatives, strict=True)
    ]


def _alike(rows: Sequence[Row]) -> list[tuple[Sampling, list[int]]]:
    """Indices of rows whose logits are processed alike; seeds may differ."""
    found: dict[Sampling, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(replace(row.sampling, seed=0), []).append(index)
    return list(found.items())


def _seen(logits: Tensor, rows: Sequence[Row], proposed: Proposed) -> Tensor | None:
    seen = [row.seen(logits.shape[-1], logits.device, ids) for row, ids in zip(rows, proposed, strict=True)]
    known = [one for one in seen if one is not None]
    return torch.stack(known) if known else None
