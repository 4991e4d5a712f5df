"""Parameter counts of decoders: those of transformers' own models, on the meta device, and published totals."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from attn_variants.architectures import PRESETS, parameters
from attn_variants.architectures.families import FAMILIES
from attn_variants.architectures.family import FALSE, TRUE, Nested
from attn_variants.architectures.weights import WEIGHTS

DATA = Path(__file__).parents[1] / "data" / "transformers_cache_bytes.jsonl.gz"

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 38,
    "moe_intermediate_size": 34,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ABSENT = object()
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 6,
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 18,
}
EXPERTS = {"n_routed_experts": 5, "n_shared_experts": 3, "first_k_dense_replace": 2, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 22}
MIXTRAL_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
}
INDEXER = {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 4}

OWN: dict[str, list[dict[str, Any]]] = {
    "deepseek_v2": [LATENT | EXPERTS, LATENT | EXPERTS | {"q_lora_rank": None}],
    "deepseek_v3": [LATENT | EXPERTS, LATENT | EXPERTS | {"q_lora_rank": None}],
    "deepseek_v32": [LATENT | EXPERTS | INDEXER],
    "deepseek_v4": [
        EXPERTS
        | INDEXER
        | {"num_key_value_heads": 1, "q_lora_rank": 12, "qk_rope_head_dim": 4, "o_groups": 2, "o_lora_rank": 8}
        | {
            "intermediate_size": ABSENT,
            "hc_mult": 3,
            "n_shared_experts": 1,
            "num_hidden_layers": 6,
            "sliding_window": 8,
        }
        | {"layer_types": [*("sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention") * 2]}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
    ],
    "falcon": [
        {"head_dim": ABSENT, "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 38},
        {"head_dim": ABSENT, "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {"head_dim": ABSENT, "multi_query": False, "new_decoder_architecture": False},
        {"head_dim": ABSENT, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": False},
    ],
    "gemma3n_text": [
        {"num_kv_shared_layers": 2, "laurel_rank": 7, "altup_num_inputs": 3, "hidden_size_per_layer_input": 9}
        | {"vocab_size_per_layer_input": 91, "intermediate_size": [38, 42, 44, 46, 48]}
        | {"activation_sparsity_pattern": [0.0] * 5}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}
    ],
    "gemma4_text": [
        {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 9, "vocab_size_per_layer_input": 91}
        | {"global_head_dim": 40, "num_global_key_value_heads": 1, "num_hidden_layers": 6}
        | {"num_experts": 5, "top_k_experts": 2, "layer_types": ["sliding_attention", "full_attention"] * 3}
    ],
    "glm4_moe": [EXPERTS],
    "glm4_moe_lite": [LATENT | EXPERTS | {"first_k_dense_replace": 1}],
    "glm_moe_dsa": [LATENT | EXPERTS | INDEXER | {"indexer_types": ["full", "full", "shared", "shared", "full"]}],
    "gpt_oss": [MIXTRAL_EXPERTS],
    "granitemoe": [MIXTRAL_EXPERTS],
    "kimi_linear": [
        LATENT
        | EXPERTS
        | {"num_local_experts": 5, "linear_num_heads": 3, "linear_head_dim": 20, "linear_conv_kernel_dim": 3}
    ],
    "llama4_text": [
        MIXTRAL_EXPERTS | {"intermediate_size_mlp": 42, "interleave_moe_layer_step": 2},
        MIXTRAL_EXPERTS | {"intermediate_size_mlp": 42, "moe_layers": [3]},
    ],
    "longcat_flash": [
        LATENT
        | {"num_hidden_layers": ABSENT, "num_layers": 3, "n_routed_experts": 5, "moe_topk": 2, "zero_expert_num": 0}
        | {"ffn_hidden_size": 38, "expert_ffn_hidden_size": 34, "head_dim": 6}
    ],
    "mimo_v2_flash": [
        EXPERTS
        | {
            "first_k_dense_replace": 1,
            "v_head_dim": 18,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
        }
    ],
    "minicpm3": [LATENT],
    "minimax": [MIXTRAL_EXPERTS],
    "minimax_m2": [MIXTRAL_EXPERTS],
    "minimax_m3_vl_text": [
        MIXTRAL_EXPERTS
        | {"dense_intermediate_size": 42, "shared_intermediate_size": 22, "index_n_heads": 2, "index_head_dim": 16}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"]}
        | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"] + ["full_attention"] * 2}
    ],
    "mixtral": [MIXTRAL_EXPERTS],
    "nemotron_h": [
        {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "mamba_num_heads": 4}
        | {"mamba_head_dim": 8, "ssm_state_size": 10, "n_groups": 2, "conv_kernel": 3, "n_routed_experts": 5}
        | {"moe_shared_expert_intermediate_size": 22, "moe_latent_size": latent}
        for latent in (None, 26)
    ],
    "opt": [
        {"ffn_dim": 38, "max_position_embeddings": 53},
        {"ffn_dim": 38, "max_position_embeddings": 53, "word_embed_proj_dim": 30, "do_layer_norm_before": False},
    ],
    "gpt2": [{"n_positions": 53, "n_inner": 38}, {"n_positions": 53}],
    "qwen2_moe": [QWEN_EXPERTS, QWEN_EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}],
    "qwen3_5_moe_text": [QWEN_EXPERTS | DELTA],
    "qwen3_5_text": [DELTA],
    "qwen3_moe": [QWEN_EXPERTS, QWEN_EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}],
    "qwen3_next": [QWEN_EXPERTS | DELTA, QWEN_EXPERTS | DELTA | {"mlp_only_layers": [0, 3]}],
    "qwen3_vl_moe_text": [QWEN_EXPERTS],
    "solar_open": [EXPERTS],
    "step3p5": [
        EXPERTS
        | {"share_expert_dim": 22, "num_sliding_attention_heads": 6, "sliding_window": 8}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"]}
    ],
    "youtu": [LATENT],
}
"""Sizes of families that know more than `SIZES`, all different."""

TWINS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "minimax_m3": "minimax_m3_vl_text"}
"""Model types of the hub that transformers has no class of, and the one whose weights they share."""
STUCK = {"do_layer_norm_before", "_remove_final_layer_norm", "num_ln_in_parallel_attn"}


def counted(config: dict[str, Any]) -> int:
    """Numbers that a checkpoint of transformers' model would hold of its decoder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    built = transformers.AutoConfig.for_model(**config)
    makers = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel)
    with torch.device("meta"):
        for maker in makers:
            if type(built) in maker._model_mapping:
                model = maker.from_config(built)
                break
        else:
            raise AssertionError(f"transformers builds no {config['model_type']}")
    # Towers and what joins them, and constants of lightning attention.
    apart = ("vision", "visual", "multi_modal", "projector", "image_newline", "connector", "_decay", "slope_rate")
    held = {
        id(tensor): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not any(word in name for word in apart)
    }
    numbers = sum(tensor.numel() for tensor in held.values())
    if maker is not transformers.AutoModel or config.get("tie_word_embeddings"):
        return numbers
    return numbers + config["vocab_size"] * config["hidden_size"]


def wrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Step's text model is built inside the model of pictures alone."""
    if config["model_type"] != "step3p5":
        return config
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return {"model_type": "step3p7", "text_config": config, "vision_config": vision}


def variants(model_type: str) -> list[dict[str, Any]]:
    """Small configs of one type: its sizes, and each of its switches the other way round."""
    found = []
    for own in OWN.get(model_type, [{}]):
        config = {"model_type": model_type, **SIZES, **own}
        config = {name: value for name, value in config.items() if name not in own or value is not ABSENT}
        found.append(config)
        for name, rule in WEIGHTS[model_type].fields.items():
            if rule is FALSE or rule is TRUE:
                found.append(config | {name: rule is FALSE})
        found.append(
            config | {"tie_word_embeddings": WEIGHTS[model_type].fields.get("tie_word_embeddings") is not TRUE}
        )
    return found


@pytest.mark.parametrize("model_type", [name for name in WEIGHTS if name not in TWINS])
def test_a_count_is_that_of_the_model_which_transformers_builds(model_type: str) -> None:
    for config in variants(model_type):
        given = wrapped(config)
        assert parameters(given) == counted(given), config
