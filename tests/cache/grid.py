"""Attention layers on one store: fed tokens row by row over poisoned memory, and held to the textbook.

A query over a store reads what the codec made of keys and values. So the textbook attends over the same: its own keys
and values, coded and decoded, each held to the codec's bound. What is left to differ is float32's rounding.

A code on the edge between two may fall either way when float32 rounds; so the layer's entries are held to the
textbook's, and the store is given the textbook's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from attn_variants import VARIANTS
from attn_variants.cache import KVCache
from attn_variants.cache.layouts import held_positions, up_to
from attn_variants.cache.quantize import PLAIN, Codec, codec_named
from tests import reference
from tests.tiny import GEOMETRY, sharpen

ROWS, CAPACITY, IDS = 3, 16, 13
TOLERANCE = 1e-5
LIMITS = {
    "whole": {},
    "window": {"sliding_window": 4},
    "window and sinks": {"sliding_window": 3, "sink_tokens": 2},
    "chunk": {"attention_chunk_size": 4},
}
HIDDEN = torch.randn(IDS, GEOMETRY.hidden_size, generator=torch.Generator().manual_seed(5))
BRANCHES = torch.randint(IDS, (2, ROWS, CAPACITY), generator=torch.Generator().manual_seed(6)).tolist()
"""The ids that rows go on with, by position, in two ways that they may go."""


@dataclass(frozen=True)
class Layer:
    """A variant under limits. wide: a latent of whole groups of 128, for the codec that takes no other."""

    variant: str
    limit: str
    wide: bool = False

    @cached_property
    def config(self):
        geometry = replace(GEOMETRY, kv_lora_rank=128) if self.wide else GEOMETRY
        return replace(VARIANTS[self.variant].config.from_geometry(geometry), **LIMITS[self.limit])

    @cached_property
    def module(self):
        return sharpen(VARIANTS[self.variant].module(self.config).double()).float().eval()

    @cached_property
    def weights(self):
        return reference.weights_of(self.module)

    @cached_property
    def spec(self):
        return self.module.cache_spec

    @cached_property
    def kept(self) -> dict[str, Tensor]:
        """(IDS, CAPACITY, heads, dim) float32 by entry: what the textbook remembers of each id at each position."""
        if self.limit != "whole":
            return layer(self.variant, "whole", self.wide).kept
        by_id = [self._remembered([token] * CAPACITY) for token in range(IDS)]
        return {
            entry.name: torch.stack([kept.reshape(entry.heads, CAPACITY, entry.dim) for kept in of_entry])
            .transpose(1, 2)
            .float()
            for entry, of_entry in zip(self.spec.entries, zip(*by_id, strict=True), strict=True)
        }

    @cache  # noqa: B019
    def said(self, codec: Codec, ids: tuple[int, ...], coded: int) -> Tensor:
        """(T, hidden): the textbook's output over what this codec makes of the first `coded` keys and values."""
        kept = {name: table[list(ids), range(len(ids))].transpose(0, 1) for name, table in self.kept.items()}
        back = decoded(codec, self.spec, kept, coded)
        shapes = [tensor.shape for tensor in self._remembered(ids)]
        given = tuple(
            back[entry.name].double().reshape(shape) for entry, shape in zip(self.spec.entries, shapes, strict=True)
        )
        return reference.VARIANTS[self.variant](self.weights, self.config, HIDDEN[list(ids)].double(), given)

    def _remembered(self, ids) -> tuple[Tensor, ...]:
        return reference.KEPT[self.variant](self.weights, self.config, HIDDEN[list(ids)].double())


layer = cache(Layer)


def decoded(codec: Codec, spec, entries: dict[str, Tensor], coded: int) -> dict[str, Tensor]:
    """What a store gives back for these entries, the first `coded` of them coded: each within the codec's bound."""
    found = {}
    for record in spec.records:
        row = torch.cat([entries[entry.name] for entry in record.entries], dim=-1)
        if coded:
            front = row[:, :coded]
            back = codec.decode(record, codec.encode(record, front), row.dtype)
            assert ((back.double() - front.double()).abs() <= codec.bound(record, front)).all(), "beyond its bound"
            row = torch.cat([back, row[:, coded:]], dim=1)
        found |= {entry.name: row[..., record.columns(entry.name)] for entry in record.entries}
    return found


def made(specs, codec: str, *, store: str, **options) -> KVCache:
    """An empty cache; a pool has room for as many rows again, so that a fork of all may go on."""
    _, _, page = store.partition(":")
    pages = 2 * ROWS * -(-CAPACITY // int(page)) if page else None
    return KVCache(
        specs, batch=ROWS, capacity=CAPACITY, dtype="float32", codec=codec, store=store, pages=pages, **options
    )


class Given:
    """A layer's cache that takes the textbook's entries in the place of the layer's, which are about the same."""

    def __init__(self, own, entries: dict[str, Tensor]) -> None:
        self._own, self._entries = own, entries

    def append(self, step, **entries):
        real = (step.positions >= 0)[:, None, :, None]
        for name, wanted in self._entries.items():
            if step.padded:
                entries[name] = torch.where(real, wanted, entries[name])
                continue
            assert torch.dist(entries[name], wanted, p=math.inf) < TOLERANCE * wanted.abs().max(), (
                f"{name} is not the textbook's"
            )
            entries[name] = wanted
        return self._own.append(step, **entries)


class Rows:
    """A cache whose layers are these, one variant each, and the ids that its rows hold.

    All layers are given the same tokens, so that one step serves all variants. Every step goes over poisoned memory;
    `check` comes last.
    """

    def __init__(
        self, layers: Sequence[Layer], codec: str, *, of: Rows | None = None, forked: KVCache | None = None, **options
    ):
        self.layers, self.spelled, self.options = layers, codec, options
        self.model = nn.ModuleList(layer.module for layer in layers)
        self.cache = forked or made([layer.spec for layer in layers], codec, **options)
        (self.layout,) = self.cache._layouts.values()
        self.codec = codec_named(codec).over(self.layout.together)
        self.said: list[list[int]] = [[] for _ in range(self.cache.batch)]
        self.heard = of.heard if of else []
        # All that live on one pool are known to each.
        self.alive: list[Rows] = of.alive if of else []
        self.alive.append(self)

    @property
    def burst(self) -> int:
        return self.cache.burst

    @torch.inference_mode()
    def feed(self, *counts: int, branch: int = 0, rows=None, mask=None) -> None:
        """Append so many tokens to these rows, or as many as a mask (T,) for each leaves."""
        named = list(range(self.cache.batch)) if rows is None else rows
        if mask is not None:
            mask = torch.tensor(mask, dtype=torch.bool)
            counts = tuple(mask.sum(1).tolist())
        starts = [len(self.said[row]) for row in named]
        tokens = max(counts) if mask is None else mask.shape[1]
        self._poison_pool()
        ragged = None if mask is not None or len(set(counts)) == 1 else counts
        step = self.cache.step(len(named), tokens, rows=rows, counts=ragged, mask=mask)
        self._poison_rows(step)
        real, ids = step.positions >= 0, torch.zeros_like(step.positions)
        for at, (row, start, count) in enumerate(zip(named, starts, counts, strict=True)):
            new = BRANCHES[branch][row][start : start + count]
            ids[at, real[at]] = torch.tensor(new, dtype=torch.long)
            self.said[row] = self.said[row] + new
        x = torch.where(real[..., None], HIDDEN[ids], 1e3)
        coded = None if step.sealed is None else step.sealed.tolist()
        for layer, own in zip(self.layers, self.cache.layers, strict=True):
            kept = {name: table[ids, step.positions].transpose(1, 2) for name, table in layer.kept.items()}
            out = layer.module(x, step, Given(own, kept))
            assert not step.padded or not out[~real].any(), "padding is not zero"
            for at, (row, start, count) in enumerate(zip(named, starts, counts, strict=True)):
                if count:
                    read = None if step.cold else len(self.said[row]) if coded is None else coded[at]
                    new = out[at, real[at]] if step.padded else out[at]
                    self.heard.append((layer, self.codec, read, tuple(self.said[row]), start, new))
        self.cache.advance(step)
        self._check_pool()

    def fork(self, rows) -> Rows:
        twin = Rows(self.layers, self.spelled, of=self, forked=self.cache.fork(rows))
        twin.said = [self.said[row] for row in rows]
        self._check_pool()
        return twin

    def fresh(self, **options) -> Rows:
        """Another cache of this kind, whose outputs are checked with these."""
        other = Rows(self.layers, self.spelled, **{**self.options, **options})
        other.heard = self.heard
        return other

    def rewind(self, *drops: int) -> None:
        self.cache.rewind(drops)
        self.said = [ids[: len(ids) - drop] for ids, drop in zip(self.said, drops, strict=True)]
        self._check_pool()

    def reorder(self, *rows: int) -> None:
        self.cache.reorder(rows)
        self.said = [self.said[row] for row in rows]
        self._check_pool()

    def free(self, row: int) -> None:
        self.cache.free([row])
        self.said[row] = []
        self._check_pool()

    def check(self) -> int:
        """Hold all outputs to the textbook; the fewest tokens that a layer read from a store."""
        told = {layer: ([], []) for layer in self.layers}
        read = Counter()
        # The longest first: the textbook's outputs of a sequence hold those of all it begins with.
        for layer, codec, coded, ids, start, out in sorted(self.heard, key=lambda heard: -len(heard[3])):
            for tokens, more in zip(
                told[layer], (out, said(layer, codec if coded else PLAIN, ids, coded)[start:]), strict=True
            ):
                tokens.append(more)
            read[layer] += len(out) * (coded is not None)
        for layer, (out, wanted) in told.items():
            out, wanted = torch.cat(out).double(), torch.cat(wanted)
            missed = (out - wanted).abs().amax(-1) / wanted.abs().amax(-1)
            assert (missed < TOLERANCE).all(), f"{layer.variant}: a token is off by {missed.max():.1e}"
        return min(read.values())

    def _live(self, row: int) -> Tensor:
        """The slots whose numbers some step may still need."""
        length = len(self.said[row])
        if not length:
            return torch.tensor([], dtype=torch.long)
        held = held_positions(self.layout.spec, length, min(self.layout.first(row), length))
        if self.layout.together > 1:
            # The others wait in the residual, and their slots hold nothing yet.
            held = held[held < self.cache._sealing.sealed(self.cache._high[row])]
        return self.layout.slots(row, held)

    def _poison_pool(self) -> None:
        """NaN in free pages, 1e4 in slots of other pages that hold nothing: a mask has to hide them."""
        if not self.layout.pooled:
            return
        pool, page = self.layout.pool, self.layout.page
        live = torch.zeros((pool.total + 1) * page, dtype=torch.bool)
        live[:page] = True
        for rows in self.alive:
            for row in range(rows.cache.batch):
                live[rows._live(row)] = True
        held = torch.tensor([pool.holders(number) > 0 for number in range(pool.total + 1)]).repeat_interleave(page)
        self._poison(~live & held, 1e4)
        self._poison(~live & ~held, torch.nan)

    def _poison_rows(self, step) -> None:
        """NaN in slots that the step does not read, 1e4 in those that it reads and that hold nothing."""
        if self.layout.pooled:
            return
        (plan,) = (plan for kind, plan in step.plans.items() if isinstance(kind, str))
        batch, _, slots, _ = self.layout.shape(1, 1)
        dead, read = torch.ones(batch, slots, dtype=torch.bool), torch.zeros(batch, slots, dtype=torch.bool)
        for row in range(batch):
            dead[row, self._live(row)] = False
        if not step.cold:
            rows = slice(None) if step.rows is None else step.rows
            read[rows, plan.first : plan.first + up_to(plan.limit, self.layout.together)] = True
        self._poison(dead & read, 1e4)
        self._poison(dead & ~read, torch.nan)

    def _poison(self, where: Tensor, value: float) -> None:
        """Put what the codec makes of this number into these slots, (slots,) of a pool or (rows, slots)."""
        for layer, store in zip(self.layers, self.cache._stores.values(), strict=True):
            stored = poisoned(self.codec, layer.spec, value)
            for (name, memory), per in zip(store._row(slice(None)).items(), store.per.values(), strict=True):
                # What several slots share is poisoned where none of them holds anything.
                alone = where if per == 1 else where.unflatten(-1, (-1, per)).all(-1)
                memory.transpose(-3, -2)[alone] = stored[name]

    def _check_pool(self) -> None:
        if self.layout.pooled:
            self.layout.pool.check([table for rows in self.alive for table in rows.layout.tables])


KNOWN: dict = {}
"""The textbook's outputs by layer and codec, of every sequence that was asked for and all that it begins with."""


def said(layer: Layer, codec: Codec, ids: tuple[int, ...], coded: int | None) -> Tensor:
    """The textbook's output over these ids, the first `coded` of them coded where a codec takes tokens together."""
    together = codec.together > 1
    known = KNOWN.setdefault((layer, codec, coded if together else None), {})
    if ids not in known:
        row = next((row for row in range(ROWS) if tuple(BRANCHES[0][row][: len(ids)]) == ids), None)
        whole = ids if row is None else tuple(BRANCHES[0][row])
        out = layer.said(codec, whole, coded if together else len(whole))
        known.update({whole[:n]: out[:n] for n in range(1, len(whole) + 1) if whole[:n] not in known})
    return known[ids]


@cache
def poisoned(codec: Codec, spec, value: float) -> dict[str, Tensor]:
    """(heads, width) of every stored tensor: what the codec makes of this number."""
    return {
        record.name + suffix: part[:, 0]
        for record in spec.records
        for suffix, part in codec.encode(
            record, torch.full((record.heads, codec.together, record.width), value)
        ).items()
    }
