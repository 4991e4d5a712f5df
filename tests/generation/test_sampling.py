"""Sampling: the processed distribution, to the bit transformers' where nothing ties, and what is refused."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attn_variants.generation.draws import draw, draw_rows, uniform
from attn_variants.generation.sampling import (
    GREEDY,
    Sampling,
    _by_radix,
    broken,
    broken_message,
    penalised,
    probabilities,
    processed,
    seen_in,
)

CUT = -math.inf
NATURAL = Sampling()


def of_transformers(sampling, ids, logits):
    """Its processors, in the order of its `generate` and left out where that leaves them out."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors(ids, logits)


def pick(generator, choices):
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def drawn_case(seed, vocabulary):
    """Random logits of three rows without ties, what each has seen, and a random combination of settings."""
    generator = torch.Generator().manual_seed(seed)
    scale = pick(generator, [0.01, 1.0, 4.0, 30.0])
    logits = torch.randn(3, vocabulary, generator=generator) * scale
    while any(len(row.unique()) < vocabulary for row in logits):
        logits = logits.double().add(torch.randn(3, vocabulary, generator=generator) * scale).float()
    if seed % 3 == 0:
        logits[torch.rand(3, vocabulary, generator=generator) < 0.1] = CUT
        logits[:, 1] = scale
    ids = torch.randint(vocabulary, (3, 12), generator=generator)
    sampling = Sampling(
        temperature=pick(generator, [1.0, 0.7, 0.05, 1.3, 10.0]),
        top_k=pick(generator, [None, None, 1, 2, 50, vocabulary - 1, vocabulary, 60_000]),
        top_p=pick(generator, [None, None, 1.0, 0.95, 0.8, 0.5, 1e-3, 0.9999999]),
        min_p=pick(generator, [None, None, 0.0, 0.05, 0.3, 1.0]),
        repetition_penalty=pick(generator, [1.0, 1.2, 2.0, 0.7]),
    )
    return sampling, logits, ids


@pytest.mark.parametrize("vocabulary", [3, 4, 17, 50, 1000])
@pytest.mark.parametrize("block", range(4))
def test_scores_are_those_of_transformers_to_the_bit(vocabulary, block):
    compared = 0
    for seed in range(100 * block, 100 * block + 100):
        if vocabulary == 1000 and seed % 4:
            continue
        sampling, logits, ids = drawn_case(seed, vocabulary)
        before = logits.clone()
        got = processed(sampling, logits, seen_in(ids.tolist(), vocabulary))
        # Divided by a temperature, or by a penalty, two scores may round to one: a tie, whose rule is another's.
        if any(len(row[row > CUT].unique()) < (row > CUT).sum() for row in tempered_only(sampling, logits, ids)):
            continue
        assert torch.equal(got, of_transformers(sampling, ids, logits.clone())), (seed, sampling)
        assert torch.equal(logits, before), "logits are the caller's"
        compared += 1
    assert compared >= (10 if vocabulary == 1000 else 80)


def tempered_only(sampling, logits, ids):
    return processed(
        replace(sampling, top_k=None, top_p=None, min_p=None), logits, seen_in(ids.tolist(), logits.shape[1])
    )


@pytest.mark.parametrize("vocabulary", [9000, 32_000, 50_000])
@pytest.mark.parametrize("seed", [1, 2, 4, 5, 7])
def test_they_are_over_large_vocabularies_too(vocabulary, seed):
    """In these the sort is by radix. Some scores tie: what is left is as many and as large, whichever it is."""
    sampling, logits, ids = drawn_case_with_ties(seed, vocabulary)
    got = processed(sampling, logits, seen_in(ids.tolist(), vocabulary))
    wanted = of_transformers(sampling, ids, logits)
    assert torch.equal(got.sort(-1).values, wanted.sort(-1).values), sampling


def drawn_case_with_ties(seed, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocabulary, generator=generator) * 3
    ids = torch.randint(vocabulary, (2, 40), generator=generator)
    return Sampling(0.7, None, pick(generator, [0.9, 0.99, 0.5]), pick(generator, [None, 0.001]), 1.3), logits, ids


def test_the_radix_sort_is_the_sort():
    rows = torch.randn(4, 40_000, generator=torch.Generator().manual_seed(0)) * 10
    rows[0, :100] = CUT
    rows[1, :9] = torch.tensor([0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, math.inf, CUT, 1.0])
    for row in (*rows, rows[0, :20], rows[1, :9].flip(-1)):
        assert torch.equal(_by_radix(row), row.sort().values)


@pytest.mark.parametrize(
    ("given", "top_p", "left"),
    [
        ([0.50, 0.35, 0.10, 0.05], 0.9, [0.50, 0.35, 0.10]),
        ([0.4, 0.3, 0.2, 0.1], 0.8, [0.4, 0.3, 0.2]),
        ([0.5, 0.41, 0.09], 0.9, [0.5, 0.41]),
        ([0.95, 0.05], 0.1, [0.95]),
        # Exactly reached: two are enough.
        ([0.5, 0.25, 0.25], 0.75, [0.5, 0.25]),
    ],
)
def test_the_token_that_crosses_top_p_is_kept(given, top_p, left):
    """J1: it was removed."""
    got = probabilities(Sampling(top_p=top_p), torch.tensor([given]).log())[0]
    wanted = torch.tensor([*left, *[0.0] * (len(given) - len(left))]) / sum(left)
    assert (got > 0).tolist() == (wanted > 0).tolist()
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("top_p", [0.9999999, 1.0])
def test_a_top_p_near_one_keeps_a_uniform_vocabulary(top_p):
    """J3: a float32 sum that never gets there."""
    logits = torch.full((1, 100_000), 0.3)
    scores = processed(Sampling(top_p=top_p), logits)
    assert torch.equal(scores, logits)
    assert draw(probabilities(Sampling(top_p=top_p), logits)[0], 1 - 2.0**-53) == 99_999


def test_a_top_p_of_one_changes_nothing_where_tails_underflow():
    logits = torch.tensor([[0.0, -200.0, -1e30, CUT]])
    assert torch.equal(processed(Sampling(top_p=1.0), logits), logits)


def test_exactly_k_are_kept_and_of_equal_ones_the_first():
    """J5: a threshold keeps all of them, and top_k=1 is random."""
    tied = torch.tensor([[5.0, 5, 1], [4, 5, 5]]).bfloat16()
    for seed in range(200):
        numbers = [uniform(seed, 0, row, "draw") for row in range(2)]
        assert draw_rows(probabilities(Sampling(top_k=1, seed=seed), tied), numbers) == [0, 1]
    assert processed(GREEDY, tied).argmax(-1).tolist() == [0, 1]
    assert processed(Sampling(top_k=2), torch.tensor([[5.0, 4, 4, 4]])).tolist() == [[5, 4, CUT, CUT]]
    mixed = torch.tensor([[4.0, 4, 5, 4, 3], [5, 1, 2, 3, 4]])
    assert processed(Sampling(top_k=2), mixed).tolist() == [[4, CUT, 5, CUT, CUT], [5, CUT, CUT, CUT, 4]]


def test_of_equal_ones_the_first_fill_top_p_and_min_p_takes_them_all():
    quarters = torch.zeros(1, 4)
    assert processed(Sampling(top_p=0.5), quarters).tolist() == [[0, 0, CUT, CUT]]
    assert processed(Sampling(top_p=0.6), quarters).tolist() == [[0, 0, 0, CUT]]
    tenths = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.1, 0.1]]).log()
    assert (processed(Sampling(top_p=0.65), tenths) > CUT).tolist() == [[True, True, False, True, False, False]]
    assert (processed(Sampling(min_p=1.0), tenths) > CUT).tolist() == [[False, True, False, True, False, False]]
    assert (processed(Sampling(min_p=0.3), tenths) > CUT).all()
    assert (processed(Sampling(top_k=3, top_p=0.99), tenths) > CUT).tolist() == [
        [True, True, False, True, False, False]
    ]


def test_the_order_is_penalty_temperature_top_k_top_p_min_p():
    """J7: top-p before the temperature leaves another support."""
    logits = torch.tensor([[3.0, 2, 1]])
    assert processed(Sampling(temperature=0.5, top_p=0.8), logits).tolist() == [[6, CUT, CUT]]
    # Top-k first leaves .731 and .269, of which the first alone reaches .7; top-p first would leave two.
    assert processed(Sampling(top_k=2, top_p=0.7), logits).tolist() == [[3, CUT, CUT]]
    # The penalty first makes the second the largest.
    got = processed(Sampling(temperature=0.5, top_k=1, repetition_penalty=2), logits, seen_in([[0]], 3))
    assert got.tolist() == [[CUT, 4, CUT]]
    # min-p against what top-p left, not against all: the shares of one another are the same.
    assert processed(Sampling(top_p=0.95, min_p=0.3), logits).tolist() == [[3, 2, CUT]]


def test_a_token_seen_often_is_penalised_once_and_by_its_sign():
    """J9: once per occurrence made 1.0 of 8."""
    logits = torch.tensor([[8.0, 1, -2, -3, 0, CUT]])
    seen = seen_in([[0, 0, 0, 1, 2, 4, 5]], 6)
    assert seen.tolist() == [[True, True, True, False, True, True]]
    assert penalised(Sampling(repetition_penalty=2), logits, seen).tolist() == [[4, 0.5, -4, -3, 0, CUT]]
    assert penalised(Sampling(repetition_penalty=0.5), logits, seen).tolist() == [[16, 2, -1, -3, 0, CUT]]
    assert penalised(Sampling(repetition_penalty=2), logits).tolist() == logits.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_row_is_the_same_whatever_shares_the_batch(dtype):
    """J11: seeded output depended on batch mates, one of them a broken row."""
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(5, 9001, generator=generator) * 4).to(dtype)
    logits[3] = math.nan
    logits[4, :50] = logits[4, 0]
    seen = torch.rand(5, 9001, generator=generator) < 0.1
    for sampling in (NATURAL, Sampling(0.8, 40, 0.9, 0.01, 1.2, seed=42), Sampling(1.2, top_p=0.7, seed=7), GREEDY):
        together = probabilities(sampling, logits, seen)
        assert together.dtype == torch.float32
        numbers = [uniform(sampling.seed, 0, 10 + row, "draw") for row in range(5)]
        tokens = draw_rows(together, numbers)
        for row in (0, 1, 2, 4):
            alone = probabilities(sampling, logits[row : row + 1], seen[row : row + 1])
            assert torch.equal(alone[0], together[row])
            assert draw(alone[0], numbers[row]) == tokens[row]


def test_greedy_is_one_token_and_the_penalty_still_counts():
    assert Sampling(temperature=0) == GREEDY
    assert GREEDY.greedy
    assert not NATURAL.greedy
    logits = torch.tensor([[1.0, 3, 3, 2]])
    assert probabilities(GREEDY, logits).tolist() == [[0, 1, 0, 0]]
    assert processed(Sampling(temperature=0, top_p=0.1), logits).tolist() == [[CUT, 3, CUT, CUT]]
    chosen = Sampling(temperature=0.0, repetition_penalty=2)
    assert probabilities(chosen, logits, seen_in([[1, 2]], 4)).tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-30, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy_and_no_overflow(temperature):
    logits = torch.tensor([[300.0, 299, -1e30, CUT], [-4, -3, -3, -1e38], [0, 0, 0, 0]])
    got = probabilities(Sampling(temperature=temperature), logits)
    assert got.tolist() == [[1, 0, 0, 0], [0, 0.5, 0.5, 0], [0.25] * 4]


def test_settings_at_the_end_of_their_range_leave_a_distribution():
    logits = torch.tensor([[-300.0, -299, -1e30, CUT]])
    seen = torch.ones(1, 4, dtype=torch.bool)
    for sampling in (
        Sampling(temperature=1e308),
        Sampling(repetition_penalty=1e308),
        Sampling(0.5, repetition_penalty=1e300),
        Sampling(repetition_penalty=1e-300),
        Sampling(temperature=10**400),
    ):
        got = probabilities(sampling, logits, seen)
        assert float(got.sum()) == pytest.approx(1)
        assert got[0, 3] == 0
    assert probabilities(Sampling(repetition_penalty=1e-300), -logits[:, :2], seen[:, :2]).isfinite().all()


def test_what_is_cut_in_the_logits_stays_cut():
    logits = torch.tensor([[CUT, 1.0, CUT, 0.5, CUT]])
    for sampling in (NATURAL, Sampling(top_k=4), Sampling(top_p=0.999), Sampling(min_p=0.01), Sampling(1e8)):
        assert (probabilities(sampling, logits) > 0).tolist() == [[False, True, False, True, False]]
    assert (
        probabilities(Sampling(top_k=4), torch.full((1, 5), CUT).index_fill(1, torch.tensor(2), 0.0)) > 0
    ).sum() == 1


def test_broken_rows_are_found_and_the_others_are_not():
    logits = torch.zeros(6, 4)
    logits[1, 2], logits[2], logits[3, 0], logits[4, :3] = math.nan, CUT, math.inf, CUT
    logits[5, 1] = -math.nan
    assert broken(logits).tolist() == [False, True, True, True, False, True]
    assert broken(logits.bfloat16()).tolist() == [False, True, True, True, False, True]
    good = [0, 4]
    for sampling in (NATURAL, GREEDY, Sampling(0.5, 2, 0.9, 0.1, 1.5), Sampling(top_p=0.5)):
        got = probabilities(sampling, logits)
        assert torch.equal(got[good], probabilities(sampling, logits[good]))
    assert broken_message(2, 17).startswith("row 2: the logits for position 17 hold NaN")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, r"temperature \(-0.1\) must be a number at least 0 and finite; 0 is greedy"),
        ({"temperature": math.nan}, r"temperature \(nan\)"),
        ({"temperature": math.inf}, r"temperature \(inf\)"),
        ({"temperature": "0.7"}, r"temperature \('0.7'\)"),
        ({"temperature": True}, r"temperature \(True\)"),
        ({"temperature": None}, r"temperature \(None\)"),
        ({"top_k": 0}, r"top_k \(0\) must be an integer of at least 1"),
        ({"top_k": 2.0}, r"top_k \(2.0\)"),
        ({"top_k": True}, r"top_k \(True\)"),
        ({"top_p": 0}, r"top_p \(0\) must be a number above 0 and at most 1; None keeps all"),
        ({"top_p": 1.0001}, r"top_p \(1.0001\)"),
        ({"top_p": math.nan}, r"top_p \(nan\)"),
        ({"min_p": -1e-9}, r"min_p \(-1e-09\) must be a number of 0 to 1"),
        ({"min_p": 2}, r"min_p \(2\)"),
        ({"min_p": False}, r"min_p \(False\)"),
        ({"repetition_penalty": 0}, r"repetition_penalty \(0\) must be a number above 0 and finite; 1 is none"),
        ({"repetition_penalty": math.inf}, r"repetition_penalty \(inf\)"),
        ({"repetition_penalty": math.nan}, r"repetition_penalty \(nan\)"),
        ({"penalise_prompt": 1}, r"penalise_prompt \(1\) must be True or False"),
        ({"seed": -1}, r"seed \(-1\) must be an integer of at least 0"),
        ({"seed": 2**63}, r"seed \(9223372036854775808\) must be at most 9223372036854775807"),
        ({"seed": 1.0}, r"seed \(1.0\)"),
    ],
)
def test_what_is_out_of_range_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_a_sampling_is_a_value():
    with pytest.raises(FrozenInstanceError):
        NATURAL.temperature = 2
    assert Sampling(top_k=5, seed=2**63 - 1).seed == 2**63 - 1
    assert hash(Sampling(0.5)) == hash(Sampling(0.5))


@pytest.mark.parametrize(
    ("logits", "seen", "message"),
    [
        (torch.zeros(3), None, r"logits must be floats of shape \(B, V\), got torch.float32 of shape \(3,\)"),
        (torch.zeros(1, 3, dtype=torch.int64), None, "logits must be floats"),
        (torch.zeros(1, 3), torch.zeros(1, 4, dtype=torch.bool), r"seen must be bool of the logits' shape \(1, 3\)"),
        (torch.zeros(1, 3), torch.zeros(1, 3), "seen must be bool"),
    ],
)
def test_other_shapes_are_refused(logits, seen, message):
    with pytest.raises(ValueError, match=message):
        processed(NATURAL, logits, seen)
