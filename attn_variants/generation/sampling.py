"""From logits to the distribution that a token is drawn from: penalty, temperature, top-k, top-p, min-p, in that order.

The order and the arithmetic are those of transformers 5.24's logits processors, to the bit in float32. Where it leaves
ties open, the lowest index comes first: exactly k tokens are left by top-k, and exactly the smallest set by top-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_variants.contract import require_size

from .draws import LARGEST

SMALLEST, GREATEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
REGISTERS = 256
"""A multiple of the numbers that any sum over a row takes at once."""
TIED = 32
"""So many more than k are looked at, for those that tie with the k-th: in bfloat16 scores often do."""
RADIX = 32768
"""Numbers from which on torch sorts integers by radix on a CPU: 8 to 14 times faster than floats (measured)."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: what scores are divided by; 0 is greedy, the most likely token and of equal ones the lowest index.
    top_k: at most so many tokens.     top_p: the most likely ones that add up to it, the one that reaches it included.
    min_p: tokens at least so likely, as a share of the likeliest.     None leaves that out.
    repetition_penalty: each token seen has a positive score divided by it and a negative one multiplied, once.
    penalise_prompt: tokens of the prompt count as seen, and not those alone that were generated.
    seed: of `draws.uniform`.

    Raises ValueError for a field out of range, naming it.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    penalise_prompt: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self._require("temperature", "at least 0 and finite; 0 is greedy", lambda value: 0 <= value < math.inf)
        if self.top_k is not None:
            require_size("top_k", self.top_k)
        if self.top_p is not None:
            self._require("top_p", "above 0 and at most 1; None keeps all tokens", lambda value: 0 < value <= 1)
        if self.min_p is not None:
            self._require("min_p", "of 0 to 1; None keeps all tokens", lambda value: 0 <= value <= 1)
        self._require("repetition_penalty", "above 0 and finite; 1 is none", lambda value: 0 < value < math.inf)
        if not isinstance(self.penalise_prompt, bool):
            raise ValueError(f"penalise_prompt ({self.penalise_prompt!r}) must be True or False")
        require_size("seed", self.seed, 0, LARGEST)

    def _require(self, name: str, what: str, holds: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
            raise ValueError(f"{name} ({value!r}) must be a number {what}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


GREEDY = Sampling(temperature=0)
"""The most likely token, always."""


def processed(sampling: Sampling, logits: Tensor, seen: Tensor | None = None) -> Tensor:
    """Scores (B, V) in float32 whose softmax is the distribution to draw from; -inf where a token is cut.

    logits: (B, V) of any float; what is -inf in them stays cut.     seen: (B, V) bool, as of `seen_in`; None is none.
    Greedy leaves the one token. A row that is `broken` gives what is no distribution, and does not touch the others.
    """
    scores, tokens = candidates(sampling, logits, seen)
    if tokens is None:
        return scores
    return torch.full(logits.shape, -math.inf, device=scores.device).scatter_(-1, tokens, scores)


def candidates(sampling: Sampling, logits: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """`processed` without most of what is cut: scores (B, C), and the tokens (B, C) they are of, ascending.

    None stands for all tokens. A draw from few costs less than one from a whole vocabulary.
    """
    scores = penalised(sampling, logits, seen)
    if sampling.greedy:
        only = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.argmax(-1, True), True)
        return _kept(scores, only), None
    size = scores.shape[-1]
    if sampling.top_k is not None and sampling.top_k + TIED < size and not sampling.min_p:
        largest = scores.topk(sampling.top_k + TIED)
        tokens, order = largest.indices.sort(-1)
        few = _tempered(largest.values.gather(-1, order), sampling.temperature)
        kept = _cut(sampling, few, size)
        # Where the least of them is kept, others that tie with it may be missing.
        if not (kept == few.amin(-1, True)).any():
            return kept, tokens
    return _cut(sampling, _tempered(scores, sampling.temperature), size), None


def _cut(sampling: Sampling, scores: Tensor, size: int) -> Tensor:
    """Top-k, top-p and min-p of all `size` scores, or of the largest, in the order of tokens."""
    largest = None
    if sampling.top_k is not None and sampling.top_k < size:
        largest = scores.topk(sampling.top_k).values
    if sampling.top_p is not None and sampling.top_p < 1:
        # The largest of the largest are those of all.
        ascending = _ascending(scores) if largest is None else _behind_others(largest.flip(-1), size)
        scores = _largest(scores, *_nucleus(ascending, sampling.top_p))
    elif largest is not None:
        scores = _largest(scores, largest.shape[-1], largest[:, -1:])
    if sampling.min_p:
        shares = scores.softmax(-1)
        scores = _kept(scores, shares >= sampling.min_p * shares.amax(-1, True))
    return scores


def probabilities(sampling: Sampling, logits: Tensor, seen: Tensor | None = None) -> Tensor:
    """The processed distributions (B, V) in float32: what is drawn from, and what speculative decoding compares."""
    return processed(sampling, logits, seen).softmax(-1)


def penalised(sampling: Sampling, logits: Tensor, seen: Tensor | None = None) -> Tensor:
    """Logits (B, V) in float32 with the repetition penalty alone: each token seen once, however often it was.

    Arguments as in `processed`, whose first step this is; greedy is the argmax of it. Raises ValueError for other
    shapes.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floats of shape (B, V), got {logits.dtype} of shape {tuple(logits.shape)}")
    if seen is not None and (seen.shape != logits.shape or seen.dtype != torch.bool):
        raise ValueError(
            f"seen must be bool of the logits' shape {tuple(logits.shape)}, got {seen.dtype} of {tuple(seen.shape)}"
        )
    scores = logits.float()
    if seen is None or sampling.repetition_penalty == 1:
        return scores
    penalty = min(max(sampling.repetition_penalty, SMALLEST), GREATEST)
    changed = torch.where(scores < 0, scores * penalty, scores / penalty).clamp(-GREATEST, GREATEST)
    return torch.where(seen & (scores > -math.inf), changed, scores)


def seen_in(histories: Sequence[Sequence[int]], vocab_size: int, *, device: torch.device | str | None = None) -> Tensor:
    """(B, V) bool: which tokens occur in each history."""
    seen = torch.zeros(len(histories), vocab_size, dtype=torch.bool)
    for row, history in zip(seen, histories, strict=True):
        row[torch.tensor(list(history), dtype=torch.int64)] = True
    return seen.to(device)


def broken(logits: Tensor) -> Tensor:
    """(B,) bool: rows that are no distribution, for a NaN, a +inf or nothing but -inf among them.

    Nothing here raises for one: who drives the rows ends this one with `broken_message`, and the others go on.
    """
    return ~logits.amax(-1).isfinite()


def broken_message(row: int, position: int) -> str:
    """What to say of a broken row, whose token at this position could not be chosen."""
    return (
        f"row {row}: the logits for position {position} hold NaN or +inf, or -inf alone, and no token can be drawn "
        "from them; check the weights, or compute in float32"
    )


def _tempered(scores: Tensor, temperature: float) -> Tensor:
    """Scores over the temperature; where that overflows, those less their largest, which it does not."""
    if temperature == 1:
        return scores
    temperature = min(max(temperature, SMALLEST), GREATEST)
    tempered = scores / temperature
    if math.isfinite(tempered.max()):
        return tempered
    overflowed = tempered.amax(-1, True).isinf()
    return tempered.where(~overflowed, (scores - scores.amax(-1, True)) / temperature)


def _nucleus(ascending: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """How many tokens are the smallest set of the most likely that adds up to top_p, and the least score among them.

    (B, 1) each; arXiv 1904.09751. Added up from the least.
    """
    tokens = ascending.shape[-1]
    cut = (ascending.softmax(-1).cumsum(-1) <= 1 - top_p).sum(-1, keepdim=True).clamp(max=tokens - 1)
    return tokens - cut, ascending.gather(-1, cut)


def _largest(scores: Tensor, count: int | Tensor, least: Tensor) -> Tensor:
    """Exactly the `count` largest of a row, `least` (B, 1) being the smallest of them; of equal ones the first."""
    kept = scores >= least
    if (kept.sum(-1, keepdim=True) != count).any():
        tied = scores == least
        kept &= ~tied | (tied.cumsum(-1) <= count - (kept & ~tied).sum(-1, keepdim=True))
    return _kept(scores, kept)


def _kept(scores: Tensor, kept: Tensor) -> Tensor:
    return scores.where(kept, -math.inf)


def _ascending(scores: Tensor) -> Tensor:
    """Each row (B, V) sorted."""
    if scores.device.type != "cpu" or scores.shape[-1] < RADIX // 4:
        return scores.sort(-1).values
    return torch.stack([_by_radix(row) for row in scores])


def _behind_others(ascending: Tensor, size: int) -> Tensor:
    """The largest of `size` scores, (B, k) sorted, where all others are cut.

    Behind as many -inf that they stand at the places in a vector register that they would have in the whole row: then
    their sum, too, is the whole row's to the bit.
    """
    return F.pad(ascending, ((size - ascending.shape[-1]) % REGISTERS, 0), value=-math.inf)


def _by_radix(row: Tensor) -> Tensor:
    """(V,) sorted as integers: the bits of a float, those of a negative one turned over, are ordered as the floats."""
    keys = _turned(row.contiguous().view(torch.int32))
    filled = F.pad(keys, (0, max(RADIX - len(keys), 0)), value=2**31 - 1)
    return _turned(filled.sort().values[: len(row)]).view(torch.float32)


def _turned(bits: Tensor) -> Tensor:
    return bits ^ ((bits >> 31) & (2**31 - 1))
