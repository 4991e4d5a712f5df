"""The cache of a whole model: the clock of its rows, and one store per layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

import torch
from torch import Tensor

from attn_variants.contract import CacheSpec, Step, require_size
from attn_variants.dtypes import dtype_bytes, float_dtype
from attn_variants.transient import place

from .accounting import require_storable
from .layouts import Layout, layout_named
from .quantize import codec_named
from .store import Store


class KVCache:
    """What a decoder remembers of `batch` sequences of up to `capacity` tokens each; rows may differ in length.

    Made from a decoder's `cache_specs`; all memory is allocated here. One forward pass is `step`, which places the new
    tokens, then each layer's `append`, then `advance`, which alone moves the clock: an error between leaves the cache
    as it was.

    dtype: of the stored numbers, torch's or by name; None is torch's default. store: the layout; codec: how numbers are
    stored. burst: the most tokens that a step brings to rows that hold some already; a full store takes any number.
    static: fixed shapes for compiled steps, see `layouts.Full`.
    Raises ValueError for sizes below 1, unknown names and for layers that remember what no store holds.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        store: str = "full",
        codec: str = "plain",
        burst: int = 1,
        static: bool = False,
    ) -> None:
        require_storable(specs)
        if not specs:
            raise ValueError("a cache needs the specs of at least one layer, got none")
        require_size("burst", burst)
        self.specs = tuple(specs)
        self.batch = batch
        self.capacity = capacity
        self.dtype = float_dtype(torch.get_default_dtype() if dtype is None else dtype)
        self.store = store
        self.codec = codec
        self.static = static
        self._layout: Layout = layout_named(store, batch=batch, capacity=capacity, static=static)
        self._kinds = {_kind(spec): spec for spec in self.specs}
        # Made under inference mode the memory could be written to in no other.
        with torch.inference_mode(False):
            self.layers = [
                Store(spec, self._layout, codec_named(codec), kind=_kind(spec), dtype=self.dtype, device=device)
                for spec in self.specs
            ]
        self._device = next(iter(self.layers[0].tensors.values())).device
        self._lengths = [0] * batch
        self._pending: tuple[Step, list[int], tuple[int, ...]] | None = None

    @property
    def lengths(self) -> Tensor:
        """(batch,) int64: tokens each row holds."""
        return torch.tensor(self._lengths, device=self._device)

    def step(
        self,
        batch: int,
        tokens: int,
        *,
        counts: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        mask: Tensor | None = None,
    ) -> Step:
        """Where the next `tokens` columns of `batch` rows stand; padding as in `attn_variants.transient.place`.

        Raises ValueError, with nothing changed, for rows that are not there and for tokens beyond the capacity.
        """
        named = self._rows(rows)
        if len(named) != batch:
            raise ValueError(
                f"the tokens have {batch} rows, the cache {len(named)}; make it with batch={batch}, "
                f"or name its rows with rows="
            )
        starts = [self._lengths[row] for row in named]
        placement = place(starts, tokens, counts=counts, mask=mask, device=self._device)
        for row, start, count in zip(named, starts, placement.counts, strict=True):
            if start + count > self.capacity:
                raise ValueError(
                    f"row {row} holds {start} tokens and {count} more make {start + count}, beyond the cache's "
                    f"capacity of {self.capacity}: make the KVCache with a larger capacity, or give fewer tokens"
                )
        lengths = [start + count for start, count in zip(starts, placement.counts, strict=True)]
        step = Step(
            positions=placement.positions,
            lengths=torch.tensor(lengths, device=self._device),
            rows=None if rows is None else torch.tensor(named, device=self._device),
            fresh=placement.left and not any(starts),
            padded=placement.padded,
            owner=self._layout,
        )
        for kind, spec in self._kinds.items():
            step.plans[kind] = self._layout.plan(step, placement, starts, spec)
        self._pending = (step, named, placement.counts)
        return step

    def advance(self, step: Step) -> None:
        """The step's tokens are cached: move the clock. Raises ValueError for a step that is not the newest."""
        if self._pending is None or self._pending[0] is not step:
            raise ValueError("advance takes the step that this cache made last, once")
        _, named, counts = self._pending
        for row, count in zip(named, counts, strict=True):
            self._lengths[row] += count
        self._pending = None

    def rewind(self, tokens: int | Sequence[int]) -> None:
        """Forget the last `tokens` of every row, or that many of each. Raises ValueError, with nothing changed."""
        drops = [index(drop) for drop in tokens] if isinstance(tokens, Iterable) else [index(tokens)] * self.batch
        if len(drops) != self.batch:
            raise ValueError(f"rewind was given {len(drops)} numbers for a cache of {self.batch} rows")
        for row, (drop, length) in enumerate(zip(drops, self._lengths, strict=True)):
            floor = self._layout.floor(row)
            if drop < 0 or length - drop < floor:
                raise ValueError(
                    f"row {row} holds {length} tokens, of which 0 to {length - floor} can be dropped, not {drop}"
                )
        self._lengths = [length - drop for length, drop in zip(self._lengths, drops, strict=True)]
        self._pending = None

    def fork(self, rows: Sequence[int]) -> KVCache:
        """A new cache whose row i is a copy of row rows[i]; a row may be named more than once."""
        named = self._rows(rows, distinct=False)
        twin = KVCache(
            self.specs,
            batch=len(named),
            capacity=self.capacity,
            dtype=self.dtype,
            device=self._device,
            store=self.store,
            codec=self.codec,
            static=self.static,
        )
        twin._take(self, named)
        return twin

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was (beam search); a row may be named more than once."""
        named = self._rows(rows, distinct=False)
        if len(named) != self.batch:
            raise ValueError(f"reorder was given {len(named)} rows for a cache of {self.batch}")
        self._take(self, named)

    def free(self, rows: Sequence[int] | None = None) -> None:
        """Empty these rows (all, if None named) for other sequences; their memory is zeroed."""
        named = self._rows(rows)
        for store in self.layers:
            store.clear(torch.tensor(named, device=self._device))
        for row in named:
            self._lengths[row] = 0
        self._pending = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor, named as in `cache_shapes`: "layers.0.k"."""
        return {
            f"layers.{layer}.{name}": tensor
            for layer, store in enumerate(self.layers)
            for name, tensor in store.tensors.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes allocated, read off the storages themselves."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.tensors.values()}
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def bytes_used(self) -> int:
        """Bytes of the tokens that rows hold now."""
        held = sum(self._lengths)
        return sum(
            held * entry.numel * dtype_bytes(entry.dtype or self.dtype) for spec in self.specs for entry in spec.entries
        )

    def _take(self, other: KVCache, rows: list[int]) -> None:
        taken = torch.tensor(rows, device=self._device)
        for store, source in zip(self.layers, other.layers, strict=True):
            store.take(source, taken)
        self._lengths = [other._lengths[row] for row in rows]
        self._pending = None

    def _rows(self, rows: Sequence[int] | None, *, distinct: bool = True) -> list[int]:
        named = list(range(self.batch)) if rows is None else [index(row) for row in rows]
        if not named or any(not 0 <= row < self.batch for row in named):
            raise ValueError(f"rows {named} must be some of 0 to {self.batch - 1}")
        if distinct and len(set(named)) != len(named):
            raise ValueError(f"rows {named} must be distinct")
        return named


def _kind(spec: CacheSpec) -> str:
    """Layers of one kind share a plan."""
    return f"window={spec.window} chunk={spec.chunk} sinks={spec.sinks}"
