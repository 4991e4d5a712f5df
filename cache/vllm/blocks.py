"""Tokens per block: what the attention kernels ask for, and in a hybrid, what it takes to hold one state."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from .kernels import kernel_for
from .pages import Kind, Page, ceil_div
from .rows import Rows

DEFAULT_BLOCK_SIZE = 16
LATENT_HYBRID_MULTIPLE = 128
"""Hybrids with latents keep whole runs of 128 tokens for other kernels' sake (_align_hybrid_block_size)."""


def sized_pages(rows: Rows, *, block_size: int | None, prefix_caching: bool, state_block: int | None) -> Counter[Page]:
    """The pages of the layers, each with its block size (update_block_size_for_backend, platforms/interface.py).

    block_size:  tokens asked for; None is the default.
    state_block: tokens per block of a state without prefix caching, the longest request; None is the attention's.
    """
    kernels = [kernel_for(rows.kernels, size, rows.kv_dtype, block_size) for size in rows.head_sizes]
    multiple = math.lcm(*(kernel.multiple for kernel in kernels))
    block = block_size or (DEFAULT_BLOCK_SIZE if DEFAULT_BLOCK_SIZE % multiple == 0 else multiple)
    state = max((page.entry for page in rows.pages if page.kind is Kind.STATE), default=0)
    if state and rows.attention:
        block = _holding(state, rows, block, multiple, prefix_caching)
    largest = min((kernel.largest for kernel in kernels if kernel.largest is not None), default=block)
    sized: Counter[Page] = Counter()
    for page, count in rows.pages.items():
        if page.kind is Kind.STATE:
            made = _state(page, rows, state_block or block, prefix_caching)
        else:
            tokens = min(block, largest) if page.kind is Kind.SLIDING else block
            made = replace(page, block=page.block or tokens)
        sized[made] += count
    return sized


def _holding(state: int, rows: Rows, block: int, multiple: int, prefix_caching: bool) -> int:
    """The block that is asked for, or the smallest whose attention page holds a state (_align_hybrid_block_size)."""
    unit = max(multiple, block, LATENT_HYBRID_MULTIPLE if rows.latent else 1)
    if prefix_caching and rows.rules.states is not None:
        unit = math.lcm(unit, rows.rules.states.aligned)
    least = unit * ceil_div(state, unit * rows.attention[0].entry)
    return max(block, multiple * ceil_div(least, multiple))


def _state(page: Page, rows: Rows, block: int, prefix_caching: bool) -> Page:
    """States are planned the running one, the one before it and a checkpoint (MambaSpec.max_memory_usage_bytes)."""
    planned = 2 + rows.checkpoints if prefix_caching else 1
    return replace(page, block=block, states=planned)
