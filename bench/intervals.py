"""How sure a median is. Steps of one turn share what the machine did meanwhile, so that turns count, not samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

CONFIDENCE = 0.95


def in_turns(samples: Sequence[float], turns: Sequence[int]) -> Iterator[Sequence[float]]:
    """The samples of each turn, given how many each had."""
    start = 0
    for size in turns:
        yield samples[start : start + size]
        start += size


def median_interval(samples: Sequence[float], turns: Sequence[int]) -> list[float] | None:
    """[low, high] that holds the median with 95 % confidence, from the order of the turns' medians; None below 6 turns.

    Of n independent turns the k-th lowest lies above the median with probability sum over i < k of C(n, i) / 2^n,
    whatever the distribution, and the k-th highest below it with the same; k is the largest for which both together
    stay within 5 %. With fewer than six turns even lowest to highest is less sure than that.
    """
    medians = sorted(statistics.median(turn) for turn in in_turns(samples, turns))
    rank = most_extreme(len(medians))
    if not rank:
        return None
    middle = statistics.median(samples)
    return [min(medians[rank - 1], middle), max(medians[-rank], middle)]


def most_extreme(count: int) -> int:
    """k of `median_interval`; 0 where there is none."""
    rank, outside = 0, 0.0
    for below in range(count // 2):
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        rank = below + 1
    return rank
