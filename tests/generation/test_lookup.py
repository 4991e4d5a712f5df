"""Prompt lookup against a search of the whole text, and by hand."""

import random

import pytest

from attn_variants.generation.drafts import Proposal
from attn_variants.generation.lookup import Lookup


def proposed(text, limit=8, **options):
    drafting = Lookup(**options).open(batch=1, capacity=1, vocab_size=1)
    drafting.begin(0, list(text))
    return "".join(drafting.propose({0: limit}, None)[0].ids)


def searched(text, limit, longest, shortest):
    """The same by reading the text backwards."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if len(text) >= size and text[end - size : end] == text[-size:]:
                whole = text
                while len(whole) < len(text) + limit:
                    whole += whole[end + len(whole) - len(text)]
                return whole[len(text) :]
    return ""


@pytest.mark.parametrize(
    ("text", "continuation"),
    [
        ("the cat. the", " cat. th"),
        ("abcXabcYabc", "YabcYabc"),  # the most recent occurrence
        ("xbcP..abcQ..xbc", "P..abcQ."),  # three tokens before two, though two stood later
        ("bcP..abcQ..zbc", "Q..zbcQ."),
        ("aaaa", "aaaaaaaa"),
        ("abab", "abababab"),
        ("abcd", ""),
        ("a", ""),
        ("", ""),
    ],
)
def test_the_longest_run_that_stood_before_goes_on(text, continuation):
    assert proposed(text) == continuation


def test_never_more_than_the_limit_or_its_tokens():
    assert proposed("abcdefghi.abc", limit=3) == "def"
    assert proposed("abcdefghi.abc", tokens=2) == "de"
    assert proposed("abcdefghi.abc", limit=0) == ""


def test_a_run_shorter_than_the_shortest_is_none():
    assert proposed("abXc.dab", shortest=2) == "Xc.dabXc"
    assert proposed("aXc.da", shortest=2) == ""


@pytest.mark.parametrize("seed", range(4))
def test_an_index_of_each_token_finds_what_a_search_finds(seed):
    draws = random.Random(seed)
    longest = draws.randint(1, 4)
    shortest = draws.randint(1, longest)
    text = "".join(draws.choice("abc") for _ in range(60))
    drafting = Lookup(6, longest, shortest, least=0).open(batch=3, capacity=1, vocab_size=1)
    drafting.begin(2, list(text[:5]))
    for length in range(5, len(text)):
        found = drafting.propose({2: 5}, None)
        assert found == {2: Proposal(tuple(searched(text[:length], 5, longest, shortest)))}
        drafting.grow(2, [text[length]])


def test_it_proposes_where_it_was_right_lately():
    """By hand: after `a` came the b it would have proposed, after `b` an x and not the point.

    Its share is (0.9 x (0.9 x 1 + 1) + 0) / (0.9 x (0.9 x 1 + 1) + 1) = 0.631, with the one before the first. Of eight
    such tokens 0.631 + 0.398 + 0.251 + ... = 1.67 are expected to be taken, of two 1.03.
    """
    for options, number in (
        ({"least": 1.6}, 8),
        ({"least": 1.7}, 0),
        ({"least": 1.0, "tokens": 2}, 2),
        ({"least": 5.0, "tokens": 2}, 2),  # half of them is enough
        ({"least": 5.0, "tokens": 9}, 0),
        ({"least": 0.0, "tokens": 9}, 9),
    ):
        drafting = Lookup(longest=1, **options).open(batch=1, capacity=1, vocab_size=1)
        drafting.begin(0, list("ab.a"))
        drafting.grow(0, "b")
        assert len(drafting.propose({0: 99}, None)[0].ids) == options.get("tokens", 8)
        drafting.grow(0, "x")
        assert drafting.propose({0: 99}, None)[0].ids == ()
        drafting.grow(0, "a")  # nothing was known of x, so that nothing was right or wrong
        assert len(drafting.propose({0: 99}, None)[0].ids) == number


def test_near_the_end_it_proposes_fewer_but_expects_the_same():
    drafting = Lookup(longest=1, least=1.6).open(batch=1, capacity=1, vocab_size=1)
    drafting.begin(0, list("ab.a"))
    drafting.grow(0, "bxa")
    assert drafting.propose({0: 1}, None)[0].ids == ("b",)


def test_runs_of_different_lengths_are_judged_apart():
    """A lone token's continuation was wrong five times, and right once; those of two tokens are yet to be seen."""
    drafting = Lookup(tokens=3, longest=2, least=1.5).open(batch=1, capacity=1, vocab_size=1)
    drafting.begin(0, list("pqr"))
    drafting.grow(0, "1q2q3q4q5pq")
    assert drafting.propose({0: 3}, None)[0].ids == tuple("r1q")
    drafting.grow(0, "6q")
    assert drafting.propose({0: 3}, None)[0].ids == ()


def test_the_prompt_says_nothing_of_how_often_it_is_right():
    """In it `abc` was never followed by what had followed it before; what is written may yet copy it."""
    drafting = Lookup().open(batch=1, capacity=1, vocab_size=1)
    drafting.begin(0, list("abcXabcYabcZabcWabc"))
    assert drafting.propose({0: 8}, None)[0].ids == tuple("WabcWabc")


def test_rows_begin_and_end_apart():
    drafting = Lookup().open(batch=2, capacity=1, vocab_size=1)
    drafting.begin(0, [1, 2, 1])
    drafting.begin(1, [1, 5, 1])
    assert {row: found.ids[:2] for row, found in drafting.propose({0: 4, 1: 4}, None).items()} == {0: (2, 1), 1: (5, 1)}
    drafting.end(0)
    drafting.begin(0, [1, 7, 1])
    assert drafting.propose({0: 1}, None)[0].ids == (7,)


def test_a_long_text_is_not_read_again_for_each_token():
    """The index grows by the number of sizes per token, and a proposal looks up as many."""
    drafting = Lookup(longest=3).open(batch=1, capacity=1, vocab_size=1)
    drafting.begin(0, range(1000))
    assert len(drafting._rows[0]._ends) == 999 + 998 + 997
    drafting.grow(0, [500])
    assert drafting.propose({0: 2}, None)[0].ids == (501, 502)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, r"tokens \(0\) must be an integer of at least 1"),
        ({"shortest": 0}, r"shortest \(0\)"),
        ({"longest": 1, "shortest": 2}, r"longest \(1\) must be at least shortest \(2\)"),
        ({"least": -1}, r"least \(-1\) must be a number of at least 0"),
        ({"least": float("nan")}, r"least \(nan\)"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Lookup(**options)
