"""Layouts: in which slot a token lives, and how a step is read and written there. Imports no torch at the top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from attn_variants.contract import LARGEST_SIZE, CacheSpec, Plan, Step, require_size
from attn_variants.names import unknown

if TYPE_CHECKING:
    import torch

    from attn_variants.transient import Placement


class Layout(Protocol):
    """Position to slot, for all layers of one kind."""

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        """Of one stored tensor."""
        ...

    def plan(self, step: Step, placement: Placement, starts: Sequence[int], spec: CacheSpec) -> Plan:
        """The step as this kind of layer sees it."""
        ...

    def floor(self, row: int) -> int:
        """The shortest length this row can still be rewound to."""
        ...


@dataclass(eq=False)
class Full:
    """slot = position: `capacity` slots in every row, whatever the window. Memory is (batch, heads, capacity, width).

    static: every step reads all slots through a mask, so that shapes never change and a compiled step is never remade.
    """

    batch: int
    capacity: int
    static: bool = False
    _slots: torch.Tensor | None = field(default=None, init=False, repr=False)

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        """Of one stored tensor: (batch, heads, capacity, width)."""
        return (self.batch, heads, self.capacity, width)

    def floor(self, row: int) -> int:
        """Nothing is ever overwritten: 0."""
        return 0

    def plan(self, step: Step, placement: Placement, starts: Sequence[int], spec: CacheSpec) -> Plan:
        """Read the slots up to the longest row, write each token where its position says."""
        from attn_variants.transient import mask_plan

        batch, tokens = step.positions.shape
        device = step.positions.device
        longest = max(start + count for start, count in zip(starts, placement.counts, strict=True))
        limit = self.capacity if self.static else longest
        # A slot's position is its index, written or not: what is not written yet lies in the future, and hides itself.
        kv_positions = self._positions(device)[:limit].expand(batch, limit)
        even = len(set(starts)) == 1 and not placement.padded
        plan = Plan(kv_positions, causal=False, mask=None, limit=limit)
        if even and step.rows is None and not self.static:
            plan.start = starts[0]
        else:
            plan.blocks, plan.offsets, plan.source = _scatter(step, placement)
        if not step.fresh and (self.static or not (even and tokens == 1 and _sees_all(spec, longest))):
            mask_plan(plan, step, spec)
        return plan

    def _positions(self, device: torch.device) -> torch.Tensor:
        """(capacity,) the position in each slot, made once: a decode step allocates nothing of the cache's length."""
        import torch

        if self._slots is None:
            self._slots = torch.arange(self.capacity, device=device)
        return self._slots


def _sees_all(spec: CacheSpec, length: int) -> bool:
    """Whether the newest of `length` tokens sees every one before it."""
    return spec.visible_tokens(length) == length and spec.chunk is None


def _scatter(step: Step, placement: Placement) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, slot and token of every write; padding repeats a real token's, so that shapes stay fixed."""
    import torch

    batch, tokens = step.positions.shape
    device = step.positions.device
    positions = step.positions.flatten()
    rows = torch.arange(batch, device=device) if step.rows is None else step.rows
    row, column = placement.last
    source = torch.arange(batch * tokens, device=device)
    if placement.padded:
        source = torch.where(positions >= 0, source, row * tokens + column)
    return rows.repeat_interleave(tokens)[source], positions[source], source


def layout_named(name: str, *, batch: int, capacity: int, static: bool = False) -> Layout:
    """The layout called `name` at these sizes; an unknown name or a size below 1 is refused."""
    require_size("batch", batch, most=LARGEST_SIZE)
    require_size("capacity", capacity, most=LARGEST_SIZE)
    if name != "full":
        raise ValueError(unknown("store", name, ("full",)))
    return Full(batch, capacity, static)
