"""What a speed is measured of: our decoder on its store, behind the calls that peers answer too."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor

from attn_variants.cache import KVCache
from attn_variants.decoder import Decoder

from .batch_spec import BatchSpec
from .cache_sizes import cache_sizes, goes_back_by_copy
from .passes import in_passes
from .reference import step_logits


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
        rewinds: int = 0,
        ragged: BatchSpec | None = None,
    ) -> None:
        self.store, self.codec = store, codec
        self._copies = goes_back_by_copy(decoder.cache_specs, store, static=static)
        self._filled: KVCache | None = None
        self._decoder = decoder
        self._ragged = ragged
        sizes = cache_sizes(
            decoder.cache_specs,
            ragged or BatchSpec(((batch, capacity),)),
            capacity,
            store=store,
            codec=codec,
            static=static,
            shuffled=shuffled,
            rewinds=rewinds,
        )
        self._cache = KVCache(decoder.cache_specs, **sizes, dtype=decoder.dtype, static=static, device=decoder.device)
        for pool in self._cache.pools if shuffled else ():
            pool.shuffle(seed=0)

    def choose(self, way: str) -> None:
        """There is one way."""

    def clear(self) -> None:
        """Back to the beginning."""
        self._cache.free()
        self._filled = None

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
        if self._ragged is None:
            return step_logits(self._decoder, self._cache, token)
        # Rows of one length at a time: a short one is not padded to the longest.
        rows = [rows for rows, _ in self._ragged.rows]
        return torch.cat(
            [step_logits(self._decoder, self._cache, token[some.start : some.stop], rows=some) for some in rows]
        )

    def _forward(self, ids: Tensor, rows: range | None = None) -> Tensor:
        logits: Tensor = self._decoder(ids, self._cache, rows=rows, last=True)
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
        ragged: BatchSpec | None = None,
    ) -> None:
        super().__init__(
            decoder,
            batch=batch,
            capacity=capacity,
            store=store,
            codec=codec,
            static=True,
            rewinds=rewinds,
            ragged=ragged,
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
