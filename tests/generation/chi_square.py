"""Pearson's test of counts against a distribution."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist


def chi_square(counts: Mapping[object, int], expected: Mapping[object, float]) -> tuple[float, float]:
    """The statistic, and what it exceeds once in 10,000 times (Wilson and Hilferty's approximation).

    Outcomes of which fewer than 5 are expected count as one. What has probability 0 must not have been counted.
    """
    total = sum(counts.values())
    assert counts.keys() <= {outcome for outcome, probability in expected.items() if probability > 0}
    pooled: dict[object, list[float]] = {}
    for outcome, probability in expected.items():
        count_and_mean = pooled.setdefault(outcome if total * probability >= 5 else "rare", [0, 0])
        count_and_mean[0] += counts.get(outcome, 0)
        count_and_mean[1] += total * probability
    statistic = sum((count - mean) ** 2 / mean for count, mean in pooled.values() if mean)
    freedom = len(pooled) - 1
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + NormalDist().inv_cdf(0.9999) * spread**0.5) ** 3
