"""Published models by name: minimal config.json dicts, each with its source. The data is presets.json beside this file.

A preset holds what its decoder's cache and shape depend on; what it leaves out is the family's default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_variants.names import nearest


@dataclass(frozen=True)
class Preset:
    """A published model: its config.json, as far as it matters here, and where that was read."""

    config: Mapping[str, Any]
    source: str


def _loaded() -> dict[str, Preset]:
    data = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    return {name: Preset(entry["config"], entry["source"]) for name, entry in data.items()}


PRESETS: Mapping[str, Preset] = _loaded()
"""The published name in lower case, without the owner."""


def preset(name: str) -> dict[str, Any]:
    """The config of the preset called `name`, a dict of its own; an unknown name is refused with the nearest ones."""
    if name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}{nearest(name.rsplit('/', 1)[-1].lower(), PRESETS)}")
    copied: dict[str, Any] = json.loads(json.dumps(PRESETS[name].config))
    return copied
