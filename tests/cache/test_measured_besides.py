"""Caches of transformers 5.24 that the shared rows do not have, measured like them, to the byte."""

import pytest

from attn_variants.cache import model_cache

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
KOSMOS = {"embed_dim": 64, "layers": 3, "attention_heads": 4}
DIFFUSION = SMALL | {"num_hidden_layers": 7, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8}
MODERNBERT = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "sliding_window": 8}


def _bytes(config, context, store=None):
    return model_cache(config).bytes(batch=2, context=context, policy="transformers", store=store)


@pytest.mark.parametrize(
    ("config", "at_21", "at_23"),
    [
        ({"model_type": "chameleon", **SMALL, "head_dim": 99}, 16128, 17664),
        ({"model_type": "csm", **SMALL}, 16128, 17664),
        ({"model_type": "diffusion_gemma", "text_config": DIFFUSION}, 30464, 32512),
        ({"model_type": "gradium_phonon_tts", **SMALL, "num_key_value_heads": None}, 32256, 35328),
        ({"model_type": "higgs_audio_v2", **SMALL, "head_dim": 24}, 24192, 26496),
        ({"model_type": "imagegpt", "n_embd": 64, "n_layer": 3, "n_head": 4}, 32256, 35328),
        ({"model_type": "kosmos-2.5", "text_config": KOSMOS}, 32256, 35328),
        ({"model_type": "pocket_tts", **SMALL, "num_key_value_heads": None}, 32256, 35328),
        # `sliding_window` goes before half of `local_attention`, which is its default.
        ({"model_type": "modernbert-decoder", **MODERNBERT}, 35840, 37888),
        # It makes 32 states, whatever the number of blocks.
        ({"model_type": "xlstm", "hidden_size": 128, "num_heads": 4, "num_blocks": 2}, 270856, 270856),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_bytes_of_a_prompt_of_21_tokens_and_after_two_more(config, at_21, at_23):
    assert (_bytes(config, 21), _bytes(config, 23)) == (at_21, at_23)


def test_a_dynamic_window_of_one_token_drops_nothing():
    """It keeps W - 1 = 0 tokens by the slice `[-0:]`, which is all of them."""
    config = {"model_type": "mistral", **SMALL, "head_dim": 24, "sliding_window": 1}
    every = 2 * 3 * 2 * 2 * 24 * 2
    assert _bytes(config, 23) == 23 * every
    assert _bytes(config, 23, "static") == every


@pytest.mark.parametrize("model_type", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_text_config_may_lie_two_keys_deep(model_type):
    config = {"model_type": model_type, "thinker_config": {"text_config": SMALL | {"head_dim": 16}}}
    assert _bytes(config, 21) == 16128
    config["thinker_config"]["text_config"] = SMALL | {"num_key_value_heads": 3}
    with pytest.raises(ValueError, match=r"thinker_config\.text_config\.num_key_value_heads \(3\)"):
        _bytes(config, 21)
    config["thinker_config"] = {}
    with pytest.raises(ValueError, match=r"thinker_config\.text_config is missing"):
        _bytes(config, 21)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "diffllama", **SMALL, "num_key_value_heads": 1}, r"num_key_value_heads must be even"),
        (
            {"model_type": "dory", **SMALL, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 3},
            "n_input_layers, n_recurrent_layers and n_output_layers must add up",
        ),
        (
            {
                "model_type": "kimi_linear",
                **SMALL,
                "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3, 6]},
            },
            "must name every layer once",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_transformers_refuses_to_build_has_no_size(config, message):
    with pytest.raises(ValueError, match=message):
        _bytes(config, 21)
