"""The largest number that still fits, by search: sizes are neither proportional to it nor, in every model, monotone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

MOST = 2**40
"""What fits at this size is said to fit at any."""


Fall = tuple[int, int]
"""(tokens, every): less is held after the token that follows so many, and again `every` tokens later, and so on."""


def crests(falls: Iterable[Fall], context: int) -> Iterator[int]:
    """Contexts of up to `context` tokens at which the most may be held: it, and those just before a fall.

    One round of all falls is enough: growth repeats after it, and never ends lower.
    """
    falls = frozenset(falls)
    period = math.lcm(*(every for _, every in falls))
    yield context
    for tokens, every in falls:
        yield from range(context - (context - tokens) % every, max(0, context - period), -every)


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
