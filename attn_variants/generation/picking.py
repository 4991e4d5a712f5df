"""From the logits of some rows to their next tokens, each by its own sampling and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .draws import draw_rows
from .row import Alternatives, Row
from .sampling import Sampling, candidates, penalised, probabilities

Proposed = Sequence[Sequence[int]]
"""What is taken to follow each row's tokens so far."""


def picked(logits: Tensor, rows: Sequence[Row], proposed: Proposed | None = None) -> list[int]:
    """The next token of each row, logits (n, vocab) being theirs; behind what is proposed for it."""
    tokens = [0] * len(rows)
    for group in _groups(logits, rows, proposed):
        if group.sampling.greedy:
            chosen = penalised(group.sampling, group.logits, group.seen).argmax(-1).tolist()
        else:
            scores, ids = candidates(group.sampling, group.logits, group.seen)
            chosen = drawn(scores.softmax(-1), group.rows, group.proposed, "draw")
            if ids is not None:
                chosen = [of[place] for of, place in zip(ids.tolist(), chosen, strict=True)]
        for index, token in zip(group.members, chosen, strict=True):
            tokens[index] = token
    return tokens


def drawn(distributions: Tensor, rows: Sequence[Row], proposed: Proposed, purpose: str) -> list[int]:
    """A token of each row, from distributions (n, vocab) and by its own random number."""
    numbers = [row.uniform(len(ids), purpose) for row, ids in zip(rows, proposed, strict=True)]
    return draw_rows(distributions, numbers)


def distributions(logits: Tensor, rows: Sequence[Row], proposed: Proposed) -> Tensor:
    """(n, vocab) in float32: what the next token of each row is drawn from, behind what is proposed for it."""
    found = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for group in _groups(logits, rows, proposed):
        found[group.members] = probabilities(group.sampling, group.logits, group.seen)
    return found


def log_probabilities(logits: Tensor, tokens: Sequence[int], count: int) -> list[tuple[float, Alternatives]]:
    """For each row of logits (n, vocab) the log-probability of its token and of its `count` likeliest, by the model.

    NaN for a row that is `broken`.
    """
    scores = logits.float().log_softmax(-1)
    # A row without a distribution has no token.
    places = torch.tensor(tokens, device=scores.device).clamp(min=0)[:, None]
    chosen = scores.gather(-1, places)[:, 0].tolist()
    if not count:
        return [(logprob, ()) for logprob in chosen]
    likeliest = scores.topk(min(count, scores.shape[-1]), -1)
    alternatives = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [
        (logprob, tuple(zip(ids, values, strict=True)))
        for logprob, (ids, values) in zip(chosen, alternatives, strict=True)
    ]


@dataclass(frozen=True)
class _Group:
    """Rows whose logits are processed alike; members: which of all rows they are."""

    sampling: Sampling
    members: list[int]
    rows: list[Row]
    proposed: list[Sequence[int]]
    logits: Tensor

    @property
    def seen(self) -> Tensor | None:
        """(n, vocab) bool, or None where nothing is penalised."""
        size, device = self.logits.shape[-1], self.logits.device
        seen = [row.seen(size, device, ids) for row, ids in zip(self.rows, self.proposed, strict=True)]
        known = [one for one in seen if one is not None]
        return torch.stack(known) if known else None


def _groups(logits: Tensor, rows: Sequence[Row], proposed: Proposed | None) -> list[_Group]:
    behind: Proposed = [()] * len(rows) if proposed is None else proposed
    members: dict[Sampling, list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(row.alike, []).append(index)
    return [
        _Group(
            sampling,
            of,
            [rows[index] for index in of],
            [behind[index] for index in of],
            logits[of] if len(of) < len(rows) else logits,
        )
        for sampling, of in members.items()
    ]
