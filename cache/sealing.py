"""When tokens are coded whose codec takes several together: complete, and out of reach of a rewind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attn_variants.contract import Step

from .accounting import residual_slots
from .layouts import Layout, require_burst, up_to

if TYPE_CHECKING:
    from attn_variants.transient import Placement


@dataclass(frozen=True)
class Sealing:
    """`together` tokens are coded, for good, once the row has grown `burst` beyond them; 1: each by itself, at once."""

    together: int
    burst: int

    def sealed(self, high: int) -> int:
        """Tokens that are coded in a row that has been so long: what it cannot be rewound below."""
        if self.together == 1:
            return 0
        return max(0, high - self.burst) // self.together * self.together

    def check(self, rows: Sequence[int], placement: Placement) -> None:
        """Raise ValueError for more tokens than may wait."""
        if self.together > 1:
            require_burst(rows, placement, self.burst, residual_slots(self.together, self.burst))

    def mark(
        self,
        step: Step,
        layouts: Mapping[str, Layout],
        rows: Sequence[int],
        placement: Placement,
        high: Sequence[int],
    ) -> None:
        """Say in a planned step what waits, and what of a prompt is coded at once."""
        if self.together == 1:
            return
        sealed = [self.sealed(high[row]) for row in rows]
        step.sealed = torch.tensor(sealed, device=step.positions.device)
        for kind, layout in layouts.items():
            plan = step.plans[kind]
            if placement.cold:
                plan.seals = tuple(
                    (at, row, *run)
                    for at, (row, end) in enumerate(zip(rows, placement.ends, strict=True))
                    for run in self._runs(layout, row, end)
                )
            elif layout.ordered:
                plan.sealed = min(sealed)

    def _runs(self, layout: Layout, row: int, length: int) -> list[tuple[int, int]]:
        """From where to where a row that was empty codes its tokens: the sinks', and those that are not gone again."""
        sealed, first = self.sealed(length), layout.first(row) // self.together * self.together
        runs = [(0, min(up_to(layout.spec.sinks, self.together), first, sealed)), (first, sealed)]
        return [(start, stop) for start, stop in runs if start < stop]
