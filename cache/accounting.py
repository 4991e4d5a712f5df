"""Exact bytes and shapes of a cache, added up from its declaration. Imports no torch.

Three figures answer three questions: `cache_bytes` is what a store reserves, `ideal_bytes` what attention can ever
read, `bytes_per_token` what one more token costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attn_variants.architectures.strided import StridedSpec, kept_entries
from attn_variants.contract import CacheSpec, Entry, require_size
from attn_variants.dtypes import dtype_bytes, float_dtype

from .formats import Format, format_named
from .layouts import layout_named
from .parallel import WHOLE, Split
from .quantize import codec_named

if TYPE_CHECKING:
    from .kv_cache import KVCache

Shapes = dict[str, tuple[tuple[int, ...], str]]
Kept = Sequence[tuple[Entry, int]]
"""Entries, each with how many times it is kept."""


def cache_shapes(
    specs: Sequence[CacheSpec],
    *,
    batch: int,
    capacity: int,
    store: str = "full",
    codec: str = "plain",
    dtype: Any = "bfloat16",
) -> Shapes:
    """Shape and dtype of every tensor a store makes: {"layers.0.k": ((B, K, capacity, D), "bfloat16"), ...}.

    Raises ValueError for sizes below 1, unknown names, and layers that remember what no store holds.
    """
    require_storable(specs)
    layout = layout_named(store, batch=batch, capacity=capacity)
    chosen, name = codec_named(codec), float_dtype(dtype)
    return {
        f"layers.{index}.{record.name}{part.suffix}": (layout.shape(record.heads, part.width), part.dtype)
        for index, spec in enumerate(specs)
        for record in spec.records
        for part in chosen.parts(record, name)
    }


def cache_bytes(
    specs: Sequence[CacheSpec],
    *,
    batch: int,
    capacity: int,
    store: str = "full",
    codec: str = "plain",
    dtype: Any = "bfloat16",
) -> int:
    """Bytes that a store reserves: the sum over `cache_shapes`."""
    shapes = cache_shapes(specs, batch=batch, capacity=capacity, store=store, codec=codec, dtype=dtype)
    return sum(math.prod(shape) * dtype_bytes(part) for shape, part in shapes.values())


def ideal_bytes(specs: Sequence[CacheSpec], *, batch: int, context: int, dtype: Any = "bfloat16") -> int:
    """Bytes that attention can ever read after `context` tokens: a window's layer needs its window and no more.

    dtype: a plain one, or a format such as `fp8` or `int4:64` (`attn_variants.cache.formats`).
    States count once per sequence; a layer that shares another's cache adds nothing.
    """
    require_size("batch", batch)
    require_size("context", context, least=0)
    form = format_named(dtype)
    return batch * sum(layer_bytes(spec, kept_entries(spec, context), form) for spec in specs)


def layer_bytes(spec: CacheSpec, kept: Kept, form: Format, split: Split = WHOLE, rank: int = 0) -> int:
    """Bytes of one sequence in one layer on one rank: entries, each as often as it is kept, and states.

    rank: the context-parallel one.
    """
    if spec.shares is not None:
        return 0
    tokens = sum(
        split.entry_heads(entry) * form.tokens_bytes(entry, split.tokens(count, rank)) for entry, count in kept
    )
    return tokens + sum(split.state_numbers(state) * dtype_bytes(state.dtype or form.model) for state in spec.states)


def bytes_per_token(specs: Sequence[CacheSpec], *, context: int, dtype: Any = "bfloat16") -> int:
    """Bytes that one more token adds to `ideal_bytes` of one sequence that holds `context` tokens, over all layers."""
    after, before = (ideal_bytes(specs, batch=1, context=tokens, dtype=dtype) for tokens in (context + 1, context))
    return after - before


def assert_cache_shapes(cache: KVCache | Mapping[str, Any], specs: Sequence[CacheSpec], **sizes: Any) -> None:
    """Raise AssertionError, naming both shapes, unless the cache's tensors are exactly those that `specs` declare.

    cache: a `KVCache`, or tensors by name for a cache of your own; then give `batch`, `capacity` and, unless they are
    the defaults of `cache_shapes`, `dtype`, `store` and `codec`.
    """
    if isinstance(cache, Mapping):
        tensors = cache
    else:
        tensors = cache.tensors
        sizes = {name: getattr(cache, name) for name in ("batch", "capacity", "store", "codec", "dtype")} | sizes
    wanted = cache_shapes(specs, **sizes)
    if tensors.keys() != wanted.keys():
        missing, surplus = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        raise AssertionError(f"the cache lacks tensors {missing} and has {surplus} that the specs do not declare")
    for name, (shape, dtype) in wanted.items():
        held = (tuple(tensors[name].shape), str(tensors[name].dtype).removeprefix("torch."))
        if held != (shape, dtype):
            raise AssertionError(f"{name} is {held[0]} in {held[1]}, the specs declare {shape} in {dtype}")


def require_storable(specs: Sequence[CacheSpec]) -> None:
    """Refuse, by name, layers that remember what no store holds."""
    if isinstance(specs, CacheSpec):
        raise ValueError("specs must be a sequence with one CacheSpec per layer, got a single CacheSpec: [spec]")
    for index, spec in enumerate(specs):
        if spec.states:
            names = ", ".join(state.name for state in spec.states)
            raise ValueError(f"layer {index} keeps a constant-size state ({names}), which no store holds")
        if isinstance(spec, StridedSpec):
            raise ValueError(f"layer {index} pools every {spec.stride} tokens into one, which no store holds")
        if spec.shares is not None:
            raise ValueError(f"layer {index} shares the cache of layer {spec.shares}, which no store supports")
        if not spec.records:
            raise ValueError(f"layer {index} declares no records, so there is nothing to store")
