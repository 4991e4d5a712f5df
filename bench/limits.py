"""The least time of a decode step: what it has to read and to multiply, counted from the decoder and its cache specs.

    limit             (bytes of weights + bytes of cache) / read bandwidth
    operator limit    sum over the operators of max(bytes / read bandwidth, FLOPs / matmul rate)

The second is never less: an operator that multiplies much cannot use the time in which another waits for memory. A
matrix of weights is one operator, and so is the attention of a layer, its scores and its values together, as kernels
compute them. Counted are the products, two FLOPs for each number multiplied and added, and not norms, softmax or the
decoding of codes, and the bytes of weights and cache, and not those of activations, which stay near the cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_variants.attend import BACKENDS, backend
from attn_variants.backends.request import Request
from attn_variants.cache import KVCache
from attn_variants.cache.accounting import states_bytes, token_bytes
from attn_variants.config import DecoderConfig
from attn_variants.contract import CacheSpec
from attn_variants.decoder import Decoder

from .batch_spec import BatchSpec

OBSERVED = "observed"


@dataclass(frozen=True)
class Operator:
    """One operator of a decode step: what it reads and the arithmetic it does, for the whole batch."""

    name: str
    bytes: int
    flops: int

    def seconds(self, bandwidth: float, rate: float) -> float:
        """The longer of reading at `bandwidth` bytes/s and multiplying at `rate` FLOP/s."""
        return max(self.bytes / bandwidth, self.flops / rate)


def step_operators(decoder: Decoder, rows: BatchSpec, *, codec: str = "plain", steps: int = 1) -> list[Operator]:
    """The operators of a step that appends one token to each of the rows, which hold so many.

    steps: of so many steps from there on, the one that sees the least; it matters where a chunk ends.
    """
    return [*_weights(decoder, rows.batch), *_attention(decoder, rows, codec=codec, steps=steps)]


def operator_limit(operators: Sequence[Operator], bandwidth: float, rate: float) -> float:
    """Seconds, one operator after the other."""
    return sum(operator.seconds(bandwidth, rate) for operator in operators)


def cache_bytes_read(decoder: Decoder, rows: BatchSpec, *, codec: str = "plain", steps: int = 1) -> int:
    """Bytes of what the layers' caches hold in sight, each once, also where several layers share one."""
    sizes: dict[str, Any] = {"codec": codec, "dtype": decoder.dtype, "steps": steps}
    return sum(_layer_bytes(spec, spec, rows, **sizes) for spec in decoder.cache_specs if spec.shares is None)


def weight_bytes_read(decoder: Decoder, batch: int) -> int:
    """Bytes of weights that a decode step reads: all but the embedding, of which it reads a row per sequence.

    A head tied to the embedding is read whole, and counted once.
    """
    return sum(operator.bytes for operator in _weights(decoder, batch))


def least_seen(spec: CacheSpec, context: int, steps: int) -> int:
    """Cached tokens in sight of the token at position `context`, or of the one that sees fewest of so many from there.

    A window counts the token itself, which is not read; a chunk begins anew.
    """
    return min(_seen(spec, position) for position in range(context, context + steps))


def _seen(spec: CacheSpec, position: int) -> int:
    if spec.window is not None:
        return min(position, spec.window - 1 + spec.sinks)
    if spec.chunk is None:
        return position
    start = position // spec.chunk * spec.chunk
    return position - start + min(spec.sinks, start)


def _weights(decoder: Decoder, batch: int) -> Iterator[Operator]:
    """A module's own parameters: each matrix meets every row of the batch once, absorbed into the query or not."""
    tied = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Linear)}
    for name, module in decoder.named_modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.Embedding):
            if id(module.weight) not in tied:
                yield Operator(name, batch * module.weight[0].nbytes, 0)
        elif own:
            multiplied = sum(parameter.numel() for parameter in own if parameter.ndim > 1)
            yield Operator(name, sum(parameter.nbytes for parameter in own), 2 * batch * multiplied)


def _attention(decoder: Decoder, rows: BatchSpec, *, codec: str, steps: int) -> Iterator[Operator]:
    # How the decoder attends is decided by the longest row.
    specs, asked = decoder.cache_specs, attention_widths(decoder.config, rows.longest)
    for layer, spec in enumerate(specs):
        owner = spec if spec.shares is None else specs[spec.shares]
        # Its own token is among those that each row attends to, but not among those that it reads.
        pairs = sum(count * (least_seen(spec, tokens, steps) + 1) for count, tokens in rows.runs)
        flops = sum(2 * pairs * heads * (key + value) for heads, key, value in asked[layer])
        size = _layer_bytes(spec, owner, rows, codec=codec, dtype=decoder.dtype, steps=steps)
        yield Operator(f"model.layers.{layer}.attention", size, flops)


def _layer_bytes(
    spec: CacheSpec, owner: CacheSpec, rows: BatchSpec, *, codec: str, dtype: torch.dtype, steps: int
) -> int:
    """What a layer reads of its cache, or of the cache it shares."""
    seen = sum(count * least_seen(spec, tokens, steps) for count, tokens in rows.runs)
    return seen * token_bytes(owner, codec=codec, dtype=dtype) + rows.batch * states_bytes(spec, dtype=dtype)


def attention_widths(config: DecoderConfig, context: int) -> list[list[tuple[int, int, int]]]:
    """(query heads, key width, value width) of each call of `attend`, by layer, in a decode step after this context.

    What the modules themselves ask for: the decoder is made once more without memory, on the meta device, and runs one
    token over a cache that is as long, since MLA decides by the length whether it absorbs.
    """
    with torch.device("meta"):
        twin = Decoder(config).eval()
    cache = KVCache(config.cache_specs, batch=1, capacity=context + 1, device="meta")
    cache.advance(cache.step(1, context))
    step = cache.step(1, 1)
    asked: list[list[tuple[int, int, int]]] = []
    x = torch.empty(1, 1, config.hidden_size, device="meta")
    with torch.inference_mode():
        for module, layer in zip(twin.model.layers, cache.layers, strict=True):
            with _observed() as calls:
                module(x, step, layer)
            asked.append(calls)
    return asked


@contextmanager
def _observed() -> Iterator[list[tuple[int, int, int]]]:
    """Within, attention computes nothing and is written down."""
    calls: list[tuple[int, int, int]] = []

    def observe(request: Request) -> Tensor:
        key, value = request.read()
        calls.append((request.q.shape[1], key.shape[-1], value.shape[-1]))
        return request.q.new_empty(*request.q.shape[:3], value.shape[-1])

    BACKENDS[OBSERVED] = (lambda request: True, observe)
    try:
        with backend(OBSERVED):
            yield calls
    finally:
        del BACKENDS[OBSERVED]
