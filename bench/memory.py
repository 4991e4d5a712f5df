"""Cache sizes: by formula from the declaration, and, when asked, as a store really allocates them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from attn_variants.cache import bytes_per_token, cache_bytes, cache_shapes, ideal_bytes
from attn_variants.contract import CacheSpec
from attn_variants.dtypes import dtype_bytes

from .case import Subject
from .results import Report, Row
from .tables import Column, Table, exact, size

META_ABOVE = 1 << 30
"""A store of more bytes than this is made on the meta device: every shape and size is real, no memory is taken."""

COLUMNS = (
    Column("subject", "subject", right=False),
    Column("entries", "kept per token, each layer", lambda entries: described(entries), right=False),
    Column("bytes_per_token", "bytes/token", exact),
    Column("bytes_ideal", "ideal", size),
    Column("bytes_formula", "reserved", size),
    Column("bytes_allocated", "allocated", size),
    Column("allocated_on", "on", right=False),
    Column("windowed_layers", "windowed layers"),
    Column("ratio_to_mha", "of MHA", "{:.2%}".format),
)
SHAPE_COLUMNS = (
    Column("subject", "subject", right=False),
    Column("name", "tensor", right=False),
    Column("shape", "shape", lambda shape: " x ".join(map(str, shape)), right=False),
    Column("dtype", "dtype", right=False),
    Column("bytes", "bytes", exact),
)
NOTE = (
    "bytes/token: what one more token of one sequence adds over all layers at this context, 0 where windows are full; "
    "ideal: what attention can ever read; reserved: what the store sets aside for batch x context, by formula."
)


def memory_report(
    subjects: Iterable[Subject],
    *,
    batch: int,
    context: int,
    kv_dtype: str,
    store: str = "full",
    codec: str = "plain",
    shapes: bool = False,
    device: str | None = None,
) -> Report:
    """One row per subject; `device` not None also makes the store there and reads its storages.

    kv_dtype is a canonical name. Raises ValueError for a store or codec that does not exist.
    """
    rows = []
    for subject in subjects:
        row = _sized(subject, batch=batch, context=context, kv_dtype=kv_dtype, store=store, codec=codec)
        if shapes:
            row["tensors"] = _tensors(subject.layers, batch, context, kv_dtype, store, codec)
        if device is not None:
            row["allocated_on"] = "meta" if row["bytes_formula"] > META_ABOVE else device
            row["bytes_allocated"] = _allocated(subject.layers, row)
        rows.append(row)
    where = f"batch {batch}, context {context:,}, {kv_dtype}, {store} store, {codec} codec"
    report = Report(rows, [Table(f"KV cache: {where}", _shown(rows), rows, NOTE)])
    if shapes:
        tensors = [{"subject": row["subject"], **tensor} for row in rows for tensor in row["tensors"]]
        report.tables.append(Table(f"Stored tensors: {where}", SHAPE_COLUMNS, tensors))
    report.failures += [
        f"{row['subject']}: allocated {row['bytes_allocated']} bytes, the formula says {row['bytes_formula']}"
        for row in rows
        if row["bytes_allocated"] not in (None, row["bytes_formula"])
    ]
    return report


def described(entries: list[Row]) -> str:
    """Entries in words, `k 8 x 128, v 8 x 128`; the layers are named where they differ."""
    counts = {entry["layers"] for entry in entries}
    return ", ".join(
        f"{entry['name']} {entry['heads']} x {entry['dim']}"
        + (f" ({entry['layers']} layers)" if len(counts) > 1 else "")
        for entry in entries
    )


def _sized(subject: Subject, *, batch: int, context: int, kv_dtype: str, store: str, codec: str) -> Row:
    reserved = cache_bytes(subject.layers, batch=batch, capacity=context, store=store, codec=codec, dtype=kv_dtype)
    row: Row = {
        "subject": subject.name,
        "variant": subject.variant,
        "layers": len(subject.layers),
        "batch": batch,
        "context": context,
        "kv_dtype": kv_dtype,
        "store": store,
        "codec": codec,
        "policy": "allocated",
        "tp": 1,
        "entries": _entries(subject.layers, kv_dtype),
        "windowed_layers": sum(1 for spec in subject.layers if spec.window or spec.chunk),
        "bytes_per_token": bytes_per_token(subject.layers, context=context, dtype=kv_dtype),
        "bytes_ideal": ideal_bytes(subject.layers, batch=batch, context=context, dtype=kv_dtype),
        "bytes_formula": reserved,
        "bytes_allocated": None,
        "allocated_on": None,
        "ratio_to_mha": None,
    }
    if subject.mha is not None:
        mha = cache_bytes(subject.mha, batch=batch, capacity=context, store=store, codec="plain", dtype=kv_dtype)
        row["ratio_to_mha"] = reserved / mha
    return row


def _entries(layers: tuple[CacheSpec, ...], kv_dtype: str) -> list[Row]:
    counts = Counter(
        (entry.name, entry.heads, entry.dim, entry.dtype or kv_dtype)
        for spec in layers
        if spec.shares is None
        for entry in spec.entries
    )
    return [
        {"name": name, "heads": heads, "dim": dim, "dtype": dtype, "layers": count}
        for (name, heads, dim, dtype), count in counts.items()
    ]


def _tensors(
    layers: tuple[CacheSpec, ...], batch: int, context: int, kv_dtype: str, store: str, codec: str
) -> list[Row]:
    shapes = cache_shapes(layers, batch=batch, capacity=context, store=store, codec=codec, dtype=kv_dtype)
    return [
        {"name": name, "shape": list(shape), "dtype": dtype, "bytes": math.prod(shape) * dtype_bytes(dtype)}
        for name, (shape, dtype) in shapes.items()
    ]


def _allocated(layers: tuple[CacheSpec, ...], row: Row) -> int:
    from attn_variants.cache import KVCache

    cache = KVCache(
        layers,
        batch=row["batch"],
        capacity=row["context"],
        dtype=row["kv_dtype"],
        device=row["allocated_on"],
        store=row["store"],
        codec=row["codec"],
    )
    return cache.nbytes


def _shown(rows: list[Row]) -> tuple[Column, ...]:
    return tuple(column for column in COLUMNS if any(row[column.field] not in (None, 0) for row in rows))
