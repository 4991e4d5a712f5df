"""What counts as a change: intervals that hold as often as they say, and a band for what no interval sees."""

import math
import random

import pytest

from attn_variants.bench.change import (
    FASTER,
    MACHINE,
    NOT_COMPARABLE,
    QUANTILES,
    SAME,
    SINGLE,
    SLOWER,
    blocks,
    change,
)

PAIRS = 200


def steps(rng: random.Random, turns: int = 6, each: int = 8, *, rho: float = 0.5, scale: float = 1.0) -> list[float]:
    """Milliseconds with 3 % noise: an AR(1) series over all steps, so that neighbours resemble each other."""
    samples, state = [], rng.gauss(0, 1)
    for _ in range(turns * each):
        state = rho * state + math.sqrt(1 - rho**2) * rng.gauss(0, 1)
        samples.append(20 * scale * math.exp(0.03 * state))
    return samples


def share(outside, **how) -> float:
    """The share of simulated pairs of runs for which `outside` says so."""
    rng = random.Random(5)
    turns = [8] * how.get("turns", 6)
    found = 0
    for _ in range(PAIRS):
        old, new = steps(rng, **how), steps(rng, **how)
        found += outside(change(old, new, turns=(turns, turns)))
    return found / PAIRS


def test_an_interval_holds_the_truth_nineteen_times_in_twenty():
    def misses(found):
        return not found.low <= 1 <= found.high

    # Five standard errors of a share of 0.05 in 200 are 0.077 above it; what is wrong by half is far beyond.
    for rho in (0.0, 0.5, 0.8):
        for turns in (3, 6, 24):
            assert share(misses, rho=rho, turns=turns) <= 0.1, (rho, turns)


def test_samples_taken_for_independent_would_miss_often():
    rng, naive, ours = random.Random(5), 0, 0
    error = 1.96 * math.sqrt(math.pi / 2) * 0.03 * math.sqrt(2 / 48)
    for _ in range(PAIRS):
        old, new = steps(rng, rho=0.9), steps(rng, rho=0.9)
        found = change(old, new, turns=([8] * 6, [8] * 6))
        naive += abs(math.log(found.ratio)) > error
        ours += not found.low <= 1 <= found.high
    assert naive / PAIRS > 0.4
    assert ours < naive / 2


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("turns", [None, 4, 6])
def test_equal_programs_are_seldom_told_apart(rho, turns):
    rng, alarms = random.Random(7), 0
    known = None if turns is None else [8] * turns
    for _ in range(PAIRS):
        old, new = steps(rng, turns or 5, rho=rho), steps(rng, turns or 5, rho=rho)
        alarms += change(old, new, turns=(known, known)).verdict != SAME
    assert alarms / PAIRS <= 0.05


def test_a_tenth_is_found_in_noise_of_three_per_cent():
    rng, slower, faster = random.Random(9), 0, 0
    for _ in range(PAIRS):
        old, new = steps(rng, 8), steps(rng, 8, scale=1.1)
        slower += change(old, new).verdict == SLOWER
        faster += change(new, old).verdict == FASTER
    assert slower / PAIRS > 0.8
    assert faster / PAIRS > 0.8


def test_two_turns_by_hand():
    # Medians of the turns 10 and 10 e^0.02, of new 11 and 11 e^0.02: each log variance is 0.0002, over two turns
    # 0.0001, of medians pi/2 of that. Two degrees of freedom in all: t = 4.303.
    old = [10.0] * 3 + [10.0 * math.exp(0.02)] * 3
    new = [1.1 * sample for sample in old]
    found = change(old, new, turns=([3, 3], [3, 3]))
    width = 4.303 * math.sqrt(2 * 0.0001 * math.pi / 2)
    assert found.ratio == pytest.approx(1.1)
    assert math.log(found.high / found.ratio) == pytest.approx(width)
    assert math.log(found.ratio / found.low) == pytest.approx(width)


def test_blocks_are_whole_turns_and_without_turns_neighbours():
    assert blocks(range(6), [1, 2, 3]) == [range(1), range(1, 3), range(3, 6)]
    assert [len(block) for block in blocks(range(28), [4] * 7)] == [4, 4, 4, 4, 4, 8]
    assert [len(block) for block in blocks(range(40))] == [8] * 5
    assert [len(block) for block in blocks(range(12))] == [3] * 4
    assert [len(block) for block in blocks(range(3))] == [1] * 3
    assert [len(block) for block in blocks(range(4800))] == [800] * 6


def test_a_change_within_the_noise_floor_is_none():
    old, new = [10.0, 10.01] * 8, [10.6, 10.61] * 8
    assert change(old, new, noise=0.05).verdict == SLOWER
    assert change(old, new, noise=0.07).verdict == SAME
    assert change(new, old, noise=0.05).verdict == FASTER
    assert change(new, old, noise=0.07).verdict == SAME


def test_what_the_machine_changed_by_is_not_the_programs():
    old, new = [10.0, 10.01] * 8, [13.0, 13.01] * 8
    assert change(old, new).verdict == SLOWER
    # Memory is read at 0.77 of the rate: that may be all there is to it.
    explained = change(old, new, machine=[1.3])
    assert (explained.verdict, explained.why) == (NOT_COMPARABLE, MACHINE)
    # A machine that became faster explains no slower program, and one that did a little not all of it.
    assert change(old, new, machine=[0.7]).verdict == SLOWER
    assert change(old, new, machine=[1.1]).verdict == SLOWER
    assert change(new, old, machine=[1 / 1.3]).verdict == NOT_COMPARABLE
    assert change(new, old, machine=[1.3]).verdict == FASTER


def test_one_sample_shows_no_noise():
    for old, new in (([10.0], [20.0]), ([10.0], [20.0] * 9), ([10.0] * 9, [20.0])):
        found = change(old, new)
        assert (found.low, found.high, found.verdict, found.why) == (None, None, NOT_COMPARABLE, SINGLE)


def test_samples_without_any_spread_are_compared_as_they_are():
    assert change([10.0] * 8, [11.0] * 8).verdict == SLOWER
    assert change([10.0] * 8, [10.0] * 8).verdict == SAME


@pytest.mark.parametrize("freedom", [1, 2, 5, 20])
def test_quantiles_are_students(freedom):
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    end, parts = QUANTILES[freedom - 1], 4000

    def density(t: float) -> float:
        return scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2)

    # Simpson's rule from the middle.
    inner = sum((4 if part % 2 else 2) * density(end * part / parts) for part in range(1, parts))
    below = 0.5 + end / parts / 3 * (density(0) + density(end) + inner)
    assert below == pytest.approx(0.975, abs=2e-5)
