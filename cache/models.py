"""The cache of a published model, from its config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from attn_variants.architectures import Architecture, architecture, parameters
from attn_variants.contract import CacheSpec, require_size
from attn_variants.dtypes import canonical_dtype, dtype_bytes

from .budgets import crests, largest
from .formats import Format, format_named
from .parallel import Split
from .policies import Priced, pricing, vllm_pricing
from .quantize import codec_named, format_of
from .vllm import VllmCache, vllm_cache


@dataclass(frozen=True)
class ModelCache:
    """What each layer of a model remembers, and what that costs.

    Its methods share these options:

    kv_dtype: a plain dtype, a format such as `fp8`, `int4:64` or `q8_0`, or `auto`, the model's own. A format leaves
        states, and whatever else does not follow the cache's dtype, as they are.
    policy: `ideal`, `allocated`, `transformers` or `vllm`; see `attn_variants.cache.policies`.
    store:  for `allocated` one of our stores (default `full`), for `transformers` `dynamic` (default) or `static`, for
        `vllm` `held` (default) or `planned`.
    tp, pp, dp, cp: ranks of tensor, pipeline, data (attention) and context parallelism.

    They raise ValueError for unknown names, for splits that do not work out, and for what a policy cannot hold.
    """

    architecture: Architecture

    @property
    def config(self) -> Mapping[str, Any]:
        """The config.json; empty for what has none."""
        return self.architecture.config

    @property
    def layers(self) -> tuple[CacheSpec, ...]:
        """One declaration per cache slot."""
        return self.architecture.layers

    @cached_property
    def held(self) -> Architecture:
        """What transformers' own cache keeps, which is more in some families."""
        if not self.config:
            raise ValueError("policy 'transformers' prices models that have a config.json; give one, or another policy")
        return architecture(self.config, held_by="transformers")

    @cached_property
    def dtype(self) -> str:
        """The model's own, as its config says; bfloat16 where it does not."""
        parts = [self.config, *(part for part in self.config.values() if isinstance(part, Mapping))]
        said = [(name, part[name]) for part in parts for name in ("dtype", "torch_dtype") if part.get(name) is not None]
        if not said or said[0][1] == "auto":
            return "bfloat16"
        name, dtype = said[0]
        if not isinstance(dtype, str):
            raise ValueError(f"{name} ({dtype!r:.40}) must be a string")
        return canonical_dtype(dtype)

    def pricing(
        self,
        *,
        kv_dtype: str = "bfloat16",
        codec: str = "plain",
        policy: str = "ideal",
        store: str | None = None,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
    ) -> Priced:
        """How these options price every layer: what the figures below are added up from.

        codec: how our stores code numbers of a plain kv_dtype; a kv_dtype such as `int8` is a codec of the model's.
        """
        if policy == "vllm":
            if codec != "plain":
                raise ValueError(f"codec {codec!r} is one of our stores; policy 'vllm' takes a kv_dtype")
            return vllm_pricing(self.vllm(tp=tp, kv_dtype=self._vllm_dtype(kv_dtype)), store, Split(tp, pp, dp, cp))
        found = self.held if policy == "transformers" else self.architecture
        return pricing(found, policy, store, self.form(kv_dtype, codec), Split(tp, pp, dp, cp))

    def bytes(self, *, context: int, batch: int = 1, **options: Any) -> int:
        """Bytes of `batch` sequences of `context` tokens, on the fullest rank."""
        _require_sizes(batch, context)
        return self.pricing(**options).fullest(batch, context)

    def bytes_over_ranks(self, *, context: int, batch: int = 1, **options: Any) -> int:
        """The same on all ranks together; what is whole on every rank counts on each."""
        _require_sizes(batch, context)
        return self.pricing(**options).over_ranks(batch, context)

    def bytes_per_token(self, *, context: int, **options: Any) -> int:
        """Bytes that one more token adds to a sequence of `context` tokens, over all layers of the fullest rank."""
        _require_sizes(1, context)
        priced = self.pricing(**options)
        return priced.fullest(1, context + 1) - priced.fullest(1, context)

    def bytes_per_token_mean(self, *, context: int, **options: Any) -> float:
        """The same as a mean over the tokens after which growth repeats: a stride that is pooled, a block of vLLM's.

        A single one of those tokens may cost nothing, a whole block, or less than nothing. Elsewhere it is the same.
        """
        _require_sizes(1, context)
        priced = self.pricing(**options)
        grown = priced.fullest(1, context + priced.period) - priced.fullest(1, context)
        return grown // priced.period if grown % priced.period == 0 else grown / priced.period

    def bytes_fixed(self, **options: Any) -> int:
        """Bytes of one sequence before its first token: its states."""
        return self.pricing(**options).fullest(1, 0)

    def max_batch(self, *, budget: int, context: int, **options: Any) -> int | None:
        """The most sequences of `context` tokens that fit into `budget` bytes per rank; None if any number does."""
        require_size("budget", budget, least=0)
        _require_sizes(1, context)
        priced = self.pricing(**options)
        return largest(lambda batch: priced.fullest(batch, context) <= budget)

    def max_context(self, *, budget: int, batch: int = 1, **options: Any) -> int | None:
        """The longest context that `batch` sequences can grow to within `budget` bytes per rank; None if any.

        Every shorter one fits too, also in models that at times hold less after a token than before.
        """
        require_size("budget", budget, least=0)
        _require_sizes(batch, 0)
        priced = self.pricing(**options)

        def fits(context: int) -> bool:
            return all(priced.fullest(batch, tokens) <= budget for tokens in crests(priced.falls, context))

        return largest(fits)

    def weights(self, dtype: str = "auto") -> int:
        """Bytes of the decoder's weights: what a checkpoint holds of it, every number in `dtype`.

        dtype: a plain one, or `auto`, the model's own, as if nothing were quantised. Raises ValueError for other
        names and for a model_type whose weights are not described.
        """
        return parameters(self.config) * dtype_bytes(self.dtype if str(dtype) == "auto" else dtype)

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

        The arguments are vLLM's own, kv_dtype its names too.
        Raises ValueError in one line for what vLLM refuses, and for a model_type whose rules are not known here.
        """
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

    def _vllm_dtype(self, kv_dtype: str) -> str:
        """vLLM's name of a dtype that goes by another here."""
        if str(kv_dtype) == "auto":
            return "auto"
        name = format_named(kv_dtype).name
        return {"fp8-mla": "fp8_ds_mla", "fp8-token-head": "fp8_per_token_head"}.get(name, name)

    def form(self, kv_dtype: str, codec: str = "plain") -> Format:
        """What a cached number costs in this kv_dtype, coded so."""
        found = format_named(self.dtype if str(kv_dtype) == "auto" else kv_dtype)
        if codec_named(codec).name == "plain":
            return found if found.plain else replace(found, model=self.dtype)
        if not found.plain:
            raise ValueError(f"kv_dtype {found.name!r} is coded already: give codec {codec!r} a plain one, as bfloat16")
        return replace(format_named(format_of(codec, found.name)), model=found.name)


def _require_sizes(batch: int, context: int) -> None:
    require_size("batch", batch)
    require_size("context", context, least=0)


def model_cache(config: str | Path | Mapping[str, Any]) -> ModelCache:
    """The cache of the model with this config: a config.json, its folder, its contents, or a preset's name.

    Raises ValueError for a config that cannot be read or that names an architecture nobody has described.
    """
    return ModelCache(architecture(config))
