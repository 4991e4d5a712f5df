"""A cache is lists of tokens: whatever is done in whatever order, every token that is there can be read and is right.

`pytest --hypothesis-profile long tests/cache/test_interleavings.py` goes on for minutes, differently every time.
"""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attn_variants import CacheSpec, Entry, Record, State
from attn_variants.cache import KVCache
from attn_variants.cache.layouts import STORES, held_positions, limited
from attn_variants.cache.quantize import codec_named
from attn_variants.cache.rows import coded
from tests import reference
from tests.tiny import same, snapshot

NUMBER = Record.of(Entry("number", 1, 1, dtype="float32"))
"""The number of a token, which no codec touches."""
SUM = State("sum", (3,), dtype="float32")

sizes = st.integers(1, 5)
limits = st.one_of(
    st.builds(dict),
    st.builds(dict, window=sizes),
    st.builds(dict, window=sizes, sinks=st.integers(1, 3)),
    st.builds(dict, chunk=sizes),
    st.builds(dict, chunk=sizes, sinks=st.integers(1, 3)),
)
stores = st.sampled_from(STORES).flatmap(
    lambda name: st.just(name) if ":" not in name else st.integers(1, 6).map(lambda page: f"paged:{page}")
)
picks = st.lists(st.integers(0, 99), min_size=1, max_size=4)
"""Numbers that choose among what there is, whatever that is."""


class Sequences:
    """A cache and the lists that it should be."""

    def __init__(self, cache, said) -> None:
        self.cache, self.said = cache, said


class Interleavings(RuleBasedStateMachine):
    """Tokens are numbers, no two alike. A layer keeps them, a vector made of them, and perhaps their sum as a state."""

    @initialize(
        kinds=st.lists(limits, min_size=1, max_size=2),
        store=stores,
        codec=st.sampled_from(["plain", "int8:asym", "int8-kivi:2", "int4-kivi:3"]),
        static=st.booleans(),
        burst=st.sampled_from([1, 1, 2, 3, 7]),
        batch=st.integers(1, 3),
        capacity=st.sampled_from([5, 11, 23]),
        pages=st.sampled_from([None, None, 3, 6, 12]),
        states=st.booleans(),
        heads=st.integers(1, 3),
        width=st.integers(1, 7),
    )
    def made(self, kinds, store, codec, static, burst, batch, capacity, pages, states, heads, width):
        self.record = Record.of(Entry("k", heads, width))
        specs = [
            CacheSpec(records=(self.record, NUMBER), states=(SUM,) if states and layer == 0 else (), **kind)
            for layer, kind in enumerate(kinds)
        ]
        cache = KVCache(
            specs,
            batch=batch,
            capacity=capacity,
            dtype="float32",
            store=store,
            codec=codec,
            burst=burst,
            pages=pages if store.startswith("paged") else None,
            static=static and not store.startswith("paged"),
        )
        self.all = [Sequences(cache, [[] for _ in range(batch)])]
        self.next, self.codec = 1, codec_named(codec).over(cache.together)

    @rule(
        which=st.integers(0, 99),
        rows=st.none() | picks,
        counts=st.lists(st.integers(0, 4), min_size=4, max_size=4),
        columns=st.none() | st.randoms(use_true_random=False),
        grown=st.sampled_from([1, 1, 1, 4]),
        fate=st.sampled_from(["advance", "advance", "advance", "forget", "append and forget"]),
    )
    def step(self, which, rows, counts, columns, grown, fate):
        batch = self._one(which).cache.batch
        rows = None if rows is None else list(dict.fromkeys(row % batch for row in rows))
        counts = [count * grown for count in counts[: batch if rows is None else len(rows)]]
        counts += [0] * (batch - len(counts) if rows is None else 0)
        assume(any(counts))
        self._grown(which, rows, counts, columns, fate)

    def _grown(self, which, rows, counts, columns, fate):
        one = self._one(which)
        named = list(range(one.cache.batch)) if rows is None else rows
        padding = {} if len(set(counts)) == 1 else {"counts": counts}
        tokens = max(counts)
        if columns is not None:
            tokens += 2
            padding = {"mask": torch.zeros(len(named), tokens, dtype=torch.bool)}
            for row, count in enumerate(counts):
                padding["mask"][row, columns.sample(range(tokens), count)] = True
        with self._refused_only_if(one, self._may_refuse(one, named, counts)):
            step = one.cache.step(len(named), tokens, rows=rows, **padding)
            if fate != "forget":
                said = self._appended(one, step, named)
            if fate == "advance":
                one.cache.advance(step)
                one.said = said

    @rule(which=st.integers(0, 99), tokens=st.sampled_from([1, 1, 3]))
    def go_on(self, which, tokens):
        """Every row by as many tokens, which is what is done most."""
        batch = self._one(which).cache.batch
        self._grown(which, None, [tokens] * batch, None, "advance")

    @rule(which=st.integers(0, 99), row=st.integers(0, 99), tokens=st.integers(1, 7))
    def go_on_alone(self, which, row, tokens):
        self._grown(which, [row % self._one(which).cache.batch], [tokens], None, "advance")

    @rule(which=st.integers(0, 99), drops=st.lists(st.integers(0, 9), min_size=4, max_size=4), allowed=st.booleans())
    def rewind(self, which, drops, allowed):
        one = self._one(which)
        room = [len(ids) - one.cache.floor(row) for row, ids in enumerate(one.said)]
        drops = [drop % (left + 1) if allowed else drop for drop, left in zip(drops, room, strict=False)]
        drops += [0] * (len(room) - len(drops))
        beyond = any(drop > max(left, 0) for drop, left in zip(drops, room, strict=True))
        with self._refused_only_if(one, beyond, always=True):
            one.cache.rewind(drops)
            one.said = [ids[: len(ids) - drop] for ids, drop in zip(one.said, drops, strict=True)]

    @rule(which=st.integers(0, 99), rows=picks)
    def reorder(self, which, rows):
        one = self._one(which)
        rows = [rows[at % len(rows)] % one.cache.batch for at in range(one.cache.batch)]
        one.cache.reorder(rows)
        one.said = [one.said[row] for row in rows]

    @rule(which=st.integers(0, 99), rows=picks)
    def free(self, which, rows):
        one = self._one(which)
        rows = {row % one.cache.batch for row in rows}
        one.cache.free(list(rows))
        one.said = [[] if row in rows else ids for row, ids in enumerate(one.said)]

    @precondition(lambda self: len(self.all) < 3)
    @rule(which=st.integers(0, 99), rows=picks)
    def fork(self, which, rows):
        one = self._one(which)
        rows = [row % one.cache.batch for row in rows]
        self.all.append(Sequences(one.cache.fork(rows), [one.said[row] for row in rows]))

    @precondition(lambda self: len(self.all) > 1)
    @rule(which=st.integers(0, 99))
    def forget(self, which):
        del self.all[which % len(self.all)]

    @rule(which=st.integers(0, 99), source=st.integers(0, 99), row=st.integers(0, 99), tokens=st.integers(0, 12))
    def share(self, which, source, row, tokens):
        one = self._one(which)
        source, row = source % one.cache.batch, row % one.cache.batch
        held = len(one.said[source])
        tokens = held if tokens > held else tokens
        fits = held and not one.said[row] and max(1, one.cache.floor(source)) <= tokens
        with self._refused_only_if(one, not fits, always=True):
            one.cache.share(source, [row], tokens)
            one.said[row] = one.said[source][:tokens]

    @invariant()
    def every_token_that_is_held_is_right(self):
        for one in getattr(self, "all", ()):
            cache = one.cache
            assert cache.lengths.tolist() == [len(ids) for ids in one.said]
            for store in cache._stores.values():
                layout = cache._layouts[store.kind]
                for row, ids in enumerate(one.said):
                    if ids:
                        held = held_positions(store.spec, len(ids), layout.first(row))
                        # The newest wait elsewhere where some are coded together.
                        lie = coded(cache, held, cache._high[row])
                        stored = store.read_row(row, layout.slots(row, lie))
                        assert stored["number"].flatten().tolist() == [ids[at] for at in lie.tolist()]
                        self._check_sight(store.spec, len(ids), cache.floor(row), held.tolist())

    @invariant()
    def pages_are_neither_lost_nor_given_twice(self):
        pools = {}
        for one in getattr(self, "all", ()):
            for layout in one.cache._layouts.values():
                if layout.pooled:
                    pools.setdefault(layout.pool, []).extend(layout.tables)
        for pool, tables in pools.items():
            pool.check(tables)

    def _one(self, which):
        return self.all[which % len(self.all)]

    def _check_sight(self, spec, length, floor, held):
        """What the next token can see is held, also that after the furthest rewind."""
        for newest in {length, floor}:
            for position in range(newest):
                if _sees(spec, newest, position):
                    assert position in held, f"{position} is gone, and {newest} can see it"

    def _may_refuse(self, one, named, counts):
        """Whether there is a reason: no room, more than a burst where that is a limit, or a spent pool."""
        if one.cache.store.startswith("paged"):
            return True
        before = [len(one.said[row]) for row in named]
        if any(length + count > one.cache.capacity for length, count in zip(before, counts, strict=True)):
            return True
        limited = one.cache.store == "ring" or one.cache.together > 1
        return limited and any(before) and max(counts) > one.cache.burst

    @contextmanager
    def _refused_only_if(self, one, reason, *, always=False):
        before = [(snapshot(each.cache), _host_facts(each.cache)) for each in self.all]
        refused = None
        try:
            yield
        except ValueError as refusal:
            # The exception itself would keep the caches of its frames alive.
            refused = str(refusal)
        if refused is None:
            assert not (reason and always), "this should have been refused"
            return
        assert reason, f"refused without a reason: {refused}"
        for each, (numbers, facts) in zip(self.all, before, strict=True):
            assert same(snapshot(each.cache), numbers)
            assert _host_facts(each.cache) == facts

    def _appended(self, one, step, named):
        """Give every layer the step's new tokens and hold what each query reads to the lists; the lists after it."""
        real = step.positions >= 0
        numbers = torch.full(step.positions.shape, 5e5)
        numbers[real] = torch.arange(self.next, self.next + int(real.sum())).float()
        self.next += int(real.sum())
        said = list(one.said)
        for at, row in enumerate(named):
            said[row] = said[row] + numbers[at, real[at]].tolist()
        for layer in one.cache.layers:
            if layer.spec.states:
                before = layer.states(step)["sum"]
                assert before[:, 0].tolist() == [sum(one.said[row]) for row in named]
                after = before[:, None] + torch.where(real, numbers, 0).cumsum(1)[..., None]
                layer.keep(step, sum=after)
            view = layer.append(step, k=_vectors(numbers, self.record), number=numbers[:, None, :, None])
            self._check_view(view, step, [said[row] for row in named])
        return said

    def _check_view(self, view, step, said):
        numbers, k = view.dense("number", "k")
        numbers = numbers[:, 0, :, 0]
        mask = view.plan.mask
        if mask is None:
            mask = torch.ones(len(said), 1, step.positions.shape[1], numbers.shape[1], dtype=torch.bool)
            mask = mask.tril() if view.plan.causal else mask
        for row, ids in enumerate(said):
            expected = self._read(step, row, ids)
            for at, position in enumerate(step.positions[row].tolist()):
                if position >= 0:
                    seen = mask[row, 0, at]
                    wanted = [ids[other] for other in range(position + 1) if _sees(view.spec, position, other)]
                    assert sorted(numbers[row, seen].tolist()) == sorted(wanted)
                    positions = [ids.index(number) for number in numbers[row, seen].tolist()]
                    assert torch.equal(k[row, :, seen], expected[:, positions])

    def _read(self, step, row, ids):
        """(heads, T, width): what is read of a row's vectors. A cold step reads its own; what waits is exact too."""
        vectors = _vectors(torch.tensor([ids]), self.record)[0]
        stop = 0 if step.cold else len(ids) if step.sealed is None else int(step.sealed[row])
        if not stop:
            return vectors
        back = self.codec.decode(self.record, self.codec.encode(self.record, vectors[:, :stop]), torch.float32)
        return torch.cat([back, vectors[:, stop:]], dim=1)


def _vectors(numbers, record):
    """(B, T) to (B, heads, T, width): a vector of each."""
    waves = torch.arange(1, record.heads * record.width + 1).reshape(record.heads, 1, record.width)
    return torch.sin(numbers[:, None, :, None] * waves).float()


def _sees(spec, query, key):
    return reference.sees(query, key, window=spec.window, chunk=spec.chunk, sinks=spec.sinks)


def _host_facts(cache):
    """What a cache can do besides its numbers: how far rows go back, which pages they hold and how many are free."""
    return [
        [cache.floor(row) for row in range(cache.batch)],
        [
            ([list(table) for table in layout.tables], layout.pool.free) if layout.pooled else layout.first(0)
            for layout in cache._layouts.values()
        ],
    ]


TestInterleavings = Interleavings.TestCase


@pytest.mark.parametrize("store", ["paged:1", "paged:4"])
def test_a_fork_that_nobody_holds_gives_its_pages_back(store):
    spec = CacheSpec(records=(Record.of(Entry("k", 2, 6)), NUMBER))
    cache = KVCache([spec], batch=2, capacity=9, dtype="float32", store=store, pages=20)
    (layout,) = cache._layouts.values()

    def grow(cache, rows):
        step = cache.step(rows, 5)
        cache.layers[0].append(step, k=torch.zeros(rows, 2, 5, 6), number=torch.zeros(rows, 1, 5, 1))
        cache.advance(step)

    grow(cache, 2)
    free = layout.pool.free
    twins = [cache.fork([0]).fork([0, 0]), cache.fork([1, 1, 0])]
    assert layout.pool.free == free
    cache.free()
    assert layout.pool.free == free
    assert limited(spec) is False
    del twins
    assert layout.pool.free == layout.pool.total
    layout.pool.check(layout.tables)
