"""Which of a draft's tokens a model takes, so that what it emits is distributed as if there had been no draft.

Speculative sampling (arXiv 2211.17192, 2302.01318): x, drawn from q, is taken with probability min(1, p(x) / q(x));
the first that is not taken is replaced by a draw from max(0, p - q), normalised. Both are the distributions that are
drawn from, after temperature, top-k and the like. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .draws import draw

Uniform = Callable[[int, str], float]
"""A random number in [0, 1) for a place of the block, the first proposal's being 0, and a purpose."""


@dataclass(frozen=True)
class Verified:
    """How many proposals were taken, from the first on, and the token that follows them: a round adds one more."""

    accepted: int
    token: int


def verified(target: Tensor, proposed: Sequence[int], draft: Tensor | None, uniform: Uniform) -> Verified:
    """One sequence's block.

    target: (k + 1, V) probabilities of the model at each of the k proposals and after the last.
    draft: (k, V) what each proposal was drawn from; None where it was no draw (looked up, the most probable): then
    q is one at the proposal, which is taken with probability p(x).
    uniform: asked for `accept` at each place up to the first rejection, then for `residual` there, or for `draw` after
    the last.
    Raises ValueError for shapes that do not fit, for a proposal that q cannot give, and where p is no distribution.
    """
    _check_shapes(target, proposed, draft)
    places = range(len(proposed))
    for place in places:
        p, token = target[place], proposed[place]
        q = None if draft is None else draft[place]
        if uniform(place, "accept") < _accepted(float(p[token]), 1.0 if q is None else float(q[token]), token):
            continue
        rest = residual(p, one_hot(token, p) if q is None else q)
        return Verified(place, draw(rest, uniform(place, "residual")))
    return Verified(len(proposed), draw(target[-1], uniform(len(proposed), "draw")))


def matched(chosen: Sequence[int], proposed: Sequence[int]) -> Verified:
    """The block of a model that has chosen its k + 1 tokens already: proposals are taken while they are the same.

    Greedy decoding, and as exact where the choices are draws: each is the model's own. A draft that draws apart from
    them is then taken with probability sum_x p(x) q(x), which is below `verified`'s sum_x min(p(x), q(x)).
    """
    if len(chosen) != len(proposed) + 1:
        raise ValueError(f"{len(proposed)} proposals need {len(proposed) + 1} choices, got {len(chosen)}")
    accepted = 0
    while accepted < len(proposed) and chosen[accepted] == proposed[accepted]:
        accepted += 1
    return Verified(accepted, chosen[accepted])


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """(V,) float64: with which probability each token drawn from q is taken, min(1, p / q); 0 where q gives none."""
    p, q = p.double(), q.double()
    return torch.where(q > 0, (p / q).clamp(max=1), 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(V,) float64: what a rejected token is replaced from, max(0, p - q) normalised.

    Where nothing is left of it (p and q are equal but for rounding) it is p itself.
    """
    p, q = p.double(), q.double()
    left = (p - q).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else p


def one_hot(token: int, like: Tensor) -> Tensor:
    """(V,) float64: the distribution of what is no draw."""
    q = torch.zeros_like(like, dtype=torch.float64)
    q[token] = 1
    return q


def _accepted(p: float, q: float, token: int) -> float:
    if not q > 0:
        raise ValueError(f"token {token} was proposed, and the distribution it was drawn from gives it {q}")
    # A comparison with NaN would pass for a rejection.
    if p != p:
        raise ValueError(f"the model's probability of token {token} is NaN; its logits are no numbers")
    return min(1.0, p / q)


def _check_shapes(target: Tensor, proposed: Sequence[int], draft: Tensor | None) -> None:
    if target.ndim != 2 or len(target) != len(proposed) + 1:
        raise ValueError(
            f"{len(proposed)} proposals need the model's probabilities at {len(proposed) + 1} places, (k + 1, V), "
            f"got {tuple(target.shape)}"
        )
    if draft is not None and draft.shape != (len(proposed), target.shape[1]):
        raise ValueError(
            f"the draft's probabilities are {tuple(draft.shape)}, and {len(proposed)} proposals of a vocabulary of "
            f"{target.shape[1]} need {(len(proposed), target.shape[1])}"
        )
