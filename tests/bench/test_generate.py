"""`generate` and `fetch`: text as it comes, whole characters only, and what it cost."""

import io
import json
import sys
from pathlib import Path

import pytest

from attn_variants import Decoder
from attn_variants.bench import generate as module
from attn_variants.bench.cli import main
from attn_variants.checkpoints import fetch as fetch_module
from attn_variants.checkpoints import load_tokenizer
from attn_variants.generation import Sampling, Stopping, generate
from tests.bench.saved_models import letters, save_model

PROMPT = "Grüße"


def rows(capsys, model: Path, *arguments: str) -> list[dict]:
    assert main(["generate", "--model", str(model), *arguments, "--format", "json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["rows"]


def expected(model: Path, prompt: str, **options) -> list:
    tokenizer = load_tokenizer(model)
    decoder = Decoder.from_pretrained(model).eval()
    return generate(decoder, [tokenizer.encode(prompt)], decode=tokenizer.decode, **options)


def test_the_row_holds_the_greedy_continuation_and_its_cost(model, capsys):
    (row,) = rows(capsys, model, "--prompt", PROMPT, "--max-new-tokens", "9")
    (wanted,) = expected(model, PROMPT, stopping=Stopping(9))
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.encode(PROMPT)
    assert row["ids"] == list(wanted.ids)
    assert row["text"] == tokenizer.decode(wanted.ids)
    assert row["logprobs"] == pytest.approx(wanted.logprobs, abs=1e-4)
    assert (row["prompt_tokens"], row["new_tokens"], row["reason"]) == (len(prompt), 9, "length")
    assert (row["sample"], row["alternatives"], row["matched"], row["error"]) == (0, [], None, None)
    # k and v, 2 layers, 2 heads of 8 float32 numbers; the last token is never fed.
    assert row["cache_bytes"] == row["cache_bytes_used"] == 2 * 2 * 2 * 8 * 4 * (len(prompt) + 9 - 1)
    assert row["ttft_ms"] > 0
    assert row["tokens_per_s"] > 0


def test_what_is_streamed_is_the_text_in_pieces_that_are_never_half_a_character(model, capsys, monkeypatch):
    pieces: list[str] = []
    monkeypatch.setattr("attn_variants.bench.cli.to_stdout", pieces.append)
    record = model / "record.json"
    flags = ["--prompt", PROMPT, "--max-new-tokens", "60", "--output", str(record)]
    assert main(["generate", "--model", str(model), *flags]) == 0
    (row,) = json.loads(record.read_text())["rows"]
    assert "".join(pieces) == row["text"] + "\n"
    assert len([piece for piece in pieces if piece]) > 10


def test_a_terminal_sees_the_text_and_then_the_statistics(speaker, capsys):
    assert main(["generate", "--model", str(speaker), "--prompt", "ab", "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr().out
    (wanted,) = expected(speaker, "ab", stopping=Stopping(4))
    assert printed.startswith(wanted.text + "\n")
    assert printed.index("prompt tokens") < printed.index("tokens/s")


def test_a_file_and_stdin_are_prompts_too(speaker, capsys, monkeypatch, tmp_path):
    (tmp_path / "p.txt").write_text("abc\n")
    (wanted,) = expected(speaker, "abc\n", stopping=Stopping(5))
    (row,) = rows(capsys, speaker, "--file", str(tmp_path / "p.txt"), "--max-new-tokens", "5")
    assert row["ids"] == list(wanted.ids)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\n")))
    (row,) = rows(capsys, speaker, "--file", "-", "--max-new-tokens", "5")
    assert row["ids"] == list(wanted.ids)


def test_flags_of_sampling_and_the_seed_draw_as_the_library_does(speaker, capsys):
    flags = [
        "--temperature",
        "1.5",
        "--top-k",
        "40",
        "--top-p",
        "0.95",
        "--min-p",
        "0.01",
        "--repetition-penalty",
        "1.2",
    ]
    sampling = Sampling(1.5, 40, 0.95, 0.01, 1.2, seed=7)
    (row,) = rows(capsys, speaker, "--prompt", "ab", "--max-new-tokens", "12", *flags, "--seed", "7")
    (wanted,) = expected(speaker, "ab", sampling=sampling, stopping=Stopping(12))
    assert row["ids"] == list(wanted.ids)
    (again,) = rows(capsys, speaker, "--prompt", "ab", "--max-new-tokens", "12", *flags, "--seed", "7")
    (other,) = rows(capsys, speaker, "--prompt", "ab", "--max-new-tokens", "12", *flags, "--seed", "8")
    assert again["ids"] == row["ids"] != other["ids"]


@pytest.mark.parametrize(
    ("flags", "sampling"),
    [
        (["--top-k", "50"], Sampling(top_k=50, seed=1)),
        (["--top-p", "0.9"], Sampling(top_p=0.9, seed=1)),
        (["--min-p", "0.3"], Sampling(min_p=0.3, seed=1)),
        (["--repetition-penalty", "1.5"], Sampling(repetition_penalty=1.5, seed=1)),
        (
            ["--repetition-penalty", "3", "--no-penalise-prompt", "--temperature", "0"],
            Sampling(0, repetition_penalty=3.0, penalise_prompt=False, seed=1),
        ),
    ],
)
def test_each_flag_of_sampling_alone_means_temperature_1(speaker, capsys, flags, sampling):
    (row,) = rows(capsys, speaker, "--prompt", "ab", "--max-new-tokens", "12", *flags, "--seed", "1")
    (wanted,) = expected(speaker, "ab", sampling=sampling, stopping=Stopping(12))
    assert row["ids"] == list(wanted.ids)


def test_stops_end_the_text_and_say_by_what(speaker, capsys):
    (whole,) = expected(speaker, "ab", stopping=Stopping(24))
    text = whole.text
    assert len(text) == 24
    (row,) = rows(capsys, speaker, "--prompt", "ab", "--stop", "never there", "--stop", text[5:8])
    assert (row["text"], row["reason"], row["matched"]) == (text[: text.index(text[5:8])], "string", text[5:8])
    (row,) = rows(capsys, speaker, "--prompt", "ab", "--stop-regex", r"[\s\S]{6}$", "--max-new-tokens", "24")
    assert (row["text"], row["reason"]) == ("", "regex")
    (row,) = rows(capsys, speaker, "--prompt", "ab", "--max-length", "7")
    assert (row["text"], row["reason"], row["new_tokens"]) == (text[:5], "length", 5)
    (row,) = rows(capsys, speaker, "--prompt", "ab", "--max-new-tokens", "0")
    assert (row["ids"], row["text"], row["reason"], row["ttft_ms"]) == ([], "", "length", None)


def test_the_model_s_end_can_be_ignored(speaker, capsys):
    (wanted,) = expected(speaker, "ab", stopping=Stopping(8))
    config = json.loads((speaker / "config.json").read_text())
    (speaker / "config.json").write_text(json.dumps(config | {"eos_token_id": wanted.ids[3]}))
    (row,) = rows(capsys, speaker, "--prompt", "ab", "--max-new-tokens", "8")
    assert row["reason"] == "eos"
    assert row["ids"] == list(wanted.ids[: wanted.ids.index(wanted.ids[3]) + 1])
    (row,) = rows(capsys, speaker, "--prompt", "ab", "--max-new-tokens", "8", "--ignore-eos")
    assert (row["reason"], row["ids"]) == ("length", list(wanted.ids))


def test_a_whole_unit_ends_the_text(tmp_path, capsys):
    nest = save_model(tmp_path / "brackets", letters("ab()"), seed=5)
    flags = ["--prompt", "ab", "--temperature", "50", "--max-new-tokens", "200"]
    (row,) = rows(capsys, nest, *flags, "--stop-unit", "bracket", "--seed", "1")
    first = row["text"].index("(")
    depths = [row["text"].count("(", 0, end) - row["text"].count(")", first, end) for end in range(first + 1, 201)]
    assert (row["reason"], len(row["text"])) == ("unit", first + 1 + depths.index(0))
    count = save_model(tmp_path / "numbers", letters("1 ab"), seed=5)
    (row,) = rows(capsys, count, *flags, "--stop-unit", "json")
    assert row["reason"] == "unit"
    assert isinstance(json.loads(row["text"]), int)


def test_samples_share_the_prompt_on_pages_and_are_told_one_after_another(speaker, capsys):
    prompt = "a prompt of exactly thirty-two c"
    assert len(prompt) == 32
    flags = ["--prompt", prompt, "--n", "3", "--max-new-tokens", "5", "--store", "paged:16", "--seed", "4"]
    found = rows(capsys, speaker, *flags)
    wanted = expected(speaker, prompt, sampling=Sampling(seed=4), stopping=Stopping(5), n=3)
    assert [row["ids"] for row in found] == [list(result.ids) for result in wanted]
    assert [row["sample"] for row in found] == [0, 1, 2]
    # Two pages of the prompt, one of each sample and the pool's own: of 16 tokens, 2 layers, k and v, 2 heads of 8.
    assert {row["cache_bytes"] for row in found} == {6 * 16 * 2 * 2 * 2 * 8 * 4}
    assert {row["cache_bytes_used"] for row in found} == {(2 * 16 + 3 * 4) * 2 * 2 * 2 * 8 * 4}
    assert main(["generate", "--model", str(speaker), *flags]) == 0
    printed = capsys.readouterr().out
    for row in found:
        assert f"--- sample {row['sample']}, ended by length\n{row['text']}\n" in printed


def test_the_best_sample_has_the_highest_mean_log_probability(speaker, capsys):
    found = rows(capsys, speaker, "--prompt", "ab", "--n", "4", "--max-new-tokens", "6", "--choose", "best")
    means = [sum(row["logprobs"]) / 6 for row in found]
    assert len(set(means)) == 4
    assert [row["chosen"] for row in found] == [mean == max(means) for mean in means]


def test_a_vote_goes_to_the_text_that_most_samples_are(speaker, capsys):
    flags = ["--prompt", "ab", "--n", "9", "--max-new-tokens", "1", "--top-k", "3", "--choose", "vote"]
    found = rows(capsys, speaker, *flags)
    texts = [row["text"].strip() for row in found]
    assert len(set(texts)) > 1
    assert [row["votes"] for row in found] == [texts.count(text) for text in texts]
    winners = {row["text"] for row in found if row["chosen"]}
    assert len(winners) == 1
    assert texts.count(winners.pop().strip()) == max(map(texts.count, texts))
    assert main(["generate", "--model", str(speaker), *flags]) == 0
    assert f"--- {max(map(texts.count, texts))} of 9 say\n" in capsys.readouterr().out


def test_alternatives_are_the_likeliest_tokens_of_each_place(speaker, capsys):
    flags = ["--prompt", "ab", "--max-new-tokens", "3", "--alternatives", "4"]
    (row,) = rows(capsys, speaker, *flags)
    (wanted,) = expected(speaker, "ab", stopping=Stopping(3), alternatives=4)
    assert [[one["id"] for one in place] for place in row["alternatives"]] == [
        [id for id, _ in place] for place in wanted.alternatives
    ]
    for place, id, logprob in zip(row["alternatives"], row["ids"], row["logprobs"], strict=True):
        assert (place[0]["id"], place[0]["logprob"]) == (id, pytest.approx(logprob))
        assert place[0]["text"] == load_tokenizer(speaker).decode([id])
    assert main(["generate", "--model", str(speaker), *flags]) == 0
    assert "Log-probabilities" in capsys.readouterr().out


def test_a_prompt_read_in_chunks_goes_on_the_same(speaker, capsys, monkeypatch):
    fed: list[int] = []
    forward = Decoder.forward
    monkeypatch.setattr(
        Decoder,
        "forward",
        lambda self, ids, *rest, **more: fed.append(ids.shape[1]) or forward(self, ids, *rest, **more),
    )
    (whole,) = rows(capsys, speaker, "--prompt", "abcdefgh", "--max-new-tokens", "3")
    (chunked,) = rows(capsys, speaker, "--prompt", "abcdefgh", "--max-new-tokens", "3", "--prefill-chunk", "3")
    assert fed == [8, 1, 1, 3, 3, 2, 1, 1]
    assert chunked["ids"] == whole["ids"]


def test_a_dtype_a_store_and_a_codec_are_obeyed(speaker, capsys):
    flags = ["--dtype", "bfloat16", "--store", "ring", "--codec", "int8"]
    (row,) = rows(capsys, speaker, "--prompt", "ab", "--max-new-tokens", "4", *flags)
    assert (row["dtype"], row["store"], row["codec"]) == ("bfloat16", "ring", "int8")
    # 5 tokens; each of 2 x 2 x 2 rows of 8 numbers is 8 bytes and a scale of 2.
    assert row["cache_bytes"] == 5 * 2 * 2 * 2 * (8 + 2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prompt", ""], ["--prompt", "empty"]),
        (["--prompt", "x", "--dtype", "floot32"], ["'floot32'", "float32"]),
        (["--prompt", "x", "--max-new-tokens", "2000000000"], ["--max-new-tokens", "of memory", "238.4 GiB"]),
        (["--prompt", "x", "--store", "rin"], ["unknown store 'rin'", "ring"]),
        (["--prompt", "x", "--codec", "int8:3"], ["int8:3", "8 numbers"]),
    ],
)
def test_bad_input_is_refused_before_weights_are_read(model, capsys, arguments, parts):
    (model / "model.safetensors").unlink()
    assert main(["generate", "--model", str(model), *arguments]) == 2
    printed = capsys.readouterr()
    assert all(part in printed.err for part in parts), printed.err
    assert printed.err.count("error:") == 1
    assert printed.out == ""


def test_a_row_that_ends_in_an_error_says_so_and_the_command_fails(speaker, capsys):
    decoder = Decoder.from_pretrained(speaker)
    (speaker / "config.json").unlink()
    (speaker / "model.safetensors").unlink()
    decoder.get_parameter("lm_head.weight").data.fill_(float("nan"))
    decoder.save_pretrained(speaker)
    assert main(["generate", "--model", str(speaker), "--prompt", "ab", "--format", "json"]) == 1
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["rows"]
    assert (row["reason"], row["ids"]) == ("error", [])
    assert printed.err == f"failed: {row['error']}\n"
    assert main(["generate", "--model", str(speaker), "--prompt", "ab", "--n", "2", "--choose", "vote"]) == 1


def test_a_truncated_checkpoint_is_refused(model, capsys):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["generate", "--model", str(model), "--prompt", "x"]) == 2
    printed = capsys.readouterr()
    assert "model.safetensors" in printed.err
    assert printed.out == ""


def test_a_reader_that_goes_away_ends_the_command_quietly(speaker, capsys, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return unused.fileno()

    with (speaker / "unused").open("w") as unused:
        monkeypatch.setattr(sys, "stdout", Gone())
        with pytest.raises(SystemExit) as ended:
            main(["generate", "--model", str(speaker), "--prompt", "ab"])
    assert ended.value.code == 0
    assert capsys.readouterr().err == ""


def test_an_interruption_ends_with_130(speaker, capsys, monkeypatch):
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_answered", interrupted)
    assert main(["generate", "--model", str(speaker), "--prompt", "ab"]) == 130
    assert "Traceback" not in capsys.readouterr().err


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
