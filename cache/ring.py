"""The ring: as many slots as a window needs, used over and over. Imports no torch at the top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from attn_variants.contract import CacheSpec, Plan, Step

from .layouts import Moves, held_positions, require_burst, scattered, sees_all, span, up_to

if TYPE_CHECKING:
    import torch

    from attn_variants.transient import Placement


@dataclass(eq=False)
class Ring:
    """slot = position % size, behind `sinks` slots that stay: the newest tokens overwrite the oldest.

    sinks + span + burst - 1 slots in every row, at most the capacity: span is the window or the chunk, burst the most
    tokens that a step brings to a row that holds some. One slot fewer, and the first token of such a step would find
    the oldest of its window overwritten by the last. Memory is (batch, heads, size, width).
    """

    spec: CacheSpec
    batch: int
    capacity: int
    burst: int = 1
    static: bool = False
    together: int = 1
    pooled: bool = field(default=False, init=False)
    ordered: bool = field(default=False, init=False)
    _held: torch.Tensor | None = field(default=None, init=False, repr=False)
    _high: list[int] = field(default_factory=list, init=False, repr=False)
    _given: list[int] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._high, self._given = [0] * self.batch, [0] * self.batch

    @property
    def size(self) -> int:
        """Slots of a row."""
        around = up_to(span(self.spec) + self.burst - 1, self.together)
        return min(up_to(self.capacity, self.together), self._front + around)

    @property
    def _front(self) -> int:
        """Slots that stay: the sinks'."""
        return min(up_to(self.spec.sinks, self.together), up_to(self.capacity, self.together))

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        """Of one stored tensor: (batch, heads, size, width)."""
        return (self.batch, heads, self.size, width)

    def check(self, rows: Sequence[int], placement: Placement) -> None:
        """At most `burst` tokens for a row that holds some; beside such rows, a ring of them for an empty row."""
        if self.size < self.capacity:
            require_burst(rows, placement, self.burst, self.size)

    def reserve(self, rows: Sequence[int], placement: Placement) -> Moves:
        """Every row has its slots from the start."""
        return Moves()

    def settle(self, row: int, length: int) -> None:
        """Remember how far the row has been: a rewind does not bring back what was overwritten."""
        self._high[row] = max(self._high[row], length) if length else 0
        if length:
            return
        self._given[row] = 0
        if self._held is not None:
            self._held[row] = -1

    def first(self, row: int) -> int:
        """The oldest that was not overwritten, or the first that it was given."""
        overwritten = self._high[row] > self.size
        return max(self._given[row], self._high[row] - (self.size - self._front) if overwritten else 0)

    def admit(self, row: int, length: int, first: int, device: torch.device) -> Moves:
        """Every row has its slots from the start; say which positions are in them."""
        self._high[row], self._given[row] = length, first
        positions = held_positions(self.spec, length, self.first(row)).to(device)
        self._positions(device)[row, self.slots(row, positions)] = positions
        return Moves()

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """The positions themselves up to the sinks' end, and around behind them."""
        sinks, around = self._front, self.size - self._front
        return positions.where(positions < sinks, sinks + (positions - sinks) % max(around, 1))

    def take(self, other: Self, rows: Sequence[int]) -> None:
        """Positions and marks of those rows."""
        import torch

        self._high = [other._high[row] for row in rows]
        self._given = [other._given[row] for row in rows]
        # Made under inference mode they could be written to in no other.
        with torch.inference_mode(False):
            self._held = None if other._held is None else other._held[list(rows)]

    def fork(self, rows: Sequence[int]) -> Self:
        """A ring of the same size for other rows."""
        twin = replace(self, batch=len(rows))
        twin.take(self, rows)
        return twin

    def used(self, lengths: Sequence[int]) -> int:
        """What attention can read of each row."""
        return sum(map(self.spec.visible_tokens, lengths))

    @property
    def bookkeeping(self) -> int:
        """The position in each slot of each row."""
        return 0 if self._held is None else self._held.nbytes

    def write(self, step: Step, rows: Sequence[int], placement: Placement) -> Plan:
        """The tokens that stay, each in its slot."""
        plan = Plan(None, causal=False, mask=None, limit=0)
        tokens = step.positions.shape[1]
        held = self._positions(step.positions.device)
        start = self._run(placement.starts[0], tokens)
        if start is not None and placement.even and step.rows is None and not self.static:
            plan.start = start
            held[:, start : start + tokens] = step.positions
        else:
            plan.blocks, plan.offsets, plan.source = self._scattered(step, placement)
            held[plan.blocks, plan.offsets] = step.positions.flatten()[plan.source]
        # A step that is never advanced has overwritten what it was to overwrite all the same.
        for row, end in zip(rows, placement.ends, strict=True):
            self._high[row] = max(self._high[row], end)
        return plan

    def read(self, plan: Plan, step: Step, rows: Sequence[int], placement: Placement) -> bool:
        """The slots that are in use, in memory order."""
        reach = max(self._high[row] for row in rows)
        plan.limit = self.size if self.static else min(self.size, reach)
        held = self._positions(step.positions.device)
        plan.kv_positions = held[:, : plan.limit] if step.rows is None else held[step.rows, : plan.limit]
        single = placement.even and step.positions.shape[1] == 1 and not self.static and reach == placement.ends[0]
        return single and sees_all(self.spec, reach, slots=plan.limit)

    def _run(self, start: int, tokens: int) -> int | None:
        """The first of the neighbouring slots that so many tokens from `start` on are written to, if they are such."""
        sinks, around = self._front, self.size - self._front
        if start + tokens <= self.size:
            return start
        if start < sinks:
            return None
        first = sinks + (start - sinks) % around
        return first if first + tokens <= self.size else None

    def _scattered(self, step: Step, placement: Placement) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sinks, around = self._front, self.size - self._front
        positions = step.positions
        stays = (positions >= step.lengths[:, None] - around) | (positions < sinks)
        blocks, positions, source = scattered(step, placement, stays)
        return blocks, self.slots(0, positions), source

    def _positions(self, device: torch.device) -> torch.Tensor:
        """(batch, size) the position in each slot, -1 where none was written."""
        import torch

        if self._held is None:
            with torch.inference_mode(False):
                self._held = torch.full((self.batch, self.size), -1, device=device)
        return self._held
