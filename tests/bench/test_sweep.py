"""A sweep survives what happens to it: an interruption costs the case at work, and memory that runs out one row."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_variants.bench import throughput as module
from attn_variants.bench.agreement import Agreement
from attn_variants.bench.cli import main
from attn_variants.bench.contest import contest

ROOT = Path(__file__).parents[2]
SIZES = ["--layers", "1", "--hidden-size", "48", "--heads", "6", "--kv-heads", "2", "--head-dim", "8"]
SIZES += ["--intermediate-size", "44", "--vocab-size", "50"]
SHORT = ["--repeats", "1", "--warmup", "1", "--threads", "1"]
LISTS = ["--variant", "mqa,gqa", "--batch-spec", "1x4,2x3+1x6", "--store", "full,paged:4"]
CASES = [(variant, "float32", spec) for variant in ("mqa", "gqa") for spec in ("1x4", "2x3+1x6")]

HANGS_IN_THE_THIRD_CASE = """
import sys, time
from attn_variants.bench import throughput
from attn_variants.bench.cli import main

contest, begun = throughput.contest, []

def hanging(*given):
    begun.append(given)
    if len(begun) == 3:
        time.sleep(600)
    return contest(*given)

throughput.contest, throughput.read_bandwidth = hanging, lambda device: 1e9
throughput.matmul_rates = lambda device, dtype: {dtype: 1e10}
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ceilings that need not be measured; the threads of other tests are left as they were."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(module, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(module, "matmul_rates", lambda device, dtype: {dtype: 1e10})
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every case that is measured, by its batch."""
    cases: list[str] = []

    def counted(case: Any, *given: Any) -> Any:
        cases.append(str(case.rows))
        return contest(case, *given)

    monkeypatch.setattr(module, "contest", counted)
    return cases


def sweep(path: Path, *more: str, lists: list[str] = LISTS) -> int:
    return main(["throughput", *SIZES, *lists, *SHORT, "--output", str(path), *more])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(path: Path) -> list[tuple[str, ...]]:
    """What each row of a record is of."""
    return [
        tuple(row[name] for name in ("variant", "dtype", "batch_spec", "store", "codec", "phase"))
        for row in lines(path)[1:]
    ]


ROWS = [
    (*case, store, "plain", phase) for case in CASES for store in ("full", "paged:4") for phase in ("prefill", "decode")
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What is on the disk of a sweep that was killed in its third case."""
    path = tmp_path_factory.mktemp("killed") / "sweep.jsonl"
    arguments = ["throughput", *SIZES, *LISTS, *SHORT, "--output", str(path)]
    with subprocess.Popen(
        [sys.executable, "-c", HANGS_IN_THE_THIRD_CASE, *arguments], cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and len(_there(path)) < 9:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()
    return path.read_bytes()


def _there(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def test_a_killed_sweep_has_lost_the_case_at_work_alone(killed, tmp_path):
    path = tmp_path / "sweep.jsonl"
    path.write_bytes(killed)
    assert measured(path) == ROWS[:8]
    assert lines(path)[0]["environment"]["threads"] == 1


@pytest.mark.parametrize("cut", [0, 1, 50])
def test_it_goes_on_where_it_was_killed(killed, cut, tmp_path, begun, capsys):
    """Also where its last line is cut off, by its end or by more."""
    path = tmp_path / "sweep.jsonl"
    path.write_bytes(killed[: len(killed) - cut])
    assert sweep(path, "--resume") == 0
    remaining = CASES[1:] if cut == 50 else CASES[2:]
    assert begun == [spec for _, _, spec in remaining]
    assert measured(path) == ROWS
    if cut < 50:
        assert path.read_bytes().startswith(killed)
    assert f"{4 - len(remaining)} of 4 cases are in the record already" in capsys.readouterr().err


def test_a_record_that_is_whole_is_shown_again_and_nothing_measured(killed, tmp_path, begun, capsys):
    path, whole = tmp_path / "sweep.jsonl", tmp_path / "all.json"
    path.write_bytes(killed)
    assert sweep(path, "--resume", "--output", str(whole)) == 0
    begun.clear()
    before = path.read_bytes()
    capsys.readouterr()
    assert sweep(path, "--resume") == 0
    assert (begun, path.read_bytes()) == ([], before)
    # With other cases' rows beside it, a .json of the same command holds them all, in the order they were asked for.
    assert json.loads(whole.read_text())["rows"] == lines(path)[1:]
    assert "paged:4" in capsys.readouterr().out


def test_lists_may_grow(killed, tmp_path, begun):
    path = tmp_path / "sweep.jsonl"
    path.write_bytes(killed)
    grown = [word.replace("1x4,", "1x9,1x4,").replace("mqa,gqa", "mqa") for word in LISTS]
    assert sweep(path, "--resume", lists=grown) == 0
    assert begun == ["1x9"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--warmup", "2"], "was measured with warmup 1, and this would be 2"),
        (["--seed", "3"], "was measured with seed 0, and this would be 3"),
        (["--kv-heads", "3"], "was measured with kv_heads 2, and this would be 3"),
        (["--codec", "int8"], "was measured with stores"),
        ([], "holds records already: --resume continues it"),
    ],
)
def test_a_record_of_another_command_is_refused_before_anything_is_measured(
    killed, more, said, tmp_path, begun, capsys
):
    path = tmp_path / "sweep.jsonl"
    path.write_bytes(killed + b'{"half": ')
    assert sweep(path, *(["--resume", *more] if more else [])) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line for line in errors if line.startswith("error: ")] == errors
    assert said in errors[0]
    assert (begun, path.read_bytes()) == ([], killed + b'{"half": ')


def test_cases_that_are_not_asked_for_are_not_mixed_with_others(killed, tmp_path, begun, capsys):
    path = tmp_path / "sweep.jsonl"
    path.write_bytes(killed)
    assert sweep(path, "--resume", lists=["--variant", "gqa", *LISTS[2:]]) == 2
    assert "line 2 is of mqa float32 1x4, which this command does not ask for" in capsys.readouterr().err
    assert (begun, path.read_bytes()) == ([], killed)


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    path, count = tmp_path / "sweep.jsonl", 0

    def interrupted(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return contest(*given)

    monkeypatch.setattr(module, "contest", interrupted)
    assert sweep(path) == 130
    assert f"{path} holds 2 of 4 cases; --resume goes on" in capsys.readouterr().err
    assert measured(path) == ROWS[:8]


def test_memory_that_does_not_suffice_is_a_row_and_the_sweep_goes_on(tmp_path, capsys):
    path = tmp_path / "sweep.jsonl"
    lists = ["--variant", "gqa", "--batch-spec", "1x4,1x1000m,3x4", "--store", "full,paged:4"]
    assert sweep(path, lists=lists) == 0
    rows = [row for row in lines(path)[1:] if row["phase"] == "decode"]
    assert [(row["batch_spec"], row["store"], row["error"] is None) for row in rows] == [
        *(("1x4", "full", True), ("1x4", "paged:4", True)),
        *(("1x1000m", "full", False), ("1x1000m", "paged:4", False)),
        *(("3x4", "full", True), ("3x4", "paged:4", True)),
    ]
    # 1000 Mi tokens of 2 heads x 8 numbers x 4 bytes, of keys and of values: 125 GiB in either store; in float64, with
    # what is stored and 6 scores three times, 515.6 GiB; and their ids.
    assert all(row["error"].startswith("out of memory: needs 648.4 GiB of ") for row in rows[2:4])
    assert {row["tokens_per_s"] for row in rows[2:4]} == {None}
    # Its fields are those of the other rows.
    assert [list(row) for row in rows[2:4]] == [list(rows[0])] * 2
    shown = capsys.readouterr().out
    assert "out of" in shown
    assert "needs" in shown
    # It is no case to be measured again.
    assert sweep(path, "--resume", lists=lists) == 0
    assert len(lines(path)) == 1 + 4 + 2 + 4


def test_when_nothing_fits_the_run_has_failed(tmp_path, capsys):
    path = tmp_path / "sweep.jsonl"
    assert sweep(path, lists=["--variant", "gqa", "--batch-spec", "1x1000m"]) == 1
    assert "failed: no case fits in memory" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_rows_too(tmp_path):
    path = tmp_path / "sweep.jsonl"
    large = ["--intermediate-size", "2000000000"]
    assert sweep(path, *large, lists=["--variant", "gqa", "--batch-spec", "1x4"]) == 1
    (row,) = lines(path)[1:]
    assert row["error"].startswith("out of memory: the weights alone need 1.048 TiB of ")


def test_memory_that_runs_out_while_measuring_is_a_row(tmp_path, monkeypatch):
    def greedy(case: Any, *given: Any) -> Any:
        if case.batch == 2:
            torch.empty(1 << 60, dtype=torch.uint8)
        return contest(case, *given)

    monkeypatch.setattr(module, "contest", greedy)
    path = tmp_path / "sweep.jsonl"
    assert sweep(path, lists=["--variant", "gqa", "--batch-spec", "1x4,2x4,3x4"]) == 0
    errors = {row["batch_spec"]: row["error"] for row in lines(path)[1:]}
    assert (errors["1x4"], errors["3x4"]) == (None, None)
    assert "can't allocate memory" in errors["2x4"]


def test_other_errors_are_not_taken_for_it(tmp_path, monkeypatch):
    def broken(*given: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(module, "contest", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        sweep(tmp_path / "sweep.jsonl")


def test_a_check_that_failed_fails_the_resumed_run_too(tmp_path, monkeypatch, capsys):
    path, lists = tmp_path / "sweep.jsonl", ["--variant", "gqa", "--batch-spec", "1x4"]
    judge = Agreement.judge
    monkeypatch.setattr(Agreement, "judge", lambda *given: [*judge(*given), "gqa computes other logits"])
    assert sweep(path, lists=lists) == 1
    monkeypatch.undo()
    capsys.readouterr()
    assert sweep(path, "--resume", lists=lists) == 1
    assert "failed: gqa computes other logits" in capsys.readouterr().err


def test_progress_says_how_long_it_still_takes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("attn_variants.bench.progress.QUIET_SECONDS", 0.0)
    assert sweep(tmp_path / "sweep.jsonl") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("throughput ")]
    # The ceiling and each of 4 cases' prefill and one turn; before a case is done nothing is known.
    assert [line.split(":")[0] for line in said] == [f"throughput {number}/9" for number in range(1, 10)]
    assert [" left" in line for line in said] == [False] * 3 + [True] * 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-spec", "4x8k", "--context", "5"], "--batch-spec says what --context would; give one or the other"),
        (["--batch-spec", "4x8k", "--batch", "5", "--context", "5"], "says what --batch and --context would"),
        (["--batch-spec", "4y8k"], "--batch-spec (4y8k) is no batch; give sequences x tokens"),
        (["--resume"], "--resume goes on with a record of one line per row; name it with --output FILE.jsonl"),
        (["--resume", "--output", "a.json"], "--resume goes on with a record of one line per row"),
        (["--output", "a.jsonl", "--format", "json"], "--format json and --output a.jsonl exclude each other"),
        (["--output", "a.jsonl", "--output", "b.jsonl"], "one .jsonl is written while measuring; give one"),
        (["--context", "2147483647"], "context 2147483647 and 8 steps more are beyond the 2147483647 tokens"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["throughput", *SIZES, *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_command_writes_lines_where_the_suffix_says_so(tmp_path):
    path = tmp_path / "memory.jsonl"
    assert main(["memory", "--variant", "gqa,mla", "--output", str(path)]) == 0
    first, *rows = lines(path)
    assert (first["schema"], "environment" in first) == (1, True)
    assert [row["variant"] for row in rows] == ["gqa", "mla"]
