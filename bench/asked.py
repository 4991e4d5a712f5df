"""What the flags ask for, found to work out before any work: what cannot be is refused here, by name."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_variants.cache import cache_shapes
from attn_variants.cache.formats import format_named
from attn_variants.cache.layouts import layout_named
from attn_variants.cache.quantize import codec_named
from attn_variants.config import Geometry
from attn_variants.dtypes import canonical_dtype
from attn_variants.registry import VARIANTS, variant_named

from .case import Sight, decoder_config
from .options import Common, Sizing, Stored, listed, require_positive, sized
from .results import require_writable

if TYPE_CHECKING:
    from .fitting import Question


def question(sizing: Sizing) -> Question:
    """What the flags ask of every subject; numbers and names are checked here."""
    from .fitting import Question

    require_positive(**{name: getattr(sizing, name) for name in ("batch", "context", "tp", "pp", "dp", "cp")})
    values = vars(sizing) | {"codec": codec_named(sizing.codec).name}
    if sizing.kv_dtype != "auto":
        values["kv_dtype"] = format_named(sizing.kv_dtype).name
    if sizing.budget is not None:
        values["budget"] = sized("--budget", sizing.budget)
    if sizing.weights is not None:
        if sizing.budget is None:
            raise ValueError("--weights says what the weights take of a budget; give --budget too")
        values["weights"] = sizing.weights if sizing.weights == "auto" else sized("--weights", sizing.weights)
    return Question(**values)


def variants_named(values: Sequence[str] | None) -> list[str]:
    """The variants asked for, all of them for None; an unknown one is refused with the nearest."""
    names = list(VARIANTS) if values is None else listed("--variant", values)
    return [variant_named(name).name for name in names]


def buildable(variants: list[str], geometry: Geometry, sight: Sight | None = None) -> list[str]:
    """The same, after their decoders' sizes were found to work out: before any of them is measured."""
    for name in variants:
        decoder_config(name, geometry, sight)
    return variants


def storable(
    stored: Stored, variants: list[str], geometry: Geometry, *, static: bool = False, sight: Sight | None = None
) -> tuple[list[str], list[str]]:
    """The stores and codecs asked for, after each was found to hold each of these variants: before any is made."""
    stores = listed("--store", [stored.store])
    codecs = [codec_named(name).name for name in listed("--codec", [stored.codec])]
    for variant in variants:
        specs = decoder_config(variant, geometry, sight).cache_specs
        try:
            for store, codec in itertools.product(stores, codecs):
                cache_shapes(specs, batch=1, capacity=1, store=store, codec=codec)
                layout_named(store, specs[0], batch=1, capacity=1, static=static)
        except ValueError as error:
            raise ValueError(f"{variant}: {error}") from None
    return stores, list(dict.fromkeys(codecs))


def dtypes_named(values: Sequence[str]) -> list[str]:
    """Canonical names of the dtypes asked for."""
    return list(dict.fromkeys(canonical_dtype(name) for name in listed("--dtype", values)))


def read_text(flag: str, path: str) -> str:
    """What a UTF-8 file holds, or stdin for `-`. Raises ValueError for what is empty or of another encoding."""
    if path == "-" and sys.stdin is None:
        raise ValueError(f"{flag} - reads stdin, which is closed; give a file")
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path} is no UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
    if not text:
        raise ValueError(f"{flag} {path} is empty; give some text")
    return text


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def require_ready(common: Common) -> None:
    """Refuse common flags that could not be obeyed, before any work."""
    for path in common.output or ():
        require_writable(path)
    require_positive(threads=common.threads)
    if common.threads is not None and common.threads > (cores := usable_cores()):
        raise ValueError(
            f"--threads ({common.threads}) must be at most {cores}, the cores there are; more would wait for each other"
        )
    if not 0 <= common.seed < 2**63:
        raise ValueError(f"--seed ({common.seed}) must be an integer of 0 to 2**63 - 1")
