"""What pictures have in common: panels in a grid, colours that everybody tells apart, a footer, the same bytes again.

matplotlib, of the extra `plots`, is imported where something is drawn.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .results import Row, require_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Of Okabe and Ito, told apart by colour-blind readers too; the yellow is left out, which is lost on white."""

MARKERS = "osD^vPX*"
"""One more than colours, so that 56 lines differ in one of the two."""

SUFFIXES = ("svg", "png")
PANEL = (4.2, 3.2)
ALONE = (7.0, 3.6)
"""Inches of a panel among others, and of one alone."""

STYLE: Any = {
    "svg.hashsalt": "attn-variants",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.markersize": 4.5,
    "lines.linewidth": 1.5,
}
INSTALL = "pip install 'attn-variants[plots]' brings it"
LINE, LEGEND_LINE = 0.115, 0.2
"""Inches of a footer's line, and of a legend's."""

FOOTERS = 2
"""Commands that are told whole; of more only the number."""


def require_drawable(flag: str, folder: Path) -> None:
    """Make the folder. Raises ValueError where it cannot be made or written to, and without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"{flag} needs matplotlib: {INSTALL}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.exists() else error.strerror
        raise ValueError(f"{flag} {folder} is no folder and cannot be made ({reason}); choose another") from None
    require_writable(folder / f"picture.{SUFFIXES[0]}", flag=flag)


@contextmanager
def styled() -> Iterator[None]:
    """Our style, while figures are made and saved; a user's own is left as it was."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def panels(title: str, rows: Sequence[Row], names: Sequence[str]) -> tuple[Figure, list[tuple[Axes, list[Row]]]]:
    """A figure with a panel for each value of these fields; what all agree on joins the title."""
    from matplotlib.figure import Figure

    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    agreed = varying(rows, names, same=True)
    columns = min(len(groups), 2 if len(groups) in (2, 4) else 3)
    lines = math.ceil(len(groups) / columns)
    wide, high = ALONE if columns == 1 else (PANEL[0] * columns, PANEL[1] * lines)
    figure = Figure(figsize=(wide, high), layout="constrained")
    figure.suptitle(", ".join([title, *(told(rows[0], name) for name in agreed)]), fontsize=10)
    grid = figure.subplots(lines, columns, squeeze=False).flat
    drawn = []
    for axes, members in zip(grid, groups.values(), strict=False):
        axes.set_title(", ".join(told(members[0], name) for name in names if name not in agreed), loc="left")
        drawn.append((axes, members))
    for axes in list(grid)[len(groups) :]:
        axes.set_axis_off()
    return figure, drawn


def varying(rows: Sequence[Row], names: Iterable[str], *, same: bool = False) -> list[str]:
    """Of these fields those in which rows differ, or with `same` those that all have and agree on."""
    values = {name: {row.get(name) for row in rows} for name in names}
    if same:
        return [name for name, found in values.items() if len(found) == 1 and None not in found]
    return [name for name, found in values.items() if len(found) > 1]


def told(row: Row, name: str) -> str:
    """A field's value in words: names speak for themselves, numbers are named."""
    value = row.get(name)
    if value is None:
        return f"no {name}"
    return f"{name} {value:,}" if isinstance(value, int) else str(value)


def looks(names: Iterable[str], dashed: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """A colour, a marker and a stroke for each of these lines, `dashed` ones of peers; the same in every panel."""
    names, strokes = list(dict.fromkeys(names)), set(dashed)
    pairs = islice(zip(cycle(COLOURS), cycle(MARKERS), strict=False), len(names))
    return {
        name: {"color": colour, "marker": marker, "linestyle": "--" if name in strokes else "-"}
        for name, (colour, marker) in zip(names, pairs, strict=True)
    }


def over_contexts(axes: Axes, contexts: Iterable[int]) -> None:
    """A logarithmic axis of tokens that names those measured."""
    from matplotlib.ticker import NullLocator

    ticks = sorted(set(contexts))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [in_thousands(context) for context in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context (tokens)")


def in_thousands(count: int) -> str:
    """Tokens, in 1024s where they are: 512, 8k."""
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"


def finish(figure: Figure, handles: Mapping[str, Any], environments: Sequence[Row]) -> Figure:
    """A legend below all panels and, small, what the rows were made by; the figure grows by what they take."""
    width, height = figure.get_size_inches()
    columns, lines = 1, 0
    if len(handles) > 1:
        columns = max(1, min(len(handles), int(width / (0.075 * max(map(len, handles)) + 0.65))))
        lines = math.ceil(len(handles) / columns)
    made_by = _footer(environments, int(width * 21))
    footer = LINE * len(made_by) + 0.08
    below = footer + LEGEND_LINE * lines
    figure.set_size_inches(width, height + below)
    tall = figure.get_figheight()
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, below / tall, 1, 1 - below / tall))
    if lines:
        place = (0.5, footer / tall)
        legend = figure.legend(
            list(handles.values()), list(handles), loc="lower center", ncols=columns, bbox_to_anchor=place, borderpad=0
        )
        # Its room is set aside above; the layout would take it from the panels again.
        legend.set_in_layout(False)
    figure.text(0.005, 0.04 / tall, "\n".join(made_by), va="bottom", fontsize=6, color="#666666")
    return figure


def _footer(environments: Sequence[Row], width: int) -> list[str]:
    commands = list(dict.fromkeys(_made_by(environment) for environment in environments))
    lines = [line for command in commands[:FOOTERS] for line in textwrap.wrap(command, width)]
    return lines + ([f"and {len(commands) - FOOTERS} more"] if len(commands) > FOOTERS else [])


def _made_by(environment: Row) -> str:
    facts = [environment.get("cpu"), f"commit {environment['commit'][:12]}" if environment.get("commit") else None]
    return ", ".join([str(environment.get("command")), *(str(fact) for fact in facts if fact)])


def saved(figure: Figure, suffix: str) -> bytes:
    """The file's content: the same for the same figure, with no date in it."""
    drawn = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if suffix == "svg" else {"Software": None}
    figure.savefig(drawn, format=suffix, dpi=150, metadata=metadata)
    return drawn.getvalue()
