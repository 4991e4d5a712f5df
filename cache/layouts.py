"""Layouts: in which slot a token lives, and how a step is read and written there. Imports no torch at the top.

A layout serves all layers of one kind (window, chunk, sinks). It keeps what it must know per row; the numbers lie in
the layers' stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from attn_variants.contract import LARGEST_SIZE, CacheSpec, Plan, Step, require_size
from attn_variants.names import unknown

if TYPE_CHECKING:
    import torch

    from attn_variants.transient import Placement


@dataclass(frozen=True)
class Moves:
    """What has to happen in every store before a step is written: slots copied and slots zeroed, as (first, past)."""

    copied: tuple[tuple[slice, slice], ...] = ()
    zeroed: tuple[slice, ...] = ()


class Layout(Protocol):
    """Position to slot, for all layers of one kind. Rows are those of the cache, lengths the tokens they hold."""

    spec: CacheSpec
    together: int
    """Neighbouring tokens, counted from position 0, whose slots are neighbours too: they can be coded together."""

    pooled: bool
    """Whether all rows share one pool of slots: a stored tensor is then (heads, slots, width)."""

    ordered: bool
    """Whether slots lie in the order of positions."""

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        """Of one stored tensor."""
        ...

    def check(self, rows: Sequence[int], placement: Placement) -> None:
        """Raise ValueError, with nothing changed, for a step that this memory cannot take."""
        ...

    def reserve(self, rows: Sequence[int], placement: Placement) -> Moves:
        """Make room for a checked step."""
        ...

    def write(self, step: Step, rows: Sequence[int], placement: Placement) -> Plan:
        """A plan that says where each token of the reserved step is written, and nothing of reading yet."""
        ...

    def read(self, plan: Plan, step: Step, rows: Sequence[int], placement: Placement) -> bool:
        """Say in the plan which slots are read; true where every query sees every one of them."""
        ...

    def settle(self, row: int, length: int) -> None:
        """The row holds `length` tokens from now on: it has grown, was rewound or was freed."""
        ...

    def first(self, row: int) -> int:
        """The oldest position, sinks aside, from which on this row's memory holds all of its tokens.

        Those of a step that is written count, whether it is advanced or not: what they went over is gone.
        """
        ...

    def admit(self, row: int, length: int, first: int, device: torch.device) -> Moves:
        """Make room in an empty row for `length` tokens, of which the sinks and those from `first` on will be written.

        It may keep fewer, as `first(row)` then says. Raises ValueError where there is no room; `settle(row, 0)` undoes.
        """
        ...

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """The slot of each of these positions, (n,), all of them held."""
        ...

    def take(self, other: Self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] of `other` is, which may be this layout."""
        ...

    def fork(self, rows: Sequence[int]) -> Self:
        """A layout of its own whose row i is as row rows[i] here; a pooled one stays on the same pool."""
        ...

    def used(self, lengths: Sequence[int]) -> int:
        """Slots that hold a token which can still be read, rows being so long."""
        ...

    @property
    def bookkeeping(self) -> int:
        """Bytes of tables and positions, beside the cache itself."""
        ...


def planned(layout: Layout, step: Step, rows: Sequence[int], placement: Placement) -> Plan:
    """The reserved step as one kind of layer sees it. A cold one reads its own tensors, and no slot."""
    from attn_variants.transient import mask_plan

    plan = layout.write(step, rows, placement)
    if not placement.cold and not layout.read(plan, step, rows, placement):
        mask_plan(plan, step, layout.spec)
    return plan


def span(spec: CacheSpec) -> int:
    """Newest tokens that a layer of this kind can need, its sinks aside. Raises for one that needs them all."""
    assert spec.window is not None or spec.chunk is not None
    return min(limit for limit in (spec.window, spec.chunk) if limit is not None)


def shortest(spec: CacheSpec, first: int) -> int:
    """The shortest length to go on from, or be rewound to, where the sinks and positions from `first` on are held."""
    return first + span(spec) - 1 if first > spec.sinks else 0


def held_positions(spec: CacheSpec, length: int, first: int) -> torch.Tensor:
    """Positions of the sinks and from `first` to `length`, ascending."""
    import torch

    return torch.cat([torch.arange(min(spec.sinks, first)), torch.arange(first, length)])


def up_to(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def limited(spec: CacheSpec) -> bool:
    """Whether tokens pass out of sight."""
    return spec.window is not None or spec.chunk is not None


def require_burst(rows: Sequence[int], placement: Placement, burst: int, size: int) -> None:
    """Refuse a step that would overwrite what its own first token still needs."""
    if placement.cold:
        return
    for row, start, count in zip(rows, placement.starts, placement.counts, strict=True):
        if start and count > burst:
            raise ValueError(
                f"row {row} holds {start} tokens and {count} more come in one step, beyond burst ({burst}): make the "
                f"KVCache with burst={count}, or give at most {burst} at a time"
            )
        if not start and count > size:
            raise ValueError(
                f"row {row} is empty and {count} tokens come beside rows that hold some; such a row takes at most "
                f"{size} (window and burst): give the long prompt in a step of its own"
            )


def sees_all(spec: CacheSpec, length: int, *, slots: int | None = None) -> bool:
    """Whether the newest of `length` tokens sees every one before it, or all that are in so many slots."""
    held = length if slots is None else min(length, slots)
    return spec.chunk is None and spec.visible_tokens(length) == held


def scattered(
    step: Step, placement: Placement, stays: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, position and token of every write. Padding repeats a real token's write, so that shapes stay fixed.

    stays: (B, T) false on tokens that are out of sight already and are not written either.
    """
    import torch

    batch, tokens = step.positions.shape
    device = step.positions.device
    positions = step.positions.flatten()
    rows = torch.arange(batch, device=device) if step.rows is None else step.rows
    source = torch.arange(batch * tokens, device=device)
    if placement.padded or stays is not None:
        written = positions >= 0
        if stays is not None:
            written = written & stays.flatten()
        row, column = placement.last
        source = torch.where(written, source, row * tokens + column)
    return rows.repeat_interleave(tokens)[source], positions[source], source


def kind_of(spec: CacheSpec) -> str:
    """Layers of one kind share a layout and a plan."""
    return f"window={spec.window} chunk={spec.chunk} sinks={spec.sinks}"


STORES = ("full", "ring", "paged:PAGE")


def layout_named(
    name: str,
    spec: CacheSpec,
    *,
    batch: int,
    capacity: int,
    burst: int = 1,
    static: bool = False,
    pages: int | None = None,
    together: int = 1,
) -> Layout:
    """The layout called `name` for layers of this kind; unknown names and sizes below 1 are refused.

    `ring` is a ring where tokens pass out of sight, and full elsewhere. `paged:16` has pages of 16 tokens, of which the
    pool holds `pages` for each kind; None is as many as all rows can need. together: tokens that a codec wants side by
    side; pages take what divides them.
    """
    require_size("batch", batch, most=LARGEST_SIZE)
    require_size("capacity", capacity, most=LARGEST_SIZE)
    require_size("burst", burst, most=LARGEST_SIZE)
    base, _, size = name.partition(":")
    if pages is not None and base != "paged":
        raise ValueError(f"pages ({pages}) belong to a paged store, not to {name!r}")
    if base == "paged":
        from .paged import Paged, page_size

        if static:
            raise ValueError(f"store {name!r} has no fixed shapes (static=True); give full or ring")
        return Paged.of(
            spec,
            batch=batch,
            capacity=capacity,
            page=page_size(name, size),
            burst=burst,
            pages=pages,
            together=together,
        )
    if name == "full" or (name == "ring" and not limited(spec)):
        from .full import Full

        return Full(spec, batch, capacity, static, together)
    if name == "ring":
        from .ring import Ring

        return Ring(spec, batch, capacity, burst, static, together)
    raise ValueError(unknown("store", name, STORES))
