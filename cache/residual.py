"""The newest tokens of a layer in full precision, until those that are coded together are complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from attn_variants.contract import Record, Step
from attn_variants.dtypes import torch_dtype

from .accounting import RESIDUAL


class Residual:
    """The newest `slots` tokens of each record, that at position p in slot p % slots: (rows, heads, slots, width).

    A codec whose tokens stand alone has none: no slots, and no tensors.
    """

    def __init__(
        self, records: Sequence[Record], *, batch: int, slots: int, dtype: str, device: torch.device | str | None
    ) -> None:
        self._slots = slots
        self._memory = {
            record.name: torch.zeros(
                (batch, record.heads, slots, record.width), dtype=torch_dtype(record.dtype or dtype), device=device
            )
            for record in records
            if slots
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor by name."""
        return {name + RESIDUAL: memory for name, memory in self._memory.items()}

    def write(self, record: Record, step: Step, row: Tensor) -> None:
        """Keep the newest of the step's tokens, (B, heads, T, width)."""
        positions, length = step.positions, step.lengths[:, None]
        kept = (positions >= 0) & (positions >= length - self._slots)
        # What is not kept writes the newest token once more, so that shapes stay fixed.
        newest = positions.argmax(1, keepdim=True)
        columns = torch.where(kept, torch.arange(positions.shape[1], device=positions.device), newest)
        slots = positions.gather(1, columns)
        # A row without a real token keeps what it has: it writes back one of its own.
        empty = slots[:, :1] < 0
        slots = slots.clamp(min=0) % self._slots
        rows = torch.arange(len(positions), device=positions.device) if step.rows is None else step.rows
        memory = self._memory[record.name]
        source = torch.arange(len(rows), device=rows.device)[:, None]
        given = row.transpose(1, 2)[source, columns]  # (B, T, heads, width)
        held = memory[rows[:, None], :, slots]
        memory[rows[:, None], :, slots] = torch.where(empty[:, :, None, None], held, given)

    def overlaid(self, record: Record, step: Step, decoded: Tensor, kv_positions: Tensor) -> Tensor:
        """Decoded slots (B, heads, n, width) with what has waited here in the place of what is not coded yet."""
        assert step.sealed is not None
        memory = self._memory[record.name]
        if step.rows is not None:
            memory = memory[step.rows]
        slots = (kv_positions.clamp(min=0) % self._slots)[:, None, :, None].expand_as(decoded)
        waiting = (kv_positions >= step.sealed[:, None])[:, None, :, None]
        return torch.where(waiting, memory.gather(2, slots).to(decoded.dtype), decoded)

    def tokens(self, record: Record, row: int, positions: Tensor) -> Tensor:
        """(heads, n, width) of a row's tokens at these positions."""
        return self._memory[record.name][row][:, positions % self._slots]

    def wipe(self, row: int, positions: Tensor) -> None:
        """Zero what a row keeps of these positions."""
        for memory in self._memory.values():
            memory[row][:, positions % self._slots] = 0

    def read_row(self, row: int, length: int) -> dict[str, Tensor]:
        """The newest of a row's first `length` tokens, (heads, slots, width) by name; zero in other slots."""
        found = {}
        for name, memory in self.tensors.items():
            kept = torch.arange(max(0, length - self._slots), length, device=memory.device) % self._slots
            found[name] = torch.zeros_like(memory[row])
            found[name][:, kept] = memory[row][:, kept]
        return found

    def write_row(self, row: int, stored: Mapping[str, Tensor]) -> None:
        """Put into a row what `read_row` gave."""
        for name, memory in self.tensors.items():
            memory[row] = stored[name].to(memory.device)

    def take(self, other: Residual, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i] of `other`, which may be this one."""
        for name, memory in self._memory.items():
            memory.copy_(other._memory[name][rows])

    def fork(self, rows: Tensor) -> Residual:
        """One of its own whose row i is a copy of row rows[i]."""
        twin = copy(self)
        twin._memory = {name: memory[rows] for name, memory in self._memory.items()}
        return twin

    def clear(self, rows: Tensor) -> None:
        """Zero these rows."""
        for memory in self._memory.values():
            memory[rows] = 0
