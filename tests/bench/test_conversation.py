"""A conversation is the whole of it at once, fed turn by turn."""

import io
import json
import sys

import pytest

from attn_variants import Decoder
from attn_variants.bench import conversation as module
from attn_variants.bench.cli import main
from attn_variants.checkpoints import load_tokenizer
from attn_variants.generation import Lookup, Sampling, Stopping, generate

LINES = ["Who are you?", "Say it again.", "And again?"]


def conversed(capsys, monkeypatch, model, *flags: str, lines=LINES) -> list[dict]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["generate", "--model", str(model), "--chat", *flags, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def whole(model, rows: list[dict], lines=LINES, system: str | None = None, **options) -> None:
    """Each answer follows from the whole conversation before it, read at once."""
    tokenizer, decoder = load_tokenizer(model), Decoder.from_pretrained(model).eval()
    messages = [] if system is None else [{"role": "system", "content": system}]
    assert len(rows) == len(lines)
    for turn, (row, line) in enumerate(zip(rows, lines, strict=True)):
        messages.append({"role": "user", "content": line})
        ids = tokenizer.chat(messages)
        (wanted,) = generate(decoder, [ids], decode=tokenizer.decode, **options)
        assert (row["turn"], row["prompt_tokens"], row["ids"]) == (turn, len(ids), list(wanted.ids))
        messages.append({"role": "assistant", "content": wanted.text})


def test_turns_are_answered_as_the_whole_conversation_at_once_would_be(speaker, capsys, monkeypatch):
    rows = conversed(capsys, monkeypatch, speaker, "--max-new-tokens", "6", "--system", "Be brief.")
    whole(speaker, rows, system="Be brief.", stopping=Stopping(6))


def test_each_turn_feeds_only_what_is_new(speaker, capsys, monkeypatch):
    rows = conversed(capsys, monkeypatch, speaker, "--max-new-tokens", "6")
    assert rows[0]["fed_tokens"] == rows[0]["prompt_tokens"] == len("<u>Who are you?</><a>")
    for row, line in zip(rows[1:], LINES[1:], strict=True):
        # The last token of the answer before was never fed.
        assert row["fed_tokens"] == 1 + len(f"</><u>{line}</><a>")


def test_an_answer_whose_text_is_other_tokens_is_read_again(model, capsys, monkeypatch):
    rows = conversed(capsys, monkeypatch, model, "--max-new-tokens", "20")
    assert any("\ufffd" in row["text"] for row in rows)
    whole(model, rows, stopping=Stopping(20))


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--temperature", "2", "--seed", "5"], {"sampling": Sampling(2.0, seed=5)}),
        (["--repetition-penalty", "1.8", "--temperature", "0"], {"sampling": Sampling(0.0, repetition_penalty=1.8)}),
        (["--speculative", "lookup"], {"draft": Lookup()}),
        (["--store", "paged:7"], {}),
        (["--prefill-chunk", "4"], {}),
    ],
)
def test_it_is_the_same_with_every_option(speaker, capsys, monkeypatch, flags, options):
    rows = conversed(capsys, monkeypatch, speaker, "--max-new-tokens", "9", *flags)
    whole(speaker, rows, stopping=Stopping(9), **options)


def test_a_draft_reads_what_the_cache_holds_already(speaker, capsys, monkeypatch):
    rows = conversed(capsys, monkeypatch, speaker, "--max-new-tokens", "9", "--speculative", str(speaker))
    assert [row["acceptance_rate"] for row in rows] == [1.0, 1.0, 1.0]
    assert rows[2]["fed_tokens"] < rows[2]["prompt_tokens"]


def test_a_cache_that_is_spent_is_made_larger_and_read_again(speaker, capsys, monkeypatch):
    # The turns need 24, 43 and 62 slots.
    monkeypatch.setattr(module, "ROOM", 40)
    lines = ["Who are you?", "x", "y"]
    rows = conversed(capsys, monkeypatch, speaker, "--max-new-tokens", "6", lines=lines)
    assert rows[1]["fed_tokens"] == rows[1]["prompt_tokens"]
    assert rows[2]["fed_tokens"] < rows[2]["prompt_tokens"]
    assert [row["cache_bytes"] // (2 * 2 * 2 * 8 * 4) for row in rows] == [40, 80, 80]
    whole(speaker, rows, lines, stopping=Stopping(6))


def test_an_empty_line_ends_it(speaker, capsys, monkeypatch):
    rows = conversed(capsys, monkeypatch, speaker, "--max-new-tokens", "3", lines=["a", "", "b"])
    assert len(rows) == 1


def test_a_length_ends_it(speaker, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\nc\n"))
    flags = ["--chat", "--max-length", "30", "--format", "json"]
    assert main(["generate", "--model", str(speaker), *flags]) == 0
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["rows"]
    assert row["prompt_tokens"] + row["new_tokens"] == 30
    assert printed.err == "--max-length (30) leaves no token for an answer\n"


def test_an_interruption_ends_the_answer_alone(speaker, capsys, monkeypatch):
    said: list[str] = []

    def say(piece: str) -> None:
        said.append(piece)
        if len(said) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("attn_variants.bench.cli.to_stdout", say)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    record = speaker / "record.json"
    flags = ["--chat", "--max-new-tokens", "9", "--output", str(record)]
    assert main(["generate", "--model", str(speaker), *flags]) == 0
    first, second = json.loads(record.read_text())["rows"]
    assert (first["reason"], first["new_tokens"], len(first["text"])) == ("interrupted", 4, 4)
    tokenizer, decoder = load_tokenizer(speaker), Decoder.from_pretrained(speaker).eval()
    messages = [("user", "a"), ("assistant", first["text"]), ("user", "b")]
    ids = tokenizer.chat([{"role": role, "content": content} for role, content in messages])
    (wanted,) = generate(decoder, [ids], stopping=Stopping(9))
    assert (second["ids"], second["prompt_tokens"]) == (list(wanted.ids), len(ids))


def test_a_terminal_is_asked_on_stderr_and_reads_the_answers(speaker, capsys, monkeypatch):
    terminal = io.StringIO("a\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["generate", "--model", str(speaker), "--chat", "--max-new-tokens", "3"]) == 0
    printed = capsys.readouterr()
    tokenizer, decoder = load_tokenizer(speaker), Decoder.from_pretrained(speaker).eval()
    ids = tokenizer.chat([{"role": "user", "content": "a"}])
    (wanted,) = generate(decoder, [ids], stopping=Stopping(3), decode=tokenizer.decode)
    assert printed.out.startswith(wanted.text + "\n")
    assert printed.err == "> > \n"


def test_one_message_is_rendered_by_the_template(speaker, capsys):
    flags = ["--chat", "--prompt", "hi", "--system", "s", "--max-new-tokens", "4", "--format", "json"]
    assert main(["generate", "--model", str(speaker), *flags]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    tokenizer, decoder = load_tokenizer(speaker), Decoder.from_pretrained(speaker).eval()
    (wanted,) = generate(decoder, [tokenizer.encode("<s>s</><u>hi</><a>")], stopping=Stopping(4))
    assert (row["ids"], row["turn"]) == (list(wanted.ids), None)


def test_a_checkpoint_without_a_template_is_refused_before_weights_are_read(speaker, capsys):
    (speaker / "chat_template.jinja").unlink()
    (speaker / "model.safetensors").unlink()
    for flags in (["--chat", "--prompt", "x"], ["--chat"]):
        assert main(["generate", "--model", str(speaker), *flags]) == 2
        assert "--chat: this checkpoint has no chat template" in capsys.readouterr().err
