"""Random numbers without a generator: each a pure function of where it is used, so that no batch mate changes it."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from attn_variants.contract import require_size
from attn_variants.names import unknown

PURPOSES = ("draw", "draft", "accept", "residual")
"""What a number is for: a token of the target, one of the draft, its acceptance, and what stands in for it."""

LARGEST = 2**63 - 1
NOTHING = -1
"""What stands for the token of a row that has no distribution."""


def uniform(seed: int, sample: int, position: int, purpose: str) -> float:
    """A number in [0, 1), a multiple of 2**-53: BLAKE2b (RFC 7693) of the four, which stays the same for ever.

    sample: the index within the request.     position: of the token that is drawn, in its sequence.
    Raises ValueError for an unknown purpose and for integers that are not of 0 to 2**63 - 1.
    """
    if purpose not in PURPOSES:
        raise ValueError(unknown("purpose", purpose, PURPOSES))
    for name, value in (("seed", seed), ("sample", sample), ("position", position)):
        require_size(name, value, 0, LARGEST)
    packed = struct.pack("<QQQB", seed, sample, position, PURPOSES.index(purpose))
    hashed = int.from_bytes(blake2b(packed, digest_size=8, person=b"attn-variants").digest(), "little")
    return (hashed >> 11) * 2.0**-53


def draw(probabilities: Tensor, u: float) -> int:
    """The first token whose cumulative probability exceeds u times the total: (V,), which need not add up to 1.

    Never one of probability 0. Raises ValueError for a u outside [0, 1) and for a row without a distribution.
    """
    if probabilities.ndim != 1:
        raise ValueError(f"draw takes one row (V,), got {tuple(probabilities.shape)}; draw_rows takes several")
    (token,) = draw_rows(probabilities[None], [u])
    if token == NOTHING:
        raise ValueError(
            "there is nothing to draw from: the probabilities are all 0, or NaN or infinite ones among them"
        )
    return token


def draw_rows(probabilities: Tensor, numbers: Sequence[float]) -> list[int]:
    """`draw` of each row of (B, V) with its own number; `NOTHING` for a row without a distribution.

    Cumulative in float64: in float32 the sum over a large vocabulary may end short of the number. And on the CPU, where
    it is added up in order: in parallel it could step where nothing was added.
    Raises ValueError for numbers that are not one per row, in [0, 1).
    """
    if len(numbers) != len(probabilities):
        raise ValueError(f"{len(numbers)} numbers were given to draw from {len(probabilities)} rows; give one per row")
    if wrong := [u for u in numbers if not 0 <= u < 1]:
        raise ValueError(f"a draw takes numbers in [0, 1), got {wrong[0]!r}")
    reached = probabilities.cpu().cumsum(-1, dtype=torch.float64)
    totals = reached[:, -1].tolist()
    # A product that rounds up to the total, as subnormal ones do, would be exceeded by none.
    wanted = [[min(u * total, math.nextafter(total, 0.0))] for u, total in zip(numbers, totals, strict=True)]
    tokens = torch.searchsorted(reached, torch.tensor(wanted, dtype=torch.float64), right=True)[:, 0].tolist()
    return [token if 0 < total < math.inf else NOTHING for token, total in zip(tokens, totals, strict=True)]
