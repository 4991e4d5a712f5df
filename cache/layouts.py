"""Layouts: in which slot a token lives, and how a step is read and written there. Imports no torch at the top.

A layout serves all layers of one kind (window, chunk, sinks). It keeps what it must know per row; the numbers lie in
the layers' stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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

    def floor(self, row: int, length: int) -> int:
        """The shortest length that this row, which holds `length` tokens, can still be rewound to."""
        ...

    def first(self, row: int) -> int:
        """The oldest position, sinks aside, from which on this row's memory holds all of its tokens."""
        ...

    def kept(self, length: int) -> tuple[int, int]:
        """Of an empty row that grows to this length in one step, positions below the one and from the other on stay."""
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

    def floor(self, row: int, length: int) -> int:
        """Nothing is ever overwritten: 0, unless the row was given no more than a window."""
        return shortest(self.spec, self._given[row])

    def first(self, row: int) -> int:
        """The first that it was given."""
        return self._given[row]

    def kept(self, length: int) -> tuple[int, int]:
        """All of them."""
        return 0, 0

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
        twin = type(self)(self.spec, len(rows), self.capacity, self.static, self.together)
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

    def floor(self, row: int, length: int) -> int:
        """0 until the ring is full; then the last `burst` tokens can be dropped."""
        return shortest(self.spec, self.first(row))

    def first(self, row: int) -> int:
        """The oldest that was not overwritten, or the first that it was given."""
        overwritten = self._high[row] > self.size
        return max(self._given[row], self._high[row] - (self.size - self._front) if overwritten else 0)

    def kept(self, length: int) -> tuple[int, int]:
        """The sinks, and as many of the newest as there are slots for."""
        return (self._front, length - (self.size - self._front)) if length > self.size else (0, 0)

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
        self._high = [other._high[row] for row in rows]
        self._given = [other._given[row] for row in rows]
        self._held = None if other._held is None else other._held[list(rows)]

    def fork(self, rows: Sequence[int]) -> Self:
        """A ring of the same size for other rows."""
        twin = type(self)(self.spec, len(rows), self.capacity, self.burst, self.static, self.together)
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


def planned(layout: Layout, step: Step, rows: Sequence[int], placement: Placement, spec: CacheSpec) -> Plan:
    """The reserved step as one kind of layer sees it. A cold one reads its own tensors, and no slot."""
    from attn_variants.transient import mask_plan

    plan = layout.write(step, rows, placement)
    if not placement.cold and not layout.read(plan, step, rows, placement):
        mask_plan(plan, step, spec)
    return plan


def span(spec: CacheSpec) -> int:
    """Newest tokens that a layer of this kind can need, its sinks aside. Raises for one that needs them all."""
    assert spec.window is not None or spec.chunk is not None
    return min(limit for limit in (spec.window, spec.chunk) if limit is not None)


def shortest(spec: CacheSpec, first: int) -> int:
    """The shortest length that can be gone on from where the sinks and the positions from `first` on are held."""
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


def _first_in_window(spec: CacheSpec, length: int) -> int:
    """The oldest token in sight of the newest where those in sight lie in a row, else 0."""
    if spec.window is None or spec.chunk is not None or spec.sinks:
        return 0
    return max(0, length - spec.window)


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
        return Full(spec, batch, capacity, static, together)
    if name == "ring":
        return Ring(spec, batch, capacity, burst, static, together)
    raise ValueError(unknown("store", name, STORES))
