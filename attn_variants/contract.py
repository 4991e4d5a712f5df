"""The contract between an attention variant and a cache store: a declaration, a step and a view.

A variant *declares* what it remembers per token (`CacheSpec`); a store allocates exactly that, and accounting adds up
the same declaration. At run time a `Step` says where this pass's tokens stand, `append` hands a layer's new entries to
the store, and the `View` it returns is what attention reads. Nothing else crosses the border.

Axis letters, here and everywhere: B batch, T new tokens, S stored slots, H query heads, K key/value heads, D head dim,
R latent rank, P rope dim. Declarations import no torch: sizing a cache must not cost that import.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


LARGEST_SIZE = 2**31 - 1
"""Above this no axis of a tensor is meant."""


def require_size(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Refuse what is no integer of `least` to `most`, naming the field and its value."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} ({value!r}) must be an integer of at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name} ({value}) must be at most {most}")


@dataclass(frozen=True)
class Entry:
    """One thing a layer remembers per token: `heads` vectors of `dim` numbers.

    `dtype` None means the cache's; `sharded` says whether tensor parallelism splits it by head or keeps it whole.
    """

    name: str
    heads: int
    dim: int
    dtype: str | None = None
    sharded: bool = True

    def __post_init__(self) -> None:
        require_size(f"entry {self.name!r}: heads", self.heads)
        require_size(f"entry {self.name!r}: dim", self.dim)

    @property
    def numel(self) -> int:
        """Numbers per token."""
        return self.heads * self.dim


@dataclass(frozen=True)
class Record:
    """Entries side by side in one row of memory; they agree on heads, dtype and sharding.

    MLA's record `kv` = (latent, k_rope) is one row of R + P numbers: the whole is the key, its front is the value.
    """

    name: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError(f"record {self.name!r} must hold at least one entry")
        layouts = {(entry.heads, entry.dtype, entry.sharded) for entry in self.entries}
        if len(layouts) > 1:
            raise ValueError(
                f"record {self.name!r}: entries must agree on heads, dtype and sharded, "
                f"got {sorted(map(str, layouts))}; "
                "give entries that differ a record each"
            )

    @classmethod
    def of(cls, entry: Entry) -> Record:
        """The record of one entry, which bears the entry's name."""
        return cls(entry.name, (entry,))

    @property
    def heads(self) -> int:
        """Heads of every entry in the row."""
        return self.entries[0].heads

    @property
    def width(self) -> int:
        """Numbers per head and token."""
        return sum(entry.dim for entry in self.entries)

    @property
    def dtype(self) -> str | None:
        """The dtype all entries ask for; None means the cache's."""
        return self.entries[0].dtype

    @property
    def sharded(self) -> bool:
        """Whether tensor parallelism splits the row by head."""
        return self.entries[0].sharded

    def columns(self, name: str) -> slice:
        """Where the entry (or the record itself) called `name` lies in the row."""
        if name == self.name:
            return slice(0, self.width)
        start = 0
        for entry in self.entries:
            if entry.name == name:
                return slice(start, start + entry.dim)
            start += entry.dim
        raise KeyError(name)


@dataclass(frozen=True)
class State:
    """One thing of constant size per sequence: a linear-attention state, a convolution's tail.

    `dtype` None means the model's. sharded: the runs of the first axis, (length, heads) each, which tensor parallelism
    splits by those heads; without them the state is whole on every rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    sharded: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for size in self.shape:
            require_size(f"state {self.name!r}: shape", size)
        if self.sharded and sum(length for length, _ in self.sharded) != self.shape[0]:
            raise ValueError(f"state {self.name!r}: the runs {self.sharded} must make up the axis of {self.shape[0]}")
        for length, heads in self.sharded:
            if length % heads:
                raise ValueError(f"state {self.name!r}: {heads} heads must divide the run of {length}")

    @property
    def numel(self) -> int:
        """Numbers per sequence."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class CacheSpec:
    """All that one layer remembers, and for how long.

    records: what is kept per token.     states: what is kept per sequence.
    window:  newest tokens that stay visible, the current one included; None is all of them.
    chunk:   only tokens of the current chunk of this many are visible (chunked attention).
    sinks:   first tokens that stay visible in spite of the window.
    shares:  index of the layer whose cache this one reads; it then owns none.
    """

    records: tuple[Record, ...] = ()
    states: tuple[State, ...] = ()
    window: int | None = None
    chunk: int | None = None
    sinks: int = 0
    shares: int | None = None

    def __post_init__(self) -> None:
        for field_name, value in (("window", self.window), ("chunk", self.chunk)):
            if value is not None:
                require_size(field_name, value)
        require_size("sinks", self.sinks, least=0)
        names = [name for record in self.records for name in {record.name, *(entry.name for entry in record.entries)}]
        if len(names) != len(set(names)):
            raise ValueError(f"records and entries of one layer need names of their own, got {sorted(names)}")

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every entry of every record, in order."""
        return tuple(entry for record in self.records for entry in record.entries)

    @property
    def numel_per_token(self) -> int:
        """Numbers this layer keeps for one token while that token is visible."""
        return sum(entry.numel for entry in self.entries)

    def record_of(self, name: str) -> Record:
        """The record that is called `name` or holds the entry of that name."""
        for record in self.records:
            if name == record.name or any(entry.name == name for entry in record.entries):
                return record
        known = ", ".join(record.name for record in self.records)
        raise KeyError(f"no entry or record {name!r} in this layer's cache; it holds {known}")

    def visible_tokens(self, context: int) -> int:
        """How many of `context` tokens the newest one can read: what a cache can never do without."""
        if self.window is not None:
            return min(context, self.window + self.sinks)
        if self.chunk is not None:
            return min(context, self.chunk + self.sinks)
        return context


@dataclass(eq=False)
class Plan:
    """One step as one kind of layer sees it; built once per step and kind, read by all its layers.

    kv_positions: (B, S) position in each slot that is read, -1 where it is empty; may be None where mask is.
    causal:  host fact: the triangle over this pass's own tokens and nothing else.
    mask:    (B, 1, T, S) true where visible; None when causal, deferred, or every query sees every slot read.
    deferred: host fact: the mask is too large to be made at once; `kv_positions` give it block by block.
    limit:   host fact: S, the slots read.
    first:   host fact: the slot in memory that reading starts at, where slots are read in a row.
    start:   host fact: the slot of the first new token where every row writes T neighbouring slots from it, else None.
    blocks, offsets, source: (N,) the row and slot each token is written to, and which of the B * T tokens is written.
    table:   the pages that hold the slots read, for memory in pages; else None.
    sealed:  host fact: in every row, slots before this one hold tokens as they are coded; None: all slots do.
    seals:   tokens to code at once, as (row of the step, row of the cache, first position, past the last).
    """

    kv_positions: Tensor | None
    causal: bool
    mask: Tensor | None
    limit: int
    first: int = 0
    start: int | None = None
    blocks: Tensor | None = None
    offsets: Tensor | None = None
    source: Tensor | None = None
    table: Table | None = None
    deferred: bool = False
    sealed: int | None = None
    seals: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(eq=False)
class Table:
    """Which pages a step reads, and in which order: page `pages[b, i]` holds the slots from i * size of row b.

    pages: (B, n) int64; page 0 is nobody's and holds zeros.     size: tokens of a page.
    runs:  host fact: for each row, neighbouring pages as (first page, pages), in the order of `pages`.
    """

    pages: Tensor
    size: int
    runs: tuple[tuple[tuple[int, int], ...], ...]
    _flat: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False)

    def flat(self, first: int, past: int, heads: int, total: int) -> Tensor:
        """(B * heads * (past - first),): entries `first` to `past` of every row in every head.

        Of memory in which the `total` pages of a head follow those of the head before it.
        """
        asked = (first, past, heads, total)
        if asked not in self._flat:
            offsets = self.pages.new_tensor(range(0, heads * total, total))
            self._flat[asked] = (self.pages[:, None, first:past] + offsets[:, None]).flatten()
        return self._flat[asked]


@dataclass(eq=False)
class Step:
    """Where this pass's tokens stand; made by `KVCache.step` or `fresh_step`, shared by all layers.

    positions: (B, T) int64, absolute; rows may differ; -1 is padding.
    lengths:   (B,) tokens each row holds after this step.
    rows:      which rows of the cache these are; None is all of them, in order.
    cold:      host fact: no row holds anything before this step, so its own tensors are all there is to read.
    fresh:     host fact: cold, and real tokens 0..n-1 from the left, padding only at the right.
    padded:    host fact: some positions are padding; attention zeroes its output there.
    plans:     one `Plan` per kind of layer.          tables: the rotary cos and sin per `RopeConfig`.
    views:     what the layers' `append` returned so far, by layer, for layers that share; they die with the step.
    sealed:    (B,) the position from which on tokens wait in a residual instead of their slots; None: none do.
    owner:     the memory whose rows the step stands on; None where there is none.
    """

    positions: Tensor
    lengths: Tensor
    rows: Tensor | None = None
    fresh: bool = False
    cold: bool = False
    padded: bool = False
    plans: dict[Any, Plan] = field(default_factory=dict)
    tables: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    views: dict[int, View] = field(default_factory=dict)
    sealed: Tensor | None = None
    owner: object = None


class View(Protocol):
    """A reader of one layer's remembered tokens, bound to one step. Names are an entry's or a record's."""

    spec: CacheSpec
    step: Step
    plan: Plan
    aliased: bool
    """Host fact: `dense` copies nothing."""

    def dense(self, *names: str) -> tuple[Tensor, ...]:
        """Every slot read, (B, heads, S, dim) per name."""
        ...

    def blocks(self, size: int, *names: str) -> Iterator[tuple[tuple[Tensor, ...], slice]]:
        """The same in runs of at most `size` slots, each with the slots it covers; never more than a run is copied."""
        ...


class FactoredView(View, Protocol):
    """A view of numbers that are stored as codes with a scale per slot and head, for products of the codes."""

    def factored(self, *names: str) -> bool:
        """Host fact: all of these are stored so."""
        ...

    def factors(self, size: int, *names: str) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...], slice]]:
        """As `blocks`, of int8 codes (B, heads, n, dim) still to be multiplied by bfloat16 scales (B, heads, n, 1)."""
        ...


class LayerCache(Protocol):
    """One layer's memory, as an attention module sees it."""

    def append(self, step: Step, **entries: Tensor) -> View:
        """Write this step's entries, (B, heads, T, dim) each, and return the view to attend over."""
        ...

    def view(self, step: Step) -> View:
        """For a layer that shares: what the `append` of the layer it shares with returned in this step."""
        ...

    def states(self, step: Step) -> dict[str, Tensor]:
        """Every state as it stands before this step, (B, *shape); zero for a row that holds nothing."""
        ...

    def keep(self, step: Step, **states: Tensor) -> None:
        """Keep the states after each of the last n tokens of the step, (B, n, *shape), the newest last.

        Columns count tokens, not real ones: after padding a state is what it was before it.
        """
        ...
