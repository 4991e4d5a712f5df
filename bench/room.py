"""Whether a case fits: its weights, its caches and what a pass takes, against the memory that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from attn_variants.cache.accounting import cache_bytes, used_bytes
from attn_variants.config import DecoderConfig, Geometry
from attn_variants.contract import CacheSpec
from attn_variants.dtypes import dtype_bytes

from .cache_sizes import cache_sizes, goes_back_by_copy
from .case import decoder_config
from .contest import TURN_STEPS, Case, Settings, capacity_for
from .passes import PASS_MASK, PASS_TOKENS
from .tables import size

Refused = dict[tuple[str, str] | None, str]
"""Why there is no room for a store and codec, or for the peer, which is None."""


@cache
def numbers_of(config: DecoderConfig) -> int:
    """How many numbers the decoder's weights are, none of them made."""
    import torch

    from attn_variants.decoder import Decoder

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def weights_refused(config: DecoderConfig, dtype: str, left: int | None) -> str | None:
    """Why there is no room to make a random decoder: weights are drawn in float32, and then rounded."""
    needed = numbers_of(config) * (4 + (dtype_bytes(dtype) if dtype != "float32" else 0))
    if left is None or needed <= left:
        return None
    return f"out of memory: the weights alone need {size(needed)} of {size(left)} while they are made"


def fitting(
    case: Case, settings: Settings, specs: Sequence[CacheSpec], peer_caches: int, left: int | None
) -> tuple[Case, bool, Refused]:
    """The case with the stores that fit beside each other, whether the peer does, and why each one does not.

    All of a case are there at once, since they take turns: ours first, in their order, then the peer with all caches.
    The second seat takes of what they leave, or has no cache of its own.
    """
    if left is None:
        return case, True, {}
    there = left - _working_bytes(case, settings, specs)
    wanted: dict[tuple[str, str] | None, int] = {
        held: _contestants_bytes(case, settings, specs, *held, left) for held in case.stores
    }
    if peer_caches:
        wanted[None] = peer_caches * _store_bytes(case, settings, specs, "full", "plain", left)
    refused: Refused = {}
    taken = 0
    for name, needed in wanted.items():
        if needed > there:
            refused[name] = f"out of memory: needs {size(needed + left - there)} of {size(left)}"
        elif taken + needed > there:
            refused[name] = (
                f"out of memory: needs {size(needed)} of {size(there - taken)} beside the others; measure it alone"
            )
        else:
            taken += needed
    return (
        replace(case, stores=tuple(held for held in case.stores if held not in refused)),
        None not in refused,
        refused,
    )


def all_refused(case: Case, error: str, *, peer: bool) -> Refused:
    """Every store of the case and its peer, for one reason."""
    return dict.fromkeys([*case.stores, *([None] if peer else [])], error)


def _contestants_bytes(
    case: Case, settings: Settings, specs: Sequence[CacheSpec], store: str, codec: str, left: int
) -> int:
    """Of all caches of those that decode on one store."""
    eager = _store_bytes(case, settings, specs, store, codec, left)
    if goes_back_by_copy(specs, store, static=False):
        # One in use, one as it was filled, and for a moment the next that is made of that.
        eager *= 3
    return eager + (_store_bytes(case, settings, specs, store, codec, left, static=True) if settings.compiled else 0)


def _store_bytes(
    case: Case,
    settings: Settings,
    specs: Sequence[CacheSpec],
    store: str,
    codec: str,
    left: int,
    *,
    static: bool = False,
) -> int:
    """Of one cache."""
    least = sum(
        used_bytes(specs, batch=count, context=tokens, codec=codec, dtype=case.dtype)
        for count, tokens in case.rows.runs
    )
    if least > left:
        # So far beyond that no layout need be made to know, nor the tables of its pages.
        return least
    sizes = cache_sizes(
        specs,
        case.rows,
        capacity_for(case.context),
        store=store,
        codec=codec,
        static=static,
        shuffled=settings.shuffled,
        rewinds=TURN_STEPS,
    )
    return cache_bytes(specs, **sizes, dtype=case.dtype)


def _working_bytes(case: Case, settings: Settings, specs: Sequence[CacheSpec]) -> int:
    """Beside the caches: what a prompt's pass or the random entries of a layer take, or the step in float64.

    An upper estimate.
    """
    width = dtype_bytes(case.dtype)
    entries = max(sum(record.heads * record.width for record in spec.records) for spec in specs)
    longest_run = max(count * tokens for count, tokens in case.rows.runs)
    reference = _reference_bytes(case, longest_run, entries)
    if settings.random_cache:
        return max(reference, longest_run * entries * (4 + width))
    ids = case.batch * case.context * 8
    tokens = min(longest_run, max(PASS_TOKENS, case.batch))
    mask = min(PASS_MASK, longest_run * case.context) * (1 + width)
    return ids + max(reference, mask + tokens * width * (_activations(case.geometry) + 2 * entries))


def _reference_bytes(case: Case, tokens: int, entries: int) -> int:
    """Of the step in float64: a layer's entries and weights as they are and widened, and three of its scores."""
    width = dtype_bytes(case.dtype) + 8
    weights = numbers_of(decoder_config(case.variant, case.geometry, case.sight)) // case.geometry.layers
    return tokens * (entries * width + case.geometry.heads * 3 * 8) + weights * width


def _activations(geometry: Geometry) -> int:
    """Numbers of a token that are there at once, at the widest place of a layer: attention or the MLP."""
    head = max(geometry.head_dim, geometry.qk_nope_head_dim + geometry.qk_rope_head_dim, geometry.v_head_dim)
    return 3 * geometry.hidden_size + max(3 * geometry.intermediate_size, 4 * geometry.heads * head)
