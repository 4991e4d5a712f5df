"""What a backend of `attend` is given, and the shapes and masks that all of them work in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_variants.contract import View
from attn_variants.transient import step_mask

Expand = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Request:
    """One call of `attend`; see there for the fields. forced: the backend that was asked for by name, if any."""

    q: Tensor
    view: View
    names: tuple[str, ...]
    scale: float
    expand: Expand | None = None
    sink: Tensor | None = None
    softcap: float | None = None
    forced: str | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Key (B, K, S, Dk) and value (B, K, S, Dv)."""
        if self.expand is not None:
            return self.expand(*self.view.dense(*self.names))
        key, value = self.view.dense(*self.names)
        return key, value

    @property
    def front(self) -> int | None:
        """The value's width where the value is the front of the row that is the key, as in absorbed MLA."""
        if self.expand is not None:
            return None
        record = self.view.spec.record_of(self.names[0])
        key, value = self.names
        if key != record.name or self.view.spec.record_of(value) is not record:
            return None
        columns = record.columns(value)
        width: int = columns.stop
        return width if columns.start == 0 and width < record.width else None

    def mask(self, slots: slice | None = None) -> Tensor | None:
        """(B or 1, 1, T, n) true where visible, of these slots or of all; None where every query sees every one.

        Where the plan names a triangle, or leaves a mask to be made block by block, this makes it.
        """
        plan = self.view.plan
        if slots is None:
            slots = slice(0, plan.limit)
        if plan.causal:
            queries = torch.arange(self.q.shape[2], device=self.q.device)
            keys = torch.arange(slots.start, slots.stop, device=self.q.device)
            return (keys <= queries[:, None])[None, None]
        if plan.deferred:
            assert plan.kv_positions is not None
            return step_mask(self.view.step, plan.kv_positions[:, slots], self.view.spec)
        return None if plan.mask is None else plan.mask[..., slots]


def fold(q: Tensor, heads: int) -> Tensor:
    """(B, H, T, D) to (B, K, G * T, D): queries that read the same key stand side by side."""
    return q.reshape(q.shape[0], heads, -1, q.shape[-1])


def unfold(out: Tensor, q: Tensor) -> Tensor:
    """(B, K, G * T, Dv) back to (B, H, T, Dv)."""
    return out.reshape(*q.shape[:3], out.shape[-1])


def fold_mask(mask: Tensor, group: int) -> Tensor:
    """(B, 1, T, S) to (B, 1, G * T, S), as `fold` sets the queries."""
    return mask[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
