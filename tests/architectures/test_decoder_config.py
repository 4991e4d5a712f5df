"""Which decoder a config.json describes, and what ours does not compute."""

from typing import Any

import pytest

from attn_variants.architectures import architecture, decoder_config
from attn_variants.config import (
    DecoderConfig,
    GQAConfig,
    MHAConfig,
    MLAConfig,
    MQAConfig,
)
from attn_variants.rope_config import RopeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LATENT: dict[str, Any] = {
    **SIZES,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "first_k_dense_replace": 3,
}
FULL, SLIDING = "full_attention", "sliding_attention"
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def attention(config: dict[str, Any]) -> GQAConfig:
    read = decoder_config(config).attention
    assert isinstance(read, GQAConfig)
    return read


def rope(config: dict[str, Any]) -> RopeConfig:
    read = attention({**SIZES, "model_type": "llama", **config}).rope
    assert read is not None
    return read


# The classes


def test_a_llama_is_read_field_by_field() -> None:
    config = {**SIZES, "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": True}
    assert decoder_config(config) == DecoderConfig(
        vocab_size=50,
        num_hidden_layers=3,
        intermediate_size=40,
        attention=GQAConfig(48, 6, 2, 8, rope=RopeConfig(rope_theta=500.0)),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("model_type", "fields", "qkv", "output", "mlp", "qk_norm"),
    [
        ("llama", {}, False, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False, False),
        ("llama", {"mlp_bias": True}, False, False, True, False),
        ("mistral", {"sliding_window": None}, False, False, False, False),
        ("qwen2", {}, True, False, False, False),
        ("qwen3", {}, False, False, False, True),
        ("qwen3", {"attention_bias": True}, True, True, False, True),
    ],
)
def test_where_a_class_has_biases_and_norms(
    model_type: str, fields: dict[str, Any], qkv: bool, output: bool, mlp: bool, qk_norm: bool
) -> None:
    config = decoder_config({**SIZES, "model_type": model_type, **fields})
    assert isinstance(config.attention, GQAConfig)
    found = config.attention
    assert (found.attention_bias, found.output_bias, config.mlp_bias, found.qk_norm) == (qkv, output, mlp, qk_norm)


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("mistral", {}, (4096,) * 3),
        ("mistral", {"sliding_window": None}, (None,) * 3),
        ("mistral", {"sliding_window": 9}, (9,) * 3),
        ("mistral", {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}, (9, None, 9)),
        ("ministral", {"sliding_window": 9}, (9,) * 3),
        ("ministral", {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}, (9, None, 9)),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 1}, (None,) * 3),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 1, "use_sliding_window": True}, (None, 9, 9)),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True}, (None,) * 3),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1}, (None,) * 3),
        ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, (9,) * 3),
        (
            "qwen3",
            {"sliding_window": 9, "use_sliding_window": True, "layer_types": [FULL, FULL, SLIDING]},
            (None, None, 9),
        ),
    ],
)
def test_windows_are_those_of_each_layer(
    model_type: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = {**SIZES, "model_type": model_type, **fields}
    read = decoder_config(config)
    assert tuple(spec.window for spec in read.cache_specs) == windows
    assert read.cache_specs == architecture(config).layers
    assert isinstance(read.attention, tuple) == (len(set(windows)) > 1)


def test_query_and_key_norms_have_the_models_epsilon() -> None:
    assert attention({**SIZES, "model_type": "qwen3", "rms_norm_eps": 1e-3}).rms_norm_eps == 1e-3


@pytest.mark.parametrize(("kv_heads", "variant"), [(6, MHAConfig), (2, GQAConfig), (1, MQAConfig)])
def test_the_variant_bears_the_name_of_its_key_value_heads(kv_heads: int, variant: type[GQAConfig]) -> None:
    assert type(attention({**SIZES, "model_type": "llama", "num_key_value_heads": kv_heads})) is variant


@pytest.mark.parametrize(("model_type", "interleaved"), [("deepseek_v2", True), ("deepseek_v3", True)])
def test_a_dense_deepseek_is_read_field_by_field(model_type: str, interleaved: bool) -> None:
    config = decoder_config({**LATENT, "model_type": model_type, "rms_norm_eps": 1e-3})
    assert config.attention == MLAConfig(
        48, 6, 20, 10, 4, 12, 14, rope=RopeConfig(interleaved=interleaved), rms_norm_eps=1e-6
    )
    assert config.rms_norm_eps == 1e-3


def test_null_for_the_query_rank_is_full_rank_and_missing_is_the_class_default() -> None:
    config = {**LATENT, "model_type": "deepseek_v3"}
    assert decoder_config({**config, "q_lora_rank": None}).attention.q_lora_rank is None  # type: ignore[attr-defined]
    del config["q_lora_rank"]
    assert decoder_config(config).attention.q_lora_rank == 1536  # type: ignore[attr-defined]


def test_the_pairs_of_deepseek_v3_need_not_be_neighbours() -> None:
    found = decoder_config({**LATENT, "model_type": "deepseek_v3", "rope_interleave": False}).attention
    assert isinstance(found, MLAConfig)
    assert not found.rope.interleaved


@pytest.mark.parametrize(
    ("given", "ids"),
    [({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 9]}, (7, 9)), ({"eos_token_id": None}, ()), ({}, (2,))],
)
def test_the_end_of_text_is_a_token_several_or_none(given: dict[str, Any], ids: tuple[int, ...]) -> None:
    assert decoder_config({**SIZES, "model_type": "llama", **given}).eos_token_ids == ids


# Rope


@pytest.mark.parametrize("spelled", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_rope_say_the_same(spelled: str, place: str) -> None:
    given = {"factor": 3.0, spelled: "linear"}
    older = {"rope_theta": 500.0, place: given}
    newer = {place: {**given, "rope_theta": 500.0}}
    assert rope(older) == rope(newer) == RopeConfig(rope_theta=500.0, rope_type="linear", factor=3.0)


def test_the_parameters_of_every_kind_are_read() -> None:
    assert rope({}) == rope({"rope_scaling": None}) == rope({"rope_scaling": {"rope_type": "default"}}) == RopeConfig()
    assert rope({"rope_scaling": LLAMA3}) == RopeConfig(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )
    given = {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1, "truncate": False}
    assert rope({"rope_scaling": {**YARN, **given}}) == RopeConfig(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=1.0,
        truncate=False,
    )


def test_a_missing_original_context_is_the_whole_one_and_a_null_factor_their_ratio() -> None:
    assert rope({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}).original_max_position_embeddings == 256
    assert rope({"rope_scaling": {**YARN, "factor": None}}).factor == 256 / 64


def test_the_deepseek_v2_softmax_scale_follows_mscale_all_dim() -> None:
    def scale(**given: float) -> float:
        sizes = {**LATENT, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        scaling = {**YARN, "factor": 40.0, **given}
        found = decoder_config({**sizes, "model_type": "deepseek_v2", "rope_scaling": scaling}).attention
        assert isinstance(found, MLAConfig)
        return found.scale

    assert scale(mscale=0.707, mscale_all_dim=1.0) == pytest.approx(0.1352338, rel=1e-6)
    assert scale(mscale=0.707) == scale(mscale=0.707, mscale_all_dim=0) == pytest.approx(0.0721688, rel=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_scaling.rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "rope_scaling.factor ('2') must be a positive number",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor (0.5)"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": None}}, "rope_scaling.high_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, "rope_scaling.mrope_section"),
        ({"rope_scaling": {**LLAMA3, "mscale_all_dim": 1.0}}, "rope_scaling.mscale_all_dim (1.0)"),
        ({"rope_scaling": [1]}, "rope_scaling ([1]) must be an object or null"),
        ({"rope_theta": -1.0}, "rope_theta (-1.0) must be a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor (0.5)"),
        ({"hidden_act": "gelu"}, "hidden_act ('gelu') is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping (30.0) is not supported"),
        ({"num_local_experts": 8}, "num_local_experts (8) is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"sliding_window": 64}, "layer 0 sees a window of 64 tokens (sliding_window = 64)"),
        ({"eos_token_id": [1, -1]}, "eos_token_id (-1) must be a token id"),
        ({"eos_token_id": "</s>"}, "eos_token_id ('</s>') must be a token id"),
        ({"bos_token_id": True}, "bos_token_id (True) must be a token id"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps ('small') must be a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings (1) must be true or false"),
        ({"vocab_size": 0}, "vocab_size (0) must be a positive integer"),
        ({"num_key_value_heads": 4}, "num_attention_heads (6) must be a multiple of num_key_value_heads (4)"),
        ({"head_dim": 7}, "head_dim (7)"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"^config: [^\n]+$") as refusal:
        decoder_config({**SIZES, "model_type": "llama", **fields})
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**SIZES, "model_type": "llama", "layer_types": [FULL, FULL, SLIDING], "sliding_window": 8}, "layer 2 sees a"),
        ({**SIZES, "model_type": "mistral", "sliding_window": 0}, "sliding_window (0) must be a positive integer"),
        (
            {**SIZES, "model_type": "mistral", "layer_types": ["chunked_attention"] * 3, "attention_chunk_size": 8},
            "8 tok",
        ),
        ({**SIZES, "model_type": "qwen2", "layer_types": [FULL, SLIDING]}, "layer_types names 2 layers"),
        (
            {**SIZES, "model_type": "qwen3", "layer_types": [FULL, FULL, SLIDING]},
            "config: layer 2 is 'sliding_attention', but its window is null",
        ),
        ({**SIZES, "model_type": "qwen2", "per_layer_config": {"1": {"num_key_value_heads": 3}}}, "per_layer_config"),
        (
            {**LATENT, "model_type": "deepseek_v3", "n_routed_experts": 4, "first_k_dense_replace": 2},
            "n_routed_experts",
        ),
        ({**SIZES, "model_type": "gemma2"}, "model_type 'gemma2' is not one the decoder computes; its cache can be"),
        ({**SIZES, "model_type": "smollm3"}, "model_type 'smollm3'"),
        ({**SIZES, "model_type": "mixtral"}, "model_type 'mixtral'"),
        ({**SIZES, "model_type": "lama"}, "did you mean llama?"),
        (SIZES, "model_type None is not one the decoder computes"),
    ],
)
def test_other_families_windows_and_experts_are_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"^config: (?!config)") as refusal:
        decoder_config(config)
    assert says in str(refusal.value)


@pytest.mark.parametrize("experts", [{"n_routed_experts": None, "first_k_dense_replace": 0}, {"n_routed_experts": 4}])
def test_a_deepseek_whose_layers_are_all_dense_is_read(experts: dict[str, Any]) -> None:
    assert decoder_config({**LATENT, "model_type": "deepseek_v2", **experts}).num_hidden_layers == 3
