"""What a cache's bytes are taken by: the formula's, the storages', what can be read of them, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .accounting import cache_bytes, states_bytes, token_bytes
from .layouts import kind_of

if TYPE_CHECKING:
    from .kv_cache import KVCache


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache: what the formula says, what is allocated, what tokens that can be read take, and the rest.

    bookkeeping: positions and block tables, beside the cache itself and in none of the others.
    """

    formula: int
    allocated: int
    used: int
    wasted: int
    bookkeeping: int


def occupancy(cache: KVCache) -> CacheBytes:
    """All figures. A page that several rows hold is used once."""
    formula = cache_bytes(
        cache.specs,
        batch=cache.batch,
        capacity=cache.capacity,
        store=cache.store,
        codec=cache.codec,
        dtype=cache.dtype,
        burst=cache.burst,
        pages=cache.pages,
    )
    slots = {kind: layout.used(cache._lengths) for kind, layout in cache._layouts.items()}
    held = sum(bool(length) for length in cache._lengths)
    used = sum(
        slots[kind_of(spec)] * token_bytes(spec, codec=cache.codec, dtype=cache.dtype)
        + held * states_bytes(spec, dtype=cache.dtype)
        for spec in cache.specs
        if spec.shares is None
    )
    bookkeeping = sum(layout.bookkeeping for layout in cache._layouts.values())
    return CacheBytes(formula, cache.nbytes, used, cache.nbytes - used, bookkeeping)
