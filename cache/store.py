"""A layer's memory: one zeroed tensor per record and codec part, written and read as a step's plan says."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor

from attn_variants.contract import CacheSpec, Plan, Record, Step, View
from attn_variants.dtypes import torch_dtype
from attn_variants.transient import OWN_ENTRIES, own_view

from .accounting import part_shape
from .layouts import Layout, Moves
from .quantize import Codec
from .residual import Residual
from .states import StateStore
from .views import StoreView

OVER = object()
"""Owns steps that were advanced or given up: their slots may be other tokens' by now."""


class Store:
    """Layout x codec for one layer. Implements `LayerCache`; with its residual and states it alone allocates, here.

    A step on rows that hold nothing reads its own tensors: all there is to see is in them, in full precision.
    kind: the plan that its layout makes.    owner: whose steps it takes.    layer: its index where others share it.
    """

    def __init__(
        self,
        spec: CacheSpec,
        layout: Layout,
        codec: Codec,
        states: StateStore,
        residual: Residual,
        *,
        kind: str,
        owner: object,
        dtype: str,
        device: torch.device | str | None,
        layer: int | None = None,
    ) -> None:
        self.spec = spec
        self.kind = kind
        self._layout = layout
        self._codec = codec
        self._states = states
        self._residual = residual
        self._owner = owner
        self._layer = layer
        self._dtypes = {name: torch_dtype(record.dtype or dtype) for record in spec.records for name in _names(record)}
        made = {record.name: codec.parts(record, dtype) for record in spec.records}
        self._tensors = {
            record.name: {
                part.suffix: torch.zeros(part_shape(layout, record, part), dtype=torch_dtype(part.dtype), device=device)
                for part in made[record.name]
            }
            for record in spec.records
        }
        self._per = {name: {part.suffix: part.per for part in parts} for name, parts in made.items()}
        self._device = device

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor by name: the record's, with the codec part's suffix, and the states'."""
        parts = {name + suffix: tensor for name, parts in self._tensors.items() for suffix, tensor in parts.items()}
        return parts | self._residual.tensors | self._states.tensors

    @property
    def per(self) -> dict[str, int]:
        """How many slots share a row of every stored tensor of a record."""
        return {name + suffix: per for name, parts in self._per.items() for suffix, per in parts.items()}

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """(heads, width) of every stored tensor of a record."""
        return {name: (memory.shape[-3], memory.shape[-1]) for name, memory in self._row(0).items()}

    def append(self, step: Step, **entries: Tensor) -> View:
        """Write the step's entries, (B, heads, T, dim) each; what is returned reads them and all before them.

        Gradients flow through a step's own tensors, never through the memory.
        Raises ValueError, before anything is written, for entries of other names, shapes or dtypes than declared.
        """
        entries = self._checked(step, entries)
        plan = step.plans[self.kind]
        for record in self.spec.records:
            rows = [entries[entry.name] for entry in record.entries]
            # A cache outlives the pass: it must not keep the pass's graph alive, which would grow with every token.
            row = (rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)).detach()
            if step.sealed is None:
                self._write(plan, record, row)
            else:
                self._wait(step, plan, record, row)
        view: View = own_view(self.spec, step, entries) if step.cold else self._view(step, plan)
        if self._layer is not None:
            step.views[self._layer] = view
        return view

    def view(self, step: Step) -> View:
        """Refused: this layer has entries of its own."""
        raise ValueError(OWN_ENTRIES)

    def states(self, step: Step) -> dict[str, Tensor]:
        """Every state as it stands before this step, (B, *shape); zero for a row that holds nothing."""
        self._own(step)
        return self._states.read(step)

    def keep(self, step: Step, **states: Tensor) -> None:
        """Keep the states after each of the step's last n tokens, (B, n, *shape), the newest last, once it advances."""
        self._own(step)
        self._states.write(step, states)

    def commit(self) -> None:
        """The step's tokens are cached."""
        self._states.commit()

    def drop(self) -> None:
        """The step will not be advanced."""
        self._states.drop()

    def seal(self, row: int, start: int, stop: int) -> None:
        """Code a row's tokens from `start` to `stop`, which have waited in the residual and are complete now."""
        positions = torch.arange(start, stop, device=self._device)
        for record in self.spec.records:
            self._code(record, row, positions, self._residual.tokens(record, row, positions))

    def move(self, moves: Moves) -> None:
        """Copy and zero slots of the pool, so that a step can be written."""
        for name, parts in self._tensors.items():
            for suffix, memory in parts.items():
                per = self._per[name][suffix]
                for source, target in moves.copied:
                    memory[:, _per(target, per)] = memory[:, _per(source, per)]
                for slots in moves.zeroed:
                    memory[:, _per(slots, per)] = 0

    def take(self, other: Store, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i] of a store of the same kind (which may be this one)."""
        self._states.take(other._states, rows)
        self._residual.take(other._residual, rows)
        if self._layout.pooled:
            return
        for name, parts in self._tensors.items():
            for suffix, memory in parts.items():
                memory.copy_(other._tensors[name][suffix][rows])

    def read_row(self, row: int, slots: Tensor) -> dict[str, Tensor]:
        """What is stored of a row in these slots, (heads, n, width) per record and codec part.

        n counts what they share, each once, where slots share a row.
        """
        return {name: memory[:, once(slots, self.per[name])] for name, memory in self._row(row).items()}

    def write_row(self, row: int, slots: Tensor, stored: Mapping[str, Tensor]) -> None:
        """Put into these slots of a row what `read_row` of such a store gave."""
        for name, memory in self._row(row).items():
            memory[:, once(slots, self.per[name])] = stored[name].to(memory.device)

    def wipe(self, row: int, slots: Tensor, positions: Tensor) -> None:
        """Zero these slots of a row, and what waits in the residual at these positions."""
        for name, memory in self._row(row).items():
            memory[:, once(slots, self.per[name])] = 0
        self._residual.wipe(row, positions)

    def read_residual(self, row: int, length: int) -> dict[str, Tensor]:
        """The newest of a row's first `length` tokens in full precision, where some are coded together."""
        return self._residual.read_row(row, length)

    def write_residual(self, row: int, stored: Mapping[str, Tensor]) -> None:
        """Put into a row what `read_residual` of such a store gave."""
        self._residual.write_row(row, stored)

    def read_states(self, row: int, lengths: range) -> dict[str, Tensor]:
        """A row's states at these lengths, (n, *shape) each."""
        return self._states.read_row(row, lengths)

    def write_states(self, row: int, length: int, states: Mapping[str, Tensor]) -> None:
        """Put into a row the states at the last lengths up to this one, as many as it has room for."""
        self._states.write_row(row, length, states)

    def _row(self, row: int) -> dict[str, Tensor]:
        """(heads, slots, width) per record and codec part; of a pool all of it."""
        return {
            name + suffix: memory if self._layout.pooled else memory[row]
            for name, parts in self._tensors.items()
            for suffix, memory in parts.items()
        }

    def fork(self, layout: Layout, owner: object, rows: Tensor) -> Store:
        """A store of its own for those rows of this one; on a pool it is the same memory."""
        twin = copy(self)
        twin._layout, twin._owner = layout, owner
        twin._states, twin._residual = self._states.fork(rows), self._residual.fork(rows)
        if not layout.pooled:
            twin._tensors = {
                name: {suffix: memory[rows] for suffix, memory in parts.items()}
                for name, parts in self._tensors.items()
            }
        return twin

    def clear(self, rows: Tensor) -> None:
        """Zero these rows, so that another sequence finds nothing of theirs; pages are zeroed when taken again."""
        self._states.clear(rows)
        self._residual.clear(rows)
        if self._layout.pooled:
            return
        for parts in self._tensors.values():
            for memory in parts.values():
                memory[rows] = 0

    def _write(self, plan: Plan, record: Record, row: Tensor) -> None:
        for suffix, part in self._codec.encode(record, row).items():
            memory = self._rows_of(self._tensors[record.name][suffix])
            if plan.start is not None:
                memory[:, :, plan.start : plan.start + part.shape[2]] = part
                continue
            assert plan.source is not None
            tokens = part.transpose(1, 2).flatten(0, 1)[plan.source]  # (N, heads, width)
            memory[plan.blocks, :, plan.offsets] = tokens

    def _wait(self, step: Step, plan: Plan, record: Record, row: Tensor) -> None:
        """Keep the step's newest tokens as they are; those of a prompt that wait for no others are coded at once."""
        self._residual.write(record, step, row)
        for at, cache_row, start, stop in plan.seals:
            positions = step.positions[at]
            columns = ((positions >= start) & (positions < stop)).nonzero()[:, 0]
            self._code(record, cache_row, positions[columns], row[at][:, columns])

    def _code(self, record: Record, row: int, positions: Tensor, numbers: Tensor) -> None:
        """Code tokens of a row, (heads, n, width), and write them to their slots."""
        slots = self._layout.slots(row, positions)
        for suffix, part in self._codec.encode(record, numbers).items():
            memory, per = self._rows_of(self._tensors[record.name][suffix]), self._per[record.name][suffix]
            memory[0 if self._layout.pooled else row][:, once(slots, per)] = part

    def _view(self, step: Step, plan: Plan) -> StoreView:
        memory = {
            name: {suffix: self._rows_of(memory) for suffix, memory in parts.items()}
            for name, parts in self._tensors.items()
        }
        residual = None if step.sealed is None else self._residual
        return StoreView(self.spec, step, plan, memory, self._per, self._codec, self._dtypes, residual)

    def _rows_of(self, memory: Tensor) -> Tensor:
        """(rows, heads, slots, width); a pool is one row."""
        return memory[None] if self._layout.pooled else memory

    def _own(self, step: Step) -> None:
        # A compiled step would be remade for every cache whose identity it looked at.
        if torch.compiler.is_compiling() or step.owner is self._owner:
            return
        if step.owner is OVER:
            raise ValueError("this step is over: it was advanced, or its cache was changed since; make a new one")
        raise ValueError("this step was made by another cache; a layer's store takes the steps of its own KVCache")

    def _checked(self, step: Step, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        self._own(step)
        declared = {entry.name: entry for entry in self.spec.entries}
        if entries.keys() != declared.keys():
            raise ValueError(
                f"the store holds entries {', '.join(declared)}, the layer gives {', '.join(entries)}: "
                "make the KVCache from this decoder's own cache_specs"
            )
        batch, tokens = step.positions.shape
        for name, entry in declared.items():
            given, wanted = entries[name], (batch, entry.heads, tokens, entry.dim)
            if tuple(given.shape) != wanted:
                raise ValueError(
                    f"the store holds {name} as (B, heads, T, dim) {wanted}, the layer gives {tuple(given.shape)}: "
                    "make the KVCache from this decoder's own cache_specs"
                )
            if given.dtype != self._dtypes[name]:
                if not torch.is_autocast_enabled(given.device.type):
                    raise ValueError(
                        f"the store holds {name} in {str(self._dtypes[name]).removeprefix('torch.')}, the layer gives "
                        f"{str(given.dtype).removeprefix('torch.')}: make the KVCache with dtype={given.dtype}"
                    )
                entries[name] = given.to(self._dtypes[name])
        return entries


def once(slots: Tensor, per: int) -> Tensor:
    """The rows that these slots have where `per` of them share one, each once and in their order."""
    return slots if per == 1 else torch.unique_consecutive(slots // per)


def _per(slots: slice, per: int) -> slice:
    return slice(slots.start // per, slots.stop // per)


def _names(record: Record) -> set[str]:
    return {record.name, *(entry.name for entry in record.entries)}
