"""Layers that keep states, indexer keys or pooled entries, share a cache, run in loops, or keep nothing."""

from typing import Any

import pytest

from attn_variants.architectures import architecture
from attn_variants.architectures.strided import StridedSpec, kept_entries, strided_entries
from attn_variants.contract import CacheSpec, Entry, Record, State

GQA: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
LATENT: dict[str, Any] = {"num_attention_heads": 4, "kv_lora_rank": 20, "qk_rope_head_dim": 6, "index_head_dim": 16}


def kinds(config: dict[str, Any]) -> str:
    """One letter per slot: attention, state, both or nothing."""
    letters = {(True, False): "a", (False, True): "s", (True, True): "b", (False, False): "-"}
    return "".join(letters[bool(spec.records), bool(spec.states)] for spec in architecture(config).layers)


# States


def test_the_delta_rule_keeps_a_matrix_per_value_head_and_the_tail_of_its_convolution() -> None:
    config = {
        **GQA,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 12,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 5,
    }
    assert kinds(config) == "sssa"
    # Queries and keys of two heads and values of six, over the four tokens before the newest.
    assert architecture(config).layers[0] == CacheSpec(
        states=(
            State("conv", (2 * 2 * 12 + 6 * 20, 4), sharded=((2 * 2 * 12, 2), (6 * 20, 6))),
            State("delta", (6, 12, 20), "float32", sharded=((6, 6),)),
        )
    )
    held = architecture(config, held_by="transformers").layers[0]
    assert held.states[0].shape == (168, 5)
    assert held.states[1] == State("delta", (6, 12, 20), "float32", sharded=((6, 6),))


def test_kimi_counts_its_layers_from_one() -> None:
    linear = {
        "full_attn_layers": [2, 3],
        "kda_layers": [1, 4],
        "head_dim": 8,
        "num_heads": 3,
        "short_conv_kernel_size": 5,
    }
    config = {**LATENT, "model_type": "kimi_linear", "num_hidden_layers": 4, "linear_attn_config": linear}
    assert kinds(config) == "saas"
    assert architecture(config).layers[0].states == (
        State("conv", (3 * 3 * 8, 4), sharded=((3 * 3 * 8, 3),)),
        State("delta", (3, 8, 8), "float32", sharded=((3, 3),)),
    )
    assert architecture(config).layers[1].numel_per_token == 26


def test_mamba_2_convolves_its_inputs_and_both_projections() -> None:
    config = {
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "hidden_size": 20,
        "num_heads": 5,
        "head_dim": 8,
        "n_groups": 3,
        "state_size": 7,
        "conv_kernel": 4,
    }
    assert architecture(config).layers[0].states == (
        State("conv", (40 + 2 * 3 * 7, 3), sharded=((40, 5), (2 * 3 * 7, 3))),
        State("ssm", (5, 8, 7), "float32", sharded=((5, 5),)),
    )
    with pytest.raises(ValueError, match=r"expand \* hidden_size must be num_heads \* head_dim .*num_heads = 6"):
        architecture({**config, "num_heads": 6})


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*EM"}, "s-a-s"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp", "attention"]}, "s-a"),
        ({"model_type": "jamba", "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1}, "sassa"),
        ({"model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [2]}, "ssas"),
        ({"model_type": "falcon_h1", "num_hidden_layers": 2}, "bb"),
        ({"model_type": "zamba2", "num_hidden_layers": 8, "layers_block_type": ["mamba", "hybrid"] * 4}, "sbsbsbsb"),
        ({"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}, "sa"),
        ({"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [1]}, "sass"),
        ({"model_type": "recurrent_gemma", "num_hidden_layers": 4}, "ssas"),
        ({"model_type": "minimax", "num_hidden_layers": 4}, "asas"),
        ({"model_type": "rwkv", "num_hidden_layers": 3}, "sss"),
        ({"model_type": "mllama_text_model", "num_hidden_layers": 4, "cross_attention_layers": [1]}, "a-aa"),
    ],
)
def test_which_layers_keep_tokens_and_which_a_state(config: dict[str, Any], seen: str) -> None:
    assert kinds({**GQA, "mamba_d_ssm": 128, **config}) == seen


def test_a_hybrid_layer_may_slide() -> None:
    config = {**GQA, "model_type": "zaya", "sliding_window": 9, "num_hidden_layers": 2}
    found = architecture({**config, "layer_types": ["hybrid", "hybrid_sliding"]}).layers
    assert [spec.window for spec in found] == [None, 9]
    assert found[0].states == found[1].states


def test_a_prefix_is_a_state_of_its_own() -> None:
    config = {
        "model_type": "cpmant",
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "dim_head": 8,
        "prompt_length": 5,
    }
    assert architecture(config).layers[0].states == (
        State("prompt_k", (3, 5, 8), sharded=((3, 3),)),
        State("prompt_v", (3, 5, 8), sharded=((3, 3),)),
    )


# Indexers


def test_an_indexer_keeps_one_key_beside_the_latent_and_no_rank_divides_it() -> None:
    found = architecture({**LATENT, "model_type": "deepseek_v32", "num_hidden_layers": 1}).layers[0]
    assert [record.name for record in found.records] == ["kv", "index_k"]
    assert found.records[1] == Record.of(Entry("index_k", 1, 16, sharded=False))


@pytest.mark.parametrize(
    ("fields", "widths"),
    [
        ({}, [42, 42, 42, 42, 42, 42]),
        ({"index_topk_freq": 3}, [42, 42, 26, 26, 42, 26]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, [26, 42, 26, 42, 26, 42]),
        ({"index_topk_pattern": "FSSFSS"}, [42, 26, 26, 42, 26, 26]),
        ({"indexer_types": ["shared", "full"] * 3}, [26, 42, 26, 42, 26, 42]),
    ],
)
def test_layers_that_share_a_choice_keep_no_indexer_key(fields: dict[str, Any], widths: list[int]) -> None:
    found = architecture({**LATENT, "model_type": "glm_moe_dsa", "num_hidden_layers": 6, **fields})
    assert [spec.numel_per_token for spec in found.layers] == widths


def test_an_indexer_may_stand_beside_grouped_keys() -> None:
    sparse = {"sparse_index_dim": 10, "sparse_attention_freq": [0, 1, 1]}
    config = {**GQA, "model_type": "minimax_m3", "num_hidden_layers": 3, "sparse_attention_config": sparse}
    assert [spec.numel_per_token for spec in architecture(config).layers] == [96, 106, 106]


# Pooled strides

V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 24,
    "index_head_dim": 16,
    "sliding_window": 8,
}


def strides(spec: CacheSpec, tokens: int) -> dict[str, int]:
    """Numbers in strides by entry."""
    return {entry.name: count * entry.numel for entry, count in strided_entries(spec, tokens) if count}


def test_deepseek_v4_keeps_a_window_and_pools_the_rest() -> None:
    config = {**V4, "compress_ratios": [0, 128, 4, 4], "compress_rates": {"heavily_compressed_attention": 9}}
    plain, heavy, sparse = architecture(config).layers
    assert [spec.window for spec in (plain, heavy, sparse)] == [8, 8, 8]
    assert [spec.numel_per_token for spec in (plain, heavy, sparse)] == [24, 24, 24]
    assert not isinstance(plain, StridedSpec)
    # 30 tokens are 3 strides of 9 and 3 tokens more.
    assert strides(heavy, 30) == {"compressed": 3 * 24, "pending_kv": 3 * 24, "pending_gate": 3 * 24}
    # 30 tokens are 7 strides of 4 and 2 tokens more, whose strides overlap.
    assert strides(sparse, 30) == {
        "compressed": 7 * 24,
        "index_k": 7 * 16,
        "pending_kv": 2 * 48,
        "pending_gate": 2 * 48,
        "pending_index_kv": 2 * 32,
        "pending_index_gate": 2 * 32,
        "overlap_kv": 4 * 24,
        "overlap_gate": 4 * 24,
        "overlap_index_kv": 4 * 16,
        "overlap_index_gate": 4 * 16,
    }
    # Three tokens complete no stride, so nothing overlaps yet.
    assert "overlap_kv" not in strides(sparse, 3)


def test_entries_in_strides_are_counted_by_one_function_alone() -> None:
    heavy = architecture({**V4, "compress_ratios": [128] * 3, "compress_rate_hca": 9}).layers[0]
    counted = {entry.name: count for entry, count in kept_entries(heavy, 30)}
    assert counted == {"kv": 8, "compressed": 3, "pending_kv": 3, "pending_gate": 3}
    with pytest.raises(ValueError, match="counted by kept_entries"):
        heavy.visible_tokens(30)


def test_deepseek_v4s_keys_are_its_values_but_transformers_keeps_both() -> None:
    config = {**V4, "compress_ratios": [0, 0, 0]}
    assert architecture(config).layers[0].numel_per_token == 24
    assert architecture(config, held_by="transformers").layers[0].numel_per_token == 48


# Shared caches and loops


def test_the_last_layers_of_gemma_read_the_last_cache_of_their_kind() -> None:
    config = {
        **GQA,
        "model_type": "gemma3n_text",
        "num_hidden_layers": 8,
        "num_kv_shared_layers": 3,
        "sliding_window": 9,
    }
    listed = ["sliding_attention", "full_attention"] * 4
    found = architecture({**config, "layer_types": listed}).layers
    assert [spec.shares for spec in found] == [None] * 5 + [3, 4, 3]
    assert [spec.window for spec in found] == [9, None] * 4
    assert all(bool(spec.records) == (spec.shares is None) for spec in found)
    with pytest.raises(ValueError, match="no layer before layer 1 is 'full_attention'"):
        architecture({**config, "layer_types": listed, "num_kv_shared_layers": 7})


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, (2, 512)),
        ({"global_head_dim": 40}, (2, 40)),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 1}, (1, 512)),
        ({"attention_k_eq_v": False, "num_global_key_value_heads": 1}, (2, 512)),
        ({"per_layer_config": {"5": {"head_dim": 36, "num_key_value_heads": 4}}}, (4, 36)),
    ],
)
def test_gemma_4_never_mixes_the_heads_of_one_kind_with_the_width_of_the_other(
    fields: dict[str, Any], full: tuple[int, int]
) -> None:
    found = architecture({**GQA, "model_type": "gemma4_text", "num_hidden_layers": 6, **fields}).layers
    assert [(entry.heads, entry.dim) for entry in found[0].entries] == [(2, 24)] * 2
    assert [(entry.heads, entry.dim) for entry in found[5].entries] == [full] * 2


def test_the_last_layer_of_gemma_4_is_full_whatever_the_list_says() -> None:
    listed = ["full_attention", "sliding_attention", "sliding_attention"]
    found = architecture({**GQA, "model_type": "gemma4_text", "num_hidden_layers": 3, "layer_types": listed})
    assert found.kinds == ("full_attention", "sliding_attention", "full_attention")


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({}, [0, 1, 2, 3, 1, 2, 3, 4, 5]),
        ({"n_recurrent_loops": 3}, [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5]),
        ({"n_recurrent_layers": None}, [0, 1, 2, 3, 1, 2, 3, 4, 5]),
        ({"recurrent_kv_cache_mode": "last_loop"}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layers_run_in_a_loop_keep_a_cache_for_every_run(fields: dict[str, Any], slots: list[int]) -> None:
    loop = {"num_hidden_layers": 6, "n_input_layers": 1, "n_recurrent_layers": 3, "n_output_layers": 2}
    found = architecture({**GQA, "model_type": "dory", "sliding_window": 9, **loop, **fields})
    assert found.num_hidden_layers == 6
    kept = {0: 9, 1: 9, 2: 9, 3: None, 4: 9, 5: 9}
    assert [spec.window for spec in found.layers] == [kept[layer] for layer in slots]


def test_a_list_of_attention_and_mlp_in_turn_counts_each_layer_twice() -> None:
    loop = {"num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2}
    listed = ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"]
    found = architecture({**GQA, "model_type": "dory", "sliding_window": 9, **loop, "layer_types": listed})
    assert found.kinds == ("sliding_attention", "full_attention", "full_attention", "sliding_attention")


def test_a_stack_run_in_cycles_keeps_a_cache_for_every_run() -> None:
    config = {"model_type": "hrm_text", "num_hidden_layers": 2, "H_cycles": 3, "L_cycles": 4}
    assert len(architecture(config).layers) == 2 * 3 * 5
    saved = {**config, "num_layers_per_stack": 2, "num_hidden_layers": 30}
    assert architecture(saved).layers == architecture(config).layers


def test_layers_whose_attention_was_taken_out_keep_nothing() -> None:
    blocks = [
        {"attention": {"no_op": False, "n_heads_in_group": 2}},
        {"attention": {"no_op": True, "n_heads_in_group": None}},
        {"attention": {"no_op": False, "replace_with_linear": True, "n_heads_in_group": None}},
        {"attention": {"no_op": False, "n_heads_in_group": 4}},
    ]
    config = {**GQA, "model_type": "nemotron-nas", "num_hidden_layers": 4, "block_configs": blocks}
    assert [spec.numel_per_token for spec in architecture(config).layers] == [96, 0, 0, 48]


# What is refused


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("gemma4_assistant", "the cache of another model"), ("reformer", "hash buckets"), ("blt", "patches")],
)
def test_a_model_no_entry_describes_is_refused_with_the_reason(model_type: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"model_type '{model_type}' is not read: .*{why}"):
        architecture({"model_type": model_type})


def test_a_convolution_of_one_token_remembers_none_and_is_refused() -> None:
    config = {**GQA, "model_type": "lfm2", "num_hidden_layers": 2, "full_attn_idxs": [0], "conv_L_cache": 1}
    with pytest.raises(ValueError, match=r"conv_tail comes to 0; it must be an integer of at least 1"):
        architecture(config)


def test_a_ratio_no_compressor_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compress_ratios = \[0, 7, 4\]"):
        architecture({**V4, "compress_ratios": [0, 7, 4]})


def test_a_loop_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"H_cycles \(1000000\) must be a positive integer and at most 100"):
        architecture({"model_type": "hrm_text", "num_hidden_layers": 2, "H_cycles": 10**6})


def test_layer_types_that_a_model_cannot_do_without_are_asked_for() -> None:
    with pytest.raises(ValueError, match="layer_types is missing"):
        architecture({**GQA, "model_type": "lfm2_moe"})
