"""What a contestant's cache is made with, and its bytes are counted by: slots, burst and pages. Makes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_variants.cache.layouts import kind_of, layout_named
from attn_variants.cache.paged import Paged
from attn_variants.cache.quantize import codec_named
from attn_variants.contract import CacheSpec

from .batch_spec import BatchSpec
from .passes import warm_pass


def cache_sizes(
    specs: Sequence[CacheSpec],
    rows: BatchSpec,
    capacity: int,
    *,
    store: str = "full",
    codec: str = "plain",
    static: bool = False,
    shuffled: bool = False,
    rewinds: int = 0,
    burst: int | None = None,
) -> dict[str, Any]:
    """The arguments of `KVCache`, and of `cache_bytes`, for these rows, but for the dtype and `static`.

    capacity: slots of the longest row; the others have as many to spare. Memory by rows gives each the longest's, a
    pool has the pages that each row can need, twice as many where they are shuffled.
    rewinds: the most tokens that are taken back at once.     burst: None is what a prompt's passes take.
    """
    if burst is None:
        counts = [count for count, _ in rows.runs]
        burst = max(burst_for(specs, store, count, capacity, static=static, rewinds=rewinds) for count in counts)
    sizes = {"batch": rows.batch, "capacity": capacity, "store": store, "codec": codec, "burst": burst}
    if store.startswith("paged") and (shuffled or rows.ragged):
        spare = capacity - rows.longest
        together = codec_named(codec).together
        pages = max(
            sum(_pages(spec, store, count, tokens + spare, burst, together) for count, tokens in rows.runs)
            for spec in {kind_of(spec): spec for spec in specs}.values()
        )
        sizes["pages"] = 2 * pages if shuffled else pages
    return sizes


def burst_for(specs: Sequence[CacheSpec], store: str, batch: int, capacity: int, *, static: bool, rewinds: int) -> int:
    """For the passes of a prompt, and for what is taken back."""
    taken_back = 1 if goes_back_by_copy(specs, store, static=static) else rewinds + 1
    return max(warm_pass(batch, capacity), taken_back)


def goes_back_by_copy(specs: Sequence[CacheSpec], store: str, *, static: bool) -> bool:
    """Of a ring: one that can be rewound has slots beyond its window and reads them masked."""
    return store == "ring" and not static and any(spec.window or spec.chunk for spec in specs)


def _pages(spec: CacheSpec, store: str, rows: int, capacity: int, burst: int, together: int) -> int:
    """As many as these rows can need at once."""
    layout = layout_named(store, spec, batch=rows, capacity=capacity, burst=burst, together=together)
    assert isinstance(layout, Paged)
    return layout.pool.total
