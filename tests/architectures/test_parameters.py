"""Parameter counts of decoders: those of transformers' own models, on the meta device, and published totals."""

import functools
import gzip
import json
import re
import subprocess
import sys
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
        | experts
        for experts in (
            {"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"]},
            {"moe_layers_enum": "0, 4"},
        )
    ],
    "youtu": [LATENT],
}
"""Sizes of families that know more than `SIZES`, all different."""

TWINS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "minimax_m3": "minimax_m3_vl_text"}
"""Model types of the hub that transformers has no class of, and the one whose weights they share."""


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
    apart = (
        "vision",
        "visual",
        "audio",
        "multi_modal",
        "projector",
        "image_newline",
        "connector",
        "_decay",
        "slope_rate",
    )
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


@functools.cache
def rows() -> dict[str, list[dict[str, Any]]]:
    """The measured configs of every described type, and of the models of pictures around one."""
    found: dict[str, list[dict[str, Any]]] = {}
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            family = FAMILIES.get(row["model_type"])
            inner = family.model_type if isinstance(family, Nested) else row["model_type"]
            if inner in WEIGHTS and row["model_type"] not in UNCOUNTED:
                found.setdefault(row["model_type"], []).append(row)
    return found


UNCOUNTED = {
    "janus": "transformers' model holds more towers than are told apart here",
    "longcat_flash": "transformers' model has room for the weights of experts that have none",
}


@pytest.mark.parametrize("model_type", rows())
def test_hub_spellings_and_models_of_pictures_count_the_same(model_type: str) -> None:
    row = rows()[model_type][-1]
    for spelling in ("config", "sparse_config"):
        given = {**row[spelling], "model_type": model_type}
        assert parameters(given) == counted(given), spelling


def test_room_that_transformers_leaves_for_experts_without_weights_does_not_count() -> None:
    config = {"model_type": "longcat_flash", **SIZES, **OWN["longcat_flash"][0], "zero_expert_num": 2}
    del config["num_hidden_layers"]
    # In 3 layers the gate and the input of 2 experts, 34 wide.
    assert counted(config) - parameters(config) == 3 * 2 * 2 * 34 * 64


@pytest.mark.parametrize(("model_type", "twin"), TWINS.items())
def test_types_of_the_hub_count_like_the_class_they_share_weights_with(model_type: str, twin: str) -> None:
    own = OWN.get(twin, [{}])[0]
    biased = {"attention_bias": True} if model_type == "mimo" else {}
    assert parameters({"model_type": model_type, **SIZES, **own, **biased}) == counted(
        {"model_type": twin, **SIZES, **own}
    )


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-2-27b", 27_227_128_320),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_419_200),
        ("phi-2", 2_779_683_840),
        ("pythia-160m", 162_322_944),
        ("gpt2", 124_439_808),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_published_totals(name: str, numbers: int) -> None:
    """As the hub's model pages count the tensors of the checkpoints; DeepSeek-V3's without its prediction layer."""
    assert parameters(name) == numbers


def test_what_the_hub_counts_of_nemotron_3_nano_are_all_but_the_biases_of_its_23_routers() -> None:
    assert parameters("nemotron-3-nano-30b-a3b") == 31_577_937_344 + 23 * 128


NAMED = {name: found for name in PRESETS if (found := re.search(r"-(\d+(?:\.\d+)?)([bm])(?:-|$)", name))}
UNNAMED = {"gemma-2b", "gemma-2-2b", "gemma-3-4b", "gemma-3n-e4b", "gemma-7b", "llama-3.2-1b"}
"""Names that leave embeddings or pictures in or out."""


@pytest.mark.parametrize("name", sorted(NAMED.keys() - UNNAMED))
def test_a_presets_count_is_the_one_in_its_name(name: str) -> None:
    size, unit = NAMED[name].groups()
    assert parameters(name) == pytest.approx(float(size) * {"b": 1e9, "m": 1e6}[unit], rel=0.15)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v2", 236),
        ("deepseek-r1", 671),
        ("glm-5", 744),
        ("kimi-k2", 1026),
        ("llama-4-scout", 108),
        ("llama-4-maverick", 401),
        ("mimo-v2-flash", 309),
        ("minimax-m2.5", 229),
        ("minimax-m3", 426),
        ("step-3.7-flash", 197),
        ("longcat-flash", 561),
        ("gpt-oss-20b", 21),
        ("gpt-oss-120b", 117),
        ("deepseek-v4-flash", 284),
    ],
)
def test_a_presets_count_is_the_one_its_makers_state(name: str, billions: int) -> None:
    assert round(parameters(name) / 1e9) == billions


def test_what_is_not_described_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"weights of model_type 'xlnet' are not described: give their bytes, or let"):
        parameters({"model_type": "xlnet", "n_layer": 2})
    with pytest.raises(
        ValueError, match=r"^preset kimi-k3: .*what else Kimi K3 adds.*text_config.routed_expert_hidden"
    ):
        parameters("kimi-k3")


def test_presets_that_are_not_counted_are_known() -> None:
    def refused(name: str) -> bool:
        try:
            return parameters(name) < 1
        except ValueError:
            return True

    assert [name for name in PRESETS if refused(name)] == ["kimi-k3"]


def test_a_head_tied_by_the_model_around_it_counts_once() -> None:
    """Models of pictures say it beside their text_config, and older ones by their class alone."""
    text = {"model_type": "qwen3", **SIZES}
    alone = parameters(text)
    assert parameters({"model_type": "lighton_ocr", "text_config": text}) == alone - 97 * 64
    assert parameters({"model_type": "lighton_ocr", "tie_word_embeddings": False, "text_config": text}) == alone
    assert parameters({"model_type": "fast_vlm", "text_config": {**text, "model_type": "qwen3"}}) == alone


def test_counting_imports_no_torch() -> None:
    program = "import sys; from attn_variants.architectures import parameters; parameters('deepseek-v3'); " + (
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
