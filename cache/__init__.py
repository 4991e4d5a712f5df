"""Cache stores, the clock that drives them, and exact accounting. Torch is imported only when a store is made.

Store = layout (where a token lives) x codec (how its numbers are stored)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accounting import assert_cache_shapes, bytes_per_token, cache_bytes, cache_shapes, ideal_bytes
    from .kv_cache import KVCache
    from .models import ModelCache, model_cache

__all__ = [
    "KVCache",
    "ModelCache",
    "assert_cache_shapes",
    "bytes_per_token",
    "cache_bytes",
    "cache_shapes",
    "ideal_bytes",
    "model_cache",
]

_HOME = {
    "KVCache": "kv_cache",
    "ModelCache": "models",
    "model_cache": "models",
    **dict.fromkeys(
        ("assert_cache_shapes", "bytes_per_token", "cache_bytes", "cache_shapes", "ideal_bytes"), "accounting"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
