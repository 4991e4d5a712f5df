"""What a speed is measured of: our decoder on its store, and transformers on its caches, behind the same calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor

from attn_variants.cache import KVCache
from attn_variants.contract import CacheSpec
from attn_variants.decoder import Decoder

from .reference import step_logits

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

    def rewind(self, tokens: int) -> None:
        """Take back the newest tokens, all that were decoded since the cache was filled; not part of any timing."""
        ...


class Ours:
    """Our decoder on one of our stores.

    shuffled: pages lie in random order in a pool of twice as many as are needed, as in one that was long in use.
    rewinds: the most tokens that are taken back at once.
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
        rewinds: int = 0,
    ) -> None:
        self.store, self.codec = store, codec
        self._copies = goes_back_by_copy(decoder.cache_specs, store, static=static)
        self._filled: KVCache | None = None
        self._decoder = decoder
        sizes: dict[str, Any] = {"batch": batch, "capacity": capacity, "dtype": decoder.dtype, "store": store}
        burst = burst_for(decoder.cache_specs, store, batch, capacity, static=static, rewinds=rewinds)
        sizes |= {"codec": codec, "static": static, "burst": burst}
        pools = KVCache(decoder.cache_specs, **sizes, device="meta").pools if shuffled else []
        if pools:
            sizes["pages"] = 2 * max(pool.total for pool in pools)
        self._cache = KVCache(decoder.cache_specs, **sizes, device=decoder.device)
        for pool in self._cache.pools if shuffled else ():
            pool.shuffle(seed=0)

    def choose(self, way: str) -> None:
        """There is one way."""

    def clear(self) -> None:
        """Back to the beginning."""
        self._cache.free()
        self._filled = None

    def prefill(self, ids: Tensor) -> Tensor:
        """Fill the empty cache; the last token's logits."""
        return in_passes(self._forward, ids, self._cache.capacity)

    def fill(self, tokens: int, seed: int) -> None:
        """Random entries of so many tokens in every layer."""
        generator = torch.Generator().manual_seed(seed)
        cache = self._cache
        step = cache.step(cache.batch, tokens)
        for spec, layer in zip(cache.specs, cache.layers, strict=True):
            if spec.shares is None:
                layer.append(
                    step,
                    **{
                        entry.name: torch.randn(cache.batch, entry.heads, tokens, entry.dim, generator=generator).to(
                            dtype=self._decoder.dtype, device=self._decoder.device
                        )
                        for record in spec.records
                        for entry in record.entries
                    },
                )
        cache.advance(step)

    def decode(self, token: Tensor) -> Tensor:
        """One step."""
        if self._copies and self._filled is None:
            self._filled = self._cache.fork(range(self._cache.batch))
        return self._forward(token)

    def rewind(self, tokens: int) -> None:
        """By the store's own rewind, or to a copy where tokens were overwritten."""
        if self._filled is None:
            self._cache.rewind(tokens)
        else:
            self._cache = self._filled.fork(range(self._cache.batch))

    def again(self) -> Ours:
        """The same decoder on a copy of the cache."""
        other = copy.copy(self)
        with torch.inference_mode(False):
            other._cache = copy.deepcopy(self._cache)
        return other

    def reference(self, token: Tensor) -> Tensor:
        """The next step's logits in float64, over what this cache holds, which stays as it is."""
        return step_logits(self._decoder, self._cache, token)

    def _forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._decoder(ids, self._cache, last=True)
        return logits

    @property
    def cache_bytes(self) -> int:
        """Bytes of the store's storages."""
        return self._cache.nbytes


class Compiled(Ours):
    """The same with compiled decode steps, over a static store whose shapes never change, so that one graph serves all.

    On the CPU the compiler calls operators from C++; it freezes the weights, to pack them for products with few rows,
    and joins products of one input, where oneDNN multiplies in their dtype.
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
        rewinds: int = 0,
    ) -> None:
        super().__init__(
            decoder, batch=batch, capacity=capacity, store=store, codec=codec, static=True, rewinds=rewinds
        )
        # All decoders share one `compute`, whose graphs are counted together: without this the ninth would run eagerly.
        torch._dynamo.reset()
        self._compute = torch.compile(decoder.compute, dynamic=False)
        frozen = _can_be_frozen(decoder)
        # Freezing has to be set while the first call is traced; torch.compile's own options come too late for it.
        self._compiler: AbstractContextManager[object] = inductor.patch(
            {"freezing": frozen, "cpp_wrapper": decoder.device.type == "cpu", "cpp.enable_concat_linear": frozen}
        )

    def decode(self, token: Tensor) -> Tensor:
        """One compiled step; where it stands is worked out before, so that no graph depends on it."""
        step = self._cache.step(*token.shape)
        with self._compiler, dynamo.patch(fail_on_recompile_limit_hit=True):
            logits: Tensor = self._compute(token, step, self._cache.layers)
        self._compiler = nullcontext()
        self._cache.advance(step)
        return logits


def _can_be_frozen(decoder: Decoder) -> bool:
    """Where oneDNN lacks the dtype, frozen weights are transposed ones that are read ten times slower (measured)."""
    if decoder.device.type != "cpu":
        return False
    if decoder.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return decoder.dtype == torch.float32


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
        self._filled: Cache | None = None

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
        self._filled = None
        if self._kind == "static" and self._cache.is_initialized:
            self._cache.reset()
        else:
            self._cache = self._empty()

    def prefill(self, ids: Tensor) -> Tensor:
        """Fill the empty cache; the last token's logits."""
        return in_passes(self._forward, ids, self._capacity)

    def decode(self, token: Tensor) -> Tensor:
        """One step."""
        if self._cache.is_initialized and not self._rewindable and self._filled is None:
            self._filled = copy.deepcopy(self._cache)
        return self._forward(token)

    def rewind(self, tokens: int) -> None:
        """By cropping, or to a copy where a window dropped tokens."""
        if self._filled is None:
            self._cache.crop(-tokens)
        else:
            self._cache = copy.deepcopy(self._filled)

    @property
    def _rewindable(self) -> bool:
        """transformers crops layers with a window only until it is full."""
        return self._cache.is_croppable and not any(self._cache.is_sliding)

    def _forward(self, token: Tensor) -> Tensor:
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


def goes_back_by_copy(specs: Sequence[CacheSpec], store: str, *, static: bool) -> bool:
    """Of a ring: one that can be rewound has slots beyond its window and reads them masked."""
    return store == "ring" and not static and any(spec.window or spec.chunk for spec in specs)


def burst_for(specs: Sequence[CacheSpec], store: str, batch: int, capacity: int, *, static: bool, rewinds: int) -> int:
    """The burst of a contestant's cache: for the passes of its prompt, and for what is taken back."""
    taken_back = 1 if goes_back_by_copy(specs, store, static=static) else rewinds + 1
    return max(warm_pass(batch, capacity), taken_back)


def first_pass(rows: int) -> int:
    """The most tokens of each row in the pass that comes first, which needs no mask."""
    return max(1, PASS_TOKENS // rows)


def warm_pass(rows: int, capacity: int) -> int:
    """The most of each row in a later pass, which has a mask of its tokens by all before them; 1 if there is none."""
    return max(1, min(PASS_TOKENS, PASS_MASK // capacity) // rows) if capacity > first_pass(rows) else 1
