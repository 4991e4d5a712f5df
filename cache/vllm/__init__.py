"""What vLLM 0.33.0 plans and holds for a model: its rules, read from its source, as arithmetic. Imports no torch.

    row    what a layer keeps per token and rank, or a state per sequence     rows.py, families.py, dtypes.py
    split  what tp must divide besides, for the weights' sake                 splits.py
    block  tokens per block, which attention kernels and states set           kernels.py, blocks.py
    page   one block of one layer; unequal pages are made equal               pages.py, grouping.py
    group  layers that share a block table; a block costs the largest group   grouping.py
    pool   how many blocks there are, and how many a request takes            pool.py

The figures are those of one H100 per rank (compute capability 9.0), without speculative decoding, pipeline stages or
context parallelism, as `LLM(...)` starts by default.
"""

from __future__ import annotations

from .pool import VllmCache, vllm_cache

__all__ = ["VllmCache", "vllm_cache"]
