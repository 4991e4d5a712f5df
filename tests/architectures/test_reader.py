"""What a config's fields mean for the cache: head dims, key/value heads, windows and latents."""

from typing import Any

import pytest

from attn_variants.architectures import Architecture, architecture
from attn_variants.contract import CacheSpec, Entry, Record

TINY: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}


def growth(found: Architecture) -> int:
    """Bytes in bfloat16 of the first token, all layers: every layer keeps it, windows too."""
    return sum(2 * spec.numel_per_token for spec in found.layers)


def windows(found: Architecture) -> str:
    """One letter per layer: full, window or chunk."""
    return "".join("w" if spec.window else "c" if spec.chunk else "f" for spec in found.layers)


def test_keys_and_values_are_two_records_of_k_heads() -> None:
    found = architecture({**TINY, "model_type": "llama", "num_key_value_heads": 2})
    assert found.layers == (CacheSpec((Record.of(Entry("k", 2, 16)), Record.of(Entry("v", 2, 16)))),) * 4
    assert found.query_heads == (4,) * 4
    assert found.kinds == ("full_attention",) * 4


# Sizes without a model_type


def test_a_declared_head_dim_goes_before_hidden_size_over_heads() -> None:
    qwen3_4b = {"num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert growth(architecture({**qwen3_4b, "head_dim": 128})) == 147_456
    assert growth(architecture(qwen3_4b)) == 92_160


@pytest.mark.parametrize(
    ("fields", "bytes_per_token"),
    [
        ({}, 1024),
        ({"head_dim": None}, 1024),
        ({"head_dim": 16}, 1024),
        ({"head_dim": 8}, 512),
        ({"num_key_value_heads": None}, 1024),
        ({"num_key_value_heads": 4}, 1024),
        ({"num_key_value_heads": 2}, 512),
    ],
)
def test_without_a_model_type_null_means_missing(fields: dict[str, Any], bytes_per_token: int) -> None:
    assert growth(architecture({**TINY, **fields})) == bytes_per_token


def test_the_width_of_keys_is_k_times_d_whatever_the_order_of_division() -> None:
    found = architecture(
        {"num_hidden_layers": 1, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8}
    )
    assert [entry.numel for entry in found.layers[0].entries] == [1024, 1024]


@pytest.mark.parametrize("model_type", [{}, {"model_type": "gpt_bigcode"}])
def test_multi_query_is_one_key_value_head(model_type: dict[str, str]) -> None:
    starcoder = {"n_layer": 40, "n_head": 48, "n_embd": 6144, **model_type}
    assert growth(architecture({**starcoder, "multi_query": True})) == 20_480
    assert growth(architecture({**starcoder, "multi_query": False})) == 983_040


def test_latent_attention_is_not_priced_by_its_heads() -> None:
    deepseek_v3 = {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    assert growth(architecture(deepseek_v3)) == growth(architecture({**deepseek_v3, "model_type": "deepseek_v3"}))
    assert growth(architecture(deepseek_v3)) == 70_272
    assert not any(entry.sharded for spec in architecture(deepseek_v3).layers for entry in spec.entries)


def test_a_latent_of_an_unknown_kind_gets_no_number() -> None:
    with pytest.raises(ValueError, match="q_lora_rank without kv_lora_rank is latent attention of an unknown kind"):
        architecture({**TINY, "q_lora_rank": 24})


@pytest.mark.parametrize(
    "field",
    [
        {"mamba_d_state": 16},
        {"index_topk": 2048},
        {"num_kv_shared_layers": 2},
        {"layers_block_type": ["attention"]},
        {"global_head_dim": 512},
        {"is_encoder_decoder": True},
        {"text_config": {"num_hidden_layers": 2}},
    ],
)
def test_without_a_model_type_a_sign_of_other_attention_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give model_type") as refusal:
        architecture({**TINY, **field})
    assert next(iter(field)) in str(refusal.value)


# Missing and null differ by family


@pytest.mark.parametrize(
    ("model_type", "missing", "null"),
    [
        ("llama", 4, 4),
        ("mistral", 8, None),
        ("qwen2", 32, 4),
        ("gemma2", 4, None),
        ("ernie4_5", 2, 4),
        ("glm", 2, None),
    ],
)
def test_missing_key_value_heads_are_the_class_default_and_null_its_own_rule(
    model_type: str, missing: int, null: int | None
) -> None:
    config = {**TINY, "model_type": model_type, "num_attention_heads": missing, "head_dim": 16}
    assert architecture(config).layers[0].entries[0].heads == missing
    config = {**TINY, "model_type": model_type, "head_dim": 16, "num_key_value_heads": None}
    if null is None:
        with pytest.raises(ValueError, match="num_key_value_heads is null, which this model_type does not take"):
            architecture(config)
    else:
        assert architecture(config).layers[0].entries[0].heads == null


@pytest.mark.parametrize(("model_type", "head_dim"), [("llama", 16), ("qwen3", 128), ("gemma", 256), ("gpt_oss", 64)])
def test_a_missing_head_dim_is_the_class_default(model_type: str, head_dim: int) -> None:
    found = architecture({**TINY, "model_type": model_type, "num_key_value_heads": 2})
    assert {entry.dim for entry in found.layers[0].entries} == {head_dim}


@pytest.mark.parametrize(("model_type", "kept"), [("gpt2", 16), ("qwen3_moe", 20), ("phi3", 20)])
def test_a_head_dim_the_class_does_not_know_is_kept_by_some_and_ignored_by_others(model_type: str, kept: int) -> None:
    found = architecture({**TINY, "model_type": model_type, "num_key_value_heads": 4, "head_dim": 20})
    assert found.layers[0].entries[0].dim == kept


def test_a_head_dim_that_breaks_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be hidden_size / num_attention_heads .*head_dim = 20"):
        architecture({**TINY, "model_type": "olmoe", "head_dim": 20})


# Windows


def test_a_window_caps_a_layer_and_does_not_drop_it() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    fields = {**TINY, "num_hidden_layers": 6, "num_key_value_heads": 2, "layer_types": kinds, "sliding_window": 9}
    found = architecture(fields)
    assert windows(found) == "wwwwwf"
    assert growth(found) == 768


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"model_type": "mistral"}, "wwww"),
        ({"model_type": "mistral", "sliding_window": None}, "ffff"),
        ({"model_type": "qwen2", "sliding_window": 5, "max_window_layers": 3}, "ffff"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}, "fffw"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}, "wfwf"),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 5}, "wwww"),
        ({"model_type": "gemma2"}, "wfwf"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, "wwfw"),
        ({"model_type": "gpt_oss"}, "wfwf"),
        ({"model_type": "cohere2"}, "wwwf"),
        ({"model_type": "llama4_text"}, "cccf"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0, 0, 1]}, "cffc"),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, "ffff"),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 5}, "fffw"),
        ({"model_type": "laguna"}, "ffff"),
        ({"model_type": "llama", "sliding_window": 5}, "wwww"),
        ({"use_sliding_window": False, "sliding_window": 5}, "ffff"),
        ({"sliding_window": 1000}, "wwww"),
        ({"sliding_window": None}, "ffff"),
    ],
)
def test_which_layers_slide(fields: dict[str, Any], seen: str) -> None:
    found = architecture({**TINY, "num_attention_heads": 32, "head_dim": 16, "num_key_value_heads": 2, **fields})
    assert windows(found) == seen


def test_without_a_model_type_it_is_not_known_which_layers_slide() -> None:
    config = {**TINY, "sliding_window": 5, "max_window_layers": 2}
    assert windows(architecture({**config, "use_sliding_window": False})) == "ffff"
    with pytest.raises(ValueError, match=r"max_window_layers says which layers slide by a rule .*: give model_type"):
        architecture({**config, "use_sliding_window": True})


@pytest.mark.parametrize("window", [0, -4, 2.5, "5", True, [5]])
def test_a_window_is_a_positive_integer(window: Any) -> None:
    with pytest.raises(ValueError, match=r"sliding_window \(.*\) must be a positive integer"):
        architecture({**TINY, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": window})


def test_a_layer_that_slides_needs_a_window() -> None:
    config = {**TINY, "model_type": "gemma2", "num_key_value_heads": 2, "sliding_window": None}
    with pytest.raises(ValueError, match="layer 0 is 'sliding_attention', but sliding_window is null: give"):
        architecture(config)


def test_bidirectional_windows_reach_half_as_far_back() -> None:
    fields = {**TINY, "model_type": "gemma3_text", "num_key_value_heads": 2, "sliding_window": 512}
    assert architecture(fields).layers[0].window == 512
    assert architecture({**fields, "use_bidirectional_attention": True}).layers[0].window == 257


def test_keys_and_values_may_differ_in_width_and_layers_in_heads() -> None:
    found = architecture(
        {
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 2,
            "num_attention_heads": 12,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "v_head_dim": 7,
            "sliding_window_size": 5,
        }
    )
    assert [(entry.heads, entry.dim) for entry in found.layers[0].entries] == [(3, 10), (3, 7)]
    assert [(entry.heads, entry.dim) for entry in found.layers[1].entries] == [(6, 10), (6, 7)]
    assert [spec.window for spec in found.layers] == [None, 6]


def test_one_layer_may_have_sizes_of_its_own() -> None:
    config = {**TINY, "model_type": "llama", "per_layer_config": {"02": {"head_dim": 24, "num_key_value_heads": 1}}}
    assert [spec.numel_per_token for spec in architecture(config).layers] == [128, 128, 48, 128]


def test_a_layer_counted_twice_keeps_two_caches() -> None:
    found = architecture({"model_type": "longcat_flash", "num_layers": 3, "kv_lora_rank": 20, "qk_rope_head_dim": 4})
    assert (found.num_hidden_layers, len(found.layers)) == (3, 6)


# What a library's own cache keeps


def test_a_cache_may_hold_more_than_the_model_needs() -> None:
    falcon_40b = {
        "model_type": "falcon",
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    }
    assert growth(architecture(falcon_40b)) == 122_880
    assert growth(architecture(falcon_40b, held_by="transformers")) == 16 * 122_880


def test_who_holds_the_cache_must_be_known() -> None:
    with pytest.raises(ValueError, match="held_by"):
        architecture("smollm2-135m", held_by="vllm")


# Nested configs


def test_the_text_part_of_a_nested_config_is_read() -> None:
    outer = {"model_type": "llava", "text_config": {**TINY, "model_type": "llama"}, "vision_config": {"hidden_size": 7}}
    assert architecture(outer).layers == architecture({**TINY, "model_type": "llama"}).layers


def test_a_nested_config_without_a_model_type_is_of_the_outer_ones_kind() -> None:
    found = architecture({"model_type": "gemma3", "text_config": {"num_hidden_layers": 6, "sliding_window": 512}})
    assert (found.model_type, windows(found)) == ("gemma3_text", "wwwwwf")
    assert found.layers[0].entries == (Entry("k", 4, 256), Entry("v", 4, 256))


def test_fields_of_a_nested_config_are_named_with_their_place() -> None:
    with pytest.raises(ValueError, match=r"text_config\.num_hidden_layers \(0\) must be a positive integer"):
        architecture({"model_type": "llava", "text_config": {"num_hidden_layers": 0}})
    with pytest.raises(ValueError, match=r"text_config\.model_type 'lama' is not known; did you mean llama"):
        architecture({"model_type": "llava", "text_config": {"model_type": "lama"}})
    with pytest.raises(ValueError, match="text_config of model_type 'llava' must be an object"):
        architecture({"model_type": "llava", "text_config": [1]})


def test_a_nested_config_that_contradicts_the_outer_one_is_refused() -> None:
    outer = {"model_type": "llava", "num_hidden_layers": 5, "text_config": {**TINY, "model_type": "llama"}}
    with pytest.raises(ValueError, match=r"num_hidden_layers \(5\) and text_config.num_hidden_layers \(4\) contradict"):
        architecture(outer)


def test_two_names_of_one_field_must_agree() -> None:
    assert architecture({"model_type": "gpt2", "n_layer": 3, "num_hidden_layers": 3}).num_hidden_layers == 3
    with pytest.raises(ValueError, match=r"n_layer \(3\) and num_hidden_layers \(4\) contradict each other"):
        architecture({"model_type": "gpt2", "n_layer": 3, "num_hidden_layers": 4})
