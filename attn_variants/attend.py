"""The one seam between a variant and the memory it reads: softmax(q k^T * scale) v over a view.

Backends are registered with what they accept; the first that accepts computes. The choice rests on host facts (shapes,
causal or masked, aliased or not), never on a tensor's contents. `backend(name)` forces one, for tests and comparisons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from attn_variants.backends.blockwise import accepts_blockwise, blockwise
from attn_variants.backends.reference import accepts_reference, reference
from attn_variants.backends.request import Expand, Request
from attn_variants.backends.scaled_dot_product import accepts_sdpa, accepts_split, sdpa, split
from attn_variants.contract import View
from attn_variants.names import unknown

BACKENDS: dict[str, tuple[Callable[[Request], bool], Callable[[Request], Tensor]]] = {
    "split": (accepts_split, split),
    "sdpa": (accepts_sdpa, sdpa),
    "blockwise": (accepts_blockwise, blockwise),
    "reference": (accepts_reference, reference),
}
_forced: str | None = None


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
    request = Request(q, view, names, scale, expand, sink, softcap, forced=_forced)
    out = _choose(request)(request)
    if view.step.padded:
        out = out.masked_fill((view.step.positions < 0)[:, None, :, None], 0)
    return out


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
