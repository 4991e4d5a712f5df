"""Blocks and bytes that vLLM reserves and holds: of one request, and of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from attn_variants.architectures import Architecture
from attn_variants.contract import require_size

from .blocks import sized_pages
from .dtypes import kv_dtype_named
from .grouping import Group, grouped
from .kernels import STRIDED
from .lengths import default_model_length
from .rows import Rows


@dataclass(frozen=True)
class VllmCache:
    """vLLM's figures for one rank.

    groups:    layers that share a block table.
    in_flight: tokens scheduled and not settled, whose blocks windows keep (VllmConfig.max_in_flight_tokens).
    kv_dtype:  what `auto` came to.
    """

    groups: tuple[Group, ...]
    in_flight: int
    kv_dtype: str
    architecture: Architecture
    max_model_len: int | None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool, in whichever group it is used."""
        return max(group.bytes for group in self.groups)

    def planned_blocks(self, tokens: int) -> tuple[int, ...]:
        """Blocks per group that admission reserves for a request of `tokens` tokens."""
        require_size("tokens", tokens)
        return tuple(group.planned(tokens, self.in_flight) for group in self.groups)

    def planned_bytes(self, tokens: int) -> int:
        """Bytes that admission reserves for a request of `tokens` tokens, its worst case."""
        return self.bytes_per_block * sum(self.planned_blocks(tokens))

    def held_blocks(self, tokens: int) -> tuple[int, ...]:
        """Blocks per group that a request of `tokens` tokens holds after a decode step."""
        require_size("tokens", tokens)
        return tuple(group.held(tokens) for group in self.groups)

    def held_bytes(self, tokens: int) -> int:
        """Bytes that a request of `tokens` tokens holds after a decode step."""
        return self.bytes_per_block * sum(self.held_blocks(tokens))

    def num_blocks(self, pool_bytes: int) -> int:
        """Blocks of a pool, the null block included."""
        require_size("pool_bytes", pool_bytes, least=0)
        return pool_bytes // self.bytes_per_block

    def max_concurrency(self, pool_bytes: int) -> float:
        """How many requests of max_model_len tokens the pool admits, as vLLM logs it."""
        return self.num_blocks(pool_bytes) / sum(self.planned_blocks(self._model_length()))

    def cache_tokens(self, pool_bytes: int) -> int:
        """What vLLM logs as "GPU KV cache size": not blocks times tokens, but requests times max_model_len."""
        return int(self.max_concurrency(pool_bytes) * self._model_length())

    def _model_length(self) -> int:
        return default_model_length(self.architecture) if self.max_model_len is None else self.max_model_len


def vllm_cache(
    architecture: Architecture,
    *,
    tp: int = 1,
    kv_dtype: str = "auto",
    block_size: int | None = None,
    max_model_len: int | None = None,
    max_num_batched_tokens: int = 8192,
    enable_prefix_caching: bool = True,
    async_scheduling: bool = True,
    disable_hybrid_kv_cache_manager: bool = False,
) -> VllmCache:
    """What vLLM 0.33.0 plans for one of `tp` ranks, its arguments named as vLLM names them.

    Raises ValueError in one line for what vLLM refuses, and for a model_type whose rules are not known here.
    """
    for name, value in (("tp", tp), ("max_num_batched_tokens", max_num_batched_tokens)):
        require_size(name, value)
    for name, optional in (("block_size", block_size), ("max_model_len", max_model_len)):
        if optional is not None:
            require_size(name, optional)
    for name, switch in (
        ("enable_prefix_caching", enable_prefix_caching),
        ("async_scheduling", async_scheduling),
        ("disable_hybrid_kv_cache_manager", disable_hybrid_kv_cache_manager),
    ):
        if not isinstance(switch, bool):
            raise ValueError(f"{name} ({switch!r}) must be True or False")
    dtype = kv_dtype_named(kv_dtype, architecture)
    rows = Rows(architecture, tp, dtype)
    state_block = None
    if rows.rules.states is not None and not enable_prefix_caching:
        state_block = default_model_length(architecture) if max_model_len is None else max_model_len
    pages = sized_pages(rows, block_size=block_size, prefix_caching=enable_prefix_caching, state_block=state_block)
    groups = grouped(pages, packed=rows.rules.kernels is STRIDED, disable_hybrid=disable_hybrid_kv_cache_manager)
    batches = 2 if async_scheduling else 1
    return VllmCache(groups, batches * max_num_batched_tokens, rows.kv_dtype.name, architecture, max_model_len)
