"""Two records side by side: rows found again, speeds with a verdict, exact figures exactly, bad files refused."""

import copy
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from attn_variants.bench.cli import main

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "command": "attn-bench throughput",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "a" * 40,
    "versions": {"python": "3.11.7", "attn-variants": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
    "platform": "Linux",
    "cpu": "a cpu",
    "cores": 2,
    "threads": 2,
    "device": "cpu",
    "seed": 0,
}


def speed(median=20.0, **fields):
    """A row of `throughput` whose samples lie 1 % around the median, in five turns of four."""
    row = {"subject": "small", "variant": "gqa", "peer": "attn-variants", "setting": "eager", "store": "full"}
    row |= {"codec": "plain", "sees": "all", "dtype": "float32", "device": "cpu", "threads": 2, "batch": 1}
    row |= {"context": 512, "phase": "decode", "tokens_per_s": 1e3 / median, "ms_p50": median}
    row |= {"samples": [median * (1 + 0.01 * ((5 * step) % 7 - 3) / 3) for step in range(20)], "turns": [4] * 5}
    row |= {"cache_bytes": 1000, "weight_bytes": 5000, "read_bandwidth": 1e10, "fraction_of_limit": 2 / median}
    return row | {"unquiet": False} | fields


def sizes(**fields):
    row = {"subject": "gqa", "variant": "gqa", "layers": 2, "batch": 1, "context": 512, "kv_dtype": "bfloat16"}
    row |= {"store": "full", "codec": "plain", "policy": "allocated", "entries": [{"name": "k", "heads": 2}]}
    return row | {"bytes_per_token": 64, "bytes_ideal": 32768} | fields


def checked(**fields):
    row = {"variant": "gqa", "store": "full", "codec": "plain", "backend": "sdpa", "dtype": "float32"}
    return row | {"device": "cpu", "check": "cached", "error": 1e-7, "tolerance": 1e-5, "ok": True} | fields


@pytest.fixture
def compare(tmp_path, capsys):
    """Writes two records and runs the command; its exit code, the rows and what it said on stderr."""

    def run(old, new, *flags, **other):
        paths = []
        for name, rows, environment in (("old.json", old, {}), ("new.json", new, other)):
            paths.append(tmp_path / name)
            record = {"schema": 1, "environment": ENVIRONMENT | environment, "rows": rows}
            paths[-1].write_text(json.dumps(record))
        code = main(["diff", *map(str, paths), *(flags or ("--format", "json"))])
        printed = capsys.readouterr()
        return code, printed.out if flags else json.loads(printed.out)["rows"], printed.err

    return run


def verdicts(rows):
    return [row["verdict"] for row in rows]


def test_a_slower_step_fails_and_a_faster_one_does_not(compare):
    code, rows, said = compare([speed(), speed(context=2048)], [speed(23.0), speed(17.0, context=2048)])
    assert code == 1
    assert verdicts(rows) == ["slower", "faster"]
    assert [row["ratio"] for row in rows] == pytest.approx([1.15, 0.85])
    # Their fractions of the limit are 2 / median, at the same bandwidth.
    assert [row["ratio_over_limit"] for row in rows] == pytest.approx([1.15, 0.85])
    assert all(row["ratio_low"] < row["ratio"] < row["ratio_high"] for row in rows)
    (line,) = said.splitlines()
    assert line.startswith(
        "failed: small gqa attn-variants eager full plain all float32 1 512 decode: step_ms 23, 1.150"
    )
    assert compare([speed()], [speed(17.0)])[0] == 0
    assert verdicts(compare([speed()], [speed(20.4)])[1]) == ["same within noise"]


def test_the_limit_of_each_run_makes_steps_of_two_runs_comparable(compare):
    # Memory at 0.8 of its rate, the step in 1.25 of its time: as close to what memory allows as before.
    slow = speed(25.0, read_bandwidth=0.8e10, fraction_of_limit=0.1)
    code, (row,), _ = compare([speed()], [slow])
    assert (code, row["verdict"]) == (0, "not comparable")
    assert row["why"] == "the machine changed as much: reading memory x 1.25"
    assert row["ratio"] == pytest.approx(1.25)
    assert row["ratio_over_limit"] == pytest.approx(1.0)
    assert row["machine"] == {"reading memory": pytest.approx(1.25)}


def test_a_peer_that_did_not_change_says_what_the_machine_did(compare):
    peer = {"peer": "transformers", "setting": "sdpa", "cache_bytes": 7}
    old = [speed(), speed(40.0, **peer)]
    code, (ours, theirs), _ = compare(old, [speed(24.0), speed(48.0, **peer)])
    assert ours["verdict"] == "not comparable"
    assert "transformers x 1.20" in ours["why"]
    # Of itself a peer knows only that it is slower, and that is worth a look.
    assert (theirs["verdict"], code) == ("slower", 1)
    assert verdicts(compare(old, [speed(24.0), speed(40.0, **peer)])[1]) == ["slower", "same within noise"]
    # Of another version it is no measure, nor when its cores were shared, nor in another case.
    versions = ENVIRONMENT["versions"] | {"transformers": "5.25.0"}
    assert compare(old, [speed(24.0), speed(48.0, **peer)], versions=versions)[1][0]["verdict"] == "slower"
    shared = [speed(24.0), speed(48.0, unquiet=True, **peer)]
    assert verdicts(compare(old, shared)[1]) == ["slower", "not evidence: the cores were shared"]
    elsewhere = compare([speed(), speed(40.0, context=9, **peer)], [speed(24.0), speed(48.0, context=9, **peer)])
    assert elsewhere[1][0]["verdict"] == "slower"


def test_a_peer_is_compared_by_its_fastest_setting(compare):
    old = [speed(), speed(40.0, peer="transformers", setting="dynamic cache")]
    new = [speed(24.0), speed(48.0, peer="transformers", setting="static cache")]
    ours, theirs = compare(old, new)[1]
    assert (ours["verdict"], theirs["verdict"]) == ("not comparable", "slower")
    assert theirs["why"] == "other setting: dynamic cache, then static cache"
    # Ours are ways of their own.
    assert verdicts(compare([speed()], [speed(), speed(setting="compiled")])[1]) == ["same within noise", "added"]


def test_beside_a_peer_that_held_still_smaller_changes_are_told(compare):
    peer = speed(40.0, peer="transformers")
    assert verdicts(compare([speed()], [speed(21.0)])[1]) == ["same within noise"]
    assert verdicts(compare([speed(), peer], [speed(21.0), peer])[1])[0] == "slower"
    noisy = compare([speed(noise=0.06), peer], [speed(21.0, noise=0.01), peer])
    assert verdicts(noisy[1])[0] == "same within noise"


@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
def test_shared_cores_are_no_evidence(sides, compare):
    code, (row,), _ = compare([speed(unquiet=sides[0])], [speed(40.0, unquiet=sides[1])])
    assert (code, row["verdict"]) == (0, "not evidence: the cores were shared")
    assert row["why"] == "in " + " and ".join(name for name, side in zip(("OLD", "NEW"), sides, strict=True) if side)
    assert row["ratio"] is row["ratio_low"] is row["old"] is row["new"] is None


@pytest.mark.parametrize(
    ("other", "fields", "why"),
    [
        ({"cpu": "b cpu"}, {}, "other cpu: a cpu, then b cpu"),
        ({"cores": 4}, {}, "other cores: 2, then 4"),
        ({"device": "H200"}, {"device": "cuda"}, "other device: cpu, then H200"),
        ({"threads": 1}, {"threads": 1}, "other threads: 2, then 1"),
    ],
)
def test_speeds_of_other_machines_are_not_compared(other, fields, why, compare):
    code, (row,), _ = compare([speed()], [speed(40.0, **fields)], **other)
    assert (code, row["verdict"], row["why"], row["ratio"]) == (0, "not comparable", why, None)
    text = compare([speed()], [speed(40.0, **fields)], "--format", "markdown", **other)[1]
    assert "speeds are not compared" in text


def test_another_version_of_torch_is_said(compare):
    versions = ENVIRONMENT["versions"] | {"torch": "2.14.0"}
    text = compare([speed()], [speed()], "--format", "markdown", versions=versions)[1]
    assert "| torch | 2.13.0 | 2.14.0 |" in text
    assert "a change may come from torch" in text
    assert "transformers |" not in text


def test_exact_figures_are_compared_exactly(compare):
    code, rows, _ = compare(
        [speed(), sizes(), checked(), checked(check="chunked")],
        [speed(cache_bytes=1001), sizes(bytes_ideal=32769), checked(error=2e-7), checked(check="chunked")],
    )
    assert code == 0
    changed = {row["figure"]: (row["old"], row["new"]) for row in rows if row["verdict"] == "changed"}
    assert changed == {"cache_bytes": (1000, 1001), "bytes_ideal": (32768, 32769), "error": (1e-7, 2e-7)}
    assert verdicts(rows).count("unchanged") == 1


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (checked(), checked(ok=False, error=1.0), "fails now"),
        (checked(ok=False), checked(), "holds now"),
        (checked(ok=False), checked(ok=False), "unchanged"),
        ({"model": "m", "nll": 2.5}, {"model": "m", "nll": None}, "fails now"),
        ({"model": "m", "nll": 2.5}, {"model": "m", "nll": 2.6}, "changed"),
        ({"model": "m", "reason": "eos"}, {"model": "m", "reason": "error"}, "fails now"),
    ],
)
def test_a_check_that_held_and_does_not_fails(old, new, verdict, compare):
    code, rows, said = compare([old], [new])
    assert verdict in verdicts(rows)
    assert code == (1 if verdict == "fails now" else 0)
    assert bool(said) == bool(code)


def test_what_a_clock_says_is_no_exact_figure(compare):
    old = {"model": "m", "ids": [1, 2], "ttft_ms": 5.0, "tokens_per_s": 30.0, "cache_bytes": 8}
    assert verdicts(compare([old], [old | {"ttft_ms": 6.0, "tokens_per_s": 31.0}])[1]) == ["unchanged"]
    (row,) = compare([old], [old | {"ids": [1, 3]}])[1]
    assert (row["figure"], row["old"], row["new"]) == ("ids", [1, 2], [1, 3])


def test_rows_of_one_record_alone_are_named(compare):
    code, rows, _ = compare([speed(), speed(context=2048)], [speed(), speed(store="ring")])
    assert code == 0
    lonely = {row["verdict"]: (row["store"], row["context"]) for row in rows if row["verdict"] in ("added", "gone")}
    assert lonely == {"gone": ("full", 2048), "added": ("ring", 512)}


def test_rows_that_measure_the_same_are_matched_in_their_order(compare):
    code, rows, _ = compare([speed(20.0), speed(30.0)], [speed(20.0), speed(30.0)])
    assert (code, [row["ratio"] for row in rows]) == (0, [1.0, 1.0])


def test_a_row_without_samples_is_not_comparable(compare):
    bare = speed(samples=None, turns=None)
    for old, new, where in ((speed(), bare, "NEW"), (bare, speed(), "OLD"), (bare, bare, "OLD and NEW")):
        code, (row,), _ = compare([old], [new])
        assert (code, row["verdict"], row["why"]) == (0, "not comparable", f"no samples in {where}")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "reports").glob("*.json")))
def test_a_record_does_not_differ_from_itself(name, capsys):
    path = str(ROOT / "reports" / name)
    assert main(["diff", path, path, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    count = len(json.loads(Path(path).read_text())["rows"])
    assert len(rows) >= count
    allowed = {"same within noise", "unchanged", "not comparable", "not evidence: the cores were shared"}
    assert set(verdicts(rows)) <= allowed
    assert all(
        row["why"] == "a single sample does not show its noise" for row in rows if "comparable" in row["verdict"]
    )


def test_a_real_record_with_a_third_more_time_is_slower(tmp_path, capsys):
    path = ROOT / "reports" / "stores-int8.json"
    record = json.loads(path.read_text())
    for row in record["rows"]:
        row["samples"] = [1.33 * sample for sample in row["samples"]]
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(record))
    assert main(["diff", str(path), str(slow), "--format", "json"]) == 1
    assert verdicts(json.loads(capsys.readouterr().out)["rows"]) == ["slower", "slower"]


def test_lines_are_read_as_records_are(tmp_path, capsys):
    whole, headed, each = tmp_path / "whole.json", tmp_path / "headed.jsonl", tmp_path / "each.jsonl"
    rows = [speed(), speed(30.0, context=2048)]
    head = {"schema": 1, "environment": ENVIRONMENT}
    whole.write_text(json.dumps(head | {"rows": rows}))
    headed.write_text("\n".join(map(json.dumps, [head, *rows])) + "\n")
    each.write_text("\n".join(json.dumps(row | {"environment": ENVIRONMENT}) for row in rows) + "\n")
    for lines in (headed, each):
        assert main(["diff", str(whole), str(lines), "--format", "json"]) == 0
        assert verdicts(json.loads(capsys.readouterr().out)["rows"]) == ["same within noise"] * 2


def test_every_format_tells_the_same(compare, tmp_path):
    records = [speed(), sizes()], [speed(23.0), sizes(bytes_ideal=1)]
    for form in ("table", "markdown"):
        code, text, _ = compare(*records, "--format", form)
        assert code == 1
        assert all(part in text for part in ("Records", "slower", "1.150", "bytes_ideal", "32,768"))
    cells = list(csv.DictReader(io.StringIO(compare(*records, "--format", "csv")[1])))
    assert [cell["verdict"] for cell in cells] == ["slower", "changed"]
    target = tmp_path / "diff.json"
    assert compare(*records, "--output", str(target))[0] == 1
    assert verdicts(json.loads(target.read_text())["rows"]) == ["slower", "changed"]


WHOLE = json.dumps({"schema": 1, "environment": ENVIRONMENT, "rows": [speed()]}, indent=1)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.json", None, ["No such file"]),
        ("a.json", "", ["is empty"]),
        ("a.json", WHOLE[: len(WHOLE) // 2], ["cut off", "interrupted"]),
        ("a.json", WHOLE[:-2], ["cut off"]),
        ("a.json", "subject,variant\nsmall,gqa\n", ["no JSON"]),
        ("a.json", "{'schema': 1}", ["no JSON"]),
        ("a.json", '{"schema": 1, "environment": {}, "rows": [{"error": NaN}]}', ["NaN is no number"]),
        ("a.json", "[" * 100000, ["no JSON that can be read"]),
        ("a.json", '{"model_type": "llama"}', ["no record of attn-bench"]),
        ("a.json", "[1, 2]", ["no record of attn-bench"]),
        ("a.json", '{"schema": 1, "environment": {}}', ["no record of attn-bench"]),
        ("a.json", WHOLE.replace('"schema": 1', '"schema": 2'), ["has schema 2", "reads 1"]),
        ("a.json", '{"schema": 1, "environment": {}, "rows": []}', ["holds no rows"]),
        ("a.json", '{"schema": 1, "environment": {}, "rows": [3]}', ["row 1 is no object"]),
        (
            "a.json",
            json.dumps(json.loads(WHOLE) | {"rows": [sizes()]}),
            ["no row in common", "they differ in subject;"],
        ),
        ("a.json", json.dumps(json.loads(WHOLE) | {"rows": [speed(samples=[1.0, 0.0])]}), ["row 1", "above 0"]),
        ("a.json", json.dumps(json.loads(WHOLE) | {"rows": [speed(samples="fast")]}), ["row 1", "above 0"]),
        ("a.json", json.dumps(json.loads(WHOLE) | {"rows": [speed(loop_ms=["x"])]}), ["row 1", "loop_ms", "above 0"]),
        ("a.json", json.dumps(json.loads(WHOLE) | {"rows": [speed(turns=[4])]}), ["turns ([4])", "20 samples"]),
        ("a.json", json.dumps(json.loads(WHOLE) | {"rows": [speed(noise="much")]}), ["noise ('much')"]),
        ("a.jsonl", json.dumps(speed()), ["line 1", "no environment"]),
        (
            "a.jsonl",
            json.dumps({"schema": 1, "environment": {}}) + "\n" + json.dumps(speed())[:50],
            ["line 2", "cut off"],
        ),
        ("a.jsonl", json.dumps({"schema": 3, "environment": {}}) + "\n", ["line 1", "has schema 3"]),
        ("a.jsonl", json.dumps({"schema": 1, "environment": {}}) + "\n", ["holds no rows"]),
    ],
)
def test_a_file_that_is_no_record_is_one_line_and_exit_2(name, text, parts, tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / name
    good.write_text(WHOLE)
    if text is not None:
        bad.write_text(text)
    for pair in ((good, bad), (bad, good)):
        assert main(["diff", *map(str, pair)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("error: ")
        assert all(part in line for part in [str(bad), *parts]), line


def test_bytes_that_are_no_text_and_folders_are_refused(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(WHOLE)
    bad.write_bytes(b"\x89PNG\xff")
    assert main(["diff", str(good), str(bad)]) == 2
    assert "is no JSON" in capsys.readouterr().err
    assert main(["diff", str(good), str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--seed", "--device", "--threads"])
def test_flags_that_would_mean_nothing_are_not_there(flag, capsys):
    assert main(["diff", "a.json", "b.json", flag, "1"]) == 2
    assert flag in capsys.readouterr().err


def test_records_are_compared_without_torch(tmp_path):
    record = tmp_path / "a.json"
    record.write_text(WHOLE)
    code = f"""
import sys
from attn_variants.bench.cli import main
assert main(["diff", {str(record)!r}, {str(record)!r}, "--format", "markdown"]) == 0
print([name for name in ("torch", "pandas", "transformers", "numpy") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_record_made_in_several_runs_is_taken_row_by_row(tmp_path, capsys):
    other = copy.deepcopy(ENVIRONMENT) | {"cpu": "b cpu"}
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    rows = [speed(), speed(context=2048)]
    old.write_text("\n".join(json.dumps(row | {"environment": ENVIRONMENT}) for row in rows))
    places = zip(rows, (ENVIRONMENT, other), strict=True)
    new.write_text("\n".join(json.dumps(row | {"environment": place}) for row, place in places))
    assert main(["diff", str(old), str(new), "--format", "json"]) == 0
    assert verdicts(json.loads(capsys.readouterr().out)["rows"]) == ["same within noise", "not comparable"]


def test_a_row_that_memory_did_not_hold_has_no_figures_to_compare(compare):
    refused = {"error": "out of memory: needs 2 GiB of 1 GiB", "samples": None, "turns": None, "ms_p50": None}
    refused |= dict.fromkeys(("tokens_per_s", "cache_bytes", "weight_bytes", "read_bandwidth", "fraction_of_limit"))
    code, rows, _ = compare([speed(), speed(batch=9)], [speed(), speed(batch=9, **refused)])
    assert (code, verdicts(rows)) == (0, ["same within noise", "not comparable"])
    # Nor do its bytes count as changed.
    assert (rows[1]["figure"], rows[1]["why"]) == ("step_ms", "out of memory in NEW")
    (both,) = compare([speed(**refused)], [speed(**refused)])[1]
    assert both["why"] == "out of memory in OLD and NEW"


def test_ragged_batches_are_told_apart_by_their_rows(compare):
    # 4 sequences, the longest of 512 tokens.
    ragged = [speed(batch=4, batch_spec=spec) for spec in ("3x64+1x512", "2x64+2x512")]
    slower = speed(25.0, batch=4, batch_spec="2x64+2x512")
    assert verdicts(compare(ragged, [slower, ragged[0]])[1]) == ["same within noise", "slower"]
    # Batch and context say all of rows of one length, in records from before there was a spec, too.
    assert verdicts(compare([speed(batch=4)], [speed(batch=4, batch_spec="4x512")])[1]) == ["same within noise"]
    assert compare([speed(batch=4)], ragged, "--format", "json")[0] == 2
