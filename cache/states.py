"""Constant-size states of a layer, with the snapshots that a rewind goes back to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from attn_variants.contract import State, Step
from attn_variants.dtypes import torch_dtype

from .accounting import state_shape


class StateStore:
    """The states of `batch` rows after each of their last `burst` lengths: that of length L lies at L % burst.

    So a rewind by less than `burst` tokens copies nothing. Memory is (batch, burst, *shape) per state, zero for a row
    that holds nothing.
    """

    def __init__(
        self, states: Sequence[State], *, batch: int, burst: int, dtype: str, device: torch.device | str | None
    ) -> None:
        self._burst = burst
        self._kept: tuple[Step, dict[str, Tensor]] | None = None
        self.tensors = {
            state.name: torch.zeros(
                state_shape(state, batch, burst), dtype=torch_dtype(state.dtype or dtype), device=device
            )
            for state in states
        }

    def read(self, step: Step) -> dict[str, Tensor]:
        """Every state of the step's rows as it stands before it, (B, *shape)."""
        at = _lengths(step)[:, 0] % self._burst
        rows = _rows(step)
        return {name: memory[rows, at] for name, memory in self.tensors.items()}

    def write(self, step: Step, states: dict[str, Tensor]) -> None:
        """Keep the states after each of the step's last n tokens, (B, n, *shape), from `commit` on.

        Raises ValueError for other names or shapes than declared, and for fewer tokens
        than a rewind may ask for.
        """
        self._check(step, states)
        # The snapshot that they go over may be the one that a failing pass has to be taken back to.
        self._kept = (step, {name: given.detach() for name, given in states.items()})

    def commit(self) -> None:
        """Write what was kept."""
        if self._kept is None:
            return
        step, states = self._kept
        self._kept = None
        kept = next(iter(states.values())).shape[1]
        lengths = _lengths(step)[:, -kept:]
        # Lengths out of reach of a rewind would share slots with newer ones: the newest is written again instead.
        reached = lengths > step.lengths[:, None] - self._burst
        columns = torch.where(reached, torch.arange(kept, device=lengths.device), kept - 1)
        slots = lengths.gather(1, columns) % self._burst
        source, rows = torch.arange(len(lengths), device=lengths.device)[:, None], _rows(step)[:, None]
        for name, given in states.items():
            self.tensors[name][rows, slots] = given[source, columns].to(self.tensors[name].dtype)

    def drop(self) -> None:
        """Forget what was kept."""
        self._kept = None

    def read_row(self, row: int, lengths: range) -> dict[str, Tensor]:
        """A row's states at these lengths, (n, *shape) each."""
        at = torch.tensor(lengths) % self._burst
        return {name: memory[row, at.to(memory.device)] for name, memory in self.tensors.items()}

    def write_row(self, row: int, length: int, states: Mapping[str, Tensor]) -> None:
        """Put into a row the states at the last lengths up to this one, as many as it has room for."""
        for name, memory in self.tensors.items():
            kept = states[name][-self._burst :]
            at = torch.arange(length - len(kept) + 1, length + 1) % self._burst
            memory[row, at.to(memory.device)] = kept.to(memory.device)

    def take(self, other: StateStore, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i] of `other`, which may be this store."""
        for name, memory in self.tensors.items():
            memory.copy_(other.tensors[name][rows])

    def fork(self, rows: Tensor) -> StateStore:
        """A store of its own whose row i is a copy of row rows[i]."""
        twin = copy(self)
        twin.tensors = {name: memory[rows] for name, memory in self.tensors.items()}
        return twin

    def clear(self, rows: Tensor) -> None:
        """Zero these rows."""
        for memory in self.tensors.values():
            memory[rows] = 0

    def _check(self, step: Step, states: dict[str, Tensor]) -> None:
        if states.keys() != self.tensors.keys():
            raise ValueError(f"the store holds states {', '.join(self.tensors)}, the layer keeps {', '.join(states)}")
        batch, tokens = step.positions.shape
        kept = {name: given.shape[1] if given.ndim > 1 else 0 for name, given in states.items()}
        needed = tokens if step.padded and self._burst > 1 else min(tokens, self._burst)
        for name, given in states.items():
            shape, n = self.tensors[name].shape[2:], kept[name]
            if not needed <= n <= tokens or tuple(given.shape) != (batch, n, *shape) or len(set(kept.values())) > 1:
                raise ValueError(
                    f"the store keeps {name} after the last n tokens as (B, n, *shape) {(batch, 'n', *shape)} with "
                    f"{needed} <= n <= {tokens}, alike for all states; the layer gives {tuple(given.shape)}"
                )


def _rows(step: Step) -> Tensor:
    return torch.arange(len(step.lengths), device=step.lengths.device) if step.rows is None else step.rows


def _lengths(step: Step) -> Tensor:
    """(B, 1 + T) tokens that each row holds before the step and after each of its columns."""
    real = (step.positions >= 0).cumsum(1)
    return (step.lengths - real[:, -1])[:, None] + torch.nn.functional.pad(real, (1, 0))
