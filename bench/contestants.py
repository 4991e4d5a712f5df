"""What a speed is measured of: our decoder on its store, and transformers on its caches, behind the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor

from attn_variants.cache import KVCache
from attn_variants.cache.layouts import layout_named
from attn_variants.cache.paged import Paged
from attn_variants.contract import CacheSpec
from attn_variants.decoder import Decoder

from .batch_spec import BatchSpec

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

TRANSFORMERS_CACHES = ("dynamic", "static")
PASS_TOKENS = 16384
"""Most tokens, over all rows, that one pass of a prefill takes; it bounds the memory of activations."""
PASS_MASK = 2**26
"""Most entries, over all rows, of a pass's mask."""


class Contestant(Protocol):
    """One decoder on one cache. Ids are (B, T), logits those of the last token, (B, 1, vocab)."""

    ways: tuple[str, ...]
    store: str
    codec: str

    @property
    def peer(self) -> str:
        """Who computes."""
        ...

    @property
    def setting(self) -> str:
        """How it computes, in words."""
        ...

    def choose(self, way: str) -> None:
        """Decode in one of its ways from now on."""
        ...

    def clear(self) -> None:
        """Empty the cache; not part of any timing."""
        ...

    def prefill(self, ids: Tensor) -> Tensor:
        """Fill the empty cache; the last token's logits."""
        ...

    def decode(self, token: Tensor) -> Tensor:
        """One step: (B, 1) ids appended, the next token's logits."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache's own storages."""
        ...


class Ours:
    """Our decoder on one of our stores.

    shuffled: pages lie in random order in a pool of twice as many as are needed, as in one that was long in use.
    ragged: the rows' lengths, where they differ; `capacity` is the longest's, and pages are as many as each row needs.
    """

    peer = "attn-variants"
    ways: tuple[str, ...] = ("eager",)
    setting = "eager"

    def __init__(
        self,
        decoder: Decoder,
        *,
        batch: int,
        capacity: int,
        store: str = "full",
        codec: str = "plain",
        static: bool = False,
        shuffled: bool = False,
        ragged: BatchSpec | None = None,
    ) -> None:
        self.store, self.codec = store, codec
        self._decoder = decoder
        self._ragged = ragged
        spec = ragged or BatchSpec(((batch, capacity),))
        sizes = cache_sizes(decoder.cache_specs, spec, capacity, store=store, codec=codec, shuffled=shuffled)
        self._cache = KVCache(decoder.cache_specs, **sizes, dtype=decoder.dtype, static=static, device=decoder.device)
        for pool in self._cache.pools if shuffled else ():
            pool.shuffle(seed=0)

    def choose(self, way: str) -> None:
        """There is one way."""

    def clear(self) -> None:
        """Back to the beginning."""
        self._cache.free()

    def prefill(self, ids: Tensor) -> Tensor:
        """Fill the empty cache; the last token's logits. Of a ragged batch, each row takes the ids of its length."""
        if self._ragged is None:
            return in_passes(self._forward, ids, self._cache.capacity)
        logits = [
            in_passes(partial(self._forward, rows=rows), ids[rows.start : rows.stop, :tokens], self._cache.capacity)
            for rows, tokens in self._ragged.rows
        ]
        return torch.cat(logits)

    def fill(self, tokens: int, seed: int) -> None:
        """Random entries of so many tokens in every layer; of a ragged batch, no more than each row's length."""
        generator = torch.Generator().manual_seed(seed)
        spec = self._ragged or BatchSpec(((self._cache.batch, tokens),))
        for rows, length in spec.rows:
            self._fill_rows(rows, min(tokens, length), generator)

    def _fill_rows(self, rows: range, tokens: int, generator: torch.Generator) -> None:
        cache = self._cache
        step = cache.step(len(rows), tokens, rows=None if len(rows) == cache.batch else rows)
        for spec, layer in zip(cache.specs, cache.layers, strict=True):
            if spec.shares is None:
                layer.append(
                    step,
                    **{
                        entry.name: torch.randn(len(rows), entry.heads, tokens, entry.dim, generator=generator).to(
                            dtype=self._decoder.dtype, device=self._decoder.device
                        )
                        for record in spec.records
                        for entry in record.entries
                    },
                )
        cache.advance(step)

    def decode(self, token: Tensor) -> Tensor:
        """One step."""
        return self._forward(token)

    def _forward(self, ids: Tensor, rows: range | None = None) -> Tensor:
        logits: Tensor = self._decoder(ids, self._cache, rows=rows, last=True)
        return logits

    @property
    def cache_bytes(self) -> int:
        """Bytes of the store's storages."""
        return self._cache.nbytes


class Compiled(Ours):
    """The same with compiled decode steps, over a static store whose shapes never change, so that one graph serves all.

    On the CPU the compiler freezes the weights, to pack them for products with few rows, joins products of one input,
    and calls operators from C++.
    """

    setting = "compiled"

    def __init__(
        self,
        decoder: Decoder,
        *,
        batch: int,
        capacity: int,
        store: str = "full",
        codec: str = "plain",
        ragged: BatchSpec | None = None,
    ) -> None:
        super().__init__(decoder, batch=batch, capacity=capacity, store=store, codec=codec, static=True, ragged=ragged)
        # All decoders share one `compute`, whose graphs are counted together: without this the ninth would run eagerly.
        torch._dynamo.reset()
        self._compute = torch.compile(decoder.compute, dynamic=False)
        frozen = decoder.device.type == "cpu"
        # Freezing has to be set while the first call is traced; torch.compile's own options come too late for it.
        self._compiler: AbstractContextManager[object] = inductor.patch(
            {"freezing": frozen, "cpp_wrapper": frozen, "cpp.enable_concat_linear": frozen}
        )

    def decode(self, token: Tensor) -> Tensor:
        """One compiled step; where it stands is worked out before, so that no graph depends on it."""
        step = self._cache.step(*token.shape)
        with self._compiler, dynamo.patch(fail_on_recompile_limit_hit=True):
            logits: Tensor = self._compute(token, step, self._cache.layers)
        self._compiler = nullcontext()
        self._cache.advance(step)
        return logits


class Transformers:
    """transformers' model of the same weights, one to itself, on its dynamic or its static cache."""

    peer = "transformers"
    ways: tuple[str, ...] = ("sdpa", "eager")
    store, codec = "full", "plain"

    def __init__(self, twin: PreTrainedModel, *, cache: str, capacity: int) -> None:
        self._twin = twin
        self._kind = cache
        self._capacity = capacity
        self._cache: Cache = self._empty()

    @property
    def setting(self) -> str:
        """How it attends, and over what."""
        return f"{self._twin.config._attn_implementation}, {self._kind} cache"

    def choose(self, way: str) -> None:
        """Decode with transformers' `sdpa` or `eager` attention."""
        self._twin.set_attn_implementation(way)

    def clear(self) -> None:
        """A new dynamic cache, or the static one zeroed; prefill is by sdpa, which needs no T x T scores."""
        self.choose("sdpa")
        if self._kind == "static" and self._cache.is_initialized:
            self._cache.reset()
        else:
            self._cache = self._empty()

    def prefill(self, ids: Tensor) -> Tensor:
        """Fill the empty cache; the last token's logits."""
        return in_passes(self.decode, ids, self._capacity)

    def decode(self, token: Tensor) -> Tensor:
        """One step."""
        logits: Tensor = self._twin(token, cache=self._cache, use_cache=True, logits_to_keep=1).logits
        return logits

    @property
    def cache_bytes(self) -> int:
        """Bytes of its layers' key and value storages."""
        layers: list[Any] = list(self._cache.layers)
        storages = [tensor.untyped_storage() for layer in layers for tensor in (layer.keys, layer.values)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _empty(self) -> Cache:
        from transformers import DynamicCache, StaticCache

        if self._kind == "dynamic":
            return DynamicCache(config=self._twin.config)
        return StaticCache(config=self._twin.config, max_cache_len=self._capacity)


def in_passes(forward: Callable[[Tensor], Tensor], ids: Tensor, capacity: int) -> Tensor:
    """The last logits of ids (B, T) that go through in passes of bounded size."""
    rows, tokens = ids.shape
    done = 0
    while done < tokens:
        piece = ids[:, done : done + (warm_pass(rows, capacity) if done else first_pass(rows))]
        logits = forward(piece)
        done += piece.shape[1]
    return logits


def first_pass(rows: int) -> int:
    """The most tokens of each row in the pass that comes first, which needs no mask."""
    return max(1, PASS_TOKENS // rows)


def warm_pass(rows: int, capacity: int) -> int:
    """The most of each row in a later pass, which has a mask of its tokens by all before them; 1 if there is none."""
    return max(1, min(PASS_TOKENS, PASS_MASK // capacity) // rows) if capacity > first_pass(rows) else 1


def cache_sizes(
    specs: Sequence[CacheSpec], rows: BatchSpec, capacity: int, *, store: str, codec: str, shuffled: bool
) -> dict[str, Any]:
    """What a cache for these rows is made with, and its bytes are counted by, but for the dtype.

    capacity: slots of the longest row; the others have as many to spare. Memory by rows gives each the longest's, a
    pool has the pages that each row can need.
    """
    burst = max(warm_pass(count, capacity) for count, _ in rows.runs)
    sizes = {"batch": rows.batch, "capacity": capacity, "store": store, "codec": codec, "burst": burst}
    if store.startswith("paged") and (shuffled or rows.ragged):
        spare = capacity - rows.longest
        pages = max(
            sum(_pages(spec, store, count, tokens + spare, burst) for count, tokens in rows.runs) for spec in specs
        )
        sizes["pages"] = 2 * pages if shuffled else pages
    return sizes


def _pages(spec: CacheSpec, store: str, rows: int, capacity: int, burst: int) -> int:
    """As many as these rows can need at once."""
    layout = layout_named(store, spec, batch=rows, capacity=capacity, burst=burst)
    assert isinstance(layout, Paged)
    return layout.pool.total
