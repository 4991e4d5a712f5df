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
    drafting = Lookup(6, longest, shortest).open(batch=3, capacity=1, vocab_size=1)
    drafting.begin(2, list(text[:5]))
    for length in range(5, len(text)):
        found = drafting.propose({2: 5}, None)
        assert found == {2: Proposal(tuple(searched(text[:length], 5, longest, shortest)))}
        drafting.grow(2, [text[length]])


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
    ],
)
def test_sizes_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Lookup(**options)
