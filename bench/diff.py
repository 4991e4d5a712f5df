"""Two records of the command side by side: what changed, what is noise, and what cannot be told.

Speeds are compared as samples, everything else exactly.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .change import CONTROLLED_NOISE, MACHINE, NOT_COMPARABLE, RUN_NOISE, SLOWER, change
from .diff_tables import MEMORY, diff_tables
from .records import Entry, read_record
from .results import Report, Row

IDENTITY = (
    *("section", "model", "subject", "variant", "layers", "peer", "setting", "store", "codec", "sees", "shuffled"),
    *("kv_dtype", "dtype", "device", "threads", "batch", "context", "phase", "policy", "tp", "pp", "dp", "cp"),
    *("backend", "check", "name", "chunk", "turn", "sample", "sampling", "asked", "drafts", "length", "random_cache"),
    *("speculative", "draft_tokens", "batch_spec"),
)
"""Fields that say what is measured; rows that agree on all of them are one and the same."""

PLACE = ("device", "threads")
"""Of those, the ones in which two rows may differ and are still shown side by side."""

CASE = (
    *("section", "subject", "variant", "sees", "dtype", "device", "threads", "batch", "batch_spec", "context"),
    "phase",
)
"""What a peer's row has in common with ours of the same weights."""

OURS = "attn-variants"
NOT_EVIDENCE = "not evidence: the cores were shared"
FAILS, HOLDS, CHANGED, UNCHANGED, ADDED, GONE = "fails now", "holds now", "changed", "unchanged", "added", "gone"
CLOCK = re.compile(
    r"(^|_)(ms|seconds|costs?|bandwidth|unquiet|load|noise|turns|samples|speedup)(_|$)|_per_s$|_over_wall$"
)
"""Fields that a clock decides, of rows that are about something else."""

Pair = tuple[Entry, Entry]


def diff_report(old: Path, new: Path) -> Report:
    """A row per speed that both records measured, per exact figure that changed and per row that is in one only.

    `failures` names what got slower beyond noise and the checks that held and do not. Raises OSError and ValueError
    for a file that is no record, and ValueError for two that have no row in common.
    """
    before, after = read_record(old), read_record(new)
    pairs, gone, added = _matched(before, after)
    if not pairs:
        raise ValueError(
            f"{old} ({_kind(before)}) and {new} ({_kind(after)}) have no row in common{_apart(before, after)}; "
            "give two records of the same measurement"
        )
    rivals: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair[0].row.get("peer") not in (None, OURS):
            rivals.setdefault(_case(pair), []).append(pair)
    speeds = [row for pair in pairs for row in _speeds(pair, rivals.get(_case(pair), []))]
    figures = [row for pair in pairs for row in _figures(pair)]
    lonely = [_identity(entry.row) | {"verdict": GONE} for entry in gone]
    lonely += [_identity(entry.row) | {"verdict": ADDED} for entry in added]
    failures = [f"{_named(row)}: {_failure(row)}" for row in speeds + figures if row["verdict"] in (SLOWER, FAILS)]
    tables = diff_tables((old, before), (new, after), pairs, speeds, figures, lonely, IDENTITY)
    return Report(speeds + figures + lonely, tables, failures)


def _matched(old: Sequence[Entry], new: Sequence[Entry]) -> tuple[list[Pair], list[Entry], list[Entry]]:
    """Rows that measure the same, in the old record's order, then those of the old and of the new alone.

    What is left over is matched once more whatever its device and threads, and a peer whatever its setting: of those
    only the fastest is in a record.
    """
    pairs: list[Pair] = []
    for loosely in (False, True):
        left = dict(zip(_keys(new, loosely=loosely), new, strict=True))
        alone = []
        for key, entry in zip(_keys(old, loosely=loosely), old, strict=True):
            if key in left:
                pairs.append((entry, left.pop(key)))
            else:
                alone.append(entry)
        old, new = alone, list(left.values())
    return pairs, list(old), list(new)


def _keys(entries: Iterable[Entry], *, loosely: bool) -> Iterator[str]:
    """What each row measures, as text, and which of several of the same it is."""
    seen: Counter[str] = Counter()
    for entry in entries:
        ignored = () if not loosely else PLACE if entry.row.get("peer") in (None, OURS) else (*PLACE, "setting")
        key = json.dumps({name: value for name, value in _identity(entry.row).items() if name not in ignored})
        seen[key] += 1
        yield f"{key} {seen[key]}"


def _identity(row: Row) -> Row:
    # A field that came later is None where it was not yet.
    return {name: row[name] for name in IDENTITY if row.get(name) is not None and not _said_twice(name, row)}


def _said_twice(name: str, row: Row) -> bool:
    """A batch spec of rows of one length, which batch and context tell too, as they did before there were any."""
    return name == "batch_spec" and "+" not in row[name]


def _speeds(pair: Pair, rivals: Sequence[Pair]) -> Iterator[Row]:
    """One row for each set of samples."""
    old, new = (entry.row for entry in pair)
    if _unmeasured(pair):
        yield _identity(new) | {"figure": "step_ms"} | _speed(pair, old.get("samples"), new.get("samples"), rivals)
        return
    for name in dict.fromkeys([*old, *new]):
        samples = old.get(name), new.get(name)
        measured = "unquiet" in old and name.endswith("_ms") and any(isinstance(side, list) for side in samples)
        if name == "samples" or measured:
            figure = "step_ms" if name == "samples" else name
            yield _identity(new) | {"figure": figure} | _speed(pair, *samples, rivals)


def _speed(pair: Pair, before: Any, after: Any, rivals: Sequence[Pair]) -> Row:
    old, new = (entry.row for entry in pair)
    row: Row = dict.fromkeys(("old", "new", "ratio", "ratio_low", "ratio_high", "band_low", "band_high"))
    row |= {"ratio_over_limit": None, "machine": None, "verdict": NOT_COMPARABLE, "why": None}
    shared = [name for name, side in (("OLD", old), ("NEW", new)) if side.get("unquiet")]
    if shared:
        return row | {"verdict": NOT_EVIDENCE, "why": f"in {' and '.join(shared)}"}
    if lacking := _unmeasured(pair):
        return row | {"why": f"out of memory in {' and '.join(lacking)}"}
    missing = [name for name, side in (("OLD", before), ("NEW", after)) if not side]
    if missing:
        return row | {"why": f"no samples in {' and '.join(missing)}"}
    row |= {"old": statistics.median(before), "new": statistics.median(after)}
    if other := _other_place(pair):
        return row | {"why": other}
    machine = _machine(pair, rivals)
    floor = CONTROLLED_NOISE if set(machine) - {MEMORY} else RUN_NOISE
    found = change(
        before,
        after,
        turns=(old.get("turns"), new.get("turns")),
        noise=max(floor, old.get("noise") or 0.0, new.get("noise") or 0.0),
        machine=list(machine.values()),
    )
    before_limit, after_limit = old.get("fraction_of_limit"), new.get("fraction_of_limit")
    why = found.why
    if old.get("setting") != new.get("setting"):
        why = f"other setting: {old.get('setting')}, then {new.get('setting')}"
    told = ", ".join(f"{name} x {ratio:.2f}" for name, ratio in machine.items())
    return row | {
        "ratio": found.ratio,
        "ratio_low": found.low,
        "ratio_high": found.high,
        "band_low": found.band_low,
        "band_high": found.band_high,
        "ratio_over_limit": before_limit / after_limit if before_limit and after_limit else None,
        "machine": machine,
        "verdict": found.verdict,
        "why": f"{MACHINE}: {told}" if found.why == MACHINE else why or None,
    }


def _unmeasured(pair: Pair) -> list[str]:
    """The records in which there was no memory for what is measured: the row has an error and no figures."""
    return [name for name, entry in zip(("OLD", "NEW"), pair, strict=True) if entry.row.get("error") and _timed(entry)]


def _timed(entry: Entry) -> bool:
    return "samples" in entry.row or "unquiet" in entry.row


def _machine(pair: Pair, rivals: Sequence[Pair]) -> dict[str, float]:
    """Ratios of time, new over old, that are not this program's: of reading memory, and of peers on the same weights.

    rivals: peers' rows of the same case. A peer counts where it, and all it runs on, are of the same version in both
    records.
    """
    old, new = (entry.row for entry in pair)
    ratios = {}
    if old.get("read_bandwidth") and new.get("read_bandwidth"):
        ratios[MEMORY] = old["read_bandwidth"] / new["read_bandwidth"]
    if old.get("peer") != OURS or _software(pair[0]) != _software(pair[1]):
        return ratios
    for others in rivals:
        before, after = (entry.row for entry in others)
        quiet = not before.get("unquiet") and not after.get("unquiet")
        if quiet and before.get("samples") and after.get("samples"):
            ratios[before["peer"]] = statistics.median(after["samples"]) / statistics.median(before["samples"])
    return ratios


def _case(pair: Pair) -> str:
    """The weights and sizes of both rows, which those of a peer on the same share."""
    return json.dumps([[entry.row.get(name) for name in CASE] for entry in pair])


def _software(entry: Entry) -> Row:
    versions = entry.environment.get("versions")
    return {name: version for name, version in versions.items() if name != OURS} if isinstance(versions, dict) else {}


def _other_place(pair: Pair) -> str | None:
    """Where the two rows were not measured in the same place, in words."""
    for name in ("cpu", "cores", "device"):
        facts = [entry.environment.get(name) for entry in pair]
        if facts[0] != facts[1]:
            return f"other {name}: {facts[0]}, then {facts[1]}"
    for name in PLACE:
        facts = [entry.row.get(name) for entry in pair]
        if facts[0] != facts[1]:
            return f"other {name}: {facts[0]}, then {facts[1]}"
    return None


def _figures(pair: Pair) -> Iterator[Row]:
    """A row for each exact figure that is another; one that says so where none is and there are no speeds."""
    old, new = (entry.row for entry in pair)
    if _unmeasured(pair):
        return
    timed = _timed(pair[0])
    compared = _exact_of_timed if timed else _exact
    names = [name for name in dict.fromkeys([*old, *new]) if name not in IDENTITY and compared(name)]
    changed = [name for name in names if old.get(name) != new.get(name)]
    for name in changed:
        verdict = _verdict(name, old.get(name), new.get(name))
        yield _identity(new) | {"figure": name, "old": old.get(name), "new": new.get(name), "verdict": verdict}
    if not changed and not timed:
        yield _identity(new) | {"figure": None, "verdict": UNCHANGED}


def _exact(name: str) -> bool:
    return not CLOCK.search(name)


def _exact_of_timed(name: str) -> bool:
    return "bytes" in name or name == "largest_allocation"


def _verdict(name: str, old: Any, new: Any) -> str:
    """Checks, and what stands for one: a likelihood that is a number, a reason other than an error."""
    holds: dict[str, Callable[[Any], bool]] = {
        "ok": lambda value: value is True,
        "nll": lambda value: value is not None,
        "reason": lambda value: value != "error",
    }
    if name not in holds or holds[name](old) == holds[name](new):
        return CHANGED
    return HOLDS if holds[name](new) else FAILS


def _named(row: Row) -> str:
    return " ".join(str(row[name]) for name in IDENTITY if row.get(name) is not None and name not in PLACE)


def _failure(row: Row) -> str:
    if row["verdict"] == FAILS:
        return f"{row['figure']} was {row['old']} and is {row['new']}"
    interval = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
    return f"{row['figure']} {row['new']:.4g}, {row['ratio']:.3f} of what it was ({interval})"


def _apart(old: Sequence[Entry], new: Sequence[Entry]) -> str:
    """The fields that all rows have, and in which no row of one is like any row of the other."""
    sides = [[_identity(entry.row) for entry in entries] for entries in (old, new)]
    names = []
    for name in IDENTITY:
        before, after = ({json.dumps(row.get(name)) for row in rows} for rows in sides)
        if "null" not in before | after and before.isdisjoint(after):
            names.append(name)
    return f": they differ in {', '.join(names)}" if names else ""


def _kind(entries: Sequence[Entry]) -> str:
    """What a record is of, in the words that made it."""
    command = str(entries[0].environment.get("command", "no command"))
    return " ".join(command.split()[:2])
