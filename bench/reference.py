"""The reference of every parity check: the same weights in float64, without a cache, attention by its definition.

It follows the variant's own forward, so that a variant added to the registry is checked by being there; what attention
computes is written out here once more, from positions and not from masks, and shares no code with a backend. What it
cannot see, a fault in a variant's projections, is seen by the comparison with transformers' classes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attn_variants.attend import BACKENDS, backend
from attn_variants.backends.request import Request
from attn_variants.cache.quantize import Codec
from attn_variants.contract import CacheSpec, LayerCache, Step, View
from attn_variants.decoder import Decoder
from attn_variants.mla import ExpandedMultiHeadLatentAttention, MultiHeadLatentAttention
from attn_variants.transient import fresh_step, transients

TEXTBOOK = "textbook"


def reference_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits (B, T, vocab) in float64 on the CPU, every pass expanded where a variant knows a shorter way."""
    twin = copy.deepcopy(decoder).to(device="cpu", dtype=torch.float64)
    with torch.inference_mode(), absorbed_below(twin, 0), _textbook_attention():
        logits: Tensor = twin(ids.cpu())
    return logits


def moved_logits(decoder: Decoder, ids: Tensor, codec: Codec, seed: int) -> Tensor:
    """The same where every key and value is as far off as the codec's bound allows, each to a side drawn at random.

    What rounding to codes brings is off by no more, and evenly so within the bound: a root mean square of 1 / sqrt(3).
    """
    twin = copy.deepcopy(decoder).to(device="cpu", dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    caches: list[LayerCache] = [
        Moved(spec, cache, codec, decoder.dtype, generator)
        for spec, cache in zip(decoder.cache_specs, transients(decoder.cache_specs), strict=True)
    ]
    step = fresh_step(*ids.shape)
    with torch.inference_mode(), absorbed_below(twin, 0), _textbook_attention():
        return twin.compute(ids.cpu(), step, caches)


class Moved:
    """A layer's cache that moves what it is given by the codec's bound. Implements `LayerCache`."""

    def __init__(
        self, spec: CacheSpec, own: LayerCache, codec: Codec, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        self.view, self.states, self.keep = own.view, own.states, own.keep
        self._spec = spec
        self._own = own
        self._codec = codec
        self._dtype = dtype
        self._generator = generator

    def append(self, step: Step, **entries: Tensor) -> View:
        """What the owner gives for the moved entries."""
        for record in self._spec.records:
            row = torch.cat([entries[entry.name] for entry in record.entries], dim=-1)
            side = torch.randint(2, row.shape, generator=self._generator) * 2 - 1
            # Tokens that wait for others to be coded with are exact until then.
            whole = row.shape[2] // self._codec.together * self._codec.together
            front = row[:, :, :whole] + side[:, :, :whole] * self._codec.bound(
                record, row[:, :, :whole].to(self._dtype)
            )
            row = torch.cat([front, row[:, :, whole:]], dim=2)
            entries |= {entry.name: row[..., record.columns(entry.name)] for entry in record.entries}
        return self._own.append(step, **entries)


def absorbing_layers(decoder: Decoder) -> list[MultiHeadLatentAttention]:
    """The layers that can compute the same thing in two orders, absorbed and expanded."""
    return [
        module
        for module in decoder.modules()
        if isinstance(module, MultiHeadLatentAttention) and not isinstance(module, ExpandedMultiHeadLatentAttention)
    ]


@contextmanager
def absorbed_below(decoder: Decoder, tokens: float) -> Iterator[None]:
    """Within, passes of fewer tokens than this are absorbed and others expanded, in every layer that can do both."""
    layers = absorbing_layers(decoder)
    before = [layer.absorbed_below for layer in layers]
    for layer in layers:
        layer.absorbed_below = tokens
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.absorbed_below = own


def textbook(request: Request) -> Tensor:
    """sum over the keys j that query i sees of exp(s_ij) v_j / (sum of exp(s_ij), and exp(sink) where there is one).

    s_ij = q_i . k_j * scale, capped where there is a cap; query head h reads key head h // (H / K). A key is seen that
    is not in the future and lies in the query's window or chunk, or among the first tokens, which stay.
    """
    key, value = request.read()
    group = request.q.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("bhid,bhjd->bhij", request.q, key) * request.scale
    if request.softcap is not None:
        scores = request.softcap * (scores / request.softcap).tanh()
    weights = scores.exp().masked_fill(~_seen(request)[:, None], 0)
    total = weights.sum(-1, keepdim=True)
    if request.sink is not None:
        total = total + request.sink.exp()[:, None, None]
    return torch.einsum("bhij,bhjd->bhid", weights / total, value)


def _seen(request: Request) -> Tensor:
    """(B, T, S) bool, from positions alone."""
    view, spec = request.view, request.view.spec
    assert view.plan.kv_positions is not None
    query, key = view.step.positions[:, :, None], view.plan.kv_positions[:, None, :]
    near = torch.ones_like(query == key)
    if spec.window is not None:
        near = key > query - spec.window
    if spec.chunk is not None:
        near = near & (key // spec.chunk == query // spec.chunk)
    return (key <= query) & (near | (key < spec.sinks))


@contextmanager
def _textbook_attention() -> Iterator[None]:
    BACKENDS[TEXTBOOK] = (lambda request: True, textbook)
    try:
        with backend(TEXTBOOK):
            yield
    finally:
        del BACKENDS[TEXTBOOK]
