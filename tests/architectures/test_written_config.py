"""The config.json that a decoder is written to, for a transformers class that computes the same; and back."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from attn_variants.architectures import decoder_config, hf_config
from attn_variants.config import (
    DecoderConfig,
    ExpandedMLAConfig,
    Geometry,
    GQAConfig,
    MHAConfig,
    MLAConfig,
    MQAConfig,
)
from attn_variants.rope_config import RopeConfig

GEOMETRY = Geometry(
    layers=3,
    hidden_size=48,
    heads=6,
    kv_heads=2,
    head_dim=8,
    kv_lora_rank=20,
    q_lora_rank=14,
    qk_rope_head_dim=4,
    qk_nope_head_dim=10,
    v_head_dim=12,
    intermediate_size=40,
    vocab_size=50,
)


def decoders() -> list[DecoderConfig]:
    gqa = DecoderConfig.from_geometry(GEOMETRY, GQAConfig)
    mla = DecoderConfig.from_geometry(GEOMETRY, MLAConfig)
    assert isinstance(gqa.attention, GQAConfig)
    assert isinstance(mla.attention, MLAConfig)
    yarn = RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, truncate=False)
    llama3 = RopeConfig(500.0, rope_type="llama3", factor=8.0, original_max_position_embeddings=32)

    def windows(attention: GQAConfig, *widths: int | None) -> tuple[GQAConfig, ...]:
        return tuple(replace(attention, sliding_window=width) for width in widths)

    return [
        gqa,
        DecoderConfig.from_geometry(GEOMETRY, MHAConfig),
        DecoderConfig.from_geometry(GEOMETRY, MQAConfig),
        replace(gqa, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_ids=(3, 4)),
        replace(gqa, mlp_bias=True, attention=replace(gqa.attention, attention_bias=True, output_bias=True)),
        replace(gqa, attention=replace(gqa.attention, attention_bias=True)),
        replace(gqa, attention=replace(gqa.attention, qk_norm=True)),
        replace(gqa, attention=replace(gqa.attention, hidden_size=50)),
        replace(gqa, attention=replace(gqa.attention, rope=llama3)),
        replace(gqa, attention=replace(gqa.attention, rope=RopeConfig(rope_type="linear", factor=2.5))),
        replace(gqa, attention=replace(gqa.attention, sliding_window=9)),
        replace(gqa, attention=windows(gqa.attention, 9, None, 9)),
        replace(gqa, attention=windows(replace(gqa.attention, attention_bias=True), None, 9, 9)),
        replace(gqa, attention=windows(replace(gqa.attention, qk_norm=True), 9, None, None)),
        replace(gqa, attention=replace(gqa.attention, qk_norm=True, sliding_window=9)),
        mla,
        replace(mla, attention=replace(mla.attention, q_lora_rank=None, attention_bias=True)),
        replace(mla, attention=replace(mla.attention, rope=replace(yarn, interleaved=True, mscale_all_dim=1.0))),
        replace(mla, attention=replace(mla.attention, rope=yarn)),
        replace(mla, mlp_bias=True),
    ]


@pytest.mark.parametrize("config", decoders(), ids=range(len(decoders())))
def test_a_written_config_reads_back_as_it_was(config: DecoderConfig) -> None:
    assert decoder_config(hf_config(config)) == config


def test_the_class_is_chosen_by_the_features() -> None:
    written = [hf_config(config)["model_type"] for config in decoders()]
    assert written == [
        *("llama", "llama", "llama", "llama", "llama", "qwen2", "qwen3", "mistral", "llama", "llama"),
        *("mistral", "ministral", "qwen2", "qwen3", "qwen3"),
        *("deepseek_v3", "deepseek_v3", "deepseek_v3", "deepseek_v3", "deepseek_v2"),
    ]


@pytest.mark.parametrize("config", decoders(), ids=range(len(decoders())))
def test_transformers_builds_the_written_config_and_reads_the_same_from_its_own(config: DecoderConfig) -> None:
    transformers = pytest.importorskip("transformers")
    written = hf_config(config)
    built = transformers.AutoConfig.for_model(**written)
    assert decoder_config({**built.to_dict(), "architectures": written["architectures"]}) == config


def test_mla_that_caches_expanded_keys_is_written_as_mla() -> None:
    expanded = DecoderConfig.from_geometry(GEOMETRY, ExpandedMLAConfig)
    assert hf_config(expanded) == hf_config(DecoderConfig.from_geometry(GEOMETRY, MLAConfig))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"output_bias": True}, "attention.output_bias = True"),
        ({"rope": RopeConfig(interleaved=True)}, "attention.rope.interleaved = True"),
        ({"rope": RopeConfig(partial_rotary_factor=0.5)}, "attention.rope.partial_rotary_factor = 0.5"),
        ({"rope": None}, "attention.rope"),
        ({"qk_norm": True, "rms_norm_eps": 1e-3}, "attention.rms_norm_eps = 0.001"),
        ({"attention_sink": True}, "attention.attention_sink = True"),
        ({"attn_logit_softcapping": 50.0}, "attention.attn_logit_softcapping = 50.0"),
        ({"attention_chunk_size": 8}, "attention.attention_chunk_size = 8"),
        ({"sliding_window": 8, "sink_tokens": 4}, "attention.sink_tokens = 4"),
        ({"softmax_scale": 1.0}, "attention.softmax_scale = 1.0"),
        ({"v_norm": True}, "attention.v_norm = True"),
    ],
)
def test_what_no_transformers_class_computes_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    config = DecoderConfig.from_geometry(GEOMETRY, GQAConfig)
    assert isinstance(config.attention, GQAConfig)
    with pytest.raises(ValueError, match="no transformers class computes this decoder") as refusal:
        hf_config(replace(config, attention=replace(config.attention, **changes)))
    assert says in str(refusal.value)


def test_readers_that_know_no_layer_types_find_the_same_windows() -> None:
    gqa = DecoderConfig.from_geometry(GEOMETRY, GQAConfig)
    assert isinstance(gqa.attention, GQAConfig)
    late = tuple(replace(gqa.attention, qk_norm=True, sliding_window=width) for width in (None, 9, 9))
    written = hf_config(replace(gqa, attention=late))
    assert (written["use_sliding_window"], written["sliding_window"], written["max_window_layers"]) == (True, 9, 1)
    del written["layer_types"]
    assert decoder_config(written).attention == late
    assert "layer_types" not in hf_config(replace(gqa, attention=replace(gqa.attention, sliding_window=9)))


def test_layers_that_no_transformers_class_combines_are_refused_by_field() -> None:
    gqa = DecoderConfig.from_geometry(GEOMETRY, GQAConfig)
    mla = DecoderConfig.from_geometry(GEOMETRY, MLAConfig)
    assert isinstance(gqa.attention, GQAConfig)
    plain = gqa.attention
    for layers, says in (
        ([replace(plain, sliding_window=width) for width in (8, 9, None)], r"sliding_window = \(8, 9, None\)"),
        ([plain, plain, replace(plain, kv_shared_layer=1)], r"kv_shared_layer = \(None, None, 1\)"),
        ([plain, plain, replace(plain, rope=None)], "attention.rope"),
        ([plain, plain, mla.attention], r"head_dim = \(8, 8, None\)"),
    ):
        with pytest.raises(ValueError, match=f"no transformers class computes this decoder: .*{says}"):
            hf_config(replace(gqa, attention=tuple(layers)))


def test_latent_attention_with_a_window_is_refused_by_field() -> None:
    mla = DecoderConfig.from_geometry(GEOMETRY, MLAConfig)
    assert isinstance(mla.attention, MLAConfig)
    with pytest.raises(ValueError, match=r"attention\.sliding_window = 8"):
        hf_config(replace(mla, attention=replace(mla.attention, sliding_window=8)))


def test_layers_that_are_alike_are_written_as_one() -> None:
    gqa = DecoderConfig.from_geometry(GEOMETRY, GQAConfig)
    assert hf_config(replace(gqa, attention=gqa.attentions)) == hf_config(gqa)


@dataclass(frozen=True)
class Scaled(GQAConfig):
    """Scores scaled otherwise: the same fields, another computation."""


@dataclass(frozen=True)
class Foreign:
    """A variant of its own."""

    rope: RopeConfig
    hidden_size: int = 32


@pytest.mark.parametrize("attention", [Scaled(32, 4), Foreign(RopeConfig())], ids=["derived", "foreign"])
def test_an_attention_of_somebody_s_own_is_no_class_of_transformers(attention: Any) -> None:
    config = DecoderConfig(vocab_size=50, num_hidden_layers=1, intermediate_size=44, attention=attention)
    with pytest.raises(ValueError, match=f"no transformers class .* its attention is a {type(attention).__name__}"):
        hf_config(config)
