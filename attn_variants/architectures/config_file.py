"""config.json from a file, a folder, a dict or a preset's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_variants.names import nearest

LARGEST = 4 * 1024 * 1024
"""Bytes; published config.json files are a few kilobytes."""

Source = str | Path | Mapping[str, Any]


def load(source: Source) -> tuple[dict[str, Any], str]:
    """The config and what to call it in messages.

    source: a config.json, the folder that holds one, an already parsed config, or the name of a preset; a path that
    exists goes before a preset of that name. Raises ValueError, in one line, for anything else.
    """
    if isinstance(source, Mapping):
        return dict(source), "config"
    path = Path(source)
    if _exists(path / "config.json"):
        path = path / "config.json"
    if _exists(path):
        return _parsed(path), str(path)
    if isinstance(source, str) and (preset := _preset(source)) is not None:
        return preset, f"preset {source}"
    raise ValueError(_absent(path, source))


def read_config(source: Source) -> dict[str, Any]:
    """The config.json of a file, a folder, a dict or a preset, as a dict of its own."""
    return load(source)[0]


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # The name is too long to be a path's.
        return False


def _parsed(path: Path) -> dict[str, Any]:
    try:
        size, data = path.stat().st_size, b""
        if size <= LARGEST:
            data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if size == 0:
        raise ValueError(f"{path}: the file is empty; fetch it again")
    if size > LARGEST:
        raise ValueError(f"{path}: the file has {size} bytes, a config.json a few thousand; is this the right file?")
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path}: the file begins with a byte order mark; save it as UTF-8 without one")
    try:
        config = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: not JSON at line {error.lineno}, column {error.colno} ({error.msg}); the file may be cut short"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: holds what no config.json does ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a JSON {_json_name(config)}, not an object; a config.json is one {{...}}")
    return config


def _preset(name: str) -> dict[str, Any] | None:
    from .presets import PRESETS

    return dict(PRESETS[name].config) if name in PRESETS else None


def _absent(path: Path, source: str | Path) -> str:
    from .presets import PRESETS

    name = str(source)
    if len(name) < 1000 and path.is_dir():
        return f"{path}: the folder holds no config.json"
    near = nearest(name.rsplit("/", 1)[-1].lower()[:60], PRESETS)
    return f"no file, folder or preset {name!r:.200}{near}; give a config.json, its folder, or a preset's name"


def _json_name(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]
