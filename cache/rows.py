"""What a row holds, in the order of positions and whatever the layout: read from one cache, written to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layouts import held_positions
from .paged import Paged
from .store import once

if TYPE_CHECKING:
    from .kv_cache import KVCache


@dataclass(frozen=True)
class Row:
    """The first `length` tokens of a row, as they are stored.

    first:     per kind of layer the oldest position that is here besides the sinks; layers of other kinds are left out.
    tokens:    (heads, n, width) in the order of positions, by name: "layers.0.k"; those that lie in slots (`coded`).
    states:    (snapshots, *shape), by name, after the last lengths up to this one.
    residual:  (heads, slots, width), by name: newest tokens in full precision, where some are coded together.
    """

    length: int
    first: Mapping[str, int]
    tokens: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    snapshots: int
    residual: Mapping[str, Tensor]


def read_row(cache: KVCache, row: int, length: int, first: Mapping[str, int]) -> Row:
    """The first `length` tokens of a row; `first` as in `Row`, and not before what its layout holds."""
    lengths = range(max(0, cache._high[row] - cache.burst + 1), length + 1)
    tokens: dict[str, Tensor] = {}
    states: dict[str, Tensor] = {}
    residual: dict[str, Tensor] = {}
    for layer, store in cache._stores.items():
        states |= _named(layer, store.read_states(row, lengths))
        residual |= _named(layer, store.read_residual(row, length))
        if store.kind in first:
            positions = coded(cache, held_positions(store.spec, length, first[store.kind]), cache._high[row])
            slots = cache._layouts[store.kind].slots(row, positions.to(cache._device))
            tokens |= _named(layer, store.read_row(row, slots))
    return Row(length, first, tokens, states, len(lengths), residual)


def write_rows(cache: KVCache, contents: Mapping[int, Row]) -> None:
    """Fill empty rows. Raises ValueError, with nothing changed, where there is no room."""
    moves = []
    try:
        for row, content in contents.items():
            for kind, first in content.first.items():
                moves.append((kind, cache._layouts[kind].admit(row, content.length, first, cache._device)))
    except ValueError:
        for row in contents:
            cache._settle(row, 0)
        raise
    for kind, moved in moves:
        for store in cache._stores.values():
            if store.kind == kind:
                store.move(moved)
    for row, content in contents.items():
        _write(cache, row, content)


def named_rows(rows: Sequence[int] | None, batch: int, *, distinct: bool = True) -> list[int]:
    """The rows meant, all of a cache's for None. Raises ValueError for none, for some not there or named twice."""
    named = list(range(batch)) if rows is None else [index(row) for row in rows]
    if not named or any(not 0 <= row < batch for row in named):
        raise ValueError(f"rows {named} must be some of 0 to {batch - 1}")
    if distinct and len(set(named)) != len(named):
        raise ValueError(f"rows {named} must be distinct")
    return named


def require_empty(cache: KVCache, rows: Sequence[int]) -> None:
    """Refuse rows that hold something."""
    for row in rows:
        if cache._lengths[row]:
            raise ValueError(f"row {row} holds {cache._lengths[row]} tokens already: name an empty one, or free it")


def share(cache: KVCache, source: int, rows: Sequence[int], length: int) -> None:
    """Empty rows become the first `length` tokens of row `source`: on the same pages, elsewhere by copy.

    Raises ValueError, with nothing changed, for rows that are not empty and a length that cannot be gone on from.
    """
    layouts, held, floor = cache._layouts, cache._lengths[source], max(1, cache.floor(source))
    if not held:
        raise ValueError(f"row {source} holds nothing to share")
    if not floor <= length <= held:
        raise ValueError(
            f"row {source} holds {held} tokens, of which the first {floor} to {held} can be shared, not {length}: "
            "fewer would not see all they need; a larger burst keeps more"
        )
    require_empty(cache, rows)
    cache._drop_pending()
    content = read_row(
        cache, source, length, {kind: layout.first(source) for kind, layout in layouts.items() if not layout.pooled}
    )
    for layout in layouts.values():
        if layout.pooled:
            layout.take(layout, [source if row in rows else row for row in range(cache.batch)])
            for row in rows:
                cache._written[row] = max(cache._written[row], cache._written[source])
    write_rows(cache, dict.fromkeys(rows, content))


def wipe(cache: KVCache, row: int, end: int) -> None:
    """Zero what a row's slots hold from position `end` on: what was rewound, or written by a step never advanced.

    A mask does not keep a NaN out: its weight of 0 times NaN is NaN.
    """
    past, cache._written[row] = cache._written[row], end
    for store in cache._stores.values() if past > end else ():
        layout = cache._layouts[store.kind]
        positions = torch.arange(end, past, device=cache._device)
        # Of tokens that are coded together, only those of an empty row are in slots and can be forgotten.
        slotted = positions if cache.together == 1 or not cache._lengths[row] else positions[:0]
        if isinstance(layout, Paged):
            slotted = slotted[: max(0, len(layout.tables[row]) * layout.page - end)]
        store.wipe(row, layout.slots(row, slotted), positions)


def _write(cache: KVCache, row: int, content: Row) -> None:
    cache._settle(row, content.length)
    cache._written[row] = max(cache._written[row], content.length)
    # Older snapshots are not here: as though the row had been so far ahead that they were overwritten.
    high = cache._high[row] = reached(cache, content.length, content.snapshots)
    for layer, store in cache._stores.items():
        store.write_states(row, content.length, _of_layer(layer, content.states))
        store.write_residual(row, _of_layer(layer, content.residual))
        if store.kind in content.first:
            layout = cache._layouts[store.kind]
            given = coded(cache, held_positions(store.spec, content.length, content.first[store.kind]), high)
            kept = coded(cache, held_positions(store.spec, content.length, layout.first(row)), high)
            per = store.per
            stored = {
                name: tensor[:, torch.searchsorted(once(given, per[name]), once(kept, per[name]))]
                for name, tensor in _of_layer(layer, content.tokens).items()
            }
            store.write_row(row, layout.slots(row, kept.to(cache._device)), stored)


def reached(cache: KVCache, length: int, snapshots: int) -> int:
    """How far a row counts as having been that is given so many tokens and states."""
    return length + cache.burst - min(snapshots, cache.burst)


def coded(cache: KVCache, positions: Tensor, high: int) -> Tensor:
    """Those of a row's positions that lie in slots; where tokens are coded together the newest wait in the residual.

    On a ring their slots are still those of older tokens, with whose scales they have nothing to do.
    """
    if cache.together == 1:
        return positions
    return positions[positions < cache._sealing.sealed(high)]


def _named(layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def _of_layer(layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    front = f"layers.{layer}."
    return {name.removeprefix(front): tensor for name, tensor in tensors.items() if name.startswith(front)}
