"""The cache of a published model, from its config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_variants.contract import CacheSpec
from attn_variants.names import unknown

from .accounting import bytes_per_token, cache_bytes, ideal_bytes

if TYPE_CHECKING:
    from attn_variants.architectures import Architecture

    from .vllm import VllmCache

POLICIES = ("ideal", "allocated")


@dataclass(frozen=True)
class ModelCache:
    """What each layer of a model remembers, and what that costs."""

    layers: tuple[CacheSpec, ...]
    architecture: Architecture

    def bytes(
        self,
        *,
        context: int,
        batch: int = 1,
        kv_dtype: str = "bfloat16",
        policy: str = "ideal",
        store: str | None = None,
    ) -> int:
        """Bytes of `batch` sequences of `context` tokens.

        policy `ideal`: what attention can ever read. `allocated`: what our store (default `full`) reserves.
        """
        if policy == "ideal":
            if store is not None:
                raise ValueError(f"store ({store!r}) belongs to policy 'allocated'; policy 'ideal' has none")
            return ideal_bytes(self.layers, batch=batch, context=context, dtype=kv_dtype)
        if policy == "allocated":
            return cache_bytes(self.layers, batch=batch, capacity=context, store=store or "full", dtype=kv_dtype)
        raise ValueError(unknown("policy", policy, POLICIES))

    def bytes_per_token(self, *, context: int, kv_dtype: str = "bfloat16") -> int:
        """Bytes that one more token costs a sequence that holds `context` tokens, over all layers."""
        return bytes_per_token(self.layers, context=context, dtype=kv_dtype)

    def vllm(
        self,
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
        """What vLLM 0.33.0 plans and holds on one of `tp` ranks: bytes per block and request, and a pool's figures.

        Raises ValueError in one line for what vLLM refuses, and for a model_type whose rules are not known here.
        """
        from .vllm import vllm_cache

        return vllm_cache(
            self.architecture,
            tp=tp,
            kv_dtype=kv_dtype,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        )


def model_cache(config: str | Path | Mapping[str, Any]) -> ModelCache:
    """The cache of the model with this config: a config.json, its folder, its contents, or a preset's name.

    Raises ValueError for a config that cannot be read or that names an architecture nobody has described.
    """
    from attn_variants.architectures import architecture

    found = architecture(config)
    return ModelCache(found.layers, found)
