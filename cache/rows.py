"""What a row holds, in the order of positions and whatever the layout: read from one cache, written to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layouts import held_positions

if TYPE_CHECKING:
    from .kv_cache import KVCache


@dataclass(frozen=True)
class Row:
    """The first `length` tokens of a row, as they are stored.

    first:     per kind of layer the oldest position that is here besides the sinks; layers of other kinds are left out.
    tokens:    (heads, n, width) in the order of positions, by name: "layers.0.k".
    states:    (snapshots, *shape), by name, after the last lengths up to this one.
    """

    length: int
    first: Mapping[str, int]
    tokens: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    snapshots: int


def read_row(cache: KVCache, row: int, length: int, first: Mapping[str, int]) -> Row:
    """The first `length` tokens of a row; `first` as in `Row`, and not before what its layout holds."""
    lengths = range(max(0, cache._high[row] - cache.burst + 1), length + 1)
    tokens, states = {}, {}
    for layer, store in cache._stores.items():
        states |= _named(layer, store.read_states(row, lengths))
        if store.kind in first:
            positions = held_positions(store.spec, length, first[store.kind])
            slots = cache._layouts[store.kind].slots(row, positions.to(cache._device))
            tokens |= _named(layer, store.read_row(row, slots))
    return Row(length, first, tokens, states, len(lengths))


def write_rows(cache: KVCache, contents: Mapping[int, Row]) -> None:
    """Fill empty rows. Raises ValueError, with nothing changed, where there is no room."""
    try:
        for row, content in contents.items():
            for kind, first in content.first.items():
                moves = cache._layouts[kind].admit(row, content.length, first, cache._device)
                for store in cache._stores.values():
                    if store.kind == kind:
                        store.move(moves)
    except ValueError:
        for row in contents:
            cache._settle(row, 0)
        raise
    for row, content in contents.items():
        _write(cache, row, content)


def share(cache: KVCache, source: int, rows: Sequence[int], length: int) -> None:
    """Empty rows become the first `length` tokens of row `source`: on the same pages, elsewhere by copy."""
    layouts = cache._layouts
    content = read_row(
        cache, source, length, {kind: layout.first(source) for kind, layout in layouts.items() if not layout.pooled}
    )
    for row in rows:
        for layout in layouts.values():
            if layout.pooled:
                layout.share(source, row, length)
    write_rows(cache, dict.fromkeys(rows, content))


def _write(cache: KVCache, row: int, content: Row) -> None:
    cache._settle(row, content.length)
    # Older snapshots are not here: as though the row had been so far ahead that they were overwritten.
    cache._high[row] = content.length + cache.burst - min(content.snapshots, cache.burst)
    for layer, store in cache._stores.items():
        store.write_states(row, content.length, _of_layer(layer, content.states))
        if store.kind in content.first:
            layout = cache._layouts[store.kind]
            given = held_positions(store.spec, content.length, content.first[store.kind])
            kept = held_positions(store.spec, content.length, layout.first(row))
            columns = torch.searchsorted(given, kept)
            stored = {name: tensor[:, columns] for name, tensor in _of_layer(layer, content.tokens).items()}
            store.write_row(row, layout.slots(row, kept.to(cache._device)), stored)


def _named(layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def _of_layer(layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    front = f"layers.{layer}."
    return {name.removeprefix(front): tensor for name, tensor in tensors.items() if name.startswith(front)}
