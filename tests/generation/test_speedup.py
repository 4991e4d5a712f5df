"""Rates and counts of speculation against numbers worked by hand and against a simulation."""

import random

import pytest

from attn_variants.generation.speedup import Rounds, expected_speedup, expected_tokens


@pytest.mark.parametrize(
    ("rate", "drafts", "tokens"),
    [
        (0.8, 4, 3.3616),  # (1 - .8^5) / .2
        (0.5, 2, 1.75),
        (0.8, 0, 1),
        (0, 5, 1),
        (1, 5, 6),
        (1 - 1e-12, 5, 6),
    ],
)
def test_tokens_per_call(rate, drafts, tokens):
    assert expected_tokens(rate, drafts) == pytest.approx(tokens, rel=1e-10)


@pytest.mark.parametrize(
    ("rate", "drafts", "cost", "speedup"),
    [
        (0.8, 5, 0, 3.68928),  # table 1 of arXiv 2211.17192 has 3.69 at a = .8, k = 5
        (0.8, 4, 0.1, 3.3616 / 1.4),
        (0.6, 2, 0.02, 1.96 / 1.04),
        (0, 4, 0.25, 0.5),
        (1, 4, 0.25, 2.5),
        (0.7, 0, 0.5, 1),
    ],
)
def test_speedup(rate, drafts, cost, speedup):
    assert expected_speedup(rate, drafts, cost) == pytest.approx(speedup, rel=1e-12)


def test_the_rate_of_acceptance_is_of_the_proposals_that_were_tested():
    """With proposals taken at .8, of 8 proposed ones fewer than half are: those behind a rejection are never tested."""
    draws, rounds = random.Random(0), Rounds()
    for _ in range(5000):
        accepted = next((place for place in range(8) if draws.random() >= 0.8), 8)
        rounds.add(proposed=8, accepted=accepted, emitted=accepted + 1)
    assert rounds.acceptance_rate == pytest.approx(0.8, abs=0.01)
    assert rounds.accepted / rounds.proposed == pytest.approx(sum(0.8**place for place in range(1, 9)) / 8, abs=0.01)
    assert rounds.tokens_per_call == pytest.approx(expected_tokens(0.8, 8), rel=0.02)


def test_a_block_that_a_stop_cuts_counts_what_it_gave():
    """Pitfall L7: five proposals taken, an end token among them; three tokens are emitted, not six."""
    rounds = Rounds()
    rounds.add(proposed=5, accepted=5, emitted=6)
    rounds.add(proposed=5, accepted=5, emitted=3)
    assert (rounds.rounds, rounds.proposed, rounds.tested, rounds.accepted, rounds.emitted) == (2, 10, 10, 10, 9)
    assert rounds.tokens_per_call == 4.5


def test_counts_by_hand():
    rounds = Rounds()
    assert rounds.acceptance_rate is None
    assert rounds.tokens_per_call is None
    rounds.add(proposed=0, accepted=0, emitted=1)
    assert rounds.acceptance_rate is None
    rounds.add(proposed=4, accepted=1, emitted=2)
    rounds.add(proposed=2, accepted=2, emitted=3)
    assert (rounds.tested, rounds.acceptance_rate, rounds.tokens_per_call) == (4, 0.75, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.1, 2), r"acceptance_rate \(1.1\) must lie between 0 and 1"),
        (lambda: expected_tokens(float("nan"), 2), r"acceptance_rate \(nan\)"),
        (lambda: expected_tokens(0.5, -1), r"drafts \(-1\) must be at least 0"),
        (lambda: expected_speedup(0.5, 1, -0.1), r"cost \(-0.1\) must be at least 0"),
        (lambda: Rounds().add(proposed=2, accepted=3, emitted=4), "accept 3 of 2 proposals"),
        (lambda: Rounds().add(proposed=2, accepted=1, emitted=3), "emit 3 tokens"),
    ],
)
def test_numbers_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
