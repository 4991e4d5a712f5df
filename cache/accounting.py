"""Exact bytes and shapes of a cache, added up from its declaration. Imports no torch.

Three figures answer three questions: `cache_bytes` is what a store reserves, `ideal_bytes` what attention can ever
read, `bytes_per_token` what one more token costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attn_variants.architectures.strided import StridedSpec, kept_entries
from attn_variants.contract import CacheSpec, Entry, Record, State, require_size
from attn_variants.dtypes import dtype_bytes, float_dtype

from .formats import Format, format_named
from .layouts import Layout, kind_of, layout_named
from .number_codes import Part
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
    burst: int = 1,
    pages: int | Mapping[str, int] | None = None,
) -> Shapes:
    """Shape and dtype of every tensor a store makes: {"layers.0.k": ((B, K, capacity, D), "bfloat16"), ...}.

    burst, pages: as in `KVCache`; a fork has pages by kind of layer (`layouts.kind_of`).
    A layer that shares another's cache has none.
    Raises ValueError for sizes below 1, unknown names, and layers that remember what no store holds.
    """
    require_storable(specs)
    chosen, name = codec_named(codec), float_dtype(dtype)
    shapes: Shapes = {}
    for index, spec in enumerate(specs):
        pool = pages[kind_of(spec)] if isinstance(pages, Mapping) else pages
        layout = layout_named(
            store, spec, batch=batch, capacity=capacity, burst=burst, pages=pool, together=chosen.together
        )
        if spec.shares is not None:
            continue
        for record in spec.records:
            for part in chosen.over(layout.together).parts(record, name):
                shapes[f"layers.{index}.{record.name}{part.suffix}"] = (part_shape(layout, record, part), part.dtype)
            if waiting := residual_slots(layout.together, burst):
                shape = (batch, record.heads, waiting, record.width)
                shapes[f"layers.{index}.{record.name}{RESIDUAL}"] = (shape, record.dtype or name)
        for state in spec.states:
            shapes[f"layers.{index}.{state.name}"] = (state_shape(state, batch, burst), state.dtype or name)
    return shapes


def cache_bytes(specs: Sequence[CacheSpec], *, batch: int, capacity: int, **store: Any) -> int:
    """Bytes that a store reserves: the sum over `cache_shapes`, which see for the arguments."""
    shapes = cache_shapes(specs, batch=batch, capacity=capacity, **store)
    return sum(math.prod(shape) * dtype_bytes(part) for shape, part in shapes.values())


def used_bytes(
    specs: Sequence[CacheSpec], *, batch: int, context: int, codec: str = "plain", dtype: Any = "bfloat16"
) -> int:
    """Bytes of what attention can read after `context` tokens in each row, as a store of this codec holds them."""
    tokens = (
        spec.visible_tokens(context) * token_bytes(spec, codec=codec, dtype=dtype) + states_bytes(spec, dtype=dtype)
        for spec in specs
        if spec.shares is None
    )
    return batch * sum(tokens)


def token_bytes(spec: CacheSpec, *, codec: str = "plain", dtype: Any = "bfloat16") -> int:
    """Bytes of one token in one layer, as a store of this codec holds it; rounded up where tokens share a scale."""
    chosen, name = codec_named(codec), float_dtype(dtype)
    return sum(
        -(-record.heads * part.width * dtype_bytes(part.dtype) // part.per)
        for record in spec.records
        for part in chosen.parts(record, name)
    )


def states_bytes(spec: CacheSpec, *, dtype: Any = "bfloat16") -> int:
    """Bytes of the states of one sequence in one layer, one snapshot of them."""
    return sum(state.numel * dtype_bytes(state.dtype or dtype) for state in spec.states)


RESIDUAL = ".residual"
"""Completes the name of the tensor that holds a record's newest tokens, where some are coded together."""


def residual_slots(together: int, burst: int) -> int:
    """Tokens of a row that may wait: an incomplete run, a burst that may be taken back, and one that is just coming."""
    return together + 2 * burst - 1 if together > 1 else 0


def part_shape(layout: Layout, record: Record, part: Part) -> tuple[int, ...]:
    """Of one stored tensor: the layout's, with a row per slot, or per as many slots as share one."""
    *rows, slots, width = layout.shape(record.heads, part.width)
    return (*rows, slots // part.per, width)


def state_shape(state: State, batch: int, burst: int) -> tuple[int, ...]:
    """Of a stored state, with a snapshot for each of the last `burst` lengths: (batch, burst, *shape)."""
    return (batch, burst, *state.shape)


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
        names = ("batch", "capacity", "store", "codec", "dtype", "burst", "pages")
        sizes = {name: getattr(cache, name) for name in names} | sizes
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
        if isinstance(spec, StridedSpec):
            raise ValueError(f"layer {index} pools every {spec.stride} tokens into one, which no store holds")
        if spec.shares is None and not spec.records and not spec.states:
            raise ValueError(f"layer {index} declares no records and no states, so there is nothing to store")
