"""`score`: the perplexity of a text by variant, store and codec, beside the bytes of its cache."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from attn_variants import Decoder
from attn_variants.bench import score as module
from attn_variants.bench.case import decoder_config, random_decoder
from attn_variants.bench.cli import main
from attn_variants.checkpoints import load_tokenizer
from tests import tiny

TEXT = "Größer als gedacht, und doch: nichts.\n"


def saved(folder: Path, variant: str) -> Path:
    """A folder with random weights and a tokenizer whose 256 tokens are bytes."""
    geometry = replace(tiny.GEOMETRY, vocab_size=256, hidden_size=48, kv_lora_rank=128)
    random_decoder(decoder_config(variant, geometry), dtype="float32", device="cpu", seed=2).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def model(tmp_path) -> Path:
    return saved(tmp_path / "gqa", "gqa")


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def rows(capsys, *arguments):
    assert main(["score", *map(str, arguments), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def nll_of(model: Path, ids) -> float:
    """From the logits of one pass without a cache."""
    with torch.no_grad():
        chances = Decoder.from_pretrained(model)(torch.tensor([ids]))[0].double().log_softmax(-1)
    return -sum(float(chances[at, token]) for at, token in enumerate(ids[1:])) / (len(ids) - 1)


def test_a_row_holds_the_perplexity_and_the_bytes(model, text, capsys):
    (row,) = rows(capsys, "--model", model, "--text", text)
    ids = load_tokenizer(model).encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    assert (row["variant"], row["store"], row["codec"], row["dtype"]) == ("gqa", "full", "plain", "float32")
    assert row["tokens"] == len(ids) - 1
    assert row["nll"] == pytest.approx(nll_of(model, ids), abs=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
    assert row["delta_nll"] == 0
    # k and v, 2 layers, 2 heads of 8 float32 numbers.
    assert row["bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert row["cache_bytes"] == row["bytes_per_token"] * (len(ids) - 1), "the last token is not fed"


def test_every_store_and_codec_stands_beside_full_and_plain(model, text, capsys):
    asked = ["--model", model, "--text", text, "--store", "full,ring,paged:8", "--codec", "int8,int4"]
    found = rows(capsys, *asked, "--max-tokens", "30")
    by_pair = {(row["store"], row["codec"]): row for row in found}
    assert list(by_pair) == [
        ("full", "plain"),
        *[(store, codec) for store in ("full", "ring", "paged:8") for codec in ("int8", "int4")],
    ]
    assert {row["tokens"] for row in found} == {29}
    base = by_pair["full", "plain"]
    for (_, codec), row in by_pair.items():
        assert row["delta_nll"] == pytest.approx(row["nll"] - base["nll"], abs=1e-12)
        # 16 numbers of K and V per layer at 4 bytes, 1 byte or half of one; a scale of 2 bytes per head.
        per_head = {"plain": 8 * 4, "int8": 8 + 2, "int4": 4 + 4}[codec]
        assert row["bytes_per_token"] == 2 * 2 * 2 * per_head
        assert (row["delta_nll"] == 0) == (codec == "plain")
    assert by_pair["paged:8", "int8"]["cache_bytes"] == (math.ceil(29 / 8) + 1) * 8 * 2 * 2 * 2 * 10


def test_a_codec_shows_whatever_the_steps(model, text, capsys):
    """A step onto an empty cache reads its own keys and values: the first token goes by itself."""
    asked = ["--model", model, "--text", text, "--codec", "int4"]
    for chunk in ("1", "3", "16", "100"):
        plain, coded = rows(capsys, *asked, "--chunk", chunk)
        assert plain["delta_nll"] == 0
        if chunk == "1":
            decoded = coded["delta_nll"]
            assert abs(decoded) > 1e-5
        assert coded["delta_nll"] == pytest.approx(decoded, abs=2e-6)


def test_two_tokens_are_enough(model, tmp_path, capsys):
    (tmp_path / "two.txt").write_text("ab")
    (row,) = rows(capsys, "--model", model, "--text", tmp_path / "two.txt")
    assert (row["tokens"], row["nll"]) == (
        1,
        pytest.approx(nll_of(model, load_tokenizer(model).encode("ab")), abs=1e-5),
    )


def test_mla_is_scored_with_the_expanded_cache_too(tmp_path, text, capsys):
    folder = saved(tmp_path / "mla", "mla")
    assert main(["score", "--model", str(folder), "--text", str(text), "--codec", "fp8-mla", "--format", "json"]) == 0
    printed = capsys.readouterr()
    found = {(row["variant"], row["codec"]): row for row in json.loads(printed.out)["rows"]}
    assert list(found) == [("mla", "plain"), ("mla", "fp8-mla"), ("mla-expanded", "plain")]
    assert "mla-expanded goes without full fp8-mla: codec fp8-mla is for a record of latent and k_rope" in printed.err
    assert found["mla-expanded", "plain"]["nll"] == pytest.approx(found["mla", "plain"]["nll"], abs=1e-4)
    # Per layer a latent of 128 and a rope key of 4, or 6 keys of 14 and values of 12.
    assert found["mla", "plain"]["bytes_per_token"] == 2 * 132 * 4
    assert found["mla-expanded", "plain"]["bytes_per_token"] == 2 * 6 * 26 * 4
    assert found["mla", "fp8-mla"]["delta_nll"] != 0


def test_dtypes_are_each_compared_with_their_own(model, text, capsys):
    found = rows(capsys, "--model", model, "--text", text, "--dtype", "fp32,bf16", "--codec", "plain,int4")
    assert [(row["dtype"], row["codec"]) for row in found] == [
        (dtype, codec) for dtype in ("float32", "bfloat16") for codec in ("plain", "int4")
    ]
    for plain, coded in (found[:2], found[2:]):
        assert plain["delta_nll"] == 0
        assert coded["delta_nll"] == pytest.approx(coded["nll"] - plain["nll"], abs=1e-12)
    assert found[0]["nll"] != found[2]["nll"]


def test_stdin_tables_csv_and_markdown(model, text, capsys, monkeypatch, tmp_path):
    (wanted,) = rows(capsys, "--model", model, "--text", text)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    output = tmp_path / "scores.csv"
    asked = ["score", "--model", str(model), "--text", "-", "--output", str(output), "--output", str(tmp_path / "s.md")]
    assert main(asked) == 0
    head, line = output.read_text().splitlines()
    fields = dict(zip(head.split(","), line.split(","), strict=True))
    assert float(fields["nll"]) == wanted["nll"]
    assert f"| full | plain | {wanted['tokens']} | {wanted['nll']:.5f} |" in (tmp_path / "s.md").read_text()
    assert main(["score", "--model", str(model), "--text", str(text)]) == 0
    assert "16 tokens at a time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "arguments", "parts"),
    [
        (None, [], ["text.txt", "No such file"]),
        (b"", [], ["--text", "text.txt is empty"]),
        (b"a", [], ["the text has 1 tokens", "at least 2"]),
        (b"gr\xfcn", [], ["text.txt is no UTF-8 text", "at byte 2"]),
        (b"ab", ["--max-tokens", "1"], ["--max-tokens (1)", "at least 2"]),
        (b"ab", ["--chunk", "0"], ["--chunk (0)", "at least 1"]),
        (b"ab", ["--codec", "int5"], ["unknown codec 'int5'"]),
        (b"ab", ["--codec", "fp8-mla"], ["codec fp8-mla is for a record of latent and k_rope"]),
        (b"ab", ["--store", "rung"], ["unknown store 'rung'"]),
        (b"ab", ["--dtype", "floot32"], ["'floot32'", "float32"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model, tmp_path, capsys, monkeypatch, data, arguments, parts):
    monkeypatch.setattr(module.Decoder, "from_pretrained", lambda *given, **more: pytest.fail("weights were read"))
    path = tmp_path / "text.txt"
    if data is not None:
        path.write_bytes(data)
    assert main(["score", "--model", str(model), "--text", str(path), *arguments]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in parts)
    assert printed.out == ""


def test_a_folder_is_no_text(model, tmp_path, capsys):
    assert main(["score", "--model", str(model), "--text", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Is a directory" in line


def test_a_model_that_gives_no_number_fails(model, text, capsys, monkeypatch):
    given = Decoder.from_pretrained

    def broken(*arguments, **options):
        decoder = given(*arguments, **options)
        decoder.model.norm.weight.data[0] = math.nan
        return decoder

    monkeypatch.setattr(module.Decoder, "from_pretrained", broken)
    assert main(["score", "--model", str(model), "--text", str(text), "--format", "json"]) == 1
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["rows"]
    assert (row["nll"], row["perplexity"], row["delta_nll"]) == (None, None, None)
    assert "failed: gqa full plain float32: the log-likelihood is no finite number" in printed.err
