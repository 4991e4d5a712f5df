"""Attention over one block of memory after another, merged exactly (online softmax, arXiv 1805.02867 and 2112.05682).

A block b of the slots gives for every query the largest score m_b, the sum l_b of exp(score - m_b), and the sum o_b of
exp(score - m_b) * value. With m the largest of all m_b,

    softmax(q k^T) v  =  sum of o_b exp(m_b - m)  /  sum of l_b exp(m_b - m)

Nothing of the cache's length is ever made: what a quantised or paged store dequantises or gathers is one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from . import coded_products, flash_cpu
from .request import Request, fold, fold_mask, unfold

if TYPE_CHECKING:
    from attn_variants.contract import FactoredView

BLOCK_NUMBERS = 2**21
"""The numbers read for one block: 4 MiB in bfloat16, so that what is made for a block is still in the CPU's cache when
it is used, and yet so many that what each block costs besides (some ten operations) hardly shows."""

LARGEST_PAGE = 256
"""Tokens; a block of some of them more still holds whole pages."""

LEAST_TOKENS = 64
"""The shortest block: below it, matrix products are slow whatever lies in the cache."""

UNFOLDED_TOKENS = 256
"""From so many query tokens on, a block is repeated for the heads of a group rather than its mask: it is smaller."""

FEW_QUERIES = 256
"""Query heads and tokens up to which the scales of codes multiply scores rather than every number."""

MANY_SCORES = 2**24
"""More than these, 64 MiB, are not kept at once where memory is read in place either."""

Part = tuple[Tensor, Tensor, Tensor]
"""(o, l, m) as above, of widths Dv, 1 and 1, with the queries folded: (B, K, G * T, ...)."""


def accepts_blockwise(request: Request) -> bool:
    """Everything, forced; else memory that is not read in place, and so many scores that the reference takes too much.

    Few scores over memory in place are for the reference, which needs fewer operations.
    """
    q = request.q
    if request.forced == "blockwise" or not request.view.aliased:
        return True
    return q.shape[0] * q.shape[1] * q.shape[2] * request.view.plan.limit > MANY_SCORES


def blockwise(request: Request) -> Tensor:
    """softmax(q k^T * scale) v block by block; a query that sees nothing anywhere gets zeros.

    Besides the output it holds one block, a block's scores, and outputs of blocks that are together no larger than one.
    """
    parts: list[Part] = []
    for part in _factored_parts(request) if _factored(request) else _parts(request):
        parts.append(part)
        if len(parts) * parts[-1][0].numel() > BLOCK_NUMBERS:
            parts = [_merged(parts)]
    if request.sink is not None:
        parts.append(_sink(request.sink, request.q, parts[0]))
    return unfold(_finished(_merged(parts)).to(request.q.dtype), request.q)


def _parts(request: Request) -> Iterator[Part]:
    for tensors, slots in request.view.blocks(block_tokens(request), *_names(request)):
        part = _part(request, tensors, request.mask(slots))
        # Let go of it before the next one is made.
        del tensors
        yield part


def _factored(request: Request) -> bool:
    """Whether key and value are codes with a scale per slot, and few enough queries meet them.

    A scale then multiplies a column of scores instead of every number: many queries have more scores than numbers.
    """
    factored = getattr(request.view, "factored", None)
    few = request.q.shape[1] * request.q.shape[2] <= FEW_QUERIES
    plain = request.expand is None and not (torch.is_grad_enabled() and request.q.requires_grad)
    return factored is not None and plain and few and bool(factored(*request.names))


def _factored_parts(request: Request) -> Iterator[Part]:
    """Parts of codes: scores get the key's scales, weights the value's."""
    view = cast("FactoredView", request.view)
    for codes, scales, slots in view.factors(block_tokens(request), *request.names):
        (key, value), (of_key, of_value) = codes, scales
        part = _plain(request, key, value, request.mask(slots), (of_key, of_value))
        del codes, key, value
        yield part


def block_tokens(request: Request) -> int:
    """Slots in a block: a power of two, so that pages fit, or up to a quarter more where a scrap would be left over.

    Forced, three blocks at least, so that a comparison needs no long cache.
    """
    limit = request.view.plan.limit
    per_slot = request.q.shape[0] * sum(_numbers(request, name) for name in _names(request))
    tokens = max(LEAST_TOKENS, 1 << (max(1, BLOCK_NUMBERS // per_slot).bit_length() - 1))
    if request.forced == "blockwise":
        return min(tokens, -(-limit // 3))
    blocks, scrap = divmod(limit, tokens)
    if blocks and 4 * scrap < tokens >= 4 * LARGEST_PAGE:
        tokens += -(-scrap // blocks // LARGEST_PAGE) * LARGEST_PAGE
    return tokens


def _names(request: Request) -> tuple[str, ...]:
    """What is read: a record that is key and value at once, only once."""
    return request.names if request.front is None else request.names[:1]


def _numbers(request: Request, name: str) -> int:
    record = request.view.spec.record_of(name)
    columns = record.columns(name)
    return record.heads * (int(columns.stop) - int(columns.start))


def _part(request: Request, tensors: tuple[Tensor, ...], mask: Tensor | None) -> Part:
    """The part of one block; a value that is the front of the key's row is taken from the whole row."""
    key, value = (tensors[0], tensors[-1]) if request.expand is None else request.expand(*tensors)
    inner = _fused if _fuses(request, key, value) else _plain
    return inner(request, key, value, mask)


def _plain(request: Request, key: Tensor, value: Tensor, mask: Tensor | None, scales: tuple[Tensor, ...] = ()) -> Part:
    """A block's part in plain operators, in float32 at least, whatever autocast says.

    scales: (B, K, n, 1) of key and value where these are codes.
    """
    dtype = torch.promote_types(request.q.dtype, torch.float32)
    with _without_autocast(request.q.device.type):
        scores = _scores(request, key, scales[0] if scales else None, dtype)
        if request.softcap is not None:
            scores = request.softcap * torch.tanh(scores / request.softcap)
        if mask is not None:
            scores = scores.masked_fill(~fold_mask(mask, request.q.shape[1] // key.shape[1]), -math.inf)
        top = _finite(scores.detach().amax(-1, keepdim=True))
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if scales:
            weights = weights.mul_(scales[1].mT)
        return weights @ value[..., : request.front].to(dtype), total, top


def _scores(request: Request, key: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """q k^T * scale, (B, K, G * T, n), before a softcap."""
    q = fold(request.q, key.shape[1])
    if scales is None:
        # Scaled before the product, as in the reference.
        return (q.to(dtype) * request.scale) @ key.to(dtype).mT
    products = coded_products.coded_products(q, key) if coded_products.takes(q, key) else q.to(dtype) @ key.to(dtype).mT
    return products.mul_(scales.mT.to(dtype) * request.scale)


def _fused(request: Request, key: Tensor, value: Tensor, mask: Tensor | None) -> Part:
    """A block's part from the fused kernel: its output is o / l and its log-sum-exp m + log l, so l counts as one."""
    q, heads = request.q, key.shape[1]
    group = q.shape[1] // heads
    if mask is not None and q.shape[2] >= UNFOLDED_TOKENS:
        key, value = (tensor[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for tensor in (key, value))
    else:
        parts = flash_cpu.parts(q, group) if heads == 1 else 1
        key, value = (tensor.expand(-1, heads * parts, -1, -1) for tensor in (key, value))
        q = fold(q, heads * parts)
        mask = None if mask is None else fold_mask(mask, group // parts)
    out, lse = flash_cpu.flash(q, key, value, scale=request.scale, mask=mask)
    out, top = fold(out[..., : request.front], heads), fold(lse[..., None], heads)
    return out, torch.ones_like(top), top


def _fuses(request: Request, key: Tensor, value: Tensor) -> bool:
    """Where widths differ only for many queries: the kernel takes the value padded, which few do not make up for."""
    many = request.q.shape[2] >= UNFOLDED_TOKENS
    return (
        request.softcap is None
        and (many or value.shape[-1] == key.shape[-1])
        and flash_cpu.takes(request.q, key, value)
    )


def _sink(sink: Tensor, q: Tensor, part: Part) -> Part:
    """The part of a learned logit, which has no value."""
    top = part[2]
    logit = fold(sink.to(top.dtype)[:, None, None].expand(*q.shape[:3], 1), top.shape[1])
    own = _finite(logit.detach())
    return torch.zeros_like(logit), torch.exp(logit - own), own


def _merged(parts: Sequence[Part]) -> Part:
    """The part of all their slots together."""
    if len(parts) == 1:
        return parts[0]
    totals, sums, tops = zip(*parts, strict=True)
    each = torch.cat(tops, dim=-1)  # (B, K, G * T, parts)
    top = each.amax(-1, keepdim=True)
    factors = torch.exp(each - top)
    total = totals[0] * factors[..., :1]
    for other, factor in zip(totals[1:], factors[..., 1:].split(1, -1), strict=True):
        total = torch.addcmul(total, other, factor)
    return total, (torch.cat(sums, dim=-1) * factors).sum(-1, keepdim=True), top


def _finished(part: Part) -> Tensor:
    """The output: o / l, zero for a query that sees nothing."""
    total, weight, top = part
    # The largest score of all adds e^0 to l, so that only such a query's is below one.
    return (total / weight.clamp(min=1)).masked_fill(top < flash_cpu.HIDDEN / 2, 0)


def _finite(top: Tensor) -> Tensor:
    """Where all is hidden the largest score is -inf, and -inf - -inf would be NaN."""
    return top.clamp(min=torch.finfo(top.dtype).min)


def _without_autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
