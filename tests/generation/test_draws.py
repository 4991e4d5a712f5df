"""Random numbers as functions of where they are used, and the tokens that they pick."""

import math

import pytest
import torch

from attn_variants.generation.draws import NOTHING, PURPOSES, draw, draw_rows, uniform

BELOW_ONE = 1 - 2.0**-53


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ((0, 0, 0, "draw"), 0.9099719439562797),
        ((0, 0, 0, "draft"), 0.9131474021049879),
        ((0, 0, 0, "accept"), 0.04031716455577217),
        ((0, 0, 0, "residual"), 0.2285509320205643),
        ((42, 3, 17, "draw"), 0.45591058665063267),
        ((2**63 - 1, 5, 131071, "accept"), 0.6152509121368921),
    ],
)
def test_the_numbers_never_change(arguments, number):
    assert uniform(*arguments) == number


def test_numbers_have_53_bits_and_stay_below_one():
    numbers = [uniform(7, 0, position, "draw") for position in range(2000)]
    assert all(0 <= number < 1 and (number * 2**53).is_integer() for number in numbers)
    # The last bit is as often set as not: 1000 +- 5 standard deviations of 22.
    assert 888 < sum(int(number * 2**53) & 1 for number in numbers) < 1112


def chi_square(counts):
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected


NEIGHBOURS = {
    "positions": [(5, 0, i, "draw") for i in range(8000)],
    "samples": [(5, i, 9, "draft") for i in range(8000)],
    "seeds": [(i, 0, 9, "residual") for i in range(8000)],
    "purposes": [(5, 1, i // 4, PURPOSES[i % 4]) for i in range(8000)],
}


@pytest.mark.parametrize("along", NEIGHBOURS)
def test_neighbours_are_uniform_and_independent(along):
    numbers = [uniform(*arguments) for arguments in NEIGHBOURS[along]]
    singles = [0] * 50
    for number in numbers:
        singles[int(number * 50)] += 1
    # The 0.1% and 99.9% points of chi-square with 49 and with 99 degrees of freedom.
    assert 23.98 < chi_square(singles) < 85.35
    pairs = [0] * 100
    for first, second in zip(numbers[::2], numbers[1::2], strict=True):
        pairs[int(first * 10) * 10 + int(second * 10)] += 1
    assert 61.1 < chi_square(pairs) < 148.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 0, "dram"), "unknown purpose 'dram'; did you mean draw"),
        ((-1, 0, 0, "draw"), r"seed \(-1\)"),
        ((2**63, 0, 0, "draw"), r"seed \(9223372036854775808\) must be at most"),
        ((0, True, 0, "draw"), r"sample \(True\)"),
        ((0, 0, 1.5, "draw"), r"position \(1.5\)"),
    ],
)
def test_what_no_number_is_for_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        uniform(*arguments)


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (BELOW_ONE, 4)],
)
def test_a_draw_inverts_the_distribution(u, token):
    # Reached are 0, 1/4, 1/4, 3/4, 1 and 1.
    assert draw(torch.tensor([0, 0.25, 0, 0.5, 0.25, 0]), u) == token
    assert draw(torch.tensor([0, 1.0, 0, 2.0, 1.0, 0]), u) == token, "weights need not add up to 1"


def test_what_float32_would_round_away_can_be_drawn():
    assert draw(torch.tensor([1.0, 1e-9]), 1 - 1e-10) == 1
    assert draw(torch.tensor([1.0, 1e-9]), 1 - 1e-8) == 0


def test_a_total_so_small_that_its_share_rounds_up_to_it_is_not_overrun():
    assert draw(torch.tensor([0, 5e-324, 0], dtype=torch.float64), 0.9) == 1


def test_frequencies_are_the_probabilities():
    wanted = [0.1, 0.0, 0.6, 0.3]
    counts = [0] * 4
    for position in range(6000):
        counts[draw(torch.tensor(wanted), uniform(3, 0, position, "draw"))] += 1
    assert counts[1] == 0
    # The 99.9% point of chi-square with 2 degrees of freedom.
    assert sum((counts[i] - 6000 * wanted[i]) ** 2 / (6000 * wanted[i]) for i in (0, 2, 3)) < 13.8


@pytest.mark.parametrize("total", [1.0, 1 / 3, 0.9999999, 7.3, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_number_below_one_picks_the_last_token_that_can_be(total, dtype):
    """J3: what a float32 cumulative sum lacks at its end makes an index out of the vocabulary."""
    vocabulary = 100_000
    uniform_ = torch.full((vocabulary,), total / vocabulary, dtype=dtype)
    assert draw(uniform_, BELOW_ONE) == vocabulary - 1
    assert draw(uniform_, 0.500005) == vocabulary // 2
    uniform_[90_000:] = 0
    assert draw(uniform_, BELOW_ONE) == 89_999


@pytest.mark.parametrize("seed", range(20))
def test_no_token_of_probability_zero_is_ever_drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(200, 37, generator=generator) * 10.0 ** torch.randint(-30, 3, (200, 37), generator=generator)
    weights[torch.rand(200, 37, generator=generator) < 0.7] = 0
    weights[:, 5] += 1e-20
    edges = weights.double().cumsum(-1) / weights.double().sum(-1, keepdim=True)
    # Numbers at the very edges between tokens, where rounding could take the wrong side.
    numbers = [min(float(edges[row, row % 37]), BELOW_ONE) for row in range(200)]
    tokens = draw_rows(weights, numbers)
    assert all(weights[row, token] > 0 for row, token in enumerate(tokens))


def test_rows_are_drawn_as_each_would_be_alone():
    rows = torch.rand(9, 50, generator=torch.Generator().manual_seed(1))
    numbers = [uniform(1, row, 0, "draw") for row in range(9)]
    assert draw_rows(rows, numbers) == [draw(row, number) for row, number in zip(rows, numbers, strict=True)]


def test_a_row_without_a_distribution_is_marked_and_its_mates_are_drawn():
    rows = torch.tensor([[0.5, 0.5], [math.nan, 0.5], [0.0, 0.0], [math.inf, 1.0], [0.0, 1.0]])
    assert draw_rows(rows, [0.7] * 5) == [1, NOTHING, NOTHING, NOTHING, 1]
    for row in rows[1:4]:
        with pytest.raises(ValueError, match="there is nothing to draw from"):
            draw(row, 0.7)


def test_numbers_that_cannot_be_drawn_with_are_refused():
    for number in (1.0, -1e-9, math.nan):
        with pytest.raises(ValueError, match=r"numbers in \[0, 1\)"):
            draw(torch.ones(3), number)
    with pytest.raises(ValueError, match="1 numbers were given to draw from 2 rows"):
        draw_rows(torch.ones(2, 3), [0.5])
    with pytest.raises(ValueError, match=r"draw takes one row \(V,\), got \(2, 3\)"):
        draw(torch.ones(2, 3), 0.5)
