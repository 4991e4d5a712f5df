"""A sweep's record while it grows: a `.jsonl` file that keeps each case's rows as soon as they are measured.

    {"schema": 1, "environment": {...}, "sweep": {...}}     where it was measured, and what is the same in all cases
    {"variant": ..., "dtype": ..., "batch_spec": ..., "case_rows": 2, ...}      a row a line, a case's side by side

An interruption loses the case at work: a line that is cut off and a case that lacks rows are measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from .results import SCHEMA, Row, write_whole

CASE = ("variant", "dtype", "batch_spec")
"""Fields by which the cases of a sweep differ; its `sweep` holds all else that decides them."""

MACHINE = ("platform", "cpu", "cores", "threads", "device", "commit", "versions")
"""What of the environment must be as it was for a record to be continued."""

Key = tuple[str, ...]


class SweepFile:
    """The file, open and locked; `done` holds the rows of the cases in it, by their `CASE`.

    resume: continue the file where there is one. Without it, one that holds anything is refused.
    asked: the cases of this sweep; a file may hold some of them, and no other.
    Raises ValueError, with the file as it was, for one that is no sweep's or another's, and OSError.
    """

    def __init__(self, path: Path, *, environment: Row, sweep: Row, asked: Collection[Key], resume: bool) -> None:
        self.path = path
        self.done: dict[Key, list[Row]] = {}
        header = {"schema": SCHEMA, "environment": environment, "sweep": sweep}
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file, and a sweep that can be resumed needs one")
        there = path.exists() and path.stat().st_size > 0
        if there and not resume:
            raise ValueError(f"{path} holds records already: --resume continues it; or name another file")
        if not there:
            write_whole(path, _line(header))
        self._file = path.open("r+b")
        try:
            _lock(self._file, path)
            end = self._read(json.loads(_line(header)), asked) if there else path.stat().st_size
            self._file.truncate(end)
            self._file.seek(end)
        except BaseException:
            self._file.close()
            raise

    def add(self, rows: Sequence[Row]) -> list[Row]:
        """Keep a case's rows: on the disk when this returns them, each with how many they are."""
        rows = [row | {"case_rows": len(rows)} for row in rows]
        self._file.write("".join(map(_line, rows)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done[_key(rows[0])] = rows
        return rows

    def close(self) -> None:
        """Nothing is added any more."""
        self._file.close()

    def _read(self, header: Row, asked: Collection[Key]) -> int:
        """Check what is there and take over whole cases; where in the file the last of them ends."""
        lines = self._file.read().split(b"\n")
        parsed = [self._parsed(number, line, last=number == len(lines)) for number, line in enumerate(lines, 1)]
        self._require_same(parsed[0], header)
        rows = [(number, row) for number, row in enumerate(parsed[1:], 2) if row is not None]
        blocks = [(key, list(block)) for key, block in groupby(rows, key=lambda one: self._case(*one))]
        for index, (key, block) in enumerate(blocks):
            wanted = block[0][1]["case_rows"]
            first, last = block[0][0], block[-1][0]
            if len(block) < wanted and index == len(blocks) - 1:
                return sum(len(line) + 1 for line in lines[: first - 1])
            if len(block) != wanted or key in self.done:
                raise ValueError(
                    f"{self.path}: lines {first} to {last} are not the {wanted} rows of a case that is there once; "
                    "take out what is too much, or name another file"
                )
            if key not in asked:
                raise ValueError(
                    f"{self.path}: line {first} is of {' '.join(key)}, which this command does not ask for; ask for it "
                    "too, or name another file"
                )
            self.done[key] = [row for _, row in block]
        whole = 1 + len(rows)
        if whole == len(lines):
            # The last line is whole and lacks its end.
            self._file.write(b"\n")
        return sum(len(line) + 1 for line in lines[:whole])

    def _parsed(self, number: int, line: bytes, *, last: bool) -> Row | None:
        """The line's object; None for what an interruption left at the end, and for the nothing after the last."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) or (last and row is None and number > 1):
            return row
        raise ValueError(f"{self.path}: line {number} is no record of a sweep; name another file")

    def _require_same(self, there: Row | None, asked: Row) -> None:
        """Refuse a record of other settings, of another machine or other versions."""
        if there is None or not all(isinstance(there.get(name), dict) for name in ("environment", "sweep")):
            raise ValueError(
                f"{self.path} is no record of a sweep, which begins with its environment; name another file"
            )
        if there.get("schema") != SCHEMA:
            raise ValueError(
                f"{self.path} has schema {there.get('schema')!r}, and this version writes {SCHEMA}; name another file"
            )
        for part, names in (("sweep", asked["sweep"].keys() | there["sweep"].keys()), ("environment", MACHINE)):
            for name in sorted(names) if part == "sweep" else names:
                self._require_equal(name, there[part].get(name), asked[part].get(name))

    def _require_equal(self, name: str, was: object, now: object) -> None:
        if isinstance(was, dict) and isinstance(now, dict):
            name, was, now = next(
                ((f"{key}", was.get(key), now.get(key)) for key in [*now, *was] if was.get(key) != now.get(key)),
                (name, None, None),
            )
        if was != now:
            raise ValueError(
                f"{self.path} was measured with {name} {_said(was)}, and this would be {_said(now)}; "
                "resume it as it was begun, or name another file"
            )

    def _case(self, number: int, row: Row) -> Key:
        if not isinstance(row.get("case_rows"), int) or not all(isinstance(row.get(name), str) for name in CASE):
            raise ValueError(f"{self.path}: line {number} is no row of a sweep; name another file")
        return _key(row)


def _key(row: Row) -> Key:
    return tuple(row[name] for name in CASE)


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _lock(file: BinaryIO, path: Path) -> None:
    """Keep a second run from writing the same cases; a run that ends, however it does, lets go."""
    try:
        import fcntl
    except ImportError:
        # Windows has no such locks.
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path} is being written by another run; wait for it, or name another file") from None
