"""The same weights in the attention modules of models whose decoders are not ours: what their options compute."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attn_variants import GQAConfig, GroupedQueryAttention, RopeConfig, fresh_step
from attn_variants.cache import KVCache
from attn_variants.transient import transients
from tests.tiny import error, sharpen

transformers = pytest.importorskip("transformers", reason="parity with transformers is checked where it is installed")
masking = pytest.importorskip("transformers.masking_utils")

TOKENS = 23
SIZES = {
    "vocab_size": 50,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
THETA = RopeConfig(rope_theta=500.0)
MASKS = {
    "full": "create_causal_mask",
    "sliding": "create_sliding_window_causal_mask",
    "chunked": "create_chunked_causal_mask",
}


@dataclass(frozen=True)
class Case:
    """Their module by name and config, which layers to take of it under which mask, and our options for each."""

    model: str
    attention: str
    config: dict[str, Any]
    layers: dict[int, tuple[str, dict[str, Any]]]
    prefix: str = ""
    rotary: str = "RotaryEmbedding"


CASES = {
    "gpt-oss: windows and learned sinks": Case(
        "gpt_oss.GptOss",
        "Attention",
        {"sliding_window": 5, "rope_parameters": ROPE},
        {
            0: ("sliding", {"sliding_window": 5, "attention_sink": True, "attention_bias": True, "output_bias": True}),
            1: ("full", {"attention_sink": True, "attention_bias": True, "output_bias": True}),
        },
    ),
    "gemma 2: soft-capping, windows and a scale": Case(
        "gemma2.Gemma2",
        "Attention",
        {
            "sliding_window": 6,
            "attn_logit_softcapping": 1.5,
            "query_pre_attn_scalar": 20,
            "rope_parameters": ROPE,
        },
        {
            0: ("sliding", {"sliding_window": 6, "attn_logit_softcapping": 1.5, "softmax_scale": 20**-0.5}),
            1: ("full", {"attn_logit_softcapping": 1.5, "softmax_scale": 20**-0.5}),
        },
    ),
    "llama 4: chunks, norms after rope, no positions": Case(
        "llama4.Llama4",
        "TextAttention",
        {"attention_chunk_size": 7, "rope_parameters": ROPE, "floor_scale": 4, "attn_scale": 0.3, "use_qk_norm": True},
        {
            0: (
                "chunked",
                {
                    "attention_chunk_size": 7,
                    "qk_norm_after_rope": True,
                    "rms_norm_eps": 1e-5,
                    "rope": RopeConfig(rope_theta=500.0, interleaved=True),
                },
            ),
            3: ("full", {"rope": None, "floor_scale": 4, "attn_scale": 0.3}),
        },
        prefix="Text",
        rotary="TextRotaryEmbedding",
    ),
    "mistral: a window": Case(
        "mistral.Mistral",
        "Attention",
        {"sliding_window": 5, "rope_parameters": ROPE},
        {0: ("sliding", {"sliding_window": 5})},
    ),
    "gemma 3n: layers that share, norms of values": Case(
        "gemma3n.Gemma3n",
        "TextAttention",
        {
            "sliding_window": 5,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": 50,
            "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
            "activation_sparsity_pattern": None,
        },
        {
            0: ("sliding", {"sliding_window": 5, "qk_norm": True, "v_norm": True}),
            1: ("full", {"qk_norm": True, "v_norm": True}),
            2: ("sliding", {"sliding_window": 5, "qk_norm": True, "kv_shared_layer": 0}),
            3: ("full", {"qk_norm": True, "kv_shared_layer": 1}),
        },
        prefix="Text",
    ),
}
COMMON = {"gemma3n.Gemma3n": {"softmax_scale": 1.0, "rms_norm_eps": 1e-5}}


def theirs(case: Case):
    """Their attention modules, their rotary embedding and their config."""
    package, _, name = case.model.partition(".")
    modeling = pytest.importorskip(f"transformers.models.{package}.modeling_{package}")
    config = getattr(transformers, f"{name}{case.prefix}Config")(**SIZES | case.config)
    modules = {layer: getattr(modeling, name + case.attention)(config, layer).eval() for layer in case.layers}
    return modules, getattr(modeling, name + case.rotary)(config), config


def outputs(case: Case, modules, rotary, config, x):
    """What each of their layers makes of x, one after another, keys shared as they share them."""
    positions = torch.arange(x.shape[1])[None]
    shared, made = {}, []
    for layer, (mask, _) in case.layers.items():
        kinds = (mask + "_attention",) if "Gemma3n" in case.model else ()
        given = {"shared_kv_states": shared} if kinds else {}
        seen = getattr(masking, MASKS[mask])(
            config=config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=positions
        )
        out, _ = modules[layer](
            hidden_states=x, position_embeddings=rotary(x, positions, *kinds), attention_mask=seen, **given
        )
        made.append(out)
    return made


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_attention_is_theirs_uncached_and_cached(name):
    case = CASES[name]
    modules, rotary, config = theirs(case)
    own = {
        layer: GroupedQueryAttention(
            GQAConfig(36, 6, 2, 8, **{"rope": THETA, **COMMON.get(case.model, {}), **options})
        ).eval()
        for layer, (_, options) in case.layers.items()
    }
    for layer, module in own.items():
        sharpen(module, seed=layer)
        modules[layer].load_state_dict(module.state_dict())
    x = torch.randn(2, TOKENS, 36, generator=torch.Generator().manual_seed(1))
    wanted = outputs(case, modules, rotary, config, x)

    specs = [module.cache_spec for module in own.values()]
    step = fresh_step(2, TOKENS)
    for module, memory, out in zip(own.values(), transients(specs), wanted, strict=True):
        assert error(module(x, step, memory), out) < 1e-5

    cache, parts = KVCache(specs, batch=2, capacity=TOKENS), []
    for run in x.split([9, 1, 1, 6, 1, 5], dim=1):
        step = cache.step(*run.shape[:2])
        parts.append([module(run, step, memory) for module, memory in zip(own.values(), cache.layers, strict=True)])
        cache.advance(step)
    for layer, out in enumerate(wanted):
        assert error(torch.cat([part[layer] for part in parts], dim=1), out) < 1e-5
