"""One answer of several samples, by hand."""

import pytest

from attn_variants.generation import Result, best_of, majority_vote


def result(text="", *logprobs, reason="length"):
    return Result(tuple(range(len(logprobs))), text, reason, logprobs, 1, len(logprobs))


def test_the_best_has_the_highest_mean_log_probability():
    """A sum would prefer the short one: -1.5 against -1.6 in two tokens, -0.8 each."""
    short, long = result("a", -1.5), result("b", -0.7, -0.9)
    assert best_of([short, long]) is long
    assert best_of([long, short], lambda one: one.logprob) is short


def test_of_equal_ones_the_first_is_the_best():
    one, other = result("a", -0.5), result("b", -0.5, -0.5)
    assert best_of([one, other]) is one
    assert best_of([other, one]) is other


def test_a_result_without_tokens_is_the_last_choice():
    assert best_of([result("a"), result("b", -50.0)]).text == "b"
    assert best_of([result("a")]).text == "a"


def test_errors_are_neither_best_nor_counted():
    failed = result("a", -0.1, reason="error")
    assert best_of([failed, result("b", -3.0)]).text == "b"
    assert majority_vote([failed, failed, result("b")]).votes == {"b": 1}
    for choose in (best_of, majority_vote):
        with pytest.raises(ValueError, match="none of 2 results is without an error"):
            choose([failed, failed])
        with pytest.raises(ValueError, match="none of 0 results"):
            choose([])


def test_a_score_that_is_no_number_is_never_the_best():
    one, other = result("a", -1.0), result("b", -2.0)
    scores = {"a": float("nan"), "b": 0.5}
    for order in ([one, other], [other, one]):
        assert best_of(order, lambda given: scores[given.text]) is other


def test_most_votes_win_and_of_equally_many_the_first_given():
    texts = [" 42\n", "41", "42", "41", "7"]
    vote = majority_vote([result(text) for text in texts])
    assert (vote.answer, vote.votes) == ("42", {"42": 2, "41": 2, "7": 1})
    assert majority_vote([result(text) for text in texts[1:]]).answer == "41"


def test_who_gives_no_answer_abstains():
    def number(given):
        return next((word for word in given.text.split() if word.isdecimal()), None)

    texts = ["it is 4", "no idea", "dunno", "perhaps 4", "5", "none"]
    assert majority_vote([result(text) for text in texts], number).votes == {"4": 2, "5": 1}
    with pytest.raises(ValueError, match="none of 1 results gives an answer to vote for"):
        majority_vote([result("no idea")], number)


def test_results_without_a_text_need_to_be_read():
    with pytest.raises(ValueError, match="need answer="):
        majority_vote([result(None)])
    assert majority_vote([result(None, -1.0)], lambda given: str(given.ids)).answer == "(0,)"
