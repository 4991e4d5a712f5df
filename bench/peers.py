"""transformers with the same weights: the class that a decoder's variant corresponds to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_variants.architectures import hf_config
from attn_variants.decoder import Decoder
from attn_variants.dtypes import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INSTALL = "pip install 'attn-variants[hf]' brings transformers"


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
