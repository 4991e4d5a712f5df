"""transformers with the same weights: the class that a decoder's variant corresponds to, and its turns in a contest."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attn_variants.architectures import hf_config
from attn_variants.decoder import Decoder
from attn_variants.dtypes import torch_dtype

from .passes import in_passes

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

INSTALL = "pip install 'attn-variants[hf]' brings transformers"
TRANSFORMERS_CACHES = ("dynamic", "static")


def transformers_installed() -> bool:
    """Whether the peer can be asked at all."""
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def transformers_twin(decoder: Decoder, *, dtype: str | None = None) -> PreTrainedModel:
    """The transformers model of this decoder's config, holding its weights; in its dtype the tensors are shared.

    Raises ValueError where transformers is missing and where it has no class for the variant.
    """
    if not transformers_installed():
        raise ValueError(f"the comparison needs transformers: {INSTALL}")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**hf_config(decoder.config))
    chosen = decoder.dtype if dtype is None else torch_dtype(dtype)
    # transformers' factories carry no annotations.
    twin: Any = AutoModelForCausalLM.from_config(config, dtype=chosen, attn_implementation="sdpa")
    # In transformers' own memory order: ours may have been chosen for speed.
    weights = {name: tensor.to(chosen).contiguous() for name, tensor in decoder.state_dict().items()}
    twin.load_state_dict(weights, assign=True)
    model: PreTrainedModel = twin.requires_grad_(False).eval().to(decoder.device)
    return model


class Transformers:
    """transformers' model of the same weights, one to itself, on its dynamic or its static cache."""

    peer = "transformers"
    ways: tuple[str, ...] = ("sdpa", "eager")
    store, codec = "full", "plain"

    def __init__(self, twin: PreTrainedModel, *, cache: str, capacity: int) -> None:
        self._twin = twin
        self._kind = cache
        self._capacity = capacity
        self._cache: Cache = self._empty()
        self._filled: Cache | None = None

    @property
    def setting(self) -> str:
        """How it attends, and over what."""
        return f"{self._twin.config._attn_implementation}, {self._kind} cache"

    def choose(self, way: str) -> None:
        """Decode with transformers' `sdpa` or `eager` attention."""
        self._twin.set_attn_implementation(way)

    def clear(self) -> None:
        """A new dynamic cache, or the static one zeroed; prefill is by sdpa, which needs no T x T scores."""
        self.choose("sdpa")
        self._filled = None
        if self._kind == "static" and self._cache.is_initialized:
            self._cache.reset()
        else:
            self._cache = self._empty()

    def prefill(self, ids: Tensor) -> Tensor:
        """Fill the empty cache; the last token's logits."""
        return in_passes(self._forward, ids, self._capacity)

    def decode(self, token: Tensor) -> Tensor:
        """One step."""
        if self._cache.is_initialized and not self._rewindable and self._filled is None:
            self._filled = copy.deepcopy(self._cache)
        return self._forward(token)

    def rewind(self, tokens: int) -> None:
        """By cropping, or to a copy where a window dropped tokens."""
        if self._filled is None:
            self._cache.crop(-tokens)
        else:
            self._cache = copy.deepcopy(self._filled)

    @property
    def _rewindable(self) -> bool:
        """transformers crops layers with a window only until it is full."""
        return self._cache.is_croppable and not any(self._cache.is_sliding)

    def _forward(self, token: Tensor) -> Tensor:
        logits: Tensor = self._twin(token, cache=self._cache, use_cache=True, logits_to_keep=1).logits
        return logits

    @property
    def cache_bytes(self) -> int:
        """Bytes of its layers' key and value storages."""
        layers: list[Any] = list(self._cache.layers)
        storages = [tensor.untyped_storage() for layer in layers for tensor in (layer.keys, layer.values)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _empty(self) -> Cache:
        from transformers import DynamicCache, StaticCache

        if self._kind == "dynamic":
            return DynamicCache(config=self._twin.config)
        return StaticCache(config=self._twin.config, max_cache_len=self._capacity)
