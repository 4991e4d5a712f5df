"""What a command found: rows for machines, tables for readers, and where, when and by what they were made."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .tables import Table, as_markdown, as_text

SCHEMA = 1
SUFFIXES = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".md": "markdown"}
Row = dict[str, Any]


@dataclass
class Report:
    """One command's findings.

    rows: every figure under its field name. tables: what a reader is shown. failures: the checks that do not hold.
    """

    rows: list[Row] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def extend(self, other: Report) -> None:
        """Append another report's findings."""
        self.rows += other.rows
        self.tables += other.tables
        self.failures += other.failures


def rendered(report: Report, form: str, environment: Row) -> str:
    """The report in one of the command's formats; every one but `csv` tells the environment too.

    jsonl: a line that holds the environment, then a line per row.
    """
    if form == "json":
        record = {"schema": SCHEMA, "environment": environment, "rows": report.rows}
        return json.dumps(record, indent=1, allow_nan=False) + "\n"
    if form == "jsonl":
        lines = [{"schema": SCHEMA, "environment": environment}, *report.rows]
        return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    if form == "csv":
        return as_csv(report.rows)
    if form == "markdown":
        return "\n".join([*(as_markdown(table) for table in report.tables), _facts(environment)])
    return as_text(report.tables)


def as_csv(rows: Sequence[Row]) -> str:
    """One line per row under the union of the fields; lists and objects are JSON inside their cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in row.items()}
        )
    return text.getvalue()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there complete or not at all: a sibling first, then one rename.

    What is no file, a pipe or a device, is written to as it is. Raises OSError where the folder is missing or not
    writable.
    """
    path = path.resolve()
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    descriptor, sibling = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(sibling, 0o666 & ~_umask())
        os.replace(sibling, path)
    except BaseException:
        os.unlink(sibling)
        raise


def require_writable(path: Path, flag: str = "--output") -> None:
    """Refuse an output file that could not be written, before the work that would fill it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path.resolve().parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written ({error.strerror}); choose another folder") from None


def deliver(report: Report, form: str | None, outputs: Sequence[Path], environment: Row) -> None:
    """Write the report to every output, or to stdout where there is none.

    form: one of the command's formats; None is what a file's suffix says, else `table`.
    """
    if not outputs:
        to_stdout(rendered(report, form or "table", environment))
    for path in outputs:
        write_whole(path, rendered(report, form or SUFFIXES.get(path.suffix, "table"), environment))
        print(f"wrote {path}", file=sys.stderr)


def to_stdout(text: str) -> None:
    """Print data. A reader that went away (`| head`) ends the command quietly."""
    if sys.stdout is None:
        raise ValueError("stdout is closed; give --output FILE")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def environment(arguments: Sequence[str], *, seed: int, device: str, threads: int | None) -> Row:
    """Where the numbers come from. torch is asked only if it is loaded already: sizes need no import of it."""
    torch = sys.modules.get("torch")
    return {
        "command": shlex.join(["attn-bench", *arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("attn-variants", "torch", "transformers", "numpy")},
        },
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads() if torch else threads,
        "device": torch.cuda.get_device_name() if torch and device == "cuda" else device,
        "seed": seed,
    }


def _facts(environment: Row) -> str:
    """The environment in one line."""
    facts = [f"{name} {number}" for name, number in environment["versions"].items() if number]
    facts += [f"{environment['cpu']} with {environment['cores']} cores", f"device {environment['device']}"]
    facts += [f"{name} {environment[name]}" for name in ("threads", "commit") if environment[name]]
    return f"Made by `{environment['command']}` on {environment['date']}: {', '.join(facts)}.\n"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, `-dirty` when files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
