"""Where a sequence ends and what of its text stays: worked by hand, and against a search of the whole text."""

import itertools
import json
import re

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from attn_variants.generation import Stopping, matches

END = 0


def watched(tokens, stopping, **given):
    """The watch of a sequence whose tokens are these texts, None being an end token, pushed until one is the last.

    Checks at every token that what may be streamed is a front of the text that stays.
    """
    vocab = dict(enumerate(tokens, 1))
    watch = stopping.watch(lambda ids: "".join(vocab[id] for id in ids), model_eos=[END], **given)
    shown = [watch.shown()]
    for index, token in enumerate(tokens, 1):
        if watch.reason:
            break
        watch.push(END if token is None else index)
        shown.append(watch.shown())
        assert "".join(shown) == watch.text
    assert watch.shown() == ""
    assert all(watch.text.startswith(text) for text in itertools.accumulate(shown))
    return watch


def ended(tokens, stopping, **given):
    """The number of tokens, the reason, the text and what matched."""
    watch = watched(tokens, stopping, **given)
    return len(watch.ids), watch.reason, watch.text, watch.matched


def streamed(tokens, stopping):
    """What each token lets out."""
    vocab = dict(enumerate(tokens))
    watch = stopping.watch(lambda ids: "".join(vocab[id] for id in ids))
    return [(watch.push(id), watch.shown())[1] for id in vocab]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_number_of_new_tokens_is_exact(most):
    assert ended(list("abcd"), Stopping(most)) == (most, "length", "abcd"[:most], None)


def test_no_token_at_all_is_a_length_too():
    watch = Stopping(0).watch(str)
    assert (watch.reason, watch.ids, watch.text, watch.shown()) == ("length", [], "", "")


@pytest.mark.parametrize(("max_length", "prompt", "new"), [(7, 4, 3), (7, 6, 1), (7, 7, 0), (7, 9, 0), (99, 4, 5)])
def test_the_length_counts_the_prompt_and_the_smaller_limit_holds(max_length, prompt, new):
    stopping = Stopping(5, max_length=max_length)
    assert ended(list("abcdefgh"), stopping, prompt_tokens=prompt) == (new, "length", "abcdefgh"[:new], None)


def test_an_end_token_is_an_id_and_no_text():
    assert ended(["a", "b", None, "c"], Stopping()) == (3, "eos", "ab", None)


@pytest.mark.parametrize(
    ("eos", "count"),
    [(None, 3), (7, 2), ((7,), 2), ([9, 8], 3), ((), 4), (iter([8]), 4)],
    ids=["the model's", "7", "(7,)", "[9, 8]", "()", "an iterator"],
)
def test_end_tokens_are_the_models_unless_others_are_given(eos, count):
    """A model whose config says 7 and whose generation_config says [7, 9] knows both; here it writes 9 third."""
    watch = Stopping(4, eos=eos).watch(model_eos=(9, 8) if eos is None else (5,))
    for id in (1, 7, 9, 3)[:count]:
        assert watch.reason is None
        watch.push(id)
    assert watch.reason == ("length" if count == 4 else "eos")
    assert (watch.text, watch.shown()) == (None, "")


def test_sequences_of_one_stopping_are_apart():
    stopping = Stopping(strings="ab", regex="x+y", unit="json")
    rows = [stopping.watch(lambda ids: "".join(map(chr, ids))) for _ in range(2)]
    rows[0].push(ord("a"))
    assert [rows[1].push(ord("b")), rows[0].push(ord("b"))] == [None, "string"]
    assert [row.text for row in rows] == ["", "b"]


# Stop strings.


@pytest.mark.parametrize(
    ("tokens", "strings", "expected"),
    [
        (["one ", "END", "more"], "END", (2, "string", "one ", "END")),
        (["one E", "N", "D more", "x"], "END", (3, "string", "one ", "END")),
        (["a", "...", "b"], "..", (2, "string", "a", "..")),
        (["wait.", ".", "."], "..", (2, "string", "wait", "..")),
        (["aab", "aabaac", "d"], "aabaac", (2, "string", "aab", "aabaac")),
        (["a\n", "\n", "b"], ["\n\n", "zz"], (2, "string", "a", "\n\n")),
        (["x", "say stop and end"], ["end", "stop"], (2, "string", "xsay ", "stop")),
        (["abc"], ["b", "abc"], (1, "string", "", "abc")),
        (["ab"], ["ab", "a"], (1, "string", "", "ab")),
        (["never", " here"], "herf", (2, "length", "never here", None)),
        (["alme", "nd"], "end", (2, "string", "alm", "end")),
        (["🙂", "‍", "x"], "🙂‍", (2, "string", "", "🙂‍")),
    ],
)
def test_a_stop_string_cuts_the_text_before_it(tokens, strings, expected):
    assert ended(tokens, Stopping(len(tokens), strings=strings)) == expected


def test_ids_with_the_same_text_are_the_same_stop():
    vocab = {9: "a", 10: "T", 11: "T"}
    watch = Stopping(strings="T").watch(lambda ids: "".join(vocab[id] for id in ids))
    assert [watch.push(9), watch.push(11)] == [None, "string"]
    assert (watch.ids, watch.text) == ([9, 11], "a")


def test_the_prompt_is_not_searched_nor_its_end_together_with_the_text():
    """The prompt ended in `EN`."""
    assert ended(["D", "x", None], Stopping(strings="END"), prompt_tokens=2) == (3, "eos", "Dx", None)


def test_what_may_begin_a_stop_waits_until_it_is_none():
    assert streamed(["ab", "c ", "EN", "E", "ND"], Stopping(strings=["END"])) == ["ab", "c ", "", "EN", ""]
    assert streamed(["aaa", "aab"], Stopping(strings=["aaab"])) == ["", "aa"]
    assert streamed(["a", "b", "c"], Stopping(strings=["bcd", "cx"])) == ["a", "", ""]
    assert streamed(["a", "b", "c", "x"], Stopping(4, strings=["bcd", "bcx"])) == ["a", "", "", ""]
    assert streamed(["a", "b"], Stopping(2, strings=["bc"])) == ["a", "b"]


def test_half_a_character_waits_and_cannot_hide_a_stop():
    text = "x🙂END".encode()
    watch = Stopping(strings="🙂E").watch(lambda ids: bytes(ids).decode(errors="replace"))
    shown = [(watch.push(id), watch.shown()) for id in text[:6]]
    assert shown == [(None, "x"), *[(None, "")] * 4, ("string", "")]


@pytest.mark.parametrize(("last", "reason"), [(0x9F, "length"), (3, "eos")])
def test_half_a_character_at_the_end_is_text(last, reason):
    watch = Stopping(3, eos=3).watch(lambda ids: bytes(ids).decode(errors="replace"))
    assert [watch.push(id) for id in (ord("a"), 0xF0, last)] == [None, None, reason]
    assert (watch.text, watch.shown()) == ("a�", "a�")


def test_a_stop_that_is_whole_only_at_the_end_still_cuts():
    watch = Stopping(2, strings="a�").watch(lambda ids: bytes(ids).decode(errors="replace"))
    assert [watch.push(ord("a")), watch.push(0xF0)] == [None, "string"]
    assert (watch.text, watch.matched) == ("", "a�")


# Regular expressions.


@pytest.mark.parametrize(
    ("tokens", "pattern", "expected"),
    [
        (["price 1", "2", " euro"], r"\d+ e", (3, "regex", "price ", "12 e")),
        (["abc 12", "3"], r"\d+", (1, "regex", "abc ", "12")),
        (["Q: a", "\nQ", ": b"], r"\n(?:Q|A):", (3, "regex", "Q: a", "\nQ:")),
        (["keep ", "END", "."], r"(?<=END)", (2, "regex", "keep END", "")),
        (["done", "."], r"done$", (1, "regex", "", "done")),
        (["xdone", "done"], r"^done", (2, "length", "xdonedone", None)),
        (["stra", "SSE"], re.compile("STRASSE", re.I), (2, "regex", "", "straSSE")),
        (["é", "a"], re.compile(r"\w", re.A), (2, "regex", "é", "a")),
        (["ab", "CD"], regex.compile(r"\L<words>", words=["bC", "Cx"]), (2, "regex", "a", "bC")),
        (["ab b", "c"], ["bc", "a.*c"], (2, "regex", "", "ab bc")),
        (["never", " here"], "herf?$x", (2, "length", "never here", None)),
    ],
)
def test_a_regular_expression_cuts_the_text_before_its_match(tokens, pattern, expected):
    assert ended(tokens, Stopping(len(tokens), regex=pattern)) == expected


def test_what_may_begin_a_match_waits_until_it_is_none():
    stopping = Stopping(5, regex=[r"\d+ euro", "zz"])
    assert streamed(["costs 1", "2 ", "eu", "r x", "z"], stopping) == ["costs ", "", "", "12 eur x", "z"]


def test_a_search_that_takes_too_long_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(matches, "REGEX_SECONDS", 0.02)
    watch = Stopping(regex="(a|aa)+b").watch(lambda ids: "a" * 60)
    with pytest.raises(ValueError, match=r"regex '\(a\|aa\)\+b' took longer than 0\.02 s on 60 characters; write it"):
        watch.push(1)


# Units.


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ('{"a": [1, 2]}', " tail"),
        (' \n{"a": "}"}', "}"),
        ('"say \\"hi\\" \\\\"', '"'),
        ("[[], {}]", "]"),
        ("12", " "),
        ("-0.5e+10", ","),
        ("12", ".x"),
        ("1", "e+x"),
        ("0", "1"),
        ("true", ""),
        ("null", "x"),
        ("-Infinity", ""),
    ],
)
def test_a_json_value_ends_the_text_just_after_it(text, rest):
    for tokens in ([text + rest], list(text + rest)):
        assert ended([*tokens, "more"], Stopping(unit="json"))[1:] == ("unit", text, text.strip())


def test_a_json_number_may_be_longer_than_python_reads():
    digits = "7" * 5000
    assert ended([digits, "\n"], Stopping(unit="json")) == (2, "unit", digits, digits)


def test_a_value_that_may_go_on_is_not_whole():
    assert ended(["1", "2", "3", "]"], Stopping(unit="json")) == (4, "unit", "123", "123")
    assert ended(["12", None], Stopping(unit="json")) == (2, "eos", "12", None)
    assert streamed(["1", ".", "5", "e", "-", "x"], Stopping(unit="json")) == ["1", "", ".5", "", "", ""]
    assert ended(["-", "I", "n"], Stopping(3, unit="json")) == (3, "length", "-In", None)


@pytest.mark.parametrize("text", ["Sure: {}", "{a: 1} {}", "[1,] []", "nul {}", "-x 1", "]"])
def test_a_text_that_is_no_json_never_ends_by_it(text):
    for tokens in ([text], list(text)):
        assert ended(tokens, Stopping(len(tokens), unit="json")) == (len(tokens), "length", text, None)


def test_a_value_that_is_nested_too_deeply_for_json_never_ends():
    text = "[" * 99_999 + "]" * 99_999
    assert ended([text, "1"], Stopping(2, unit="json")) == (2, "length", text + "1", None)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("f(a, (b), c)", " + (d)"),
        ("see [1] ", ""),
        ("{ ( } ", ""),
        ("x) = {1: ')'}", "}"),
        ('print(")", "\\")(")', ")"),
        ('6" (six)', '"'),
        ("it's (it's)", ")"),
    ],
)
def test_the_bracket_that_closes_the_first_ends_the_text(text, rest):
    text, matched = text.rstrip(), regex.search(r"[\[({].*", text.rstrip())[0]
    for tokens in ([text + rest], list(text + rest)):
        assert ended([*tokens, "!"], Stopping(unit="bracket"))[1:] == ("unit", text, matched)


def test_brackets_that_are_not_closed_do_not_end():
    assert ended(list("((a) [b]"), Stopping(8, unit="bracket")) == (8, "length", "((a) [b]", None)


# Several at one token.


@pytest.mark.parametrize(
    ("tokens", "stopping", "expected"),
    [
        (["a", None], Stopping(2), (2, "eos", "a", None)),
        (["a", "b"], Stopping(2, strings="b"), (2, "string", "a", "b")),
        (["x12 END"], Stopping(1, strings="END", regex=r"\d+"), (1, "regex", "x", "12")),
        (["xEND 12"], Stopping(1, strings="END", regex=r"\d+"), (1, "string", "x", "END")),
        (["END"], Stopping(1, strings="END", regex=r"E|N"), (1, "string", "", "END")),
        (['{"a": 1}END'], Stopping(1, strings="END", unit="json"), (1, "unit", '{"a": 1}', '{"a": 1}')),
        (['{"a": "END"}'], Stopping(1, strings="END", unit="json"), (1, "string", '{"a": "', "END")),
    ],
)
def test_of_several_reasons_an_end_token_then_the_least_text_then_the_length(tokens, stopping, expected):
    assert ended(tokens, stopping) == expected


def test_tokens_of_a_draft_end_at_the_first_reason():
    watch = Stopping(strings="c").watch(lambda ids: "".join(map(chr, ids)))
    taken = list(itertools.takewhile(lambda id: watch.push(id) is None, map(ord, "abcdef")))
    assert ("".join(map(chr, taken)), watch.text, len(watch.ids)) == ("ab", "ab", 3)
    with pytest.raises(AssertionError, match=r"follows the end of a sequence \(string\)"):
        watch.push(ord("d"))


# Against a search of the whole text after every token.


def split(text, sizes):
    """Pieces of these sizes, and the rest."""
    ends = [0, *itertools.takewhile(lambda end: end < len(text), itertools.accumulate(sizes)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def oracle(tokens, find):
    """Tokens, reason and text of a search that is made anew at every token."""
    for count in range(1, len(tokens) + 1):
        text = "".join(tokens[:count])
        if found := find(text):
            reason, cut = min(found, key=lambda item: item[1])
            return count, reason, text[:cut]
    return len(tokens), "length", "".join(tokens)


TOKENS = st.lists(st.text("ab.", max_size=4), min_size=1, max_size=12)


@given(TOKENS, st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=3))
def test_stop_strings_are_found_as_in_the_whole_text(tokens, strings):
    expected = oracle(tokens, lambda text: [("string", text.find(string)) for string in strings if string in text])
    assert ended(tokens, Stopping(len(tokens), strings=strings))[:3] == expected


PATTERNS = [r"a+b", r"a{3}", r"b+?a", r"(?:ab)+\.", r"b(?=a)", r"(?<=a)\.", r"^b", r"\.$", r"(a|b)\1\.", r"a[^b]*?\.b"]


@given(TOKENS, st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3), st.text("ab.", min_size=4, max_size=6))
def test_regular_expressions_beside_a_string_are_found_as_in_the_whole_text(tokens, patterns, string):
    def find(text):
        strings = [("string", text.find(string))] if string in text else []
        return strings + [("regex", found.start()) for pattern in patterns if (found := regex.search(pattern, text))]

    stopping = Stopping(len(tokens), regex=patterns, strings=string)
    assert ended(tokens, stopping)[:3] == oracle(tokens, find)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\]}🙂\n', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('"}b', max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES, st.booleans(), st.lists(st.integers(1, 5), max_size=40), st.sampled_from(["", " ", "\n\t"]))
def test_any_json_value_in_any_pieces_is_one_unit(value, ascii_only, sizes, space):
    text = space + json.dumps(value, ensure_ascii=ascii_only)
    tokens = split(text + " {}", sizes)
    assert ended(tokens, Stopping(999, unit="json"))[1:3] == ("unit", text)


@given(st.text('([{}])"a', max_size=20), st.lists(st.integers(1, 4), max_size=20))
def test_a_closing_bracket_is_where_it_is_in_the_whole_text(text, sizes):
    """Recursive, and of one kind of bracket, where the watch counts."""
    quoted = r'"(?:[^"\\]|\\.)*+"'
    kinds = [rf'\{o}(?:[^"\{o}\{c}]|{quoted}|(?R))*+\{c}' for o, c in ("()", "[]", "{}")]
    first = regex.search(r"[(\[{]", text)
    whole = first and regex.compile(kinds["([{".index(first[0])]).match(text, first.start())
    expected = ("unit", text[: whole.end()]) if whole else ("length", text)
    tokens = split(text, sizes)
    assert ended(tokens, Stopping(len(tokens), unit="bracket"))[1:3] == expected


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -1}, r"max_new_tokens \(-1\) must be an integer of at least 0"),
        ({"max_new_tokens": True}, r"max_new_tokens \(True\) must be an integer"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens \(2\.0\) must be an integer"),
        ({"max_length": 0}, r"max_length \(0\) must be an integer of at least 1"),
        ({"eos": 2.5}, r"eos \(2\.5\) must be token ids"),
        ({"eos": [1, None]}, r"eos \(None\) must be token ids"),
        ({"eos": -1}, r"eos \(-1\) must be token ids"),
        ({"strings": ""}, r"a stop string is empty"),
        ({"strings": ["a", ""]}, r"a stop string is empty"),
        ({"strings": ["a", b"b"]}, r"stop string b'b' must be text"),
        ({"strings": 7}, r"strings \(7\) must be one text or several"),
        ({"regex": "("}, r"regex '\(' is invalid: missing \)"),
        ({"regex": "a*"}, r"regex 'a\*' matches the empty text"),
        ({"regex": ["a", "$"]}, r"regex '\$' matches the empty text"),
        ({"regex": re.compile(b"a")}, r"regex b'a' must be text"),
        ({"regex": [7]}, r"regex 7 must be text"),
        ({"regex": 7}, r"regex \(7\) must be one text or several"),
        ({"regex": "(?r)ab"}, r"regex '\(\?r\)ab' searches backwards"),
        # Token by token they were missed: a search goes on from behind what they need to see.
        ({"regex": r"foo\Kbar"}, r"regex 'foo.*' hangs on where a search begins, by .K, .*a lookbehind does not"),
        ({"regex": r"\\\Gb"}, r"hangs on where a search begins, by .G"),
        ({"unit": "jsn"}, r"unknown unit 'jsn'.*json.*\(known: json, bracket\)"),
    ],
)
def test_a_stop_that_cannot_be_meant_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Stopping(**arguments)


def test_what_a_lookbehind_sees_may_have_been_shown_and_a_lookahead_waits():
    assert ended(list("a foobar"), Stopping(regex=r"(?<=foo)bar")) == (8, "regex", "a foo", "bar")
    assert ended(list("ab\n\ncd"), Stopping(regex=r"(?<=\n\n)")) == (4, "regex", "ab\n\n", "")
    assert ended(list("foo foobar"), Stopping(regex=r"foo(?=bar)")) == (10, "regex", "foo ", "foo")
    # An escaped backslash before a K is no \K.
    assert ended(["\\", "K"], Stopping(regex=r"\\K")) == (2, "regex", "", "\\K")


@pytest.mark.parametrize("arguments", [{"strings": "a"}, {"regex": "a"}, {"unit": "json"}])
def test_a_stop_in_the_text_needs_a_decode(arguments):
    with pytest.raises(ValueError, match="looked for in the text; give decode"):
        Stopping(**arguments).watch()
