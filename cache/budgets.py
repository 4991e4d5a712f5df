"""The largest number that still fits, by search: sizes are neither proportional to it nor, in every model, monotone."""

from __future__ import annotations

from collections.abc import Callable

MOST = 2**40
"""What fits at this size is said to fit at any."""


def largest(fits: Callable[[int], bool], most: int = MOST) -> int | None:
    """The largest number of 1 to `most` that fits, 0 if none does, None if even `most` does.

    fits: true up to some number and false beyond it.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        if high >= most:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
