"""A layer's memory: one zeroed tensor per record and codec part, written and read as a step's plan says."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_variants.contract import CacheSpec, Plan, Record, Step, View
from attn_variants.dtypes import torch_dtype
from attn_variants.transient import DenseView, own_view

from .layouts import Layout
from .quantize import Codec


class Store:
    """Layout x codec for one layer. Implements `LayerCache`; allocates here and nowhere else.

    A fresh step reads its own tensors: all there is to see is in them already, in full precision.
    """

    def __init__(
        self, spec: CacheSpec, layout: Layout, codec: Codec, *, kind: str, dtype: str, device: torch.device | str | None
    ) -> None:
        self.spec = spec
        self.kind = kind
        self._layout = layout
        self._codec = codec
        self._dtypes = {entry.name: torch_dtype(entry.dtype or dtype) for entry in spec.entries}
        self._tensors = {
            record.name: {
                part.suffix: torch.zeros(
                    layout.shape(record.heads, part.width), dtype=torch_dtype(part.dtype), device=device
                )
                for part in codec.parts(record, dtype)
            }
            for record in spec.records
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor by name: the record's, with the codec part's suffix."""
        return {name + suffix: tensor for name, parts in self._tensors.items() for suffix, tensor in parts.items()}

    def append(self, step: Step, **entries: Tensor) -> View:
        """Write the step's entries, (B, heads, T, dim) each; what is returned reads them and all before them.

        Gradients flow through a fresh step's own tensors, never through the memory.
        Raises ValueError, before anything is written, for entries of other names, shapes or dtypes than declared.
        """
        entries = self._checked(step, entries)
        plan = step.plans[self.kind]
        for record in self.spec.records:
            self._write(plan, record, entries)
        return own_view(self.spec, step, entries) if step.fresh else self._view(step, plan)

    def view(self, step: Step) -> View:
        """Refused: this layer has entries of its own."""
        raise ValueError("this layer has entries of its own to append; only one whose spec `shares` reads another's")

    def states(self, step: Step) -> dict[str, Tensor]:
        """None: no store holds states."""
        return {}

    def keep(self, step: Step, **states: Tensor) -> None:
        """Refused: no store holds states."""
        raise ValueError("no store holds states")

    def _write(self, plan: Plan, record: Record, entries: dict[str, Tensor]) -> None:
        rows = [entries[entry.name] for entry in record.entries]
        row = rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)
        # A cache outlives the pass: it must not keep the pass's graph alive, which would grow with every token.
        for suffix, part in self._codec.encode(record, row.detach()).items():
            memory = self._tensors[record.name][suffix]
            if plan.start is not None:
                memory[:, :, plan.start : plan.start + part.shape[2]] = part
                continue
            assert plan.source is not None
            tokens = part.transpose(1, 2).flatten(0, 1)[plan.source]  # (N, heads, width)
            memory[plan.blocks, :, plan.offsets] = tokens

    def _view(self, step: Step, plan: Plan) -> View:
        def read(name: str) -> Tensor:
            record = self.spec.record_of(name)
            stored = {}
            for suffix, memory in self._tensors[record.name].items():
                visible = memory[:, :, : plan.limit]
                stored[suffix] = visible if step.rows is None else visible[step.rows]
            row = self._codec.decode(record, stored, self._dtypes[record.entries[0].name])
            return row if name == record.name else row[..., record.columns(name)]

        return DenseView(self.spec, step, plan, read, aliased=self._codec.aliases and step.rows is None)

    def _checked(self, step: Step, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        # A compiled step would be remade for every cache whose identity it looked at.
        if not torch.compiler.is_compiling() and step.owner is not self._layout:
            raise ValueError("this step was made by another cache; a layer's store takes the steps of its own KVCache")
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

    def take(self, other: Store, rows: Tensor) -> None:
        """Become a copy of these rows of a store of the same kind (which may be this one)."""
        for name, parts in self._tensors.items():
            for suffix, memory in parts.items():
                memory.copy_(other._tensors[name][suffix][rows])

    def clear(self, rows: Tensor) -> None:
        """Zero these rows, so that another sequence finds nothing of theirs."""
        for memory in self.tensors.values():
            memory[rows] = 0
