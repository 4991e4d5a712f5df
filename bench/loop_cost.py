"""What generating costs beside the decoder's own steps, and what the cache saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch

from attn_variants.cache import KVCache
from attn_variants.config import Geometry
from attn_variants.decoder import Decoder
from attn_variants.generation import GREEDY, Sampling, Stopping, Token, stream
from attn_variants.linear import lay_out_weights

from .case import decoder_config, random_decoder
from .measure import Quiet, Timings
from .results import Row

SAMPLINGS = {"greedy": GREEDY, "temperature 0.8, top-k 50, top-p 0.9": Sampling(0.8, top_k=50, top_p=0.9)}
DTYPES = ("float32", "bfloat16")
STEPS = 8
"""Tokens of a turn."""


def loop_rows(variant: str, geometry: Geometry, *, context: int, turns: int, seed: int) -> Iterator[Row]:
    """A row per dtype and sampling: `stream` against bare steps that read as many cached tokens, in turns."""
    for dtype in DTYPES:
        decoder = random_decoder(decoder_config(variant, geometry), dtype=dtype, device="cpu", seed=seed)
        lay_out_weights(decoder)
        cache = filled(decoder, context, context + STEPS, seed)
        for name, sampling in SAMPLINGS.items():
            quiet, bare, loop = Quiet(), Timings(), Timings()
            for turn in range(turns + 1):
                works = (partial(_steps, decoder, cache), partial(_loop, decoder, cache, sampling))
                for timings, work in zip((bare, loop), works, strict=True):
                    # The first turn warms up.
                    (timings if turn else Timings()).time("cpu", work)
                    cache.rewind(STEPS)
                quiet.probe()
            yield {
                "section": "loop",
                "dtype": dtype,
                "sampling": name,
                "context": context,
                "tokens": STEPS,
                "bare_ms": [each / STEPS for each in bare.milliseconds],
                "loop_ms": [each / STEPS for each in loop.milliseconds],
                "ratio": ratio(loop.wall, bare.wall),
                "unquiet": quiet.unquiet,
            }


def cost_rows(variant: str, geometry: Geometry, *, lengths: tuple[int, ...], turns: int, seed: int) -> Iterator[Row]:
    """A row per length of what is there: a new token's time with the cache and without."""
    decoder = random_decoder(decoder_config(variant, geometry), dtype="float32", device="cpu", seed=seed)
    lay_out_weights(decoder)
    for length in lengths:
        (prompt,) = random_ids(geometry.vocab_size, length, seed).tolist()
        quiet = Quiet()
        taken: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(turns):
            for use_cache, samples in taken.items():
                tokens = stream(decoder, [prompt], stopping=Stopping(3, eos=()), use_cache=use_cache)
                samples.append(after_first(tokens)[1] * 1e3)
            quiet.probe()
        yield {
            "section": "cache",
            "length": length,
            "cached_ms": taken[True],
            "recomputed_ms": taken[False],
            "ratio": ratio(taken[False], taken[True]),
            "unquiet": quiet.unquiet,
        }


def filled(decoder: Decoder, tokens: int, capacity: int, seed: int, burst: int = 1) -> KVCache:
    """A cache of one row that holds so many random tokens."""
    cache = KVCache(decoder.cache_specs, batch=1, capacity=capacity, dtype=decoder.dtype, burst=burst)
    with torch.inference_mode():
        decoder(random_ids(decoder.config.vocab_size, tokens, seed), cache, last=True)
    return cache


def random_ids(vocab_size: int, tokens: int, seed: int) -> torch.Tensor:
    """(1, tokens) ids of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (1, tokens), generator=generator)


def ratio(first: list[float], second: list[float]) -> float:
    """The median over turns of one time over the other."""
    return statistics.median(one / other for one, other in zip(first, second, strict=True))


def after_first(tokens: Iterator[Token]) -> tuple[Token, float]:
    """The last token, and the seconds a token took after the first, which waits for the prompt."""
    first = next(tokens)
    start = time.perf_counter()
    rest = list(tokens)
    seconds = time.perf_counter() - start
    return (rest[-1], seconds / len(rest)) if rest else (first, 0.0)


@torch.inference_mode()
def _steps(decoder: Decoder, cache: KVCache) -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(STEPS):
        decoder(ids, cache, last=True)


def _loop(decoder: Decoder, cache: KVCache, sampling: Sampling) -> None:
    """A prompt of one token, so that every new one takes one step."""
    for _ in stream(decoder, [[0]], sampling=sampling, stopping=Stopping(STEPS, eos=()), cache=cache):
        pass
