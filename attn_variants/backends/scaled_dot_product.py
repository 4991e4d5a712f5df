"""torch's scaled_dot_product_attention over memory that is read in place: whole (`sdpa`), or in runs (`split`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_variants.contract import CacheSpec

from . import flash_cpu
from .request import Request, fold, fold_mask, unfold

RUN_TOKENS = 512
"""The fewest cached tokens that are worth a thread of their own."""

UNFOLDED_TOKENS = 256
"""From so many query tokens on, heads of a group are not folded: it would repeat the mask for each of them."""


def accepts_sdpa(request: Request) -> bool:
    """Memory read in place through a mask that is made, no sink or softcap, and key and value of one width.

    Widths are one where the value is the front of the key's row. Padding the value copies it, which is free only beside
    `expand` or a prompt's own tensors.
    """
    plan = request.view.plan
    if request.sink is not None or request.softcap is not None or plan.deferred or not request.view.aliased:
        return False
    if request.expand is not None or plan.causal or request.front is not None:
        return True
    return _width(request.view.spec, request.names[0]) == _width(request.view.spec, request.names[1])


def sdpa(request: Request) -> Tensor:
    """torch's scaled_dot_product_attention with equal widths of key and value, the only case with fast kernels.

    Heads of a group are folded into the query axis, so that each cached key and value is read once per step.
    """
    key, value, width = _equally_wide(request)
    return _scaled_dot_product(request, key, value)[..., :width]


def accepts_split(request: Request) -> bool:
    """A step of few tokens over a cache on the CPU, with threads to spare.

    Neither gradients, which the merge lacks, nor autocast, which does not know the operator.
    """
    if not accepts_sdpa(request) or request.expand is not None:
        return False
    if (torch.is_grad_enabled() and request.q.requires_grad) or torch.is_autocast_enabled(request.q.device.type):
        return False
    return _runs(request) > 1


def split(request: Request) -> Tensor:
    """The same over runs of the cached tokens, merged by their log-sum-exp (flash-decoding, arXiv 2311.01282).

    torch's CPU kernel shares work out by sequence and key head; with fewer of those than threads, the rest would idle.
    """
    key, value, width = _equally_wide(request)
    runs = _runs(request)
    q = fold(request.q, key.shape[1]).flatten(0, 1)[:, None]  # (B * K, 1, G * T, D)
    masks = _masks_in_runs(request, key.shape[1], runs)
    parts = zip(_in_runs(key, value, runs), masks, strict=False)
    out, lse = zip(*(_flash(q, *part, request.scale, mask) for part, mask in parts), strict=True)
    weights = torch.cat(lse, dim=1).softmax(1)[..., None]  # (B * K, runs, G * T, 1)
    merged = (torch.cat(out, dim=1)[..., :width] * weights).sum(1)
    return unfold(merged.to(request.q.dtype), request.q)


def _equally_wide(request: Request) -> tuple[Tensor, Tensor, int]:
    """Key and value of one width, and how much of the output is the value's."""
    front = request.front
    if front is not None:
        (key,) = request.view.dense(request.names[0])
        return key, key, front
    key, value = request.read()
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - width))
    return key, value, width


def _runs(request: Request) -> int:
    """Into how many runs the cached tokens are split: one per thread that would have no sequence and key head.

    Forced, it splits whatever it can, so that a comparison needs neither a long cache nor many threads.
    """
    plan, q = request.view.plan, request.q
    if q.device.type != "cpu" or plan.causal or (plan.mask is not None and q.shape[2] >= UNFOLDED_TOKENS):
        return 1
    if request.forced == "split":
        return min(3, plan.limit)
    heads = request.view.spec.record_of(request.names[0]).heads
    spare: int = flash_cpu.threads() // (q.shape[0] * heads)
    return max(1, min(spare, plan.limit // RUN_TOKENS))


def _in_runs(key: Tensor, value: Tensor, runs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Key and value as (B * K, runs, tokens, D), then the tokens left over as one run; views where memory allows."""
    tokens = key.shape[2] // runs
    even = runs * tokens
    keys, values = (tensor.flatten(0, 1) for tensor in (key, value))
    yield keys[:, :even].unflatten(1, (runs, tokens)), values[:, :even].unflatten(1, (runs, tokens))
    if even < key.shape[2]:
        yield keys[:, None, even:], values[:, None, even:]


def _masks_in_runs(request: Request, heads: int, runs: int) -> Iterator[Tensor | None]:
    """What of each part that `_in_runs` gives is visible, (B * K or 1, runs, G * T or 1, tokens); None is all."""
    mask = request.mask()
    if mask is None:
        yield from (None, None)
        return
    if request.q.shape[2] > 1:
        mask = fold_mask(mask, request.q.shape[1] // heads)
    if len(mask) > 1:
        mask = mask.repeat_interleave(heads, 0)
    tokens = mask.shape[-1] // runs
    even = runs * tokens
    yield mask[:, 0, :, :even].unflatten(-1, (runs, tokens)).transpose(1, 2)
    yield mask[..., even:]


def _flash(q: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output (N, runs, T, D) of q (N, 1, T, D) over every run, and the log-sum-exp (N, runs, T) of its scores."""
    return flash_cpu.flash(q.expand(-1, key.shape[1], -1, -1), key, value, scale=scale, mask=mask)


def _width(spec: CacheSpec, name: str) -> int:
    columns = spec.record_of(name).columns(name)
    return int(columns.stop) - int(columns.start)


def _scaled_dot_product(request: Request, key: Tensor, value: Tensor) -> Tensor:
    q, heads = request.q, key.shape[1]
    group = q.shape[1] // heads
    if request.view.plan.causal:
        if heads == 1:
            key, value = (tensor.expand(-1, group, -1, -1) for tensor in (key, value))
        return F.scaled_dot_product_attention(
            q, key, value, is_causal=True, scale=request.scale, enable_gqa=1 < heads < q.shape[1]
        )
    mask = request.view.plan.mask
    if mask is not None and q.shape[2] >= UNFOLDED_TOKENS:
        key, value = (tensor.expand(-1, q.shape[1], -1, -1) if heads == 1 else tensor for tensor in (key, value))
        return F.scaled_dot_product_attention(
            q, key, value, attn_mask=mask, scale=request.scale, enable_gqa=1 < heads < q.shape[1]
        )
    if heads == 1:
        parts = flash_cpu.parts(q, group)
        key, value = (tensor.expand(-1, parts, -1, -1) for tensor in (key, value))
        heads = parts
    folded = fold(q, heads)
    if mask is not None:
        mask = fold_mask(mask, q.shape[1] // heads)
    return unfold(F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=request.scale), q)
