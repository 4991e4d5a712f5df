"""`generate --speculative`: the same text, and what the draft was worth."""

import json

import pytest

from attn_variants.bench.cli import main
from attn_variants.generation.speedup import expected_speedup
from tests.bench.saved_models import LETTERS, letters, save_model

PROMPT = ["--prompt", "one two one two one", "--max-new-tokens", "20"]


def rows(capsys, model, *flags: str) -> list[dict]:
    assert main(["generate", "--model", str(model), *PROMPT, *flags, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.fixture
def draft(tmp_path):
    return save_model(tmp_path / "draft", letters(), seed=8, layers=1)


def test_greedy_text_is_the_same_with_a_draft_and_with_lookup(speaker, draft, capsys):
    (plain,) = rows(capsys, speaker)
    assert "acceptance_rate" not in plain
    for name in ("lookup", str(draft)):
        (row,) = rows(capsys, speaker, "--speculative", name, "--draft-tokens", "3")
        assert (row["ids"], row["reason"]) == (plain["ids"], "length")
        assert (row["speculative"], row["draft_tokens"]) == (name, 3)
        assert row["rounds"] <= 19
        assert row["tokens_per_call"] == pytest.approx(19 / row["rounds"])


def test_a_model_that_drafts_for_itself_is_always_accepted(speaker, capsys):
    (row,) = rows(capsys, speaker, "--speculative", str(speaker), "--draft-tokens", "4", "--temperature", "1")
    # The first token comes of the prompt; then 19, of which a round writes 5, the last 4.
    assert (row["acceptance_rate"], row["rounds"], row["tested"]) == (1, 4, 15)
    assert row["tokens_per_call"] == 19 / 4
    assert row["speedup"] == pytest.approx(row["tokens_per_s"] / row["plain_tokens_per_s"])
    assert row["expected_speedup"] == pytest.approx(expected_speedup(1, 4, row["draft_cost"]))


def test_lookup_costs_next_to_nothing(speaker, capsys):
    (row,) = rows(capsys, speaker, "--speculative", "lookup")
    assert row["draft_tokens"] == 8
    assert row["proposed"] >= row["tested"] >= row["accepted"] >= 0
    assert 0 < row["draft_cost"] < 0.2
    assert row["expected_speedup"] == expected_speedup(row["acceptance_rate"], 8, row["draft_cost"])


def test_every_sample_has_figures_of_its_own(speaker, draft, capsys):
    found = rows(capsys, speaker, "--speculative", str(draft), "--n", "2")
    assert len({tuple(row["ids"]) for row in found}) == 2
    assert all(row["rounds"] > 0 and row["plain_tokens_per_s"] > 0 for row in found)


def test_a_reader_sees_what_the_draft_was_worth(speaker, capsys):
    assert main(["generate", "--model", str(speaker), *PROMPT, "--speculative", "lookup"]) == 0
    printed = capsys.readouterr().out
    assert "expected speed-up" in printed
    assert "tokens per call" in printed


@pytest.mark.parametrize(
    ("alphabet", "parts"),
    [
        (LETTERS[:90], ["vocabulary of 90 tokens and the model one of 96", "lookup"]),
        (LETTERS[::-1], [r"'\n' is token 0 of the model and 95 of the draft", "lookup"]),
    ],
)
def test_a_draft_with_another_vocabulary_is_refused_before_weights_are_read(speaker, capsys, tmp_path, alphabet, parts):
    other = save_model(tmp_path / "other", letters(alphabet), seed=1)
    for folder in (speaker, other):
        (folder / "model.safetensors").unlink()
    assert main(["generate", "--model", str(speaker), *PROMPT, "--speculative", str(other)]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in [f"--speculative {other}", *parts]), message


def test_a_draft_that_is_not_there_is_refused(speaker, capsys):
    assert main(["generate", "--model", str(speaker), *PROMPT, "--speculative", "lookupp"]) == 2
    assert "--speculative lookupp: lookupp: no such folder" in capsys.readouterr().err
