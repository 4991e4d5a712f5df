"""What the flags of `generate` cannot mean is one line that names the flag, before anything is loaded."""

import importlib.util

import pytest

from attn_variants.bench import generate_flags as module
from attn_variants.bench.cli import main
from attn_variants.bench.generate_flags import NEW_TOKENS, Drawing, Ending
from attn_variants.contract import LARGEST_SIZE
from attn_variants.generation import GREEDY, Sampling

P = ["--prompt", "x"]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ["no prompt", "--prompt", "--file", "--chat"]),
        ([*P, "--file", "y"], ["--prompt and --file exclude each other"]),
        (["--prompt", ""], ["--prompt is empty"]),
        (["--file", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
        (["--prompt", "a\udcff"], ["--prompt 'a\\udcff' is no UTF-8 text"]),
        ([*P, "--system", "Be brief."], ["--system", "--chat"]),
        ([*P, "--temperature", "nan"], ["--temperature (nan)", "at least 0"]),
        ([*P, "--temperature", "-1"], ["--temperature (-1.0)", "at least 0"]),
        ([*P, "--temperature", "inf"], ["--temperature (inf)", "finite"]),
        ([*P, "--temperature", "warm"], ["--temperature", "'warm'"]),
        ([*P, "--top-k", "0"], ["--top-k (0)", "at least 1"]),
        ([*P, "--top-k", "1.5"], ["--top-k", "'1.5'", "integer"]),
        ([*P, "--top-p", "0"], ["--top-p (0.0)", "above 0"]),
        ([*P, "--top-p", "1.01"], ["--top-p (1.01)", "at most 1"]),
        ([*P, "--top-p", "nan"], ["--top-p (nan)", "at most 1"]),
        ([*P, "--min-p", "-0.1"], ["--min-p (-0.1)", "0 to 1"]),
        ([*P, "--min-p", "nan"], ["--min-p (nan)", "0 to 1"]),
        ([*P, "--repetition-penalty", "0"], ["--repetition-penalty (0.0)", "above 0"]),
        ([*P, "--repetition-penalty", "nan"], ["--repetition-penalty (nan)", "above 0"]),
        ([*P, "--no-penalise-prompt"], ["--no-penalise-prompt", "--repetition-penalty"]),
        ([*P, "--max-new-tokens", "-1"], ["--max-new-tokens (-1)", "at least"]),
        ([*P, "--max-new-tokens", "99999999999"], ["--max-new-tokens (99999999999)", "at most"]),
        ([*P, "--max-length", "0"], ["--max-length (0)", "at least 1"]),
        ([*P, "--stop", ""], ["--stop ''", "empty"]),
        ([*P, "--stop-regex", "("], ["--stop-regex '('", "invalid"]),
        ([*P, "--stop-regex", "a*"], ["--stop-regex 'a*'", "matches the empty text"]),
        ([*P, "--stop-unit", "xml"], ["--stop-unit", "'xml'", "json"]),
        ([*P, "--n", "0"], ["--n (0)", "at least 1"]),
        ([*P, "--choose", "best"], ["--choose best", "--n"]),
        ([*P, "--n", "2", "--choose", "worst"], ["--choose", "'worst'", "vote"]),
        ([*P, "--alternatives", "-1"], ["--alternatives (-1)", "0 to"]),
        ([*P, "--prefill-chunk", "0"], ["--prefill-chunk (0)", "at least 1"]),
        ([*P, "--draft-tokens", "3"], ["--draft-tokens", "--speculative"]),
        ([*P, "--speculative", "lookup", "--draft-tokens", "0"], ["--draft-tokens (0)", "at least 1"]),
        ([*P, "--speculative", ""], ["--speculative is empty"]),
        ([*P, "--no-cache", "--speculative", "lookup"], ["--no-cache and --speculative exclude each other"]),
        ([*P, "--no-cache", "--n", "2"], ["--no-cache", "--n 2"]),
        (["--chat", "--n", "2"], ["--n 2", "conversation"]),
        (["--chat", "--no-cache"], ["--no-cache", "conversation"]),
        ([*P, "--plot", "x.png"], ["--plot", "--no-cache"]),
        ([*P, "--no-cache", "--plot", "x.gif"], ["--plot x.gif", ".png or .svg"]),
        ([*P, "--no-cache", "--plot", "/nowhere/x.png"], ["--plot /nowhere/x.png", "there is no folder /nowhere"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(flags, parts, capsys):
    assert main(["generate", "--model", "/no/model", *flags]) == 2
    printed = capsys.readouterr()
    assert all(part in printed.err for part in parts), printed.err
    assert printed.err.count("error:") == 1
    assert "/no/model" not in printed.err
    assert printed.out == ""


def test_a_drawing_without_matplotlib_is_refused_naming_the_extra(capsys, monkeypatch, tmp_path):
    there = importlib.util.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "matplotlib" else there(name))
    plot = tmp_path / "x.png"
    assert main(["generate", "--model", "/no/model", *P, "--no-cache", "--plot", str(plot)]) == 2
    assert "attn-variants[plots]" in capsys.readouterr().err


def test_nothing_said_is_greedy_and_several_samples_are_drawn():
    assert Drawing().sampling(3, several=False) is GREEDY
    assert Drawing().sampling(3, several=True) == Sampling(seed=3)
    assert Drawing(temperature=0).sampling(3, several=True).greedy
    assert Drawing(top_k=4).sampling(3, several=False) == Sampling(temperature=1, top_k=4, seed=3)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, NEW_TOKENS),
        ({"max_new_tokens": 0}, 0),
        ({"max_new_tokens": 7}, 7),
        ({"max_length": 300}, LARGEST_SIZE),
        ({"max_length": 300, "max_new_tokens": 7}, 7),
    ],
)
def test_a_length_alone_leaves_the_number_of_new_tokens_to_it(given, most):
    stopping = Ending(**given).stopping()
    assert stopping.max_new_tokens == most
    assert stopping.max_length == given.get("max_length")
