"""The files of a checkpoint's folder: JSON read with a clear error, folders that appear whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ValueError, naming the file, for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as people read it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and vanishes when it does not.

    It lies beside the target, so that it arrives by renaming. Where `target` is already a folder its other files stay,
    and config.json arrives last: until then nothing reads the folder as a checkpoint.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        building = Path(scratch) / target.name
        building.mkdir()
        yield building
        for path in building.iterdir():
            # safetensors writes for the owner alone; a checkpoint is as readable as the folder it lies in.
            path.chmod(building.stat().st_mode & 0o666)
        if not target.exists():
            building.rename(target)
            return
        for path in sorted(building.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(target / path.name)
