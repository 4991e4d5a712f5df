"""What does a smaller cache buy? Speed at equal memory: every case at the largest batch whose cache fits a budget.

The budget is of the cache alone, for the context and the steps to be measured; weights are the same at every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attn_variants.cache.accounting import cache_bytes
from attn_variants.cache.budgets import largest
from attn_variants.contract import CacheSpec

from .batch_spec import BatchSpec
from .cache_sizes import cache_sizes
from .case import decoder_config
from .contest import TURN_STEPS, Case, Settings, capacity_for
from .results import Row
from .tables import Column, Table, exact, figure, folded, size

MOST = 2**30
"""Sequences, beyond which nobody asks."""

COMPARED = ("subject", "sees", "dtype", "context", "by")
"""What two lines agree on that differ by what is cached."""

COLUMNS = (
    *(Column(name, name, right=False) for name in ("subject", "variant", "sees", "dtype")),
    Column("context", "context", exact),
    *(Column(name, name, right=False) for name in ("store", "codec", "by")),
    Column("cache_bytes", "cache", size),
    Column("batch", "batch", exact),
    Column("batch_ratio", "x batch", "{:.2f}".format),
    Column("ms_p50", "step ms", figure),
    Column("tokens_per_s", "tok/s", figure),
    Column("speed_ratio", "x tok/s", "{:.2f}".format),
    Column("unquiet", "", lambda unquiet: "unquiet" if unquiet else "", right=False),
)
NOTE = (
    "Each at the largest batch whose cache fits, for the context and the steps measured; weights do not count. "
    "x batch, x tok/s: over the line of the same context that holds the fewest sequences. Batches of different size "
    "are measured one after the other, not in turns."
)


@dataclass(frozen=True)
class Reserved:
    """What one store reserves for sequences of `capacity` tokens, as `contestants.Ours` makes it with these options."""

    specs: tuple[CacheSpec, ...]
    capacity: int
    store: str
    codec: str
    dtype: str
    shuffled: bool = False
    static: bool = False
    rewinds: int = 0

    def bytes(self, batch: int, burst: int | None = None) -> int:
        """Of so many sequences. burst: as in `KVCache`; None is what a prompt's passes take."""
        sizes = cache_sizes(
            self.specs,
            BatchSpec(((batch, self.capacity),)),
            self.capacity,
            store=self.store,
            codec=self.codec,
            static=self.static,
            shuffled=self.shuffled,
            rewinds=self.rewinds,
            burst=burst,
        )
        return cache_bytes(self.specs, **sizes, dtype=self.dtype)

    def largest_batch(self, budget: int) -> int:
        """The most sequences that fit, 0 if none does."""
        most = largest(lambda batch: self.bytes(batch, burst=1) <= budget, MOST)
        # A ring holds a burst more, which is shorter in larger batches: only without it do bytes grow with every row.
        return next((rows for rows in range(MOST if most is None else most, 0, -1) if self.bytes(rows) <= budget), 0)


def filling(budget: int, cases: Sequence[Case], settings: Settings) -> list[Case]:
    """The cases at the largest batches that fit, a case for each batch: stores take turns that hold equally many.

    Raises ValueError for a peer, and where not even one sequence fits, with the least that all of them need.
    """
    if settings.against is not None:
        raise ValueError("--budget fills stores of ours, and --against brings another's cache; leave one out")
    found: list[Case] = []
    lacking: dict[str, int] = {}
    for case in cases:
        batches: dict[int, list[tuple[str, str]]] = {}
        for held in case.stores:
            reserved = _reserved(case, held, settings)
            batch = reserved.largest_batch(budget)
            batches.setdefault(batch, []).append(held)
            if not batch:
                name = f"{case.variant} {case.dtype} in {' '.join(held)} at context {case.context:,}"
                lacking[name] = reserved.bytes(1)
        found += [replace(case, batch=batch, stores=tuple(held), budget=budget) for batch, held in batches.items()]
    if lacking:
        name, least = max(lacking.items(), key=lambda item: item[1])
        others = f", and {len(lacking) - 1} more do not fit" if len(lacking) > 1 else ""
        raise ValueError(
            f"--budget ({budget:,} bytes) holds not one sequence of {name}{others}: give at least {least:,} "
            f"({size(least)}), or a shorter --context"
        )
    return found


def _reserved(case: Case, held: tuple[str, str], settings: Settings) -> Reserved:
    specs = decoder_config(case.variant, case.geometry, case.sight).cache_specs
    store, codec = held
    # A compiled contestant's cache is static, and may need more.
    return Reserved(
        specs,
        capacity_for(case.context),
        store,
        codec,
        case.dtype,
        settings.shuffled,
        static=settings.compiled,
        rewinds=TURN_STEPS,
    )


def equal_memory(lines: Sequence[Row]) -> Table:
    """Decode tokens/s of caches that take equally much, beside how many sequences that is; without rows of an error."""
    lines = [line for line in lines if not line.get("error")]
    fewest: dict[tuple[object, ...], Row] = {}
    for line in sorted(lines, key=lambda line: line["batch"]):
        fewest.setdefault(_compared(line), line)
    rows = [
        line
        | {
            "batch_ratio": line["batch"] / fewest[_compared(line)]["batch"],
            "speed_ratio": line["tokens_per_s"] / fewest[_compared(line)]["tokens_per_s"],
        }
        for line in lines
    ]
    same = [column.field for column in COLUMNS if not column.right and column.field != "unquiet"]
    title = f"Decode tokens/s at equal memory, each cache within {size(lines[0]['budget'])}"
    table = folded(title, COLUMNS, rows, NOTE, same=[*same, "context"])
    shown = [column for column in table.columns if column.field != "unquiet" or any(row["unquiet"] for row in rows)]
    return replace(table, columns=tuple(shown))


def _compared(line: Row) -> tuple[object, ...]:
    return tuple(line[name] for name in COMPARED)
