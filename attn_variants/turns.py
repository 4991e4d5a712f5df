"""Which of two ways is the faster here and now: they are timed in turns, over more weights than a cache holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

COLD_BYTES = 64 * 2**20
"""Weights of one shape are timed over this many bytes, if there are so many: one in the cores' cache says nothing."""

ROUNDS = 9
GAIN = 0.97
"""The one has to take less than this share of the other's time: a tie is not worth a copy."""

Work = Callable[[], object]


def cold(weights: int, nbytes: int) -> int:
    """How many of these weights, each of so many bytes, are to be timed together."""
    return max(1, min(weights, COLD_BYTES // nbytes))


def faster(one: Work, other: Work, rounds: int = ROUNDS) -> bool:
    """Whether `one` is: the median over rounds, so that what else the machine does falls on both."""
    with torch.inference_mode():
        one(), other()
        turns = [(seconds(one), seconds(other)) for _ in range(rounds)]
    return statistics.median(ones / others for ones, others in turns) < GAIN


def seconds(work: Work) -> float:
    """What it takes, by the wall's clock."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
