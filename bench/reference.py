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
from attn_variants.decoder import Decoder
from attn_variants.mla import ExpandedMultiHeadLatentAttention, MultiHeadLatentAttention

TEXTBOOK = "textbook"


def reference_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits (B, T, vocab) in float64 on the CPU, every pass expanded where a variant knows a shorter way."""
    twin = copy.deepcopy(decoder).to(device="cpu", dtype=torch.float64)
    with torch.inference_mode(), absorbed_below(twin, 0), _textbook_attention():
        logits: Tensor = twin(ids.cpu())
    return logits


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
    """sum over keys j <= i of exp(q_i . k_j * scale) v_j / sum of exp(q_i . k_j * scale), head by head.

    Query head h reads key head h // (H / K). Raises ValueError for what only a variant with sinks or a cap would ask.
    """
    if request.sink is not None or request.softcap is not None:
        raise ValueError("the textbook attention knows neither sinks nor softcap")
    key, value = request.read()
    group = request.q.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("bhid,bhjd->bhij", request.q, key) * request.scale
    weights = scores.exp()
    query_at, key_at = request.view.step.positions, request.view.plan.kv_positions
    if key_at is not None:
        weights = weights.masked_fill(key_at[:, None, None, :] > query_at[:, None, :, None], 0)
    return torch.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdim=True), value)


@contextmanager
def _textbook_attention() -> Iterator[None]:
    BACKENDS[TEXTBOOK] = (lambda request: True, textbook)
    try:
        with backend(TEXTBOOK):
            yield
    finally:
        del BACKENDS[TEXTBOOK]
