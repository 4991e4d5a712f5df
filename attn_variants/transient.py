"""What may be seen, where a pass's tokens stand, and the cache of a pass that keeps only its own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from attn_variants.contract import CacheSpec, LayerCache, Plan, Step, View
from attn_variants.dtypes import torch_dtype

MASK_ENTRIES = 2**26
"""The largest mask that is made at once: 64 MiB, which kernels turn into 256 MiB of float32."""


def visible(
    q_positions: Tensor, kv_positions: Tensor, *, window: int | None = None, chunk: int | None = None, sinks: int = 0
) -> Tensor:
    """Which keys each query may read, (B, T, S) bool.

    One rule for causality, padding, ragged rows, wrap-around, rejected drafts and empty slots: a key is seen when it is
    there (its position is not -1), is not in the future, and lies among the newest `window` tokens (the query's own
    included), in the query's `chunk`, or among the first `sinks`.

    q_positions: (B, T), kv_positions: (B, S), int64, -1 for padding and for empty slots. A padded query sees nothing.
    """
    query, key = q_positions[..., :, None], kv_positions[..., None, :]
    seen = (key >= 0) & (key <= query)
    if window is not None:
        seen = seen & ((query - key < window) | (key < sinks))
    if chunk is not None:
        seen = seen & ((query // chunk == key // chunk) | (key < sinks))
    return seen


def step_mask(step: Step, kv_positions: Tensor, spec: CacheSpec) -> Tensor:
    """(B, 1, T, S) bool, `visible` for attention to use.

    A padded query may read everything: a row that sees nothing makes softmax return NaN, and its output is zeroed.
    """
    seen = visible(step.positions, kv_positions, window=spec.window, chunk=spec.chunk, sinks=spec.sinks)
    if step.padded:
        seen = seen | (step.positions < 0)[..., None]
    return seen[:, None]


def mask_plan(plan: Plan, step: Step, spec: CacheSpec) -> None:
    """Give the plan the mask of its slots, or defer one of more than `MASK_ENTRIES`: blocks then make their own."""
    batch, tokens = step.positions.shape
    plan.deferred = batch * tokens * plan.limit > MASK_ENTRIES
    if not plan.deferred:
        assert plan.kv_positions is not None
        plan.mask = step_mask(step, plan.kv_positions, spec)


@dataclass(frozen=True)
class Placement:
    """Host facts about where a pass's tokens stand: the same for a cache and for a pass without one.

    positions: (B, T) as in `Step`.     starts, counts: tokens held before and real tokens of the pass, per row.
    padded: some tokens are padding.    left: real tokens come first in every row.
    last: (row, column) of a row's last real token, whichever row has one.
    """

    positions: Tensor
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    padded: bool
    left: bool
    last: tuple[int, int]

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens held after the pass, per row."""
        return tuple(start + count for start, count in zip(self.starts, self.counts, strict=True))

    @property
    def cold(self) -> bool:
        """Whether no row holds anything before the pass."""
        return not any(self.starts)

    @property
    def even(self) -> bool:
        """Whether all rows stand alike: as many tokens before, and no padding."""
        return len(set(self.starts)) == 1 and not self.padded


def place(
    starts: Sequence[int],
    tokens: int,
    *,
    counts: Sequence[int] | None = None,
    mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Placement:
    """Positions of `tokens` columns on rows that hold `starts` tokens already.

    counts: real tokens per row, the rest of the columns being padding at the right. mask: (B, T), true on real tokens,
    for padding anywhere. Neither: every token is real. Raises ValueError for shapes that do not fit, for counts out of
    range and for a pass without a real token.
    """
    batch = len(starts)
    if counts is not None and mask is not None:
        raise ValueError("give counts (padding at the right) or mask (padding anywhere), not both")
    if mask is not None:
        return _place_masked(starts, tokens, mask, device)
    if counts is None:
        counts = (tokens,) * batch
    counts = tuple(index(count) for count in counts)
    if len(counts) != batch:
        raise ValueError(f"counts has {len(counts)} rows, the tokens have {batch}")
    if any(not 0 <= count <= tokens for count in counts):
        raise ValueError(f"counts {list(counts)} must lie between 0 and the {tokens} tokens of a row")
    if not any(counts):
        raise ValueError(f"a step needs at least one real token, got counts {list(counts)} of {tokens} columns")
    padded = any(count < tokens for count in counts)
    columns = torch.arange(tokens, device=device)
    positions = torch.tensor(starts, device=device)[:, None] + columns
    if padded:
        positions = positions.masked_fill(columns >= torch.tensor(counts, device=device)[:, None], -1)
    last = next((row, count - 1) for row, count in enumerate(counts) if count)
    return Placement(positions, tuple(starts), counts, padded, True, last)


def _place_masked(starts: Sequence[int], tokens: int, mask: Tensor, device: torch.device | str | None) -> Placement:
    if tuple(mask.shape) != (len(starts), tokens):
        raise ValueError(f"mask has shape {tuple(mask.shape)}, the tokens have {(len(starts), tokens)}")
    real = mask.to(device="cpu", dtype=torch.bool)
    if not real.any():
        raise ValueError(f"a step needs at least one real token, got a mask of {tuple(mask.shape)} without any")
    counts = tuple(real.sum(1).tolist())
    positions = torch.tensor(starts)[:, None] + real.cumsum(1) - 1
    row = next(row for row, count in enumerate(counts) if count)
    return Placement(
        positions=positions.masked_fill(~real, -1).to(device),
        starts=tuple(starts),
        counts=counts,
        padded=not bool(real.all()),
        left=bool((real[:, 1:] <= real[:, :-1]).all()),
        last=(row, int(real[row].nonzero()[-1])),
    )


def fresh_step(
    batch: int,
    tokens: int,
    *,
    counts: Sequence[int] | None = None,
    mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Step:
    """The step of a pass that starts at position 0 in every row; padding as in `place`."""
    if counts is None and mask is None and tokens > 0:
        # No host fact depends on the number of tokens, so that one compiled graph serves any.
        positions = torch.arange(tokens, device=device).expand(batch, tokens)
        return Step(positions, torch.full((batch,), tokens, device=device), fresh=True, cold=True)
    placement = place((0,) * batch, tokens, counts=counts, mask=mask, device=device)
    lengths = torch.tensor(placement.counts, device=device)
    return Step(placement.positions, lengths, fresh=placement.left, cold=True, padded=placement.padded)


class DenseView:
    """A view whose entries can be read as tensors of all the slots at once. Implements `View`.

    read: gives the (B, heads, S, dim) tensor of an entry or a record, without a copy when `aliased`.
    """

    def __init__(
        self, spec: CacheSpec, step: Step, plan: Plan, read: Callable[[str], Tensor], *, aliased: bool = True
    ) -> None:
        self.spec = spec
        self.step = step
        self.plan = plan
        self.aliased = aliased
        self._read = read

    def dense(self, *names: str) -> tuple[Tensor, ...]:
        """Every slot read, (B, heads, S, dim) per name."""
        return tuple(self._read(name) for name in names)

    def blocks(self, size: int, *names: str) -> Iterator[tuple[tuple[Tensor, ...], slice]]:
        """The same in runs of at most `size` slots, each with the slots it covers."""
        whole = self.dense(*names)
        for start in range(0, self.plan.limit, size):
            slots = slice(start, min(start + size, self.plan.limit))
            yield tuple(tensor[:, :, slots] for tensor in whole), slots


def own_view(spec: CacheSpec, step: Step, entries: dict[str, Tensor]) -> DenseView:
    """The view over this pass's own tensors: all there is to see when nothing was cached before."""

    def read(name: str) -> Tensor:
        if name in entries:
            return entries[name]
        record = spec.record_of(name)
        return torch.cat([entries[entry.name] for entry in record.entries], dim=-1)

    return DenseView(spec, step, _own_plan(spec, step), read)


def _own_plan(spec: CacheSpec, step: Step) -> Plan:
    kind = ("own", spec.window, spec.chunk, spec.sinks)
    if kind not in step.plans:
        tokens = step.positions.shape[1]
        unbroken = all(limit is None or limit >= tokens for limit in (spec.window, spec.chunk))
        causal = step.fresh and unbroken
        plan = step.plans[kind] = Plan(kv_positions=step.positions, causal=causal, mask=None, limit=tokens)
        if not causal:
            mask_plan(plan, step, spec)
    return step.plans[kind]


OWN_ENTRIES = "this layer has entries of its own to append; only one whose spec `shares` reads another's"
"""What a layer that shares with none is told when it asks for another's view."""


class Transient:
    """The cache of a pass without one: keeps this pass's tensors and nothing after it. Implements `LayerCache`.

    layer: its index where other layers share what it appends, else None.
    """

    def __init__(self, spec: CacheSpec, layer: int | None = None) -> None:
        self.spec = spec
        self._layer = layer

    def append(self, step: Step, **entries: Tensor) -> View:
        """A view over the entries themselves."""
        view = own_view(self.spec, step, entries)
        if self._layer is not None:
            step.views[self._layer] = view
        return view

    def view(self, step: Step) -> View:
        """Refused: this layer has entries of its own."""
        raise ValueError(OWN_ENTRIES)

    def states(self, step: Step) -> dict[str, Tensor]:
        """Zeros, in float32 where the state names no dtype: nothing came before."""
        batch, device = step.positions.shape[0], step.positions.device
        return {
            state.name: torch.zeros((batch, *state.shape), dtype=torch_dtype(state.dtype or "float32"), device=device)
            for state in self.spec.states
        }

    def keep(self, step: Step, **states: Tensor) -> None:
        """Nothing is kept after the pass."""


class Shared:
    """The cache of a layer that owns none and reads that of another. Implements `LayerCache`."""

    def __init__(self, spec: CacheSpec) -> None:
        assert spec.shares is not None
        self.spec = spec
        self._owner = spec.shares

    def append(self, step: Step, **entries: Tensor) -> View:
        """Refused: there is no memory of its own."""
        raise ValueError(f"this layer shares the cache of layer {self._owner} and has nothing to append")

    def view(self, step: Step) -> View:
        """What the owner's `append` returned in this step."""
        if self._owner not in step.views:
            raise ValueError(f"layer {self._owner}, whose cache this layer shares, has appended nothing in this step")
        return step.views[self._owner]

    def states(self, step: Step) -> dict[str, Tensor]:
        """None: states are not shared."""
        return {}

    def keep(self, step: Step, **states: Tensor) -> None:
        """Refused: there is no memory of its own."""
        raise ValueError(f"this layer shares the cache of layer {self._owner} and has no state to keep")


def owners(specs: Sequence[CacheSpec]) -> set[int]:
    """The layers whose caches other layers share. Raises ValueError for a layer that shares what it cannot read."""
    for layer, spec in enumerate(specs):
        if spec.shares is None:
            continue
        if not 0 <= spec.shares < layer:
            raise ValueError(f"layer {layer} shares the cache of layer {spec.shares}; it must be an earlier one")
        owner = specs[spec.shares]
        if not owner.records:
            raise ValueError(f"layer {layer} shares the cache of layer {spec.shares}, which has none of its own")
        if (spec.window, spec.chunk, spec.sinks) != (owner.window, owner.chunk, owner.sinks):
            raise ValueError(
                f"layer {layer} shares the cache of layer {spec.shares}; both need the same window, chunk and sinks"
            )
    return {spec.shares for spec in specs if spec.shares is not None}


def transients(specs: Sequence[CacheSpec]) -> list[LayerCache]:
    """The caches of a whole decoder's pass without one."""
    shared = owners(specs)
    return [
        Transient(spec, layer if layer in shared else None) if spec.shares is None else Shared(spec)
        for layer, spec in enumerate(specs)
    ]


def standing(x: Tensor, step: Step | None, cache: LayerCache | None, spec: CacheSpec) -> tuple[Step, LayerCache]:
    """The step and cache of a module's pass over x (B, T, hidden); a module used alone gets its own.

    Raises ValueError for a cache without the step that says where its tokens stand, for a step that stands on a cache
    and comes without it, for a step of other rows, and for things that are none of these.
    """
    if x.ndim != 3:
        raise ValueError(f"attention takes x as (B, T, hidden), got {tuple(x.shape)}")
    if step is not None and not isinstance(step, Step):
        raise ValueError(
            f"step must be a Step, got {type(step).__name__}; for padding make one with fresh_step(B, T, mask=...)"
        )
    if hasattr(cache, "layers"):
        raise ValueError(f"a module takes one layer's cache, got a whole {type(cache).__name__}: give its layers[i]")
    if step is None:
        if cache is not None:
            raise ValueError("a layer's cache comes with the step that KVCache.step made; got a cache and no step")
        step = fresh_step(x.shape[0], x.shape[1], device=x.device)
    if cache is None and step.owner is not None:
        raise ValueError("this step stands on a cache's rows; give the module that cache's layer too")
    if step.positions.shape != x.shape[:2]:
        raise ValueError(f"the step stands for {tuple(step.positions.shape)} tokens, x has {tuple(x.shape[:2])}")
    if cache is None:
        cache = Transient(spec) if spec.shares is None else Shared(spec)
    return step, cache
