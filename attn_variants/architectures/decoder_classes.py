"""The transformers classes that compute what our decoder computes, as data: defaults, and where they have biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .families import FAMILIES
from .family import Default, Family, Rule


@dataclass(frozen=True)
class DecoderClass:
    """One transformers 5.24 class.

    fields: what a missing or null field means, beyond what its family says of the cache.
    bos, eos: token ids of a config that does not name any.
    qkv_bias, output_bias, mlp_bias: formulas; MLA's two biases are one.
    windows: which layers may have one: "none" of them, "all" alike, or "some", as `layer_types` says.
    buildable: formulas that transformers checks before it builds the class.
    always: what its config.json says in any case.
    """

    name: str
    fields: Mapping[str, Rule]
    bos: int | None = None
    eos: int | None = None
    latent: bool = False
    qk_norm: bool = False
    qkv_bias: str = "attention_bias"
    output_bias: str = "attention_bias"
    mlp_bias: str = "False"
    interleaved: str = "False"
    windows: Literal["none", "all", "some"] = "none"
    buildable: tuple[str, ...] = ()
    always: Mapping[str, Any] = field(default_factory=dict)


def _fields(family: str, vocab: int, mlp: int, context: int, **more: Rule) -> dict[str, Rule]:
    known = FAMILIES[family]
    assert isinstance(known, Family)
    return {
        **known.fields,
        "vocab_size": vocab,
        "intermediate_size": mlp,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        **more,
    }


def _latent_fields(dense: int, **more: Rule) -> dict[str, Rule]:
    return {
        "q_lora_rank": Default(1536),
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": Default(None),
        "first_k_dense_replace": dense,
        **more,
    }


WHOLE_HEADS = ("hidden_size % num_attention_heads == 0",)

DECODERS: Mapping[str, DecoderClass] = {
    "llama": DecoderClass(
        "LlamaForCausalLM",
        _fields("llama", 32000, 11008, 2048, mlp_bias=False),
        bos=1,
        eos=2,
        mlp_bias="mlp_bias",
        buildable=WHOLE_HEADS,
    ),
    "qwen2": DecoderClass(
        "Qwen2ForCausalLM",
        _fields("qwen2", 151936, 22016, 32768),
        qkv_bias="True",
        output_bias="False",
        windows="some",
    ),
    "qwen3": DecoderClass("Qwen3ForCausalLM", _fields("qwen3", 151936, 22016, 32768), qk_norm=True, windows="some"),
    "mistral": DecoderClass(
        "MistralForCausalLM",
        _fields("mistral", 32000, 14336, 131072),
        bos=1,
        eos=2,
        qkv_bias="False",
        output_bias="False",
        windows="all",
        always={"sliding_window": None},
    ),
    "ministral": DecoderClass(
        "MinistralForCausalLM",
        _fields("ministral", 32000, 14336, 131072),
        bos=1,
        eos=2,
        qkv_bias="False",
        output_bias="False",
        windows="some",
        always={"sliding_window": None},
    ),
    "deepseek_v3": DecoderClass(
        "DeepseekV3ForCausalLM",
        _fields("deepseek_v3", 129280, 18432, 4096, rope_interleave=Default(True, False), **_latent_fields(dense=3)),
        bos=0,
        eos=1,
        latent=True,
        interleaved="rope_interleave",
    ),
    "deepseek_v2": DecoderClass(
        "DeepseekV2ForCausalLM",
        _fields("deepseek_v2", 102400, 11008, 2048, mlp_bias=False, **_latent_fields(dense=0)),
        bos=1,
        eos=2,
        latent=True,
        mlp_bias="mlp_bias",
        interleaved="True",
        buildable=WHOLE_HEADS,
    ),
}
"""In the order in which a class is sought for a config that is to be written."""

LATENT_EPS = 1e-6
"""DeepSeek's classes norm their latents with this epsilon, whatever `rms_norm_eps` says."""

SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "use_qk_norm": (False,),
    "use_mrope": (False,),
    "no_rope_layers": (),
    "alibi": (False,),
    "per_layer_config": (),
    "quantization_config": (),
}
"""Options that change what a decoder computes, and the values, beside null, at which ours computes the same."""
