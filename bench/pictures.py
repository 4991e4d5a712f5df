"""Pictures of throughput records: tokens/s and bytes against context, a roofline, tokens/s at equal memory.

    python -m attn_variants.bench.pictures RECORD... --output FOLDER [--format svg|png]

Rows of several records are drawn together. Speeds of shared cores are no evidence and are left out. A picture whose
fields no row has is left out with a line that names them.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .canvas import SUFFIXES, finish, looks, over_contexts, panels, require_drawable, saved, styled, varying
from .records import Entry, read_record
from .results import Row, write_whole
from .tables import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "attn-variants"
LINE = ("variant", "peer", "setting", "store", "codec", "sees", "shuffled")
"""What one line is of. A peer's setting is the fastest at each context, so that its line goes over several."""

WIDE = 20
"""Speeds that differ by more are drawn on a logarithmic axis."""


class LackingError(ValueError):
    """No row has what a picture is made of; the message says which fields."""


def draw_pictures(entries: Sequence[Entry], folder: Path, suffix: str = "svg") -> Iterator[str]:
    """Draw all four into files of this folder; says of each that it was written, or why not, and what was left out."""
    rows, environments = decode_rows(entries), [entry.environment for entry in entries]
    if not rows:
        raise ValueError("no row is a decode row of `attn-bench throughput`; give records of that command")
    evidence = [row for row in rows if trusted(row)]
    if left := len(rows) - len(evidence):
        yield f"left out {left} of {len(rows)} rows: cores were shared (unquiet), or output wrong or missing"
    evidence, again = latest(evidence)
    if again:
        yield f"left out {again} rows that were measured again; the later ones are drawn"
    for name, picture in PICTURES.items():
        try:
            with styled():
                content = saved(picture(evidence, environments), suffix)
        except LackingError as error:
            yield f"{name} is not drawn: {error}"
            continue
        path = folder / f"{name}.{suffix}"
        write_whole(path, content)
        yield f"wrote {path}"


def decode_rows(entries: Sequence[Entry]) -> list[Row]:
    """The rows of decode steps, with what is written beside them.

    `label` is the line that a row belongs to, `place` where it was measured, `load` how many sequences there were.
    """
    entries = [entry for entry in entries if entry.row.get("phase") == "decode" and "ms_p50" in entry.row]
    return labelled([entry.row | _told(entry) for entry in entries], LINE)


def _told(entry: Entry) -> Row:
    """Fields in words; a peer's setting is no part of its line."""
    row, environment = entry.row, entry.environment
    ours, sees = row["peer"] == OURS, row.get("sees")
    on_cpu = row.get("device", "cpu") == "cpu"
    return {
        "peer": "ours" if ours else row["peer"],
        "setting": row.get("setting") if ours else "",
        "sees": None if sees == "all" else sees,
        "shuffled": "shuffled" if row.get("shuffled") else "",
        "place": f"{environment.get('cpu')}, {row.get('threads')} threads" if on_cpu else environment.get("device"),
        "load": _load(row),
    }


def _load(row: Row) -> str:
    if row.get("budget") is not None:
        return f"{size(row['budget'])} of cache"
    return f"batch {row['batch_spec'] if is_ragged(row) else row['batch']}"


def is_ragged(row: Row) -> bool:
    """Whether the batch's sequences are of several lengths, of which `context` is the longest."""
    return "+" in row.get("batch_spec", "")


def labelled(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows, each with a label of those of these fields in which they differ."""
    names = varying(rows, names)
    return [row | {"label": ", ".join(str(row[name]) for name in names if row.get(name)) or "ours"} for row in rows]


def trusted(row: Row) -> bool:
    """Whether its speed is evidence."""
    return bool(row.get("ms_p50")) and not row.get("unquiet") and not row.get("wrong")


def latest(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Without those of which a later row says the same again, and how many they were."""
    names = ("label", "place", "subject", "dtype", "load", "batch", "budget", "context")
    found = {tuple(row.get(name) for name in names): row for row in rows}
    return list(found.values()), len(rows) - len(found)


def tokens_per_s(rows: Sequence[Row], environments: Sequence[Row]) -> Figure:
    """Decode tokens/s of all sequences together against context, a panel per decoder, dtype and batch."""
    rows = _having(rows, "ms_p50")
    # Rows of a budget differ in batch from context to context: they are of another picture.
    rows = [row for row in rows if row.get("budget") is None]
    if not rows:
        raise LackingError("every row was measured at a budget, at another batch for every context")
    figure, drawn = panels("Decode speed", rows, ("subject", "dtype", "load", "place"))
    look, handles = _looks(rows), {}
    for axes, members in drawn:
        for label, line in _lines(members):
            speeds = [row["batch"] / row["ms_p50"] * 1e3 for row in line]
            errors = [_error(row, speed) for row, speed in zip(line, speeds, strict=True)]
            ends = list(zip(*errors, strict=True)) if any(map(any, errors)) else None
            contexts = [row["context"] for row in line]
            handles[label] = axes.errorbar(contexts, speeds, yerr=ends, capsize=2, **look[label])
        over_contexts(axes, (row["context"] for row in members))
        _speed_axis(axes, [row["batch"] / row["ms_p50"] * 1e3 for row in members])
    return finish(figure, handles, environments)


def _speed_axis(axes: Axes, speeds: Sequence[float]) -> None:
    if max(speeds) > WIDE * min(speeds):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s")


def _error(row: Row, speed: float) -> tuple[float, float]:
    """How far the ends of the median's interval lie below and above it, in tokens/s; no interval is none."""
    if not row.get("ms_p50_interval"):
        return 0.0, 0.0
    fast, slow = (row["batch"] / end * 1e3 for end in row["ms_p50_interval"])
    return max(0.0, speed - slow), max(0.0, fast - speed)


def cache_bytes(rows: Sequence[Row], environments: Sequence[Row]) -> Figure:
    """Bytes of a sequence's cache: a line of what the formula says is read, points of what the store reserved."""
    # In a ragged batch they are not those of a sequence of its context.
    rows = [row for row in rows if not is_ragged(row)]
    rows = labelled(_having(rows, "cache_bytes", "cache_bytes_read"), [name for name in LINE if name != "setting"])
    title = "Cache of a sequence (lines: formula; points: reserved, with the steps to come)"
    figure, drawn = panels(title, rows, ("subject", "dtype"))
    look, handles = _looks(rows), {}
    for axes, members in drawn:
        for label, line in _lines(members):
            contexts = [row["context"] for row in line]
            style = look[label] | {"markerfacecolor": "white"}
            read = [row["cache_bytes_read"] / row["batch"] for row in line]
            axes.plot(contexts, read, **look[label] | {"marker": ""})
            reserved = [row["cache_bytes"] / row["batch"] for row in line]
            axes.plot(contexts, reserved, **style | {"linestyle": ""})
            (handles[label],) = axes.plot([], [], **style)
        over_contexts(axes, (row["context"] for row in members))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: size(round(value)))
        axes.set_ylabel("bytes")
    return finish(figure, handles, environments)


def roofline(rows: Sequence[Row], environments: Sequence[Row]) -> Figure:
    """FLOP/s that decode steps reached against their FLOP per byte, below what memory and arithmetic allow.

    The two ceilings are of the same run. A line's points go from context to context.
    """
    rows = _having(rows, "step_flops", "weight_bytes", "cache_bytes_read", "read_bandwidth", "matmul_rate")
    figure, drawn = panels("Roofline of decode steps", rows, ("subject", "dtype", "load", "place"))
    look, handles = _looks(rows), {}
    for axes, members in drawn:
        roofs = dict.fromkeys((row["read_bandwidth"], row["matmul_rate"]) for row in members)
        densest = max(intensity(row) for row in members)
        for bandwidth, rate in roofs:
            ridge = rate / bandwidth
            ends = [min(intensity(row) for row in members) / 2, ridge, max(ridge, densest) * 2]
            axes.plot(ends, [min(rate, bandwidth * end) / 1e9 for end in ends], color="#888888", linewidth=1)
        for label, line in _lines(members):
            reached = [row["step_flops"] / row["ms_p50"] / 1e6 for row in line]
            (handles[label],) = axes.plot([intensity(row) for row in line], reached, **look[label] | {"linewidth": 0.8})
        bandwidth, rate = next(iter(roofs))
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte read (weights and cache)", ylabel="GFLOP/s")
        said = f"memory {bandwidth / 1e9:.3g} GB/s, matmul {rate / 1e9:.4g} GFLOP/s"
        axes.annotate(said, (0.02, 0.97), xycoords="axes fraction", va="top", fontsize=7, color="#555555")
    return finish(figure, handles, environments)


def intensity(row: Row) -> float:
    """FLOPs of a step per byte that it has to read."""
    return float(row["step_flops"] / (row["weight_bytes"] + row["cache_bytes_read"]))


def equal_memory(rows: Sequence[Row], environments: Sequence[Row]) -> Figure:
    """Decode tokens/s of caches that fill one budget: a bar each, on it the batch, a panel per context."""
    rows = _having(rows, "budget")
    names = ("subject", "dtype", "load", "context", "place")
    figure, drawn = panels("Decode speed at equal memory", rows, names)
    look = _looks(rows)
    for axes, members in drawn:
        bars = axes.barh(
            [row["label"] for row in members],
            [row["batch"] / row["ms_p50"] * 1e3 for row in members],
            color=[look[row["label"]]["color"] for row in members],
            hatch=["//" if row["peer"] != "ours" else "" for row in members],
        )
        axes.bar_label(bars, [f"batch {row['batch']:,}" for row in members], padding=3, fontsize=7)
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("tokens/s")
    return finish(figure, {}, environments)


PICTURES: dict[str, Callable[[Sequence[Row], Sequence[Row]], Figure]] = {
    "tokens-per-s": tokens_per_s,
    "cache-bytes": cache_bytes,
    "roofline": roofline,
    "equal-memory": equal_memory,
}
"""By the name of the file. Each takes the rows to draw and the environments that they came from."""


def _having(rows: Sequence[Row], *names: str) -> list[Row]:
    """The rows that have all of these."""
    found = [row for row in rows if all(row.get(name) is not None for name in names)]
    if not found:
        lacking = [name for name in names if all(row.get(name) is None for row in rows)]
        raise LackingError(f"no row has {' and '.join(lacking or names)}" if rows else "no row is left")
    return found


def _lines(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each line, by context and batch."""
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = [row for row in rows if row["label"] == label]
        yield label, sorted(mine, key=lambda row: (row["context"], row["batch"]))


def _looks(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    return looks((row["label"] for row in rows), dashed=(row["label"] for row in rows if row["peer"] != "ours"))


def main() -> None:
    """The command."""
    parser = ArgumentParser(prog="python -m attn_variants.bench.pictures", description=__doc__)
    parser.add_argument(
        "records", metavar="RECORD", type=Path, nargs="+", help="what throughput --output FILE.json wrote"
    )
    parser.add_argument("--output", type=Path, required=True, help="the folder to draw into; it is made if need be")
    parser.add_argument("--format", choices=SUFFIXES, default=SUFFIXES[0], help="of the files")
    asked = parser.parse_args()
    try:
        require_drawable("--output", asked.output)
        entries = [entry for record in asked.records for entry in read_record(record)]
        for line in draw_pictures(entries, asked.output, asked.format):
            print(line, file=sys.stderr)
    except (OSError, ValueError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"error: {what}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
