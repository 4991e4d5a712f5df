"""Tables for readers: which fields of a row are shown, under what heading, in what words; rich draws them."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Column:
    """One column: the field it shows, its heading, and how a value reads."""

    field: str
    heading: str
    show: Callable[[Any], str] = str
    right: bool = True

    def cell(self, row: dict[str, Any]) -> str:
        """The row's value in words; a value that is missing or None is a dash."""
        value = row.get(self.field)
        return "-" if value is None else self.show(value)


@dataclass(frozen=True)
class Table:
    """Rows under columns, with a title above and a line below that says how to read them."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[dict[str, Any]]
    note: str = ""


def folded(
    title: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]], note: str, same: Sequence[str]
) -> Table:
    """The table without those columns of `same` in which all rows agree; what they agree on joins the title."""
    agreed = [name for name in same if len({row[name] for row in rows}) == 1]
    facts = [title, *(f"{name} {rows[0][name]}" for name in agreed)]
    return Table(", ".join(facts), tuple(column for column in columns if column.field not in agreed), rows, note)


def size(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least one: 1073741824 is `1 GiB`; never GB."""
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {UNITS[unit]}"


def exact(count: int) -> str:
    """An integer with its thousands apart."""
    return f"{count:,}"


def figure(value: float) -> str:
    """A measured number to three digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def as_text(tables: Sequence[Table]) -> str:
    """The tables drawn for a terminal, in colour only on one that shows it (rich honours NO_COLOR)."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 200
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=width, highlight=False)
    for table in tables:
        _draw(table, console)
    return text.getvalue()


def as_markdown(table: Table) -> str:
    """The table as GitHub draws it."""
    lines = [f"### {table.title}", ""]
    lines.append("| " + " | ".join(column.heading for column in table.columns) + " |")
    lines.append("|" + "|".join("---:" if column.right else "---" for column in table.columns) + "|")
    lines += ["| " + " | ".join(column.cell(row) for column in table.columns) + " |" for row in table.rows]
    return "\n".join([*lines, "", *([table.note, ""] if table.note else [])])


def _draw(table: Table, console: Console) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table as Drawing

    drawing = Drawing(title=escape(table.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in table.columns:
        drawing.add_column(escape(column.heading), justify="right" if column.right else "left")
    for row in table.rows:
        drawing.add_row(*(escape(column.cell(row)) for column in table.columns))
    console.print(drawing)
    if table.note:
        console.print(escape(table.note) + "\n", soft_wrap=True)
