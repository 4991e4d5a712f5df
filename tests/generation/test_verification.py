"""Verification emits the target's distribution exactly, whatever the draft, and takes what the two agree on."""

import random
from collections import Counter
from itertools import product

import pytest
import torch

from attn_variants.generation.draws import draw
from attn_variants.generation.verification import Verified, acceptance, matched, one_hot, residual, verified
from tests.generation.chi_square import chi_square


def doubles(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


P, Q = doubles([0.6, 0.3, 0.1]), doubles([0.3, 0.5, 0.2])
DRAWS = 20_000


def distributions(count, size, seed, zeros=0.0):
    """Random ones; each token has no probability with probability `zeros`, but for one that has."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(count, size, generator=generator, dtype=torch.float64) ** 3
    gone = torch.rand(count, size, generator=generator) < zeros
    gone[torch.arange(count), torch.randint(size, (count,), generator=generator)] = False
    weights = weights.masked_fill(gone, 0)
    return weights / weights.sum(-1, keepdim=True)


def emitted(p, q):
    """What one place emits, by the rule's two functions alone."""
    rate = acceptance(p, q)
    return q * rate + (q * (1 - rate)).sum() * residual(p, q)


def uniforms(seed):
    """Fresh numbers, whatever they are for."""
    draws = random.Random(seed)
    return lambda place, purpose: draws.random()


def grid(accept=0.0, follow=0.0):
    return lambda place, purpose: accept if purpose == "accept" else follow


# The rule, one place


@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_one_place_emits_the_target_exactly(size, zeros):
    targets, drafts = distributions(200, size, 1, zeros), distributions(200, size, 2, zeros)
    for p, q in zip(targets, drafts, strict=True):
        torch.testing.assert_close(emitted(p, q), p, rtol=0, atol=1e-14)
        torch.testing.assert_close((q * acceptance(p, q)).sum(), torch.minimum(p, q).sum(), rtol=0, atol=1e-14)


def test_the_rule_by_hand():
    assert acceptance(P, Q).tolist() == pytest.approx([1, 0.6, 0.5])
    assert residual(P, Q).tolist() == pytest.approx([1, 0, 0])
    assert emitted(P, Q).tolist() == pytest.approx([0.6, 0.3, 0.1])
    q = doubles([0.5, 0.1, 0.4])
    assert residual(P, q).tolist() == pytest.approx([1 / 3, 2 / 3, 0])


def test_a_proposal_that_is_no_draw_is_accepted_as_often_as_the_target_gives_it():
    """Pitfall L1, by hand: token 1 always proposed; with q as if it had been drawn, [.4, .6, 0] would come out."""
    q = one_hot(1, P)
    assert acceptance(P, q).tolist() == pytest.approx([0, 0.3, 0])
    assert residual(P, q).tolist() == pytest.approx([6 / 7, 0, 1 / 7])
    assert emitted(P, q).tolist() == pytest.approx([0.6, 0.3, 0.1])


def test_equal_distributions_accept_all_and_leave_no_residual():
    for p in distributions(50, 5, 3, 0.3):
        assert acceptance(p, p)[p > 0].eq(1).all()
        assert torch.equal(residual(p, p), p)


def test_a_residual_lost_to_rounding_is_the_target():
    """p sums to a little less than q, which is nowhere below it: nothing is left, and the rule may still reject."""
    q = doubles([0.25, 0.75])
    p = doubles([0.25, 0.75 - 1e-16])
    assert p[1] < q[1]
    assert torch.equal(residual(p, q), p)
    assert verified(torch.stack([p, p]), [1], q[None], grid(accept=float(p[1] / q[1]), follow=0.1)) == Verified(0, 0)


# Blocks, with every random number of a grid: probabilities are multiples of its step, so that the sums are exact


def test_one_proposal_emits_the_target_exactly():
    found = torch.zeros(3).double()
    for token, accept, follow in product(range(3), range(10), range(10)):
        done = verified(torch.stack([P, P]), [token], Q[None], grid((accept + 0.5) / 10, (follow + 0.5) / 10))
        found[token if done.accepted else done.token] += Q[token] / 100
    assert found.tolist() == pytest.approx([0.6, 0.3, 0.1])


def test_an_argmax_proposal_emits_the_target_exactly():
    found = Counter()
    for accept, follow in product(range(10), range(7)):
        done = verified(torch.stack([P, P]), [1], None, grid((accept + 0.5) / 10, (follow + 0.5) / 7))
        found[1 if done.accepted else done.token] += 1
    assert found == {0: 42, 1: 21, 2: 7}


def test_a_block_of_two_emits_the_joint_distribution_of_the_target():
    """p(x, y, z) of a target whose next place depends on the last token, by the probability of each path."""
    size = 3
    target, draft = distributions(size + 1, size, 5), distributions(size + 1, size, 6)
    joint = torch.zeros(size, size).double()
    for x, y in product(range(size), repeat=2):
        first, second = acceptance(target[size], draft[size]), acceptance(target[x], draft[x])
        path = draft[size][x] * draft[x][y]
        joint[x, y] += path * first[x] * second[y]
        joint[x] += path * first[x] * (1 - second[y]) * residual(target[x], draft[x])
        # A token that replaces the first is followed by one of the next round's.
        replaced = residual(target[size], draft[size])
        joint += path * (1 - first[x]) * replaced[:, None] * target[:size]
    torch.testing.assert_close(joint, target[size][:, None] * target[:size], rtol=0, atol=1e-14)


def test_no_proposal_is_a_plain_draw():
    for follow in range(10):
        done = verified(P[None], [], None, grid(follow=(follow + 0.5) / 10))
        assert done == Verified(0, [0, 0, 0, 0, 0, 0, 1, 1, 1, 2][follow])


def test_a_rejection_ends_the_block_and_nothing_after_it_is_asked():
    asked = []

    def uniform(place, purpose):
        asked.append((place, purpose))
        return 0.55

    # Taken below 0.6, then not taken at 0.5.
    assert verified(P.expand(4, 3), [1, 2, 1], Q.expand(3, 3), uniform) == Verified(1, 0)
    assert asked == [(0, "accept"), (1, "accept"), (1, "residual")]


def test_a_block_taken_whole_is_followed_by_a_draw_of_the_last_place():
    target = torch.stack([P, P, doubles([0.0, 0.0, 1.0])])
    assert verified(target, [0, 0], Q.expand(2, 3), grid(accept=0.999)) == Verified(2, 2)


def test_greedy_takes_the_argmax_and_nothing_else():
    target = torch.eye(4)[[2, 0, 3]]
    for q in (None, torch.full((2, 4), 0.25)):
        assert verified(target, [2, 0], q, grid(0.9999, 0.5)) == Verified(2, 3)
        assert verified(target, [2, 1], q, grid(0.0, 0.5)) == Verified(1, 0)
        assert verified(target, [1, 0], q, grid(0.0, 0.9999)) == Verified(0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_probabilities_are_taken_as_they_are(dtype):
    p = q = torch.softmax(torch.randn(1000, generator=torch.Generator().manual_seed(0)), -1).to(dtype)
    for token in (0, 7, 999):
        assert verified(torch.stack([p, p]), [token], q[None], grid(accept=1 - 2**-53)).accepted == 1


# Draws


def test_many_blocks_have_the_distribution_of_the_target():
    """The first two tokens of 10,000 blocks, whose next place depends on the last token."""
    size = 4
    target, draft = distributions(size + 1, size, 10, 0.2), distributions(size + 1, size, 20, 0.2)
    expected = {(x, y): float(target[size, x] * target[x, y]) for x, y in product(range(size), repeat=2)}
    pairs = Counter()
    uniform = uniforms(1)
    for _ in range(DRAWS // 2):
        first = draw(draft[size], uniform(0, "draft"))
        second = draw(draft[first], uniform(1, "draft"))
        rows, q = target[[size, first, second]], draft[[size, first]]
        done = verified(rows, [first, second], q, uniform)
        ids = [*(first, second)[: done.accepted], done.token]
        if len(ids) == 1:
            ids.append(draw(target[ids[0]], uniform(1, "draw")))
        pairs[ids[0], ids[1]] += 1
    statistic, limit = chi_square(pairs, expected)
    assert statistic < limit


def test_argmax_proposals_many_times():
    """Pitfall L1: 20,000 draws; the wrong ratio is far outside."""
    counts, wrong = Counter(), Counter()
    expected = dict(enumerate(P.tolist()))
    uniform = uniforms(2)
    for number in range(DRAWS):
        done = verified(torch.stack([P, P]), [1], None, uniform)
        counts[1 if done.accepted else done.token] += 1
        if number < 5000:
            done = verified(torch.stack([P, P]), [1], Q[None], uniform)
            wrong[1 if done.accepted else done.token] += 1
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit
    assert wrong[1] / 5000 == pytest.approx(0.6, abs=0.03)
    assert chi_square(wrong, expected)[0] > 50 * limit


def test_taking_what_the_target_drew_itself_is_as_exact_and_accepts_less():
    """Pitfall L3: sum p q = .35 where min(p, q) sums to .70; and of the argmax, p = .30 in both."""
    expected = dict(enumerate(P.tolist()))
    rates = {}
    for rule in ("matched", "verified"):
        counts, accepted, uniform = Counter(), 0, uniforms(3)
        for _ in range(8000):
            token = draw(Q, uniform(0, "draft"))
            if rule == "matched":
                done = matched([draw(P, uniform(0, "draw")), 0], [token])
            else:
                done = verified(torch.stack([P, P]), [token], Q[None], uniform)
            accepted += done.accepted
            counts[token if done.accepted else done.token] += 1
        statistic, limit = chi_square(counts, expected)
        assert statistic < limit
        rates[rule] = accepted / 8000
    assert float((P * Q).sum()) == pytest.approx(0.35)
    assert rates == pytest.approx({"matched": 0.35, "verified": 0.70}, abs=0.025)


def test_a_mismatch_followed_by_a_residual_draw_is_biased():
    """Pitfall L3's other half: only then. Taken with probability p(x), replaced from max(0, p - q)."""
    matches = P * Q
    biased = matches + (1 - matches.sum()) * residual(P, Q)
    assert biased.tolist() == pytest.approx([0.83, 0.15, 0.02])


def test_matching_by_hand():
    assert matched([4, 7, 9], [4, 7]) == Verified(2, 9)
    assert matched([4, 7, 9], [4, 8]) == Verified(1, 7)
    assert matched([4, 7, 9], [5, 7]) == Verified(0, 4)
    assert matched([4], []) == Verified(0, 4)


def test_a_draw_inverts_the_distribution_and_never_gives_what_has_no_probability():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    assert [draw(p, u) for u in (0, 0.249, 0.25, 0.749, 0.75, 1 - 2**-53)] == [1, 1, 3, 3, 4, 4]
    # 0.1 and 0.2 are more together than 0.3; whatever is lost in the sum, the last is given.
    assert draw(doubles([0.1, 0.2, 0.0]), 1 - 2**-53) == 1
    # Weights need not sum to one.
    assert [draw(torch.tensor([1.0, 3.0]), u) for u in (0.2, 0.3)] == [0, 1]


@pytest.mark.parametrize(
    ("target", "proposed", "draft", "message"),
    [
        (P.expand(2, 3), [0, 1], None, r"2 proposals need the model's probabilities at 3 places, .* got \(2, 3\)"),
        (P, [], None, r"0 proposals need .* got \(3,\)"),
        (P.expand(2, 3), [0], Q, r"the draft's probabilities are \(3,\), and 1 proposals .* need \(1, 3\)"),
        (P.expand(2, 3), [0], Q[None, :2], r"are \(1, 2\), .* vocabulary of 3 need \(1, 3\)"),
        (P.expand(2, 3), [1], torch.tensor([[0.5, 0.0, 0.5]]), "token 1 was proposed, .* gives it 0.0"),
        (P.expand(2, 3), [1], torch.tensor([[0.5, float("nan"), 0.5]]), "token 1 was proposed, .* gives it nan"),
        (torch.full((2, 3), float("nan")), [1], Q[None], "probability of token 1 is NaN"),
        (torch.full((1, 3), float("nan")), [], None, "nothing to draw from"),
        (torch.zeros(1, 3), [], None, "nothing to draw from"),
    ],
)
def test_what_does_not_fit_is_refused(target, proposed, draft, message):
    with pytest.raises(ValueError, match=message):
        verified(target, proposed, draft, grid())


def test_choices_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="1 proposals need 2 choices, got 1"):
        matched([3], [3])
