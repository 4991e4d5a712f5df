"""Configs: derived sizes, and sizes that are refused by field, value and remedy."""

import pytest

from attn_variants import (
    VARIANTS,
    DecoderConfig,
    ExpandedMLAConfig,
    Geometry,
    GQAConfig,
    MHAConfig,
    MLAConfig,
    MQAConfig,
    RopeConfig,
)

GQA = {"hidden_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
MLA = {
    "hidden_size": 32,
    "num_attention_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "q_lora_rank": 18,
}
DECODER = {"vocab_size": 50, "num_hidden_layers": 2, "intermediate_size": 44, "max_position_embeddings": 64}
BAD_SIZES = [0, -3, 2.0, True, "8"]


def test_a_missing_head_dim_is_hidden_over_heads_and_missing_kv_heads_are_all():
    config = GQAConfig(hidden_size=64, num_attention_heads=4)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    assert config == GQAConfig(64, 4, None, None) == GQAConfig(64, 4, 4, 16)
    assert (config.dim, config.kv_heads) == (16, 4)


def test_a_given_head_dim_is_not_derived():
    config = GQAConfig(hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    assert config.dim == 128
    assert config.cache_spec().numel_per_token == 2 * 8 * 128


def test_division_happens_once():
    config = GQAConfig(hidden_size=5120, num_attention_heads=40, num_key_value_heads=8)
    assert (config.dim, config.kv_heads * config.dim) == (128, 1024)


def test_multi_head_and_multi_query_fill_in_their_kv_heads():
    assert MHAConfig(32, 4).kv_heads == 4
    assert MQAConfig(6144, 48).kv_heads == 1
    assert MQAConfig(6144, 48).dim == 128


@pytest.mark.parametrize("field", GQA)
@pytest.mark.parametrize("value", BAD_SIZES)
def test_sizes_of_grouped_query_attention_are_positive_integers(field, value):
    with pytest.raises(ValueError, match=rf"{field} \({value!r}\) must be a"):
        GQAConfig(**GQA | {field: value})


@pytest.mark.parametrize("config", [MLAConfig, ExpandedMLAConfig])
@pytest.mark.parametrize("field", MLA)
@pytest.mark.parametrize("value", BAD_SIZES)
def test_sizes_of_latent_attention_are_positive_integers(config, field, value):
    with pytest.raises(ValueError, match=rf"{field} \({value!r}\) must be a"):
        config(**MLA | {field: value})


@pytest.mark.parametrize("field", DECODER)
@pytest.mark.parametrize("value", BAD_SIZES)
def test_sizes_of_a_decoder_are_positive_integers(field, value):
    with pytest.raises(ValueError, match=rf"{field} \({value!r}\) must be a"):
        DecoderConfig(**DECODER | {"attention": GQAConfig(**GQA)} | {field: value})


@pytest.mark.parametrize("value", BAD_SIZES)
def test_sizes_of_a_geometry_are_positive_integers(value):
    with pytest.raises(ValueError, match=rf"kv_heads \({value!r}\) must be a"):
        Geometry(kv_heads=value)
    with pytest.raises(ValueError, match=rf"q_lora_rank \({value!r}\) must be a"):
        MLAConfig.from_geometry(Geometry(q_lora_rank=value))


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (
            GQAConfig,
            {"num_key_value_heads": 4},
            r"num_attention_heads \(6\) must be a multiple of num_key_value_heads \(4\)",
        ),
        (
            GQAConfig,
            {"num_key_value_heads": 12},
            r"num_attention_heads \(6\) must be a multiple of num_key_value_heads \(12\)",
        ),
        (
            GQAConfig,
            {"head_dim": None},
            r"hidden_size \(32\) must be a multiple of num_attention_heads \(6\) when head_dim",
        ),
        (GQAConfig, {"head_dim": 7}, r"head_dim \(7\) = 7, must be even"),
        (
            GQAConfig,
            {"rope": RopeConfig(partial_rotary_factor=0.4)},
            r"\(8\) \* partial_rotary_factor \(0\.4\) = 3, must",
        ),
        (MHAConfig, {}, r"multi-head.*num_attention_heads \(6\), got 2; use GQAConfig"),
        (MQAConfig, {}, r"multi-query.*num_key_value_heads = 1, got 2; use GQAConfig"),
    ],
)
def test_heads_that_do_not_fit_are_refused(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config(**GQA | fields)


def test_an_odd_rope_dim_of_latent_attention_is_refused():
    with pytest.raises(ValueError, match=r"qk_rope_head_dim \(5\) = 5, must be even"):
        MLAConfig(**MLA | {"qk_rope_head_dim": 5})


def test_without_rope_an_odd_head_dim_is_fine():
    assert GQAConfig(**GQA | {"head_dim": 7, "rope": None}).dim == 7


def test_the_softmax_scale_of_latent_attention():
    # 128 + 64 = 192 numbers of a query meet as many of a key: neither 1/sqrt(128) nor 1/sqrt(576).
    deepseek = MLAConfig(7168, 128)
    assert deepseek.scale == pytest.approx(0.0721688, abs=1e-7)
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    for mscales, scale in (
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, 0.1352338),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 0.1147214),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, 0.0721688),
        ({"mscale": 0.707}, 0.0721688),
        ({}, 0.0721688),
    ):
        assert MLAConfig(7168, 128, rope=RopeConfig(**yarn, **mscales)).scale == pytest.approx(scale, abs=1e-7)


def test_the_defaults_of_latent_attention_are_deepseeks():
    config = MLAConfig(7168, 128)
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (
        512,
        128,
        64,
        128,
    )
    assert config.qk_head_dim == 192
    assert config.rope.interleaved


@pytest.mark.parametrize("name", VARIANTS)
def test_a_geometry_changes_the_variant_and_nothing_else(name):
    geometry = Geometry(layers=3, hidden_size=36, heads=6, kv_heads=2, head_dim=8, intermediate_size=44, vocab_size=50)
    config = DecoderConfig.from_geometry(geometry, VARIANTS[name].config, tie_word_embeddings=True)
    assert type(config.attention) is VARIANTS[name].config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.vocab_size) == (
        36,
        3,
        44,
        50,
    )
    assert config.tie_word_embeddings
    assert config.cache_specs == (config.attention.cache_spec(),) * 3


@pytest.mark.parametrize("name", VARIANTS)
def test_configs_are_values(name):
    make = VARIANTS[name].config.from_geometry
    assert make(Geometry()) == make(Geometry())
    assert hash(make(Geometry())) == hash(make(Geometry()))
    with pytest.raises(AttributeError):
        make(Geometry()).hidden_size = 1
