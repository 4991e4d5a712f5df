"""A sweep's record keeps every whole case, whatever interrupted it, and is left as it is by a command it is not for."""

import json
from pathlib import Path
from typing import Any

import pytest

from attn_variants.bench.sweep_file import SweepFile

MACHINE = {"platform": "Linux", "cpu": "8086", "cores": 2, "threads": 1, "device": "cpu", "commit": "abc"}
ENVIRONMENT: dict[str, Any] = MACHINE | {"command": "attn-bench throughput", "versions": {"torch": "2.13.0"}}
SWEEP = {"repeats": 2, "stores": [["full", "plain"]]}
KEYS = [("gqa", "float32", spec) for spec in ("1x8", "1x16", "2x5+1x30")]


def case(key: tuple[str, str, str]) -> list[dict[str, Any]]:
    fields = dict(zip(("variant", "dtype", "batch_spec"), key, strict=True))
    return [fields | {"phase": phase, "samples": [1.5]} for phase in ("prefill", "decode")]


def opened(path: Path, *, resume: bool = True, **changed: Any) -> SweepFile:
    given: dict[str, Any] = {"environment": ENVIRONMENT, "sweep": SWEEP, "asked": KEYS} | changed
    return SweepFile(path, **given, resume=resume)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Two cases of three."""
    path = tmp_path / "sweep.jsonl"
    file = opened(path, resume=False)
    for key in KEYS[:2]:
        file.add(case(key))
    file.close()
    return path


def test_a_case_is_on_the_disk_when_it_is_added(tmp_path):
    path = tmp_path / "sweep.jsonl"
    file = opened(path, resume=False)
    assert json.loads(path.read_text()) == {"schema": 1, "environment": ENVIRONMENT, "sweep": SWEEP}
    file.add(case(KEYS[0]))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1:] == [row | {"case_rows": 2} for row in case(KEYS[0])]


def test_a_record_is_continued_where_it_ended(record):
    before = record.read_bytes()
    file = opened(record)
    assert list(file.done) == KEYS[:2]
    assert file.done[KEYS[1]] == [row | {"case_rows": 2} for row in case(KEYS[1])]
    file.add(case(KEYS[2]))
    file.close()
    assert record.read_bytes().startswith(before)
    assert list(opened(record).done) == KEYS


def test_a_record_cut_off_anywhere_keeps_its_whole_cases(record):
    whole = record.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(ends[0], len(whole)):
        record.write_bytes(whole[:length])
        file = opened(record)
        # A last line that lacks nothing but its end is whole.
        kept = sum(length >= ends[last] - 1 for last in (2, 4))
        assert list(file.done) == KEYS[:kept], length
        for key in KEYS[kept:2]:
            file.add(case(key))
        file.close()
        assert record.read_bytes() == whole, length


def test_nothing_is_kept_of_what_power_left_behind(record):
    whole = record.read_bytes()
    record.write_bytes(whole + b"\0" * 40)
    opened(record).close()
    assert record.read_bytes() == whole


def test_without_resume_a_record_is_refused_and_an_empty_file_is_none(record, tmp_path):
    whole = record.read_bytes()
    with pytest.raises(ValueError, match="holds records already: --resume continues it; or name another file"):
        opened(record, resume=False)
    assert record.read_bytes() == whole
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    opened(empty, resume=False).close()
    assert json.loads(empty.read_text())["sweep"] == SWEEP


def test_resume_begins_a_record_that_is_not_there(tmp_path):
    assert opened(tmp_path / "new.jsonl").done == {}


OTHER_VERSIONS = ENVIRONMENT | {"versions": {"torch": "2.14.0"}}
OTHERS = [
    ({"environment": OTHER_VERSIONS}, "was measured with torch 2.13.0, and this would be 2.14.0; resume it as"),
    ({"environment": ENVIRONMENT | {"cpu": "68000"}}, "was measured with cpu 8086, and this would be 68000"),
    ({"environment": ENVIRONMENT | {"threads": 2}}, "was measured with threads 1, and this would be 2"),
    ({"environment": ENVIRONMENT | {"commit": None}}, "was measured with commit abc, and this would be null"),
    ({"sweep": SWEEP | {"repeats": 5}}, "was measured with repeats 2, and this would be 5"),
    (
        {"sweep": SWEEP | {"stores": [["ring", "plain"]]}},
        r'stores \[\["full", "plain"\]\], and this would be \[\["ring',
    ),
    ({"sweep": SWEEP | {"newer": True}}, "was measured with newer null, and this would be true"),
    ({"asked": KEYS[1:]}, "line 2 is of gqa float32 1x8, which this command does not ask for; ask for it too"),
]


@pytest.mark.parametrize(("changed", "said"), OTHERS)
def test_a_record_of_something_else_is_refused_and_left(record, changed, said):
    # What an interruption left is not touched either.
    record.write_bytes(record.read_bytes() + b'{"variant"')
    whole = record.read_bytes()
    with pytest.raises(ValueError, match=said) as refused:
        opened(record, **changed)
    assert str(record) in str(refused.value)
    assert record.read_bytes() == whole


def test_the_command_and_the_date_may_differ(record):
    assert len(opened(record, environment=ENVIRONMENT | {"command": "other", "date": "later"}).done) == 2


HEADER = json.dumps({"schema": 1, "environment": ENVIRONMENT, "sweep": SWEEP})
ROW = json.dumps(case(KEYS[0])[0] | {"case_rows": 2})
FOREIGN = [
    (b"a shopping list\n", "line 1 is no record of a sweep"),
    (b"\x89PNG\r\n\x1a\n\0", "line 1 is no record of a sweep"),
    (b"[" * 100000, "line 1 is no record of a sweep"),
    (b"12\n", "line 1 is no record of a sweep"),
    (b'{"a": 1}\n', "is no record of a sweep, which begins with its environment"),
    (b'{"schema": 1, "environment": {}}\n{"subject": "llama"}\n', "is no record of a sweep, which begins with"),
    (HEADER.replace('"schema": 1', '"schema": 7').encode(), "has schema 7, and this version writes 1"),
    (f'{HEADER}\n{{"subject": "llama"}}\n'.encode(), "line 2 is no row of a sweep"),
    (f"{HEADER}\n{ROW}\nhalf\n{ROW}\n".encode(), "line 3 is no record of a sweep"),
    (f"{HEADER}\n\n{ROW}\n{ROW}\n".encode(), "line 2 is no record of a sweep"),
    (f"{HEADER}\n{ROW}\n{ROW}\n{ROW}\n".encode(), "lines 2 to 4 are not the 2 rows of a case"),
    (f"{HEADER}\n{ROW}\n{ROW.replace('1x8', '1x16')}\n".encode(), "lines 2 to 2 are not the 2 rows of a case"),
]


@pytest.mark.parametrize(("content", "said"), FOREIGN)
def test_a_file_that_is_no_sweeps_is_refused_and_left(tmp_path, content, said):
    path = tmp_path / "foreign.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        opened(path)
    assert path.read_bytes() == content


def test_two_runs_do_not_write_the_same_record(record):
    first = opened(record)
    with pytest.raises(ValueError, match="is being written by another run"):
        opened(record)
    first.close()
    opened(record).close()


def test_what_is_no_file_is_refused():
    with pytest.raises(ValueError, match="/dev/null is no file"):
        opened(Path("/dev/null"))
