"""What a store's `append` returns: a reader of its memory as one step sees it. Implements `View`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from attn_variants.contract import CacheSpec, Plan, Record, Step

from .number_codes import CODES, SCALE
from .quantize import Codec
from .residual import Residual

Memory = Mapping[str, Mapping[str, Tensor]]
"""Stored tensors by record and codec part: (rows, heads, slots, width), of a pool (1, heads, slots, width)."""


class StoreView:
    """Slots of memory in the order in which the plan reads them: in place where it can, else one block at a time."""

    def __init__(
        self,
        spec: CacheSpec,
        step: Step,
        plan: Plan,
        memory: Memory,
        per: Mapping[str, Mapping[str, int]],
        codec: Codec,
        dtypes: Mapping[str, torch.dtype],
        residual: Residual | None = None,
    ) -> None:
        self.spec = spec
        self.step = step
        self.plan = plan
        self.aliased = codec.aliases and step.rows is None and plan.table is None
        self._memory = memory
        self._per = per
        self._residual = residual
        self._codec = codec
        self._dtypes = dtypes

    def dense(self, *names: str) -> tuple[Tensor, ...]:
        """Every slot read, (B, heads, S, dim) per name; a copy unless `aliased`."""
        if self.plan.table is None:
            return self._read(slice(0, self.plan.limit), names)
        blocks = [tensors for tensors, _ in self.blocks(self.plan.limit, *names)]
        return tuple(torch.cat(parts, dim=2) if len(parts) > 1 else parts[0] for parts in zip(*blocks, strict=True))

    def blocks(self, size: int, *names: str) -> Iterator[tuple[tuple[Tensor, ...], slice]]:
        """The same in runs of at most `size` slots (but a page at least), each with the slots it covers."""
        for slots in self._ranges(size):
            yield self._read(slots, names), slots

    def factored(self, *names: str) -> bool:
        """Whether all of these are codes times a scale per slot, as `factors` gives them."""
        return all(self._codec.factored(self.spec.record_of(name)) for name in names)

    def factors(self, size: int, *names: str) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...], slice]]:
        """As `blocks`, but of codes (B, heads, n, dim) that are still to be multiplied by scales (B, heads, n, 1)."""
        for slots in self._ranges(size):
            # No name holds a block while the next one is made.
            yield *self._factors(slots, names), slots

    def storage(self, name: str) -> tuple[dict[str, Tensor], slice]:
        """For kernels: the stored tensors of the record that holds `name`, by codec part, and the entry's columns."""
        record = self.spec.record_of(name)
        return dict(self._memory[record.name]), record.columns(name)

    def _ranges(self, size: int) -> Iterator[slice]:
        if self.plan.table is None:
            size = max(size // self._codec.together, 1) * self._codec.together
            for start in range(0, self.plan.limit, size):
                yield slice(start, min(start + size, self.plan.limit))
            return
        for first, past in self._page_ranges(size):
            yield slice(first, min(past, self.plan.limit))

    def _page_ranges(self, size: int) -> Iterator[tuple[int, int]]:
        """Slots to read at once: long runs of neighbouring pages, which are read in place, and else `size` of them."""
        table = self.plan.table
        assert table is not None
        step = max(size // table.size, 1) * table.size
        if len(table.runs) > 1:
            yield from ((start, start + step) for start in range(0, self.plan.limit, step))
            return
        scattered = start = 0
        for _, pages in table.runs[0]:
            past = start + pages * table.size
            if 2 * (past - start) >= step:
                yield from ((at, min(at + step, start)) for at in range(scattered, start, step))
                yield from ((at, min(at + step, past)) for at in range(start, past, step))
                scattered = past
            start = past
        yield from ((at, min(at + step, start)) for at in range(scattered, start, step))

    def _read(self, slots: slice, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        rows: dict[str, Tensor] = {}
        out = []
        for name in names:
            record = self.spec.record_of(name)
            if record.name not in rows:
                rows[record.name] = self._record(record, slots)
            row = rows[record.name]
            out.append(row if name == record.name else row[..., record.columns(name)])
        return tuple(out)

    def _record(self, record: Record, slots: slice) -> Tensor:
        decoded = self._codec.decode(record, self._stored(record, slots), self._dtypes[record.name])
        if self._residual is None or (self.plan.sealed is not None and slots.stop <= self.plan.sealed):
            return decoded
        assert self.plan.kv_positions is not None
        return self._residual.overlaid(record, self.step, decoded, self.plan.kv_positions[:, slots])

    def _factors(self, slots: slice, names: tuple[str, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        found = [self._stored(self.spec.record_of(name), slots) for name in names]
        return tuple(stored[CODES] for stored in found), tuple(stored[SCALE] for stored in found)

    def _stored(self, record: Record, slots: slice) -> dict[str, Tensor]:
        per = self._per[record.name]
        return {suffix: self._part(memory, slots, per[suffix]) for suffix, memory in self._memory[record.name].items()}

    def _part(self, memory: Tensor, slots: slice, per: int) -> Tensor:
        """(B, heads, n, width) of one stored tensor, of which `per` slots share a row."""
        if self.plan.table is not None:
            return self._pages(memory, slots, per)
        start = self.plan.first + slots.start
        visible = memory[:, :, start // per : -(-(start + slots.stop - slots.start) // per)]
        return visible if self.step.rows is None else visible[self.step.rows]

    def _pages(self, memory: Tensor, slots: slice, per: int) -> Tensor:
        table = self.plan.table
        assert table is not None
        first, past = slots.start // table.size, -(-slots.stop // table.size)
        pool, size, rows = memory[0], table.size // per, -(-(slots.stop - slots.start) // per)
        if len(table.runs) == 1 and (page := _neighbours(table.runs[0], first, past)) is not None:
            return pool[None, :, page * size : page * size + rows]
        heads, width = pool.shape[0], pool.shape[-1]
        # As rows of a matrix they are copied whole, at half the time that it takes with heads as an axis of their own.
        pool = pool.view(-1, size * width)
        gathered = pool.index_select(0, table.flat(first, past, heads, pool.shape[0] // heads))
        return gathered.view(len(table.runs), heads, -1, width)[:, :, :rows]


def _neighbours(runs: tuple[tuple[int, int], ...], first: int, past: int) -> int | None:
    """The page in memory that entries `first` to `past` of a table begin at, if they are neighbours there."""
    start = 0
    for page, pages in runs:
        if start <= first and past <= start + pages:
            return page + first - start
        start += pages
    return None
