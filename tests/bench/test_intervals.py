"""A median's interval counts turns, and promises no more than they give."""

import math
import random
import statistics

import pytest

from attn_variants.bench.intervals import in_turns, median_interval, most_extreme


def test_below_six_turns_there_is_no_interval_of_95_percent():
    assert median_interval([float(turn) for turn in range(5 * 8)], [8] * 5) is None


def test_of_six_turns_it_reaches_from_the_lowest_to_the_highest_median():
    # Turns of three whose medians are 2, 5, 8, 11, 14 and 17.
    assert median_interval([float(sample) for sample in range(1, 19)], [3] * 6) == [2.0, 17.0]


def test_turns_may_differ_in_size():
    assert [list(turn) for turn in in_turns([1, 2, 3, 4, 5, 6], [1, 3, 2])] == [[1], [2, 3, 4], [5, 6]]


@pytest.mark.parametrize(("turns", "rank"), [(5, 0), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8)])
def test_ranks_are_those_of_the_sign_tests_table(turns, rank):
    # Critical values of the two-sided sign test at 5 %, one more than the counts that are rejected (Dixon & Mood 1946).
    assert most_extreme(turns) == rank


def test_steps_that_share_a_turns_luck_do_not_narrow_it():
    """Of runs whose turns differ by much more than their steps, 95 of 100 intervals hold the true median, or more."""
    draw, held = random.Random(0), 0
    for _ in range(400):
        levels = [draw.gauss(0, 1) for _ in range(12)]
        low, high = median_interval([level + draw.gauss(0, 0.01) for level in levels for _ in range(8)], [8] * 12)
        held += low <= 0 <= high
    # Binomial: 400 runs of 0.961 spread by 4.
    assert held / 400 > 0.961 - 3 * math.sqrt(0.961 * 0.039 / 400)


def test_the_median_lies_within():
    samples = [*[1.0] * 30, *[float(level) for level in range(2, 12)]]
    turns = [30, *[1] * 10]
    low, high = median_interval(samples, turns)
    assert low <= statistics.median(samples) <= high
