"""What a reader is shown of two records: where each comes from, the speeds, exact figures, and rows of one alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .change import FASTER, SLOWER
from .records import Entry
from .results import Row
from .tables import Column, Table, figure, folded

MEMORY = "reading memory"
"""Its ratio of time, among those of the machine."""

LONGEST = 48
"""Characters of a value in a cell; more of it is in the other formats."""

RECORD_COLUMNS = (
    Column("fact", "", right=False),
    Column("old", "OLD", right=False),
    Column("new", "NEW", right=False),
)
SPEED_COLUMNS = (
    Column("figure", "figure", right=False),
    Column("old", "old ms", figure),
    Column("new", "new ms", figure),
    Column("ratio", "new / old", "{:.3f}".format),
    Column("interval", "95 %", right=False),
    Column("band", "noise", right=False),
    Column("ratio_over_limit", "over memory's", "{:.3f}".format),
    Column("verdict", "verdict", right=False),
    Column("why", "", right=False),
)
SPEED_NOTE = (
    "new / old: of the medians, above 1 is slower. 95 %: its interval, from how far blocks of neighbouring samples are "
    "apart. noise: ratios that are no change: what runs of one program differ by (the A/A noise floor, 2% at least, or "
    "5% where no peer was measured in both), around all from 1 to what reading memory and peers of the same version "
    "changed by. A change is an interval outside of that. over memory's: the same ratio, of steps over the time that "
    "memory took in their own run."
)
ALONE_NOTE = (
    " No peer was measured in turn with both, so a machine that was slow for a whole run is not told from a slower "
    "program: believe a change that a second pair of records repeats."
)
CHANCE_NOTE = " {compared} ratios are compared: of so many, noise alone may put up to {chance:.0f} outside."
FIGURE_COLUMNS = (
    Column("figure", "figure", right=False),
    Column("old", "old", lambda value: shortened(value)),
    Column("new", "new", lambda value: shortened(value)),
    Column("by", "new / old"),
    Column("verdict", "", right=False),
)
FACTS = ("platform", "cpu", "cores", "device", "threads", "seed")
PLACE = ("cpu", "cores", "device")


def diff_tables(
    old: tuple[Path, Sequence[Entry]],
    new: tuple[Path, Sequence[Entry]],
    pairs: Sequence[tuple[Entry, Entry]],
    speeds: Sequence[Row],
    figures: Sequence[Row],
    lonely: Sequence[Row],
    identity: Sequence[str],
) -> list[Table]:
    """Every table that has something to say; `identity` are the fields that name a row."""
    tables = [_records(old, new, pairs)]
    if speeds:
        note = _speed_note([row for row in speeds if row["ratio_low"] is not None])
        tables.append(
            _named("Speeds", SPEED_COLUMNS, [row | _bounds(row) for row in speeds], note, [*identity, "figure"])
        )
    changed = [row | {"by": _by(row["old"], row["new"])} for row in figures if row["figure"] is not None]
    if changed:
        tables.append(_named("Exact figures that changed", FIGURE_COLUMNS, changed, "", identity))
    if lonely:
        verdict = Column("verdict", "", right=False)
        tables.append(_named("Rows in one record only", (verdict,), lonely, "", identity))
    return tables


def _speed_note(compared: Sequence[Row]) -> str:
    note = SPEED_NOTE
    if any(row["verdict"] in (FASTER, SLOWER) and not set(row["machine"]) - {MEMORY} for row in compared):
        note += ALONE_NOTE
    if len(compared) >= 20:
        note += CHANCE_NOTE.format(compared=len(compared), chance=len(compared) / 20)
    return note


def shortened(value: Any) -> str:
    """A value in one cell."""
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _records(
    old: tuple[Path, Sequence[Entry]], new: tuple[Path, Sequence[Entry]], pairs: Sequence[tuple[Entry, Entry]]
) -> Table:
    """Where the two come from: always the command, date and commit, and of the rest what differs."""
    sides = [_facts(entries) for _, entries in (old, new)]
    rows: list[Row] = [{"fact": "record", "old": str(old[0]), "new": str(new[0])}]
    differing = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        before, after = (side.get(name) for side in sides)
        if before != after and name not in ("command", "date", "commit"):
            differing.append(name)
        if before != after or name in ("command", "date", "commit"):
            rows.append({"fact": name, "old": before, "new": after})
    said = [f"Rows in both records: {len(pairs)}."]
    if any(name in differing for name in PLACE):
        said.append("They were made on different machines: speeds are not compared.")
    elif "threads" in differing:
        said.append("They were made with different threads: those speeds are not compared.")
    if versions := [name for name in differing if name not in FACTS]:
        said.append(f"Other versions: a change may come from {', '.join(versions)}.")
    return Table("Records", RECORD_COLUMNS, rows, " ".join(said))


def _facts(entries: Sequence[Entry]) -> Row:
    """The environment's facts in words; several where a record was made in several runs."""
    found: dict[str, dict[str, None]] = {}
    for entry in entries:
        for name, value in _flat(entry.environment):
            found.setdefault(name, {})[str(value)] = None
    return {name: ", ".join(values) for name, values in found.items()}


def _flat(environment: Row) -> Iterator[tuple[str, Any]]:
    for name in ("command", "date", "commit", *FACTS):
        if environment.get(name) is not None:
            yield name, environment[name]
    versions = environment.get("versions")
    if isinstance(versions, dict):
        yield from ((name, version) for name, version in versions.items() if version is not None)


def _named(title: str, columns: Sequence[Column], rows: Sequence[Row], note: str, identity: Sequence[str]) -> Table:
    """The table with a column for each field in which its rows differ; what they agree on joins the title."""
    names = [name for name in identity if any(row.get(name) is not None for row in rows)]
    lines = [dict.fromkeys(names) | row for row in rows]
    headed = [Column(name, name, right=False) for name in names]
    used = [
        column
        for column in columns
        if column.field not in names and any(row.get(column.field) is not None for row in rows)
    ]
    return folded(title, [*headed, *used], lines, note, same=names)


def _bounds(row: Row) -> Row:
    """The interval and the band in words."""
    names = {"interval": ("ratio_low", "ratio_high"), "band": ("band_low", "band_high")}
    return {
        name: None if row[low] is None else f"{row[low]:.3f} to {row[high]:.3f}" for name, (low, high) in names.items()
    }


def _by(old: Any, new: Any) -> str | None:
    """How far a number moved: new over old."""
    numbers = all(isinstance(side, int | float) and not isinstance(side, bool) for side in (old, new))
    return f"{new / old:.4g}" if numbers and old else None
