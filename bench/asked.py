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

from .batch_spec import BatchSpec, batch_specs
from .case import Sight, decoder_config
from .options import Common, Sizing, Stored, given, listed, numbered, require_positive, sized
from .results import require_writable

if TYPE_CHECKING:
    import typer

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


def batches_asked(
    context: typer.Context, specs: Sequence[str] | None, batches: Sequence[str] | None, contexts: Sequence[str] | None
) -> list[BatchSpec]:
    """The batches of --batch-spec, or every --batch at every --context; not both."""
    if specs is None:
        tokens = numbered("--context", contexts or ["512", "2048"])
        return [BatchSpec(((rows, each),)) for rows in numbered("--batch", batches or ["1"]) for each in tokens]
    if both := given(context, "batch", "context"):
        raise ValueError(f"--batch-spec says what {' and '.join(both)} would; give one or the other")
    return batch_specs("--batch-spec", specs)


def growing(common: Common, *, resume: bool) -> Path | None:
    """The output that gets each case's lines when they are measured: the `.jsonl`, if there is one."""
    lines = [path for path in common.output or () if path.suffix == ".jsonl"]
    if resume and not lines:
        raise ValueError("--resume goes on with a record of one line per row; name it with --output FILE.jsonl")
    if len(lines) > 1:
        raise ValueError(f"--output {', '.join(map(str, lines))}: one .jsonl is written while measuring; give one")
    if lines and common.format is not None:
        raise ValueError(
            f"--format {common.format} and --output {lines[0]} exclude each other: the suffix .jsonl is the format"
        )
    return lines[0] if lines else None


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
