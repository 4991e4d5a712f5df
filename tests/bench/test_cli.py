"""The command: a mistake is one line and an exit code, nothing is half-written, and sizes cost no import of torch."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attn_variants.bench import cli
from attn_variants.bench.cli import main

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "pandas", "transformers", "numpy")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that ends with exit code 2 and prints nothing else."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == ""
    assert lines[0].startswith("error: ")
    assert all(line.startswith("hint: ") for line in lines[1:])
    return lines[0]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("memory --variant gqq", ["unknown variant 'gqq'", "did you mean gqa"]),
        ("memory --model lama-3.1-8b", ["'lama-3.1-8b'", "did you mean llama-3.1-8b"]),
        ("memory --kv-dtype bf17", ["unknown kv_dtype 'bf17'", "did you mean bfloat16"]),
        ("memory --tp 3", ["tp (3) must divide num_attention_heads (32)"]),
        ("memory --tp 0", ["--tp (0)", "at least 1"]),
        ("memory --policy idael", ["unknown policy 'idael'", "did you mean ideal"]),
        ("memory --policy transformers", ["mha: policy 'transformers' prices models that have a config.json"]),
        ("memory --budget 80Gig", ["--budget (80Gig)", "80GiB (2**30) or 80GB (10**9)"]),
        ("memory --weights 5GB", ["--weights", "--budget"]),
        ("memory --tp 2 --allocate", ["--allocate", "--tp"]),
        ("compare gqa lama-3.1-8b", ["'lama-3.1-8b'", "did you mean llama-3.1-8b"]),
        ("models --kv-dtype fp9", ["unknown kv_dtype 'fp9'"]),
        ("memory --store fill", ["unknown store 'fill'", "full"]),
        ("memory --codec plan", ["unknown codec 'plan'", "plain"]),
        ("memory --variant gqa --model llama-3.1-8b", ["--variant", "--model", "exclude each other"]),
        ("memory --layers 2 --model llama-3.1-8b", ["--layers", "--model", "exclude each other"]),
        ("memory --heads 6 --kv-heads 4", ["(6)", "multiple", "(4)"]),
        ("memory --heads 0", ["heads (0)", "at least 1"]),
        ("memory --kv-lora-rank -3", ["kv_lora_rank (-3)", "at least 1"]),
        ("memory --qk-rope-head-dim 5", ["qk_rope_head_dim (5)", "even", "give another"]),
        ("memory --head-dim 7", ["head_dim (7)", "even", "give another"]),
        ("memory --layers 99999999999999999999", ["layers (99999999999999999999)", "at most 10000"]),
        ("memory --heads 99999999999999999999", ["heads (99999999999999999999)", "at most 2147483647"]),
        ("memory --context 99999999999999999999", ["--context (99999999999999999999)", "at most 2147483647"]),
        ("memory --batch 99999999999999999999", ["--batch (99999999999999999999)", "at most 2147483647"]),
        ("memory --context 2147483647 --batch 2147483647 --allocate", ["not enough memory"]),
        ("memory --threads 99999999", ["--threads (99999999)", "the cores there are"]),
        ("memory --seed 99999999999999999999999", ["--seed (99999999999999999999999)", "2**63 - 1"]),
        ("memory --seed -1", ["--seed (-1)", "0 to"]),
        ("memory --kv-dtype int64", ["int64", "float32"]),
        ("memory --variant GQA", ["unknown variant 'GQA'", "did you mean gqa"]),
        ("memory --model=", ["--model is empty"]),
        ("parity --heads 6 --kv-heads 4", ["(6)", "multiple", "(4)"]),
        ("throughput --heads 6 --kv-heads 4", ["(6)", "multiple", "(4)"]),
        ("throughput --qk-rope-head-dim 15", ["qk_rope_head_dim (15)", "even"]),
        ("generate --model x --prompt y --max-new-tokens 99999999999", ["--max-new-tokens (99999999999)", "at most"]),
        ("memory --batch 0", ["--batch (0)", "at least 1"]),
        ("memory --context -1", ["--context (-1)", "at least 1"]),
        ("memory --batch two", ["--batch", "'two'", "integer"]),
        ("memory --layers=1.5", ["--layers", "'1.5'", "integer"]),
        ("memory --threads 0", ["--threads (0)", "at least 1"]),
        ("memory --format yaml", ["--format", "yaml", "markdown"]),
        ("memory --variant ,", ["--variant", "','", "nothing"]),
        ("memory --variants mha", ["--variants"]),
        ("memory extra", ["extra"]),
        ("memery", ["memery", "memory"]),
        ("--format json memory", ["--format before memory"]),
        ("parity --dtype float64", ["float64", "float32, float16, bfloat16"]),
        ("parity --dtype bf17", ["unknown dtype 'bf17'"]),
        ("parity --variant mhaa", ["unknown variant 'mhaa'", "mha"]),
        ("parity --backend sdqa", ["unknown backend 'sdqa'", "sdpa"]),
        ("throughput --context 512,none", ["--context (none)", "an integer of 1 to"]),
        ("throughput --batch 0", ["--batch (0)", "an integer of 1 to"]),
        ("throughput --repeats 0", ["--repeats (0)", "at least 1"]),
        ("throughput --preset-geometry llama-100", ["unknown preset geometry 'llama-100'", "llama-100m"]),
        ("throughput --preset-geometry llama-100m --heads 4", ["--heads", "--preset-geometry", "exclude each other"]),
        ("throughput --against vllm", ["unknown peer 'vllm'", "transformers"]),
        ("throughput --dtype int8", ["'int8'", "float32"]),
        ("fetch smollm2-135", ["'smollm2-135'", "smollm2-135m"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_value_and_what_would_be_right(
    arguments: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, *arguments.split())
    assert all(part in message for part in parts), message


COMMANDS = ["", "memory", "memory --allocate", "parity", "throughput", "generate --model x --prompt y"]


@pytest.mark.parametrize("command", COMMANDS)
def test_cuda_is_refused_where_there_is_none(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    message = refused(capsys, *command.split(), "--device", "cuda")
    assert "--device cuda" in message
    assert "--device cpu" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("{", "JSON"),
        ("[1, 2]", "object"),
        ('{"model_type": "llama", "hidden_size": 0}', "hidden_size"),
        ('{"model_type": "lama"}', "llama"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_by_name(
    text: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    assert part in refused(capsys, "memory", "--model", str(config))
    assert part in refused(capsys, "memory", "--model", str(tmp_path))


def test_a_missing_model_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "nowhere")
    assert missing in refused(capsys, "memory", "--model", missing)
    assert missing in refused(capsys, "generate", "--model", missing, "--prompt", "x")


def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "variant_subject", lambda *arguments: pytest.fail("work was begun"))
    missing = tmp_path / "none" / "rows.json"
    assert str(missing.parent) in refused(capsys, "memory", "--output", str(missing))
    assert str(tmp_path) in refused(capsys, "memory", "--output", str(tmp_path))


def test_an_output_is_written_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "rows.json"
    target.write_text("what was there")
    refused(capsys, "memory", "--output", str(target), "--variant", "gqq")
    assert target.read_text() == "what was there"
    assert main(["memory", "--output", str(target), "--variant", "gqa"]) == 0
    assert json.loads(target.read_text())["rows"][0]["subject"] == "gqa"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    assert capsys.readouterr().out == ""


def test_an_output_that_is_a_link_or_a_pipe_stays_one(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "rows.json", tmp_path / "link.json", tmp_path / "pipe.json"
    target.write_text("what was there")
    link.symlink_to(target)
    assert main(["memory", "--output", str(link), "--variant", "gqa"]) == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["schema"] == 1
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        assert main(["memory", "--output", str(pipe), "--variant", "gqa"]) == 0
        assert json.loads(read.result(timeout=30))["schema"] == 1
    assert pipe.is_fifo()


def test_outputs_take_the_format_of_their_suffix_unless_one_is_named(tmp_path: Path) -> None:
    names = ["rows.json", "rows.csv", "rows.md", "rows.txt"]
    outputs = [word for name in names for word in ("--output", str(tmp_path / name))]
    assert main(["memory", "--variant", "mla", *outputs]) == 0
    as_json, as_csv, as_markdown, as_table = ((tmp_path / name).read_text() for name in names)
    assert json.loads(as_json)["schema"] == 1
    assert next(csv.DictReader(io.StringIO(as_csv)))["variant"] == "mla"
    assert "|---|" in as_markdown
    assert "mla" in as_table
    assert main(["memory", "--variant", "mla", "--format", "csv", *outputs[:2]]) == 0
    assert (tmp_path / "rows.json").read_text() == as_csv


def test_the_same_rows_come_out_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(form: str) -> str:
        assert main(["memory", "--variant", "gqa,mla", "--format", form]) == 0
        return capsys.readouterr().out

    rows = json.loads(printed("json"))["rows"]
    cells = list(csv.DictReader(io.StringIO(printed("csv"))))
    assert [int(cell["bytes_formula"]) for cell in cells] == [row["bytes_formula"] for row in rows]
    assert json.loads(cells[0]["entries"]) == rows[0]["entries"]
    for form in ("table", "markdown"):
        text = printed(form)
        assert all(row["subject"] in text and f"{row['bytes_per_token']:,}" in text for row in rows)


def test_the_record_says_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["memory", "--variant", "mqa", "--format", "json", "--seed", "7", "--threads", "1"]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == 1
    environment = record["environment"]
    assert environment["command"] == "attn-bench " + " ".join(arguments)
    assert environment["seed"] == 7
    assert {"python", "torch", "attn-variants", "transformers", "numpy"} <= environment["versions"].keys()
    assert {"date", "commit", "cpu", "cores", "threads", "device", "platform"} <= environment.keys()


@pytest.mark.parametrize("form", ["table", "json", "csv", "markdown"])
@pytest.mark.parametrize("subject", ["--variant mha,mla", "--model llama-3.1-8b", "--shapes --layers 2"])
def test_sizes_are_told_without_torch_or_pandas(form: str, subject: str) -> None:
    code = f"""
import sys
from attn_variants.bench.cli import main
assert main({["memory", *subject.split(), "--format", form]!r}) == 0
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    assert python(code).stderr.splitlines()[-1] == "[]"


def test_help_needs_no_torch() -> None:
    code = """
import sys
from attn_variants.bench.cli import main
main(["throughput", "--help"])
print("torch" in sys.modules)
"""
    assert python(code).stdout.splitlines()[-1] == "False"


def test_python_dash_m_runs_the_command() -> None:
    command = [sys.executable, "-m", "attn_variants.bench", "memory", "--variant", "mha", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["rows"][0]["subject"] == "mha"


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    # More than a pipe holds, so that the reader is gone before the end; an unbuffered stream would not even notice.
    command = [sys.executable, "-m", "attn_variants.bench", "memory", "--shapes", "--layers=1000", "--format=json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": ""}, **pipes) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == "{\n"
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 0


def test_no_color_is_honoured_on_a_terminal() -> None:
    # A table's title is bold where colour is shown.
    code = """
import io, sys
from attn_variants.bench.tables import Column, Table, as_text
sys.stdout.isatty = lambda: True
print(repr(as_text([Table("title", (Column("a", "a"),), [{"a": 1}])])))
"""
    assert "\\x1b[" in python(code, TERM="xterm").stdout
    assert "\\x1b[3" not in python(code, TERM="xterm", NO_COLOR="1").stdout


def test_an_interruption_ends_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "variant_subject", interrupt)
    # What starts in the background of a script ignores the signal; a command on a terminal does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["memory"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Traceback" not in capsys.readouterr().err
