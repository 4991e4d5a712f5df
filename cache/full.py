"""The full layout: a slot for every token. Imports no torch at the top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from attn_variants.contract import CacheSpec, Plan, Step

from .layouts import Moves, scattered, sees_all, up_to

if TYPE_CHECKING:
    import torch

    from attn_variants.transient import Placement


@dataclass(eq=False)
class Full:
    """slot = position: `capacity` slots in every row, whatever the window. Memory is (batch, heads, capacity, width).

    static: every step reads all slots through a mask, so that shapes never change and a compiled step is never remade.
    """

    spec: CacheSpec
    batch: int
    capacity: int
    static: bool = False
    together: int = 1
    pooled: bool = field(default=False, init=False)
    ordered: bool = field(default=True, init=False)
    _slots: torch.Tensor | None = field(default=None, init=False, repr=False)
    _given: list[int] = field(default_factory=list, init=False, repr=False)
    """Per row, the first position, sinks aside, that it was ever given: not 0 where it was loaded or shared."""

    def __post_init__(self) -> None:
        self._given = [0] * self.batch

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        """Of one stored tensor: (batch, heads, capacity, width)."""
        return (self.batch, heads, up_to(self.capacity, self.together), width)

    def check(self, rows: Sequence[int], placement: Placement) -> None:
        """Whatever the capacity takes fits."""

    def reserve(self, rows: Sequence[int], placement: Placement) -> Moves:
        """Every row has its slots from the start."""
        return Moves()

    def settle(self, row: int, length: int) -> None:
        """An empty row can be given anything."""
        if not length:
            self._given[row] = 0

    def first(self, row: int) -> int:
        """The first that it was given: nothing is ever overwritten."""
        return self._given[row]

    def admit(self, row: int, length: int, first: int, device: torch.device) -> Moves:
        """Every row has its slots from the start."""
        self._given[row] = first
        return Moves()

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """The positions themselves."""
        return positions

    def take(self, other: Self, rows: Sequence[int]) -> None:
        """Marks of those rows."""
        self._given = [other._given[row] for row in rows]

    def fork(self, rows: Sequence[int]) -> Self:
        """The same for other rows."""
        twin = replace(self, batch=len(rows))
        twin.take(self, rows)
        return twin

    def used(self, lengths: Sequence[int]) -> int:
        """What attention can read of each row."""
        return sum(map(self.spec.visible_tokens, lengths))

    @property
    def bookkeeping(self) -> int:
        """The position of each slot, once for all rows."""
        return 0 if self._slots is None else self._slots.nbytes

    def write(self, step: Step, rows: Sequence[int], placement: Placement) -> Plan:
        """Each token where its position says."""
        plan = Plan(None, causal=False, mask=None, limit=0)
        if placement.even and step.rows is None and not self.static:
            plan.start = placement.starts[0]
        else:
            plan.blocks, plan.offsets, plan.source = scattered(step, placement)
        return plan

    def read(self, plan: Plan, step: Step, rows: Sequence[int], placement: Placement) -> bool:
        """The slots up to the longest row; for one new token on even rows its window and nothing else."""
        batch, tokens = step.positions.shape
        longest = max(placement.ends)
        single = placement.even and tokens == 1 and not self.static
        plan.first = _first_in_window(self.spec, longest) if single and self.together == 1 else 0
        plan.limit = self.capacity if self.static else longest - plan.first
        # A slot's position is its index, written or not: what is not written yet lies in the future, and hides itself.
        positions = self._positions(step.positions.device)[plan.first : plan.first + plan.limit]
        plan.kv_positions = positions.expand(batch, plan.limit)
        return single and sees_all(self.spec, plan.limit)

    def _positions(self, device: torch.device) -> torch.Tensor:
        """(capacity,) the position in each slot, made once: a decode step allocates nothing of the cache's length."""
        import torch

        if self._slots is None:
            self._slots = torch.arange(self.capacity, device=device)
        return self._slots


def _first_in_window(spec: CacheSpec, length: int) -> int:
    """The oldest token in sight of the newest where those in sight lie in a row, else 0."""
    if spec.window is None or spec.chunk is not None or spec.sinks:
        return 0
    return max(0, length - spec.window)
