"""From a kind of layer and one layer's fields to what that layer keeps."""

from __future__ import annotations

from attn_variants.contract import CacheSpec, Entry, Record, State

from .family import Kept, KeptState, KeptStride, Layer
from .fields import Fields
from .formula import evaluate, names
from .strided import StridedSpec


def layer_spec(layer: Layer, kind: str, query_heads: int, shares: int | None, fields: Fields) -> CacheSpec:
    """What a layer of this kind keeps, its formulas worked out with the layer's fields.

    Raises ValueError, naming the fields, for a size below 1, a window that is null, or query heads that the key/value
    heads do not divide.
    """
    window, chunk = (_limit(formula, kind, fields) for formula in (layer.window, layer.chunk))
    if shares is not None:
        return CacheSpec(window=window, chunk=chunk, shares=shares)
    records = tuple(_record(made) for kept in layer.records if (made := _entries(kept, fields)))
    states = tuple(_state(state, fields) for state in layer.states if _holds(state.when, fields))
    for record in records:
        if record.name == "k" and query_heads % record.heads:
            raise ValueError(
                f"{fields.spelled('num_attention_heads')} ({query_heads}) must be a multiple of "
                f"{fields.spelled('num_key_value_heads')} ({record.heads})"
            )
    if layer.stride is None:
        return CacheSpec(records, states, window, chunk)
    return _strided(layer.stride, records, window, fields)


def depends_on_index(layer: Layer) -> bool:
    """Whether two layers of this kind may keep different things."""
    entries = [entry for record in layer.records for entry in record]
    sizes = [size for entry in entries for size in (entry.heads, entry.dim, entry.when)]
    sizes += [size for state in layer.states for size in (*state.shape, state.when, *sum(state.sharded, ()))]
    formulas = [size for size in (*sizes, layer.window, layer.chunk) if isinstance(size, str)]
    return any("i" in names(formula) for formula in formulas)


def _strided(stride: KeptStride, records: tuple[Record, ...], window: int | None, fields: Fields) -> StridedSpec:
    return StridedSpec(
        records=records,
        window=window,
        stride=_size(stride.every, fields),
        pooled=_entries(stride.pooled, fields),
        pending=_entries(stride.pending, fields),
        overlap=_entries(stride.overlap, fields),
    )


def _record(entries: tuple[Entry, ...]) -> Record:
    return Record(entries[0].name if len(entries) == 1 else "kv", entries)


def _entries(kept: tuple[Kept, ...], fields: Fields) -> tuple[Entry, ...]:
    return tuple(
        Entry(entry.name, _size(entry.heads, fields), _size(entry.dim, fields), entry.dtype, entry.sharded)
        for entry in kept
        if _holds(entry.when, fields)
    )


def _state(state: KeptState, fields: Fields) -> State:
    return State(
        state.name,
        tuple(_size(size, fields) for size in state.shape),
        state.dtype,
        tuple((_size(length, fields), _size(heads, fields)) for length, heads in state.sharded),
    )


def _holds(when: str | None, fields: Fields) -> bool:
    return when is None or bool(evaluate(when, fields))


def _size(size: int | str, fields: Fields) -> int:
    return fields.whole(size) if isinstance(size, str) else size


def _limit(formula: str | None, kind: str, fields: Fields) -> int | None:
    if formula is None:
        return None
    if evaluate(formula, fields) is None:
        first, *more = fields.names_in(formula)
        null = (
            f"its window is null: give one ({fields.values_in(formula)})" if more else f"{first} is null: give {first}"
        )
        raise ValueError(f"layer {fields['i']} is {kind!r}, but {null}, or call the layer 'full_attention'")
    return fields.whole(formula)
