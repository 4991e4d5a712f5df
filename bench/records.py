"""Records that the command wrote, read again: every row with the environment that it was measured in.

A `.json` file is one object, `{"schema": 1, "environment": {...}, "rows": [...]}`. A `.jsonl` file holds a row a line,
each with its `environment`, or after a first line `{"schema": 1, "environment": {...}}` that speaks for all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .results import SCHEMA, Row

AGAIN = "measure it again, or give a record that was written whole"


@dataclass(frozen=True)
class Entry:
    """One row and its environment."""

    row: Row
    environment: Row


def read_record(path: Path) -> list[Entry]:
    """Every row of a record, in its order.

    Raises OSError for a file that is not there, ValueError for one that is cut off, is no JSON, is no record of this
    command, has another schema version or holds no rows.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise ValueError(f"{path} is empty; {AGAIN}")
    entries = list(_lines(path, text) if path.suffix == ".jsonl" else _whole(path, text))
    if not entries:
        raise ValueError(f"{path} holds no rows; {AGAIN}")
    for number, entry in enumerate(entries, 1):
        _require_samples(f"{path}: row {number}", entry.row)
    return entries


def _whole(path: Path, text: str) -> Iterator[Entry]:
    record = _parsed(str(path), text)
    _require_record(str(path), record)
    if not isinstance(record.get("rows"), list):
        raise ValueError(f"{path} is JSON, but no record of attn-bench: it has no list of rows")
    for number, row in enumerate(record["rows"], 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} is no object")
        yield Entry(row, record["environment"])


def _lines(path: Path, text: str) -> Iterator[Entry]:
    shared: Row | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        row = _parsed(place, line)
        if not isinstance(row, dict):
            raise ValueError(f"{place} is no object")
        if number == 1 and "schema" in row and "environment" in row and "subject" not in row:
            _require_record(place, row)
            shared = row["environment"]
            continue
        if "schema" in row:
            _require_schema(place, row)
        environment = row.get("environment", shared)
        if not isinstance(environment, dict):
            raise ValueError(f"{place} has no environment, and no first line that holds it: no record of attn-bench")
        yield Entry({name: value for name, value in row.items() if name not in ("schema", "environment")}, environment)


def _parsed(place: str, text: str) -> Any:
    """The JSON value; numbers that JSON does not have are refused, as are texts that end in the middle."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        # The decoder stops at the end of what it was given, or at the string that has none.
        opened = error.msg.startswith("Unterminated string")
        if text.lstrip().startswith(("{", "[")) and (opened or error.pos >= len(text.rstrip())):
            raise ValueError(f"{place} is cut off, as when its writing was interrupted; {AGAIN}") from None
        raise ValueError(f"{place} is no JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no JSON that can be read: {error}") from None


def _require_record(place: str, record: Any) -> None:
    if not isinstance(record, dict) or "schema" not in record or not isinstance(record.get("environment"), dict):
        raise ValueError(f"{place} is JSON, but no record of attn-bench: those have schema, environment and rows")
    _require_schema(place, record)


def _require_schema(place: str, record: Row) -> None:
    if record["schema"] != SCHEMA or isinstance(record["schema"], bool):
        raise ValueError(f"{place} has schema {record['schema']!r}, and this version reads {SCHEMA}; {AGAIN}")


def _require_samples(place: str, row: Row) -> None:
    """Refuse times that are none; what they are compared by needs each above zero."""
    for name, samples in row.items():
        timed = name == "samples" and samples is not None
        timed |= "unquiet" in row and name.endswith("_ms") and isinstance(samples, list)
        if timed and not (isinstance(samples, list) and all(map(_positive, samples))):
            raise ValueError(f"{place}: {name} must be a list of numbers above 0, in milliseconds")
    samples = row.get("samples")
    turns = row.get("turns")
    if samples and turns is not None:
        whole = isinstance(turns, list) and all(isinstance(turn, int) and turn > 0 for turn in turns)
        if not whole or sum(turns) != len(samples):
            raise ValueError(
                f"{place}: turns ({turns}) must be positive integers that add up to {len(samples)} samples"
            )
    for name in ("noise", "read_bandwidth", "fraction_of_limit"):
        if row.get(name) is not None and not (_positive(row[name]) or row[name] == 0):
            raise ValueError(f"{place}: {name} ({row[name]!r}) must be a number of at least 0")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
