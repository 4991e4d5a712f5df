"""The cache of transformers' own model, run and read off: the cross-check of what the formulas say.

The model is built without its weights, on the meta device, where shapes alone are computed. What does not run there
runs on the CPU, shrunk in what the cache does not depend on: vocabulary, MLPs and experts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from attn_variants.architectures import read_config
from attn_variants.architectures.config_file import Source
from attn_variants.architectures.families import FAMILIES
from attn_variants.architectures.family import Nested
from attn_variants.architectures.reader import decoder_fields
from attn_variants.contract import require_size
from attn_variants.dtypes import torch_dtype

from .peers import INSTALL, transformers_installed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LARGEST_ON_CPU = 4 * 1024**3
"""Bytes of a shrunk model; a larger one would take minutes, or all of a machine's memory."""
NAMES = ("cache", "past_key_values", "cache_params", "mems", "state")
"""What models call the cache that they return and take."""
BOOKKEEPING = ("_sliding_window_tensor", "cumulative_length")
VOCABULARIES = ("vocab_size", "n_words")
WIDTHS = (
    "decoder_ffn_dim",
    "d_inner",
    "encoder_ffn_dim",
    "expert_ffn_hidden_size",
    "ffn_dim",
    "ffn_hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "n_inner",
    "share_expert_dim",
    "shared_expert_intermediate_size",
)
EXPERTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts", "zero_expert_num")
CHOSEN = ("moe_top_k", "moe_topk", "num_experts_per_tok", "num_experts_per_token", "moe_k")
LEAST = 8


@dataclass(frozen=True)
class Measured:
    """Bytes of the cache that a model returned, where it ran, and the numbers a checkpoint of it would hold.

    parameters: of the decoder and its head; None where transformers has no class of the two together.
    """

    bytes: int
    how: Literal["meta", "cpu"]
    parameters: int | None


def measured_bytes(config: Source, *, batch: int, context: int, dtype: str = "bfloat16") -> Measured:
    """What transformers' dynamic cache holds once `batch` sequences have `context` tokens, the last one decoded.

    config: a config.json, its folder, its contents or a preset's name; `dtype` is the model's and the cache's.
    Raises ValueError, in one line, where transformers is missing, has no class for the config, or runs it neither on
    the meta device nor on the CPU.
    """
    require_size("batch", batch)
    require_size("context", context)
    if not transformers_installed():
        raise ValueError(f"measuring needs transformers: {INSTALL}")
    given = _as_transformers_reads(read_config(config))
    with torch.no_grad():
        model = _built(given, "meta", "bfloat16")
        parameters = _numbers(model) if _has_head(model) else None
        try:
            return Measured(_cache_bytes(model, batch, context, dtype), "meta", parameters)
        except Exception as error:
            reason = error
        return Measured(_on_cpu(given, batch, context, dtype, reason), "cpu", parameters)


def _on_cpu(given: dict[str, Any], batch: int, context: int, dtype: str, reason: Exception) -> int:
    """The bytes of the shrunk model; `reason` is why it did not run on the meta device."""
    small = _shrunk(_config(given).to_dict())
    size = _numbers(_built(small, "meta", dtype)) * torch_dtype(dtype).itemsize
    if size > LARGEST_ON_CPU:
        raise ValueError(
            f"{given.get('model_type')} does not run on the meta device ({_line(reason)}), and on the CPU it would "
            f"take {size} bytes without its MLPs, more than {LARGEST_ON_CPU}: measure it with fewer layers"
        )
    try:
        return _cache_bytes(_built(small, "cpu", dtype), batch, context, dtype)
    except Exception as error:
        raise ValueError(
            f"transformers runs {given.get('model_type')} neither on the meta device ({_line(reason)}) nor on the CPU "
            f"({_line(error)})"
        ) from None


def _built(given: Mapping[str, Any], device: str, dtype: str) -> PreTrainedModel:
    """The decoder of the config, with a head where transformers has a class for both."""
    from transformers import AutoModel, AutoModelForCausalLM

    try:
        for decoder in _decoders(_config(given)):
            for maker in (AutoModelForCausalLM, AutoModel):
                if type(decoder) in maker._model_mapping:
                    with torch.device(device):
                        # transformers' factories carry no annotations.
                        made: Any = maker.from_config(decoder, dtype=torch_dtype(dtype))  # type: ignore[no-untyped-call]
                    model: PreTrainedModel = made.eval()
                    return model
    except Exception as error:
        if str(error) == _unknown(given):
            raise
        raise ValueError(f"transformers cannot build {given.get('model_type')!r}: {_line(error)}") from None
    raise ValueError(_unknown(given))


def _config(given: Mapping[str, Any]) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    if given.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(_unknown(given))
    made: PretrainedConfig = AutoConfig.for_model(**given)
    return made


def _unknown(given: Mapping[str, Any]) -> str:
    return f"transformers has no decoder of model_type {given.get('model_type')!r}, so there is nothing to measure"


def _decoders(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """The text config where there is one inside, and the config itself."""
    inner: Any = config.get_text_config(decoder=True)
    if type(inner) is not type(config):
        yield inner
    yield config


def _has_head(model: PreTrainedModel) -> bool:
    from transformers import AutoModelForCausalLM

    heads: Any = AutoModelForCausalLM._model_mapping.values()
    return type(model) in heads


def _cache_bytes(model: PreTrainedModel, batch: int, context: int, dtype: str) -> int:
    """Runs the model and adds up its cache; numbers in bfloat16 follow the model's dtype, and are taken as `dtype`."""
    ids = torch.zeros(batch, context, dtype=torch.long, device=model.device)
    try:
        name, cache = _run(model, ids[:, : max(1, context - 1)], {})
        if context > 1:
            _, cache = _run(model, ids[:, -1:], {name: cache})
    except Exception:
        # A few want all tokens again at every step; as a prompt they leave the same cache.
        _, cache = _run(model, ids, {})
    width = torch_dtype(dtype).itemsize
    return sum(
        tensor.numel() * (width if tensor.dtype == torch.bfloat16 else tensor.element_size())
        for tensor in _distinct([cache, *_kept_in_modules(model)])
    )


def _run(model: PreTrainedModel, ids: Tensor, cached: dict[str, Any]) -> tuple[str, Any]:
    """One pass; what the model takes its cache as, and the cache: returned, or filled where it must be given one."""
    from transformers import DynamicCache

    taken = inspect.signature(model.forward).parameters
    name = next(name for name in NAMES if name in taken)
    output = model(input_ids=ids, use_cache=True, **cached)
    returned = [output[found] for found in NAMES if found in output and output[found] is not None]
    if returned:
        return name, returned[0]
    cache = cached.get(name) or DynamicCache(config=model.config)
    model(input_ids=ids, use_cache=True, **{name: cache})
    return name, cache


def _kept_in_modules(model: PreTrainedModel) -> Iterator[Any]:
    """States that recurrent Gemma keeps in its modules."""
    for module in model.modules():
        for name in ("conv1d_state", "recurrent_states"):
            if isinstance(vars(module).get(name), Tensor):
                yield vars(module)[name]


def _distinct(found: Any) -> list[Tensor]:
    """Every tensor that is held, one that is key and value once, without counters of tokens."""
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            tensors[id(value)] = value
        elif id(value) in seen:
            return
        elif isinstance(value, Mapping):
            seen.add(id(value))
            for name, held in value.items():
                if name not in BOOKKEEPING:
                    visit(held)
        elif isinstance(value, list | tuple):
            seen.add(id(value))
            for held in value:
                visit(held)
        elif type(value).__module__.startswith("transformers") and not type(value).__name__.endswith("Config"):
            visit(vars(value))

    visit(found)
    return list(tensors.values())


def _numbers(model: PreTrainedModel) -> int:
    return sum(
        tensor.numel() for tensor in {id(held): held for held in model.state_dict(keep_vars=True).values()}.values()
    )


def _shrunk(given: dict[str, Any]) -> dict[str, Any]:
    """The config with the least vocabulary, MLPs and experts; what its family's cache depends on stays."""
    _, fields = decoder_fields(given)
    needed = {*fields.family.fields, *fields.family.aliases.values()}
    return _shrink(given, needed)


def _shrink(part: Mapping[str, Any], needed: set[str]) -> dict[str, Any]:
    chosen = max((part[name] for name in CHOSEN if isinstance(part.get(name), int)), default=2)
    small: dict[str, Any] = {}
    for name, value in part.items():
        if isinstance(value, dict):
            small[name] = _shrink(value, needed)
        elif isinstance(value, int) and not isinstance(value, bool) and name not in needed:
            small[name] = _least(name, value, chosen)
        else:
            small[name] = value
    return small


def _least(name: str, value: int, chosen: int) -> int:
    if name in VOCABULARIES or name in WIDTHS:
        return min(value, LEAST)
    if name in EXPERTS:
        return min(value, chosen)
    return min(value, LEAST - 1) if name.endswith("_token_id") else value


def _as_transformers_reads(given: dict[str, Any]) -> dict[str, Any]:
    """The config in the library's present spelling.

    Limits of time steps may be written as the word, which JSON has no number for; and what holds its decoder's fields
    beside the others is the decoder's own config.
    """
    family = FAMILIES.get(str(given.get("model_type")))
    if isinstance(family, Nested) and family.key not in given:
        given = {**given, "model_type": family.model_type}
    return {
        name: [math.inf if entry == "inf" else entry for entry in value] if isinstance(value, list) else value
        for name, value in given.items()
    }


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
