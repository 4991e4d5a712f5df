"""The paged layout: rows hold pages of one pool, in any order, and may hold the same page (vLLM, arXiv 2309.06180)."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Self

from attn_variants.contract import CacheSpec, Plan, Step, Table, require_size

from .layouts import Moves, limited, require_burst, scattered, sees_all, span
from .pages import Pages

if TYPE_CHECKING:
    import torch

    from attn_variants.transient import Placement

LARGEST_PAGE = 256


def page_size(name: str, size: str) -> int:
    """The 16 of "paged:16"; a size that is none or out of range is refused."""
    if not size.isdecimal() or not 1 <= int(size) <= LARGEST_PAGE:
        raise ValueError(f"store {name!r}: give pages of 1 to {LARGEST_PAGE} tokens, as in paged:16")
    return int(size)


@dataclass(eq=False)
class Paged:
    """slot = table[p // page] * page + p % page. Memory is a pool, (heads, (pages + 1) * page, width).

    All layers of a kind use one table. A page that several rows hold is copied before one of them writes to it. Where
    tokens pass out of sight, so do their pages, which go back to the pool. Page 0 is nobody's.
    """

    spec: CacheSpec
    batch: int
    capacity: int
    page: int
    burst: int
    pool: Pages
    together: int = 1
    pooled: bool = field(default=True, init=False)
    ordered: bool = field(default=False, init=False)
    tables: list[list[int]] = field(default_factory=list, init=False)
    """Per row, the page of every run of `page` positions; 0 where it is out of sight."""

    _sighted: list[int] = field(default_factory=list, init=False, repr=False)
    """Per row, the first page after the sinks' that is not out of sight."""

    _given: list[int] = field(default_factory=list, init=False, repr=False)
    """Per row, the first position, sinks aside, that it was ever given."""

    def __post_init__(self) -> None:
        self.tables = [[] for _ in range(self.batch)]
        self._sighted, self._given = [0] * self.batch, [0] * self.batch
        # A fork that nobody holds any more must not keep its pages.
        weakref.finalize(self, _release_all, self.pool, self.tables)

    @classmethod
    def of(
        cls, spec: CacheSpec, *, batch: int, capacity: int, page: int, burst: int, pages: int | None, together: int = 1
    ) -> Self:
        """With a pool of its own: `pages` of them, or as many as all rows can need at once."""
        if pages is None:
            pages = batch * most_pages(spec, capacity, page, burst)
        require_size("pages", pages)
        return cls(spec, batch, capacity, page, burst, Pages(pages), page if page < together else gcd(page, together))

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        """Of one stored tensor: (heads, slots of the pool, width), page 0 included."""
        return (heads, (self.pool.total + 1) * self.page, width)

    def check(self, rows: Sequence[int], placement: Placement) -> None:
        """At most `burst` tokens on a warm row where tokens pass out of sight; and as many free pages as needed."""
        if limited(self.spec):
            require_burst(rows, placement, self.burst, self.capacity)
        written = Counter[int]()
        for row, start, end in zip(rows, placement.starts, placement.ends, strict=True):
            table = self.tables[row]
            written.update(
                table[index] if index < len(table) else 0 for index in self._touched(start, end, placement.cold)
            )
        missing = written.pop(0, 0)
        copies = sum(min(times, self.pool.holders(page) - 1) for page, times in written.items())
        self.pool.require(missing + copies)

    def reserve(self, rows: Sequence[int], placement: Placement) -> Moves:
        """Take the pages that the step writes to, and a copy of those that others hold too."""
        copied, zeroed = [], []
        for row, start, end in zip(rows, placement.starts, placement.ends, strict=True):
            table = self.tables[row]
            touched = self._touched(start, end, placement.cold)
            if placement.cold:
                self._sighted[row] = self._first_in_sight(end)
            table.extend([0] * (-(-end // self.page) - len(table)))
            for index in touched:
                page = table[index]
                if not page:
                    table[index] = self.pool.take()
                    if (index + 1) * self.page > end or index * self.page < start:
                        zeroed.append(self._slots(table[index]))
                elif self.pool.holders(page) > 1:
                    table[index] = self.pool.take()
                    self.pool.release([page])
                    copied.append((self._slots(page), self._slots(table[index])))
        return Moves(tuple(copied), tuple(zeroed))

    def settle(self, row: int, length: int) -> None:
        """Give back the pages past `length` and those whose tokens no step can see again."""
        table = self.tables[row]
        kept = -(-length // self.page)
        self.pool.release(table[kept:])
        del table[kept:]
        if not length:
            self._sighted[row] = self._given[row] = 0
            return
        sighted = self._first_in_sight(length)
        for index in range(max(self._sighted[row], self._sink_pages), sighted):
            self.pool.release([table[index]])
            table[index] = 0
        self._sighted[row] = max(self._sighted[row], sighted)

    def first(self, row: int) -> int:
        """The oldest on a page that is still held, or the first that it was given."""
        sighted = self._sighted[row]
        return max(self._given[row], sighted * self.page if sighted > self._sink_pages else 0)

    def admit(self, row: int, length: int, first: int, device: torch.device) -> Moves:
        """Take the pages of what will be in sight, zeroed."""
        table = self.tables[row]
        sighted = max(first // self.page, self._first_in_sight(length))
        held = [*range(min(self._sink_pages, sighted)), *range(sighted, -(-length // self.page))]
        self.pool.require(len(held))
        table.extend([0] * -(-length // self.page))
        for index in held:
            table[index] = self.pool.take()
        self._sighted[row], self._given[row] = sighted, first
        return Moves(zeroed=tuple(self._slots(table[index]) for index in held))

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """Those of the pool that the row's table names."""
        import torch

        table = torch.tensor(self.tables[row], dtype=torch.int64, device=positions.device)
        return table[positions // self.page] * self.page + positions % self.page

    def take(self, other: Self, rows: Sequence[int]) -> None:
        """Hold the pages that those rows hold; no number is copied."""
        tables = [list(other.tables[row]) for row in rows]
        for table in tables:
            self.pool.share(table)
        for table in self.tables:
            self.pool.release(table)
        self.tables[:] = tables
        self._sighted = [other._sighted[row] for row in rows]
        self._given = [other._given[row] for row in rows]

    def fork(self, rows: Sequence[int]) -> Self:
        """Other tables on the same pool."""
        twin = type(self)(self.spec, len(rows), self.capacity, self.page, self.burst, self.pool, self.together)
        twin.take(self, rows)
        return twin

    def used(self, lengths: Sequence[int]) -> int:
        """What attention can read of each row, once where several hold it."""
        read: dict[int, set[int]] = {}
        for table, length in zip(self.tables, lengths, strict=True):
            newest = length - self.spec.visible_tokens(length) + min(self.spec.sinks, length)
            for position in (*range(min(self.spec.sinks, newest)), *range(newest, length)):
                read.setdefault(table[position // self.page], set()).add(position % self.page)
        return sum(map(len, read.values()))

    @property
    def bookkeeping(self) -> int:
        """The tables, at 8 bytes a page."""
        return 8 * sum(map(len, self.tables))

    def write(self, step: Step, rows: Sequence[int], placement: Placement) -> Plan:
        """Each token where its row's table says."""
        plan = Plan(None, causal=False, mask=None, limit=0)
        plan.start = self._run(rows, placement)
        if plan.start is None:
            plan.blocks, plan.offsets, plan.source = self._scattered(step, rows, placement)
        return plan

    def read(self, plan: Plan, step: Step, rows: Sequence[int], placement: Placement) -> bool:
        """The pages in sight, in the order of memory."""
        import torch

        device, length = step.positions.device, placement.ends[0]
        read = [self._read(*row) for row in zip(rows, placement.starts, placement.ends, strict=True)]
        pages = [[self.tables[row][index] for index in indices] for row, indices in zip(rows, read, strict=True)]
        plan.table = Table(_padded(pages, 0, device), self.page, tuple(tuple(_runs(held)) for held in pages))
        single = placement.even and step.positions.shape[1] == 1 and self.together == 1
        if single and sees_all(self.spec, length):
            # The page that is written to is read last, so that slots past the newest token are not read at all.
            plan.limit = length
            return True
        logical = _padded(read, -1, device)[:, :, None]
        slots = logical * self.page + torch.arange(self.page, device=device)
        plan.kv_positions = slots.where(logical >= 0, -1).flatten(1)
        plan.limit = plan.kv_positions.shape[1]
        return False

    @property
    def _sink_pages(self) -> int:
        return -(-self.spec.sinks // self.page)

    def _first_in_sight(self, length: int) -> int:
        """The first page that a row of this length needs: what a rewind by `burst` or a next token can still see."""
        if not limited(self.spec):
            return 0
        return max(0, length - (span(self.spec) + self.burst - 1)) // self.page

    def _touched(self, start: int, end: int, cold: bool) -> list[int]:
        """The pages of its table that a row writes to when it grows from `start` to `end` tokens.

        A cold step reads its own tensors, so that it writes only what will be in sight.
        """
        if start == end:
            return []
        pages = range(start // self.page, -(-end // self.page))
        if not cold:
            return list(pages)
        sighted = self._first_in_sight(end)
        return [index for index in pages if index >= sighted or index < self._sink_pages]

    def _read(self, row: int, start: int, end: int) -> list[int]:
        """The pages of its table that a row's new tokens can see, in the order of memory but for the newest."""
        first = max(0, start - span(self.spec) + 1) // self.page if limited(self.spec) else 0
        table = self.tables[row]
        seen = [*range(min(self._sink_pages, first)), *range(first, -(-end // self.page))]
        return [*sorted((index for index in seen[:-1] if table[index]), key=table.__getitem__), *seen[-1:]]

    def _run(self, rows: Sequence[int], placement: Placement) -> int | None:
        """The first of the neighbouring slots that the step writes, if it writes one row and these are such."""
        if len(rows) > 1 or placement.padded:
            return None
        start, end = placement.starts[0], placement.ends[0]
        touched = [self.tables[rows[0]][index] for index in self._touched(start, end, placement.cold)]
        if len(touched) < -(-end // self.page) - start // self.page or len(list(_runs(touched))) > 1:
            return None
        return touched[0] * self.page + start % self.page

    def _scattered(
        self, step: Step, rows: Sequence[int], placement: Placement
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch

        device, tokens = step.positions.device, step.positions.shape[1]
        stays = None
        if limited(self.spec) and placement.cold:
            sighted = torch.tensor([self._first_in_sight(end) for end in placement.ends], device=device)
            index = step.positions // self.page
            stays = (index >= sighted[:, None]) | (index < self._sink_pages)
        _, positions, source = scattered(step, placement, stays)
        first, past = min(placement.starts) // self.page, -(-max(placement.ends) // self.page)
        table = _padded([self.tables[row][first:past] for row in rows], 0, device)
        offsets = table[source // tokens, positions // self.page - first] * self.page + positions % self.page
        return torch.zeros_like(offsets), offsets, source

    def _slots(self, page: int) -> slice:
        return slice(page * self.page, (page + 1) * self.page)


def most_pages(spec: CacheSpec, capacity: int, page: int, burst: int) -> int:
    """The most pages that one row of up to `capacity` tokens holds at once."""
    whole = -(-capacity // page)
    if not limited(spec):
        return whole
    # A window and two bursts, one that came and one that may be taken back, may begin anywhere in a page.
    tokens = span(spec) + 2 * burst - 1
    return min(whole, -(-(tokens - 1) // page) + 1 - (-spec.sinks // page))


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring pages as (first page, how many), in the order given."""
    first, count = -1, 0
    for page in pages:
        if page == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = page, 1
    if count:
        yield first, count


def _padded(lists: Sequence[Sequence[int]], filler: int, device: torch.device) -> torch.Tensor:
    """(rows, longest) int64."""
    import torch

    longest = max(map(len, lists))
    return torch.tensor([[*numbers, *[filler] * (longest - len(numbers))] for numbers in lists], device=device)


def _release_all(pool: Pages, tables: list[list[int]]) -> None:
    for table in tables:
        pool.release(table)
