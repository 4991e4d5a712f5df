"""The one seam between a variant and the memory it reads: softmax(q k^T * scale) v over a view.

Backends are registered with what they accept; the first that accepts computes. The choice rests on host facts (shapes,
causal or masked, aliased or not), never on a tensor's contents. `backend(name)` forces one, for tests and comparisons.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_variants.contract import CacheSpec, View
from attn_variants.names import unknown

Expand = Callable[..., tuple[Tensor, Tensor]]

RUN_TOKENS = 512
"""The fewest cached tokens that are worth a thread of their own."""

UNFOLDED_TOKENS = 256
"""From so many query tokens on, heads of a group are not folded: it would repeat the mask for each of them."""


@dataclass(frozen=True)
class Request:
    """One call of `attend`; see there for the fields."""

    q: Tensor
    view: View
    names: tuple[str, ...]
    scale: float
    expand: Expand | None = None
    sink: Tensor | None = None
    softcap: float | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Key (B, K, S, Dk) and value (B, K, S, Dv)."""
        if self.expand is not None:
            return self.expand(*self.view.dense(*self.names))
        key, value = self.view.dense(*self.names)
        return key, value


def attend(
    q: Tensor,
    view: View,
    names: tuple[str, ...],
    *,
    scale: float,
    expand: Expand | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v, (B, H, T, Dv), zero on padding.

    q:      (B, H, T, Dk); query head h reads key/value head h // (H / K).
    names:  the view's entries or records to use as (key, value), or those that `expand` turns into them.
    expand: a pure function of the named tensors, (B, heads, S, dim) each, to key and value.
    sink:   (H,) learned logits that join each head's softmax and carry no value.
    softcap: scores become softcap * tanh(score / softcap) before the mask.
    """
    request = Request(q, view, names, scale, expand, sink, softcap)
    out = _choose(request)(request)
    if view.step.padded:
        out = out.masked_fill((view.step.positions < 0)[:, None, :, None], 0)
    return out


def reference(request: Request) -> Tensor:
    """The textbook's softmax in plain operators; reads the cache in place whatever the widths of key and value."""
    key, value = request.read()
    # Scaled before the product: float16 would overflow in it.
    q = _fold(request.q * request.scale, key.shape[1])  # (B, K, G * T, Dk)
    scores = torch.matmul(q, key.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.unflatten(2, (-1, request.q.shape[2]))  # (B, K, G, T, S)
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    mask = _mask(request.view, scores)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -math.inf)
    if request.sink is not None:
        sink = request.sink.to(scores.dtype).view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return _unfold(torch.matmul(weights.to(value.dtype).flatten(2, 3), value), request.q)


def sdpa(request: Request) -> Tensor:
    """torch's scaled_dot_product_attention with equal widths of key and value, the only case with fast kernels.

    Heads of a group are folded into the query axis, so that each cached key and value is read once per step.
    """
    key, value, width = _equally_wide(request)
    return _scaled_dot_product(request, key, value)[..., :width]


def split(request: Request) -> Tensor:
    """The same over runs of the cached tokens, merged by their log-sum-exp (flash-decoding, arXiv 2311.01282).

    torch's CPU kernel shares work out by sequence and key head; with fewer of those than threads, the rest would idle.
    """
    key, value, width = _equally_wide(request)
    runs = _runs(request)
    q = _fold(request.q, key.shape[1]).flatten(0, 1)[:, None]  # (B * K, 1, G * T, D)
    out, lse = zip(*(_flash(q, *part, request.scale) for part in _in_runs(key, value, runs)), strict=True)
    weights = torch.cat(lse, dim=1).softmax(1)[..., None]  # (B * K, runs, G * T, 1)
    merged = (torch.cat(out, dim=1)[..., :width] * weights).sum(1)
    return _unfold(merged.to(request.q.dtype), request.q)


def accepts_reference(request: Request) -> bool:
    """Everything."""
    return True


def accepts_sdpa(request: Request) -> bool:
    """No sink or softcap, and key and value of one width, or made so at no cost in copies of the cache.

    Widths are one where the value is the front of the key's row. Padding the value copies it, which is free only beside
    `expand` or a prompt's own tensors.
    """
    if request.sink is not None or request.softcap is not None:
        return False
    if request.expand is not None or request.view.plan.causal or _front(request) is not None:
        return True
    return _width(request.view.spec, request.names[0]) == _width(request.view.spec, request.names[1])


def accepts_split(request: Request) -> bool:
    """A step on the CPU that sees the whole cache, with threads to spare.

    Neither gradients, which the merge lacks, nor autocast, which does not know the operator.
    """
    if not accepts_sdpa(request) or request.expand is not None:
        return False
    if (torch.is_grad_enabled() and request.q.requires_grad) or torch.is_autocast_enabled(request.q.device.type):
        return False
    return _runs(request) > 1


BACKENDS: dict[str, tuple[Callable[[Request], bool], Callable[[Request], Tensor]]] = {
    "split": (accepts_split, split),
    "sdpa": (accepts_sdpa, sdpa),
    "reference": (accepts_reference, reference),
}
_forced: str | None = None


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Use this backend wherever it accepts the request; None lets `attend` choose. Unknown names are refused.

    It holds for the whole process, other threads included.
    """
    global _forced
    if name is not None and name not in BACKENDS:
        raise ValueError(unknown("backend", name, BACKENDS))
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Within, how often each backend computes: a forced one leaves to others what it does not accept."""
    counts: Counter[str] = Counter()
    before = dict(BACKENDS)

    def counting(name: str, run: Callable[[Request], Tensor]) -> Callable[[Request], Tensor]:
        def ran(request: Request) -> Tensor:
            counts[name] += 1
            return run(request)

        return ran

    for name, (accepts, run) in before.items():
        BACKENDS[name] = accepts, counting(name, run)
    try:
        yield counts
    finally:
        BACKENDS.update(before)


def _choose(request: Request) -> Callable[[Request], Tensor]:
    if _forced is not None and BACKENDS[_forced][0](request):
        return BACKENDS[_forced][1]
    return next(run for accepts, run in BACKENDS.values() if accepts(request))


def _front(request: Request) -> int | None:
    """The value's width where the value is the front of the row that is the key, as in absorbed MLA."""
    if request.expand is not None:
        return None
    record = request.view.spec.record_of(request.names[0])
    key, value = request.names
    if key != record.name or request.view.spec.record_of(value) is not record:
        return None
    columns = record.columns(value)
    width: int = columns.stop
    return width if columns.start == 0 and width < record.width else None


def _equally_wide(request: Request) -> tuple[Tensor, Tensor, int]:
    """Key and value of one width, and how much of the output is the value's."""
    front = _front(request)
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
    if q.device.type != "cpu" or plan.causal or plan.mask is not None or torch.compiler.is_compiling():
        return 1
    if _forced == "split":
        return min(3, plan.limit)
    heads = request.view.spec.record_of(request.names[0]).heads
    return max(1, min(torch.get_num_threads() // (q.shape[0] * heads), plan.limit // RUN_TOKENS))


def _in_runs(key: Tensor, value: Tensor, runs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Key and value as (B * K, runs, tokens, D), then the tokens left over as one run; views where memory allows."""
    tokens = key.shape[2] // runs
    even = runs * tokens
    keys, values = (tensor.flatten(0, 1) for tensor in (key, value))
    yield keys[:, :even].unflatten(1, (runs, tokens)), values[:, :even].unflatten(1, (runs, tokens))
    if even < key.shape[2]:
        yield keys[:, None, even:], values[:, None, even:]


def _flash(q: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output (N, runs, T, D) of q (N, 1, T, D) over every run, and the log-sum-exp (N, runs, T) of its scores."""
    q = q.expand(-1, key.shape[1], -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, key, value, scale=scale)
    return out, lse


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
        parts = _parts(q, group)
        key, value = (tensor.expand(-1, parts, -1, -1) for tensor in (key, value))
        heads = parts
    folded = _fold(q, heads)
    if mask is not None:
        mask = mask[:, :, None].expand(-1, -1, q.shape[1] // heads, -1, -1).flatten(2, 3)
    return _unfold(F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=request.scale), q)


def _parts(q: Tensor, group: int) -> int:
    """Into how many runs the heads that share one key are split: a CPU kernel gives each its own thread."""
    if q.device.type != "cpu":
        return 1
    return math.gcd(group, max(1, _threads() // q.shape[0]))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _threads() -> int:
    return torch.get_num_threads()


def _mask(view: View, scores: Tensor) -> Tensor | None:
    """(B, 1, T, S) true where visible; the triangle is written out where the plan only names it."""
    if not view.plan.causal:
        return view.plan.mask
    tokens, slots = scores.shape[-2:]
    return torch.ones(tokens, slots, dtype=torch.bool, device=scores.device).tril()[None, None]


def _fold(q: Tensor, heads: int) -> Tensor:
    """(B, H, T, D) to (B, K, G * T, D): queries that read the same key stand side by side."""
    return q.reshape(q.shape[0], heads, -1, q.shape[-1])


def _unfold(out: Tensor, q: Tensor) -> Tensor:
    """(B, K, G * T, Dv) back to (B, H, T, Dv)."""
    return out.reshape(*q.shape[:3], out.shape[-1])
