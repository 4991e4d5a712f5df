"""Batches by the lengths of their sequences: `4x8k` is four of 8192 tokens, `32x1k+1x32k` a ragged batch of 33.

    specs  = batch , batch ...        batch  = rows + rows ...        rows  = [count x] tokens

tokens: a whole number, with `k` for 1024 or `m` for 1024 * 1024 of them. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from attn_variants.contract import LARGEST_SIZE

from .options import listed

UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}
ROWS = re.compile(r"(?:([0-9]{1,18})\s*x\s*)?([0-9]{1,18})([km]?)")
AS_IN = "give sequences x tokens, as in 4x8k, joined by + where lengths differ, as in 32x1k+1x32k (k is 1024, m 1024 k)"


@dataclass(frozen=True)
class BatchSpec:
    """Runs of neighbouring rows of one length, (count, tokens) each, in the order of the rows.

    Runs that stand side by side and are of one length are one. str() gives the spec in its shortest form.
    """

    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        joined = groupby(self.runs, key=lambda run: run[1])
        object.__setattr__(self, "runs", tuple((sum(count for count, _ in same), tokens) for tokens, same in joined))

    @property
    def batch(self) -> int:
        """Sequences."""
        return sum(count for count, _ in self.runs)

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(tokens for _, tokens in self.runs)

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return sum(count * tokens for count, tokens in self.runs)

    @property
    def ragged(self) -> bool:
        """Whether lengths differ."""
        return len({tokens for _, tokens in self.runs}) > 1

    @property
    def rows(self) -> list[tuple[range, int]]:
        """Each run's rows, and the tokens of each of them."""
        starts = [sum(count for count, _ in self.runs[:index]) for index in range(len(self.runs))]
        return [(range(start, start + count), tokens) for start, (count, tokens) in zip(starts, self.runs, strict=True)]

    def __str__(self) -> str:
        return "+".join(f"{count}x{_short(tokens)}" for count, tokens in self.runs)


def batch_specs(flag: str, values: Sequence[str]) -> list[BatchSpec]:
    """The batches of a flag that takes comma lists and may be repeated, each once.

    Raises ValueError that names the piece which is no run of rows, and for sizes of 0 or beyond what tensors take.
    """
    return list(dict.fromkeys(_batch(flag, text) for text in listed(flag, values)))


def _batch(flag: str, text: str) -> BatchSpec:
    spec = BatchSpec(tuple(_run(flag, text, piece.strip()) for piece in text.split("+")))
    if spec.batch > LARGEST_SIZE:
        raise ValueError(f"{flag} ({text}) has {spec.batch} sequences; at most {LARGEST_SIZE} are one batch")
    return spec


def _run(flag: str, text: str, piece: str) -> tuple[int, int]:
    found = ROWS.fullmatch(piece.lower())
    where = f"{flag} ({text})" if piece == text else f"{flag} ({text}): {piece!r}"
    if found is None:
        raise ValueError(f"{where} is no batch; {AS_IN}")
    count, tokens = int(found[1] or 1), int(found[2]) * UNITS[found[3]]
    for number, what in ((count, "sequences"), (tokens, "tokens")):
        if not 1 <= number <= LARGEST_SIZE:
            raise ValueError(f"{where} has {number} {what}; give 1 to {LARGEST_SIZE}")
    return count, tokens


def _short(tokens: int) -> str:
    unit = next(unit for unit in ("m", "k", "") if tokens % UNITS[unit] == 0)
    return f"{tokens // UNITS[unit]}{unit}"
