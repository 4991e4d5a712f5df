"""A change, or noise? Two sets of samples of one thing, taken at different times on a machine whose speed drifts.

Samples of neighbouring steps resemble each other, so it is not they that are counted but blocks of them, each with its
median. What two runs of the same program differ by is allowed for on top.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 6
"""Most blocks that samples are cut into: long ones, so that what drifts over several turns shows between them."""

RUN_NOISE, CONTROLLED_NOISE = 0.05, 0.02
"""Two runs of one program differ by such fractions though nothing changed, and it shows within neither.

The second where something that did not change was measured in turn with both. Five runs of one decoder within a minute,
none of them unquiet, had medians of 31 to 45 ms: of small changes a single pair of records cannot say more.
"""

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of many normal samples."""

# fmt: off
QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)
# fmt: on
"""Student's t: 97.5 % quantiles for 1, 2, 3 ... degrees of freedom."""

FASTER, SLOWER, SAME, NOT_COMPARABLE = "faster", "slower", "same within noise", "not comparable"
MACHINE, SINGLE = "the machine changed as much", "a single sample does not show its noise"


@dataclass(frozen=True)
class Change:
    """New over old of a time; above 1 is slower.

    low, high: the 95 % interval of the ratio, None where a side has one sample. band_low, band_high: ratios that are no
    change: run-to-run noise, around everything from 1 to what the machine itself changed by.
    """

    ratio: float
    low: float | None
    high: float | None
    band_low: float
    band_high: float
    verdict: str
    why: str = ""


def change(
    old: Sequence[float],
    new: Sequence[float],
    *,
    turns: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
    noise: float = RUN_NOISE,
    machine: Sequence[float] = (),
) -> Change:
    """The ratio of medians and what to make of it: it is a change where its interval and the band are apart.

    turns: how many of the samples each turn has, of old and of new. noise: what two runs of one program differ by, as a
    fraction. machine: ratios of time that may be the machine's own, as of a peer that did
    not change or of reading memory; nobody knows how much of it these samples felt, so all between is allowed for.
    """
    ratio = statistics.median(new) / statistics.median(old)
    allowed = 1 + noise
    band = min(1.0, *machine, 1.0) / allowed, max(1.0, *machine, 1.0) * allowed
    width = _half_width(_log_medians(old, turns[0]), _log_medians(new, turns[1]))
    if width is None:
        return Change(ratio, None, None, *band, NOT_COMPARABLE, SINGLE)
    low, high = ratio / math.exp(width), ratio * math.exp(width)
    if low > band[1]:
        return Change(ratio, low, high, *band, SLOWER)
    if high < band[0]:
        return Change(ratio, low, high, *band, FASTER)
    if low > allowed or high < 1 / allowed:
        return Change(ratio, low, high, *band, NOT_COMPARABLE, MACHINE)
    return Change(ratio, low, high, *band, SAME)


def blocks(samples: Sequence[float], turns: Sequence[int] | None = None) -> list[Sequence[float]]:
    """The samples in at most `BLOCKS` runs of neighbours, of whole turns where those are known.

    Without turns in as many as have 8 samples each, and in 4 where that would be fewer.
    """
    if turns is None:
        turns = [1] * len(samples)
        most = min(BLOCKS, max(4, len(samples) // 8))
    else:
        most = BLOCKS
    count = min(most, len(turns))
    ends = [sum(turns[: part * len(turns) // count]) for part in range(count + 1)]
    return [samples[start:end] for start, end in itertools.pairwise(ends)]


def _log_medians(samples: Sequence[float], turns: Sequence[int] | None) -> list[float]:
    return [math.log(statistics.median(block)) for block in blocks(samples, turns)]


def _half_width(old: Sequence[float], new: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the medians' difference (Welch, 1947); None where a side shows no spread."""
    if min(len(old), len(new)) < 2:
        return None
    errors = [MEDIAN_ERROR**2 * statistics.variance(side) / len(side) for side in (old, new)]
    if not (error := sum(errors)):
        return 0.0
    freedom = error**2 / sum(part**2 / (len(side) - 1) for part, side in zip(errors, (old, new), strict=True))
    return QUANTILES[min(int(freedom + 1e-9), len(QUANTILES)) - 1] * math.sqrt(error)
