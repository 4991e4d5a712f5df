"""The reference of every parity check: the same weights in float64, without a cache, attention by its definition.

It follows the variant's own forward, so that a variant added to the registry is checked by being there; what attention
computes is written out here once more, from positions and not from masks, and shares no code with a backend. What it
cannot see, a fault in a variant's projections, is seen by the comparison with transformers' classes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attn_variants.attend import BACKENDS, backend
from attn_variants.backends.request import Request
from attn_variants.cache import KVCache
from attn_variants.cache.quantize import Codec
from attn_variants.contract import CacheSpec, LayerCache, Plan, Step, View
from attn_variants.decoder import Decoder
from attn_variants.mla import ExpandedMultiHeadLatentAttention, MultiHeadLatentAttention
from attn_variants.transient import fresh_step, transients

TEXTBOOK = "textbook"
HEAD_ROWS = 8192
"""Rows of the head that are widened at a time."""


def reference_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits (B, T, vocab) in float64 on the CPU, every pass expanded where a variant knows a shorter way."""
    step, caches = fresh_step(*ids.shape), transients(decoder.cache_specs)
    with torch.inference_mode(), absorbed_below(decoder, 0), _textbook_attention():
        return _widened(decoder, ids, step, caches, "cpu")


def moved_logits(decoder: Decoder, ids: Tensor, codec: Codec, seed: int) -> Tensor:
    """The same where every key and value is as far off as the codec's bound allows, each to a side drawn at random.

    What rounding to codes brings is off by no more, and evenly so within the bound: a root mean square of 1 / sqrt(3).
    """
    generator = torch.Generator().manual_seed(seed)
    caches: list[LayerCache] = [
        Moved(spec, cache, codec, decoder.dtype, generator)
        for spec, cache in zip(decoder.cache_specs, transients(decoder.cache_specs), strict=True)
    ]
    step = fresh_step(*ids.shape)
    with torch.inference_mode(), absorbed_below(decoder, 0), _textbook_attention():
        return _widened(decoder, ids, step, caches, "cpu")


def step_logits(decoder: Decoder, cache: KVCache, token: Tensor, *, rows: Sequence[int] | None = None) -> Tensor:
    """Logits (B, 1, vocab) of one more token (B, 1) in float64, over what the cache itself holds.

    rows: those that the tokens are of; None is all. The cache stays as it is: the step is not advanced.
    """
    step = cache.step(*token.shape, rows=rows)
    caches = [Widened(own, decoder.dtype) for own in cache.layers]
    with torch.inference_mode(), _textbook_attention():
        return _widened(decoder, token, step, caches, decoder.device)


def _widened(
    decoder: Decoder, ids: Tensor, step: Step, caches: Sequence[LayerCache], device: torch.device | str
) -> Tensor:
    """What `Decoder.compute` does, in float64; one layer's weights are widened at a time: a model may be large."""

    def wide(module: nn.Module) -> nn.Module:
        return copy.deepcopy(module).to(device=device, dtype=torch.float64)

    x: Tensor = decoder.model.embed_tokens(ids.to(decoder.device)).to(device, torch.float64)
    for layer, cache in zip(decoder.model.layers, caches, strict=True):
        x = wide(layer)(x, step, cache)
    x = wide(decoder.model.norm)(x)
    rows = decoder.lm_head.weight.split(HEAD_ROWS)
    return torch.cat([x @ some.to(device, torch.float64).mT for some in rows], dim=-1)


class Widened:
    """A layer's cache whose entries are rounded as they are stored, and read in float64. Implements `LayerCache`."""

    def __init__(self, own: LayerCache, dtype: torch.dtype) -> None:
        self._own = own
        self._dtype = dtype

    def append(self, step: Step, **entries: Tensor) -> View:
        """What the owner then holds."""
        narrow = {name: entry.to(self._dtype) for name, entry in entries.items()}
        return WidenedView(self._own.append(step, **narrow))

    def view(self, step: Step) -> View:
        """What the layer reads that this one shares with."""
        return WidenedView(self._own.view(step))

    def states(self, step: Step) -> dict[str, Tensor]:
        """As they are kept."""
        return {name: state.double() for name, state in self._own.states(step).items()}

    def keep(self, step: Step, **states: Tensor) -> None:
        """Rounded as they are stored."""
        self._own.keep(step, **{name: state.to(self._dtype) for name, state in states.items()})


class WidenedView:
    """A view in float64. Implements `View`."""

    aliased = False

    def __init__(self, own: View) -> None:
        self.spec: CacheSpec = own.spec
        self.step: Step = own.step
        self.plan: Plan = own.plan
        self._own = own

    def dense(self, *names: str) -> tuple[Tensor, ...]:
        """Every slot read."""
        return tuple(tensor.double() for tensor in self._own.dense(*names))

    def blocks(self, size: int, *names: str) -> Iterator[tuple[tuple[Tensor, ...], slice]]:
        """The same in runs."""
        for tensors, slots in self._own.blocks(size, *names):
            yield tuple(tensor.double() for tensor in tensors), slots


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
    # Grouped by what they read, so that no key or value is repeated: a cache may be long.
    q = request.q.unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("bkgid,bkjd->bkgij", q, key).flatten(1, 2) * request.scale
    if request.softcap is not None:
        scores = request.softcap * (scores / request.softcap).tanh()
    seen = _seen(request)
    weights = scores.exp() if seen is None else scores.exp().masked_fill(~seen[:, None], 0)
    total = weights.sum(-1, keepdim=True)
    if request.sink is not None:
        total = total + request.sink.exp()[:, None, None]
    weights = (weights / total).unflatten(1, (key.shape[1], -1))
    return torch.einsum("bkgij,bkjd->bkgid", weights, value).flatten(1, 2)


def _seen(request: Request) -> Tensor | None:
    """(B, T, S) bool, from positions alone; None where a step was given only slots that it sees."""
    view, spec = request.view, request.view.spec
    if view.plan.kv_positions is None:
        assert view.plan.mask is None
        return None
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
