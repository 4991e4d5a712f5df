"""The cache of a whole model: the clock of its rows, a layout per kind of layer and a store per layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from operator import index
from pathlib import Path

import torch
from torch import Tensor, nn

from attn_variants.contract import CacheSpec, LayerCache, Step, require_size
from attn_variants.dtypes import float_dtype
from attn_variants.transient import Placement, Shared, owners, place

from .accounting import require_storable, residual_slots
from .full import Full
from .layouts import kind_of, layout_named, limited, planned, shortest
from .occupancy import CacheBytes, occupancy
from .paged import Paged
from .pages import Pages
from .quantize import codec_named
from .residual import Residual
from .rows import named_rows, share, wipe
from .saved import load, save
from .sealing import Sealing
from .states import StateStore
from .store import OVER, Store


class KVCache:
    """What a decoder remembers of `batch` sequences of up to `capacity` tokens each; rows may differ in length.

    Made from a decoder's `cache_specs`; all memory is allocated here. One forward pass is `step`, which places the new
    tokens, then each layer's `append`, then `advance`, which alone moves the clock: an error between leaves the cache
    as it was.

    dtype: of the numbers as the model gives them, torch's or by name; None is torch's default.
    store: the layout, `full`, `ring` or `paged:16`; codec: how numbers are stored.
    burst: the most tokens that a step brings to rows that hold some already, and one more than a rewind is sure to
    take back, where tokens pass out of sight or states are kept; elsewhere any number.
    pages: of a paged store's pool, for each kind of layer; None is as many as all rows can need.
    static: fixed shapes for compiled steps, see `full.Full`.
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
        pages: int | None = None,
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
        self.burst = burst
        self.static = static
        self.pages: int | dict[str, int] | None = pages
        together = codec_named(codec).together
        self._layouts = {
            kind: layout_named(
                store,
                spec,
                batch=batch,
                capacity=capacity,
                burst=burst,
                static=static,
                pages=pages,
                together=together,
            )
            for kind, spec in {kind_of(spec): spec for spec in self.specs}.items()
        }
        self._sealing = Sealing(max(layout.together for layout in self._layouts.values()), burst)
        self._owner = object()
        shared = owners(self.specs)
        # Made under inference mode the memory could be written to in no other.
        with torch.inference_mode(False):
            self._stores = {
                layer: self._store(layer, spec, device, shared)
                for layer, spec in enumerate(self.specs)
                if spec.shares is None
            }
        self.layers = self._layers()
        self._device = next(iter(self.tensors.values())).device
        self._lengths = [0] * batch
        self._high = [0] * batch
        self._written = [0] * batch
        """Per row, the position past the last whose slot or page may hold something, of the row or left behind."""
        self._pending: tuple[Step, list[int], Placement] | None = None

    def _store(self, layer: int, spec: CacheSpec, device: torch.device | str | None, shared: set[int]) -> Store:
        states = StateStore(spec.states, batch=self.batch, burst=self.burst, dtype=self.dtype, device=device)
        layout = self._layouts[kind_of(spec)]
        residual = Residual(
            spec.records,
            batch=self.batch,
            slots=residual_slots(layout.together, self.burst),
            dtype=self.dtype,
            device=device,
        )
        return Store(
            spec,
            layout,
            codec_named(self.codec).over(layout.together),
            states,
            residual,
            kind=kind_of(spec),
            owner=self._owner,
            dtype=self.dtype,
            device=device,
            layer=layer if layer in shared else None,
        )

    def _layers(self) -> list[LayerCache]:
        """One cache per layer; those that share another's own none."""
        return [self._stores.get(layer) or Shared(spec) for layer, spec in enumerate(self.specs)]

    @property
    def pools(self) -> list[Pages]:
        """The pages of each kind of layer, where they lie on pages."""
        return [layout.pool for layout in self._layouts.values() if isinstance(layout, Paged)]

    @property
    def together(self) -> int:
        """Tokens that are coded together: what the codec wants, or what divides a page."""
        return self._sealing.together

    @property
    def lengths(self) -> Tensor:
        """(batch,) int64: tokens each row holds."""
        return torch.tensor(self._lengths, device=self._device)

    def length(self, row: int) -> int:
        """The same of one row, known without asking a device."""
        return self._lengths[row]

    @property
    def most_at_once(self) -> int | None:
        """The most tokens that a step may bring to a row that holds some: `burst`, or None where it may be any."""
        kept_back = self.together > 1 or any(
            limited(layout.spec) and not isinstance(layout, Full) for layout in self._layouts.values()
        )
        return self.burst if kept_back else None

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

        Raises ValueError, with every row as it was, for rows that are not there, for tokens beyond the capacity, for
        more than `burst` of them on a row where tokens pass out of sight, and, as OutOfPagesError, for a spent pool.
        """
        named = named_rows(rows, self.batch)
        if len(named) != batch:
            raise ValueError(
                f"the tokens have {batch} rows, the cache {len(named)}; make it with batch={batch}, "
                f"or name its rows with rows="
            )
        placement = place([self._lengths[row] for row in named], tokens, counts=counts, mask=mask, device=self._device)
        for row, start, end in zip(named, placement.starts, placement.ends, strict=True):
            if end > self.capacity:
                raise ValueError(
                    f"row {row} holds {start} tokens and {end - start} more make {end}, beyond the cache's "
                    f"capacity of {self.capacity}: make the KVCache with a larger capacity, or give fewer tokens"
                )
        self._drop_pending()
        self._sealing.check(named, placement)
        for layout in self._layouts.values():
            layout.check(named, placement)
        step = Step(
            positions=placement.positions,
            lengths=torch.tensor(placement.ends, device=self._device),
            rows=None if rows is None else torch.tensor(named, device=self._device),
            fresh=placement.left and placement.cold,
            cold=placement.cold,
            padded=placement.padded,
            owner=self._owner,
        )
        self._pending = (step, named, placement)
        for kind, layout in self._layouts.items():
            moves = layout.reserve(named, placement)
            if moves.copied or moves.zeroed:
                for store in self._stores.values():
                    if store.kind == kind:
                        store.move(moves)
            step.plans[kind] = planned(layout, step, named, placement)
        for row, count, end in zip(named, placement.counts, placement.ends, strict=True):
            if count:
                wipe(self, row, end)
        self._sealing.mark(step, self._layouts, named, placement, self._high)
        return step

    def advance(self, step: Step) -> None:
        """The step's tokens are cached: move the clock. Raises ValueError for a step that is not the newest."""
        if self._pending is None or self._pending[0] is not step:
            raise ValueError("advance takes the step that this cache made last, once")
        _, named, placement = self._pending
        self._pending, step.owner = None, OVER
        for store in self._stores.values():
            store.commit()
        for row, end in zip(named, placement.ends, strict=True):
            if not placement.cold:
                self._seal(row, end)
            self._settle(row, end)

    def _seal(self, row: int, length: int) -> None:
        start, stop = self._sealing.sealed(self._high[row]), self._sealing.sealed(max(self._high[row], length))
        for store in self._stores.values() if start < stop else ():
            store.seal(row, start, stop)

    def rewind(self, tokens: int | Sequence[int]) -> None:
        """Forget the last `tokens` of every row, or that many of each. Raises ValueError, with nothing changed."""
        drops = [index(drop) for drop in tokens] if isinstance(tokens, Iterable) else [index(tokens)] * self.batch
        if len(drops) != self.batch:
            raise ValueError(f"rewind was given {len(drops)} numbers for a cache of {self.batch} rows")
        for row, (drop, length) in enumerate(zip(drops, self._lengths, strict=True)):
            floor = self.floor(row)
            if drop < 0 or (drop and length - drop < floor):
                sealed = floor == self._sealing.sealed(self._high[row]) and floor > 0
                older = f"are sealed, {self.together} coded together" if sealed else "are out of sight or overwritten"
                raise ValueError(
                    f"row {row} holds {length} tokens, of which 0 to {max(length - floor, 0)} can be dropped, not "
                    f"{drop}: older ones {older}; a larger burst keeps more"
                )
        self._drop_pending()
        for row, (drop, length) in enumerate(zip(drops, self._lengths, strict=True)):
            self._settle(row, length - drop)

    def floor(self, row: int) -> int:
        """The shortest length that this row can still be rewound to."""
        floors = [shortest(layout.spec, layout.first(row)) for layout in self._layouts.values()]
        if any(spec.states for spec in self.specs):
            floors.append(max(0, self._high[row] - self.burst + 1))
        return max(*floors, self._sealing.sealed(self._high[row]))

    def fork(self, rows: Sequence[int]) -> KVCache:
        """A new cache whose row i is as row rows[i]; a row may be named more than once.

        On pages nothing is copied until one of them writes: both then live on one pool, which `nbytes` of each counts.
        """
        named = named_rows(rows, self.batch, distinct=False)
        self._drop_pending()
        twin = copy(self)
        twin.batch = len(named)
        twin._owner = object()
        twin._layouts = {kind: layout.fork(named) for kind, layout in self._layouts.items()}
        pools = {kind: layout.pool.total for kind, layout in self._layouts.items() if isinstance(layout, Paged)}
        twin.pages = pools or None
        taken = torch.tensor(named, device=self._device)
        with torch.inference_mode(False):
            twin._stores = {
                layer: store.fork(twin._layouts[store.kind], twin._owner, taken)
                for layer, store in self._stores.items()
            }
        twin.layers = twin._layers()
        twin._lengths = [self._lengths[row] for row in named]
        twin._high = [self._high[row] for row in named]
        twin._written = [self._written[row] for row in named]
        return twin

    def share(self, source: int, rows: Sequence[int], tokens: int | None = None) -> None:
        """These empty rows begin with the first `tokens` of row `source`, all of them if None.

        On pages nothing is copied until one of them writes. Raises ValueError, with nothing changed, for a row that is
        not empty, and for fewer tokens than `floor(source)`: what comes after them would miss what it can see.
        """
        (source,), named = named_rows([source], self.batch), named_rows(rows, self.batch)
        share(self, source, named, self._lengths[source] if tokens is None else index(tokens))

    def save(self, path: str | Path, *, model: nn.Module, rows: Sequence[int] | None = None) -> None:
        """Write what these rows hold, for `load`; None is every row that holds something. See `cache.saved.save`."""
        named = None if rows is None else named_rows(rows, self.batch)
        save(self, Path(path), model, [row for row in named or range(self.batch) if named or self._lengths[row]])

    def load(self, path: str | Path, *, model: nn.Module, rows: Sequence[int] | None = None) -> None:
        """Fill these empty rows, the first ones if None, from a file that `save` wrote. See `cache.saved.load`."""
        named = None if rows is None else named_rows(rows, self.batch)
        load(self, Path(path), model, named)

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was (beam search); a row may be named more than once."""
        named = named_rows(rows, self.batch, distinct=False)
        if len(named) != self.batch:
            raise ValueError(f"reorder was given {len(named)} rows for a cache of {self.batch}")
        self._drop_pending()
        taken = torch.tensor(named, device=self._device)
        for store in self._stores.values():
            store.take(store, taken)
        for layout in self._layouts.values():
            layout.take(layout, named)
        self._lengths = [self._lengths[row] for row in named]
        self._high = [self._high[row] for row in named]
        self._written = [self._written[row] for row in named]

    def free(self, rows: Sequence[int] | None = None) -> None:
        """Empty these rows (all, if None named) for other sequences; they find nothing of theirs."""
        named = named_rows(rows, self.batch)
        self._drop_pending()
        for store in self._stores.values():
            store.clear(torch.tensor(named, device=self._device))
        for row in named:
            self._settle(row, 0)
            self._written[row] = 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor, named as in `cache_shapes`: "layers.0.k"."""
        return {
            f"layers.{layer}.{name}": tensor
            for layer, store in self._stores.items()
            for name, tensor in store.tensors.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes allocated, read off the storages themselves."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.tensors.values()}
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def bytes_used(self) -> int:
        """Bytes of what rows hold now and attention can read, as they are stored."""
        return self.bytes.used

    @property
    def bytes(self) -> CacheBytes:
        """All figures in one call."""
        return occupancy(self)

    def _settle(self, row: int, length: int) -> None:
        self._lengths[row] = length
        self._high[row] = max(self._high[row], length) if length else 0
        for layout in self._layouts.values():
            layout.settle(row, length)

    def _drop_pending(self) -> None:
        """Forget a step that was made and never advanced: what was reserved for it goes back."""
        if self._pending is None:
            return
        step, named, _ = self._pending
        self._pending, step.owner = None, OVER
        for store in self._stores.values():
            store.drop()
        for row in named:
            self._settle(row, self._lengths[row])
