"""`generate` and `fetch`: text as it comes, whole characters only, and what it cost."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from attn_variants import Decoder
from attn_variants.bench import generate as module
from attn_variants.bench.case import decoder_config, random_decoder
from attn_variants.bench.cli import main
from attn_variants.bench.generate import generate_report
from attn_variants.checkpoints import fetch as fetch_module
from attn_variants.checkpoints import load_tokenizer
from attn_variants.generation import Stopping, Token, generate
from tests import tiny

PROMPT = "Grüße"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with random weights and a tokenizer whose 256 tokens are bytes, so that characters come in pieces."""
    geometry = replace(tiny.GEOMETRY, vocab_size=256, hidden_size=48)
    random_decoder(decoder_config("gqa", geometry), dtype="float32", device="cpu", seed=2).save_pretrained(tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_the_row_holds_the_greedy_continuation_and_its_cost(model, capsys):
    arguments = ["generate", "--model", str(model), "--prompt", PROMPT, "--max-new-tokens", "9", "--format", "json"]
    assert main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.encode(PROMPT)
    (wanted,) = generate(Decoder.from_pretrained(model), [prompt], stopping=Stopping(9))
    assert row["ids"] == list(wanted.ids)
    assert row["text"] == tokenizer.decode(wanted.ids)
    assert (row["prompt_tokens"], row["new_tokens"], row["reason"]) == (len(prompt), 9, "length")
    # k and v, 2 layers, 2 heads of 8 float32 numbers; the last token is never fed.
    assert row["cache_bytes"] == 2 * 2 * 2 * 8 * 4 * (len(prompt) + 9 - 1)
    assert row["ttft_ms"] > 0
    assert row["tokens_per_s"] > 0


def test_what_is_streamed_is_the_text_in_pieces_that_are_never_half_a_character(model):
    pieces: list[str] = []
    report = generate_report(
        str(model), PROMPT, max_new_tokens=60, dtype=None, device="cpu", say=lambda piece: pieces.append(piece)
    )
    assert "".join(pieces) == report.rows[0]["text"] + "\n"
    assert len(pieces) > 10


@pytest.mark.parametrize(
    ("written", "pieces"),
    [
        (b"a\xc3\xa9", ["a", "é", "\n"]),
        # A sequence that ends within a character says so, once there is nothing left to wait for.
        (b"a\xc3", ["a", "\ufffd\n"]),
    ],
)
def test_half_a_character_waits_for_its_other_half(monkeypatch, written, pieces):
    monkeypatch.setattr(module, "stream", lambda *args, **kwargs: iter(Token(0, byte, None) for byte in written))
    said: list[str] = []
    row = module._generated(
        tiny.decoder("gqa"), [1], lambda ids: bytes(ids).decode(errors="replace"), len(written), said.append
    )
    assert [piece for piece in said if piece] == pieces
    assert row["text"] + "\n" == "".join(pieces)


def test_a_terminal_sees_the_text_and_then_the_statistics(model, capsys):
    assert main(["generate", "--model", str(model), "--prompt", "ab", "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert printed.index("prompt tokens") > 0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prompt", ""], ["--prompt", "empty"]),
        (["--prompt", "x", "--max-new-tokens", "0"], ["--max-new-tokens (0)", "at least 1"]),
        (["--prompt", "x", "--dtype", "floot32"], ["'floot32'", "float32"]),
    ],
)
def test_bad_input_is_refused(model, capsys, arguments, parts):
    assert main(["generate", "--model", str(model), *arguments]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts)


def test_a_truncated_checkpoint_is_refused(model, capsys):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["generate", "--model", str(model), "--prompt", "x"]) == 2
    printed = capsys.readouterr()
    assert "model.safetensors" in printed.err
    assert printed.out == ""


def test_fetch_tells_the_folder(monkeypatch, capsys, tmp_path):
    def fetched(name, *, force, progress):
        assert (name, force) == ("smollm2-135m", True)
        progress("downloading")
        return tmp_path

    monkeypatch.setattr(fetch_module, "fetch", fetched)
    assert main(["fetch", "smollm2-135m", "--force", "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"] == [{"model": "smollm2-135m", "folder": str(tmp_path)}]
    assert printed.err == "downloading\n"


def test_a_download_that_fails_is_one_line(monkeypatch, capsys):
    def broken(name, *, force, progress):
        raise ValueError("the hash is wrong; nothing was kept")

    monkeypatch.setattr(fetch_module, "fetch", broken)
    assert main(["fetch", "smollm2-135m"]) == 2
    assert capsys.readouterr().err == "error: the hash is wrong; nothing was kept\n"
