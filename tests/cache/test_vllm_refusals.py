"""What vLLM refuses, and what is not known of it, is refused in one line."""

from typing import Any

import pytest

from tests.cache.vllm_models import FULL, LATENTS, STRIDES, vllm


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"kv_dtype": "fp9"}, r"unknown kv_dtype 'fp9'; did you mean fp8"),
            ({"kv_dtype": None}, r"kv_dtype \(None\) must be a string; give one of auto, bfloat16"),
            ({"kv_dtype": "nvfp4"}, r"kv_dtype \('nvfp4'\) runs on Blackwell only"),
            ({"kv_dtype": "turboquant_k8v4"}, r"has a packed layout that is not counted here"),
            ({"kv_dtype": "fp8_ds_mla"}, r"kv_dtype \('fp8_ds_mla'\) is taken by no attention backend"),
            ({"kv_dtype": "float16"}, r"kv_dtype \('float16'\) is not the model's dtype, bfloat16, .*: give 'auto'"),
            (
                {"block_size": 24},
                r"block_size \(24\) is taken by no attention backend .* give a multiple of 16, or None",
            ),
            ({"enable_prefix_caching": "no"}, r"enable_prefix_caching \('no'\) must be True or False"),
            ({"disable_hybrid_kv_cache_manager": None}, r"disable_hybrid_kv_cache_manager \(None\) must be True or"),
            ({"block_size": 0}, r"block_size \(0\) must be an integer of at least 1"),
            ({"max_num_batched_tokens": -1}, r"max_num_batched_tokens \(-1\) must be an integer of at least 1"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            vllm(FULL, **arguments)

    @pytest.mark.parametrize("model_type", ["bert", "xlnet", "rwkv", "hy_v4"])
    def test_model_types_whose_rules_are_not_known(self, model_type: str) -> None:
        with pytest.raises(ValueError, match=f"model_type '{model_type}' has no vllm figures: .*; use policy 'ideal'"):
            vllm({"model_type": model_type})

    def test_bfloat16_of_a_model_in_float16(self) -> None:
        half = {**FULL, "torch_dtype": "float16"}
        assert vllm(half, kv_dtype="float16").bytes_per_block == vllm(half).bytes_per_block == 24576
        with pytest.raises(ValueError, match="is not the model's dtype, float16"):
            vllm(half, kv_dtype="bfloat16")

    def test_fp8_with_linear_biases(self) -> None:
        bloom = {"model_type": "bloom", "n_layer": 3, "n_embed": 384, "n_head": 6, "seq_length": 1000}
        # Six heads of 64 numbers, keys and values.
        assert vllm(bloom).bytes_per_block == 3 * 16 * 2 * 6 * 64 * 2
        with pytest.raises(ValueError, match=r"kv_dtype \('fp8'\) is not taken by attention with ALiBi"):
            vllm(bloom, kv_dtype="fp8")

    @pytest.mark.parametrize(
        "quantization",
        [
            {"quant_method": "fp8"},
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"},
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        ],
    )
    def test_fp8_of_another_kind_than_the_checkpoints_scales(self, quantization: dict[str, Any]) -> None:
        with pytest.raises(
            ValueError, match=r"kv_dtype \('fp8_e5m2'\) is refused by vLLM for checkpoints .* give 'fp8'"
        ):
            vllm({**FULL, "quantization_config": quantization}, kv_dtype="fp8_e5m2")

    @pytest.mark.parametrize(
        "quantization",
        [
            {"quant_method": "compressed-tensors"},
            {"quant_method": "mxfp4"},
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        ],
    )
    def test_checkpoints_without_scales_take_either_fp8(self, quantization: dict[str, Any]) -> None:
        assert vllm({**FULL, "quantization_config": quantization}, kv_dtype="fp8_e5m2").bytes_per_block == 12288

    @pytest.mark.parametrize(
        ("config", "tp", "message"),
        [
            (
                {**FULL, "intermediate_size": 1001},
                2,
                r"tp \(2\) must divide intermediate_size \(an MLP of 1001 numbers\)",
            ),
            (
                {**FULL, "vocab_size": 32000},
                6,
                r"tp \(6\) must divide vocab_size \(32000\) rounded up to a multiple of 64",
            ),
            (
                {**FULL, "model_type": "gpt_oss", "intermediate_size": 2881},
                2,
                r"tp \(2\) must divide intermediate_size \(an MLP of 2881 numbers\)",
            ),
            # Its shared MLP is three experts wide.
            (
                {
                    **LATENTS,
                    "intermediate_size": 512,
                    "moe_intermediate_size": 36,
                    "n_shared_experts": 3,
                    "num_experts_per_tok": 2,
                },
                8,
                r"tp \(8\) must divide intermediate_size or moe_intermediate_size",
            ),
            (
                {
                    **FULL,
                    "intermediate_size": 640,
                    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
                },
                2,
                r"whole blocks of 128 numbers of intermediate_size \(an MLP of 640 numbers\), .* give a smaller tp",
            ),
        ],
    )
    def test_weights_that_a_split_leaves_a_remainder_of(self, config: dict[str, Any], tp: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            vllm(config, tp=tp)

    def test_weights_that_a_split_fits(self) -> None:
        fitting = {**FULL, "intermediate_size": 1002, "vocab_size": 32200}
        # 32200 tokens are 504 times 64 when rounded up.
        assert -(-32200 // 64) * 64 == 6 * 5376
        assert vllm(fitting, tp=6).bytes_per_block == vllm(FULL, tp=6).bytes_per_block
        blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        assert vllm({**FULL, "intermediate_size": 768, "quantization_config": blocks}, tp=6).bytes_per_block
        # What config.json leaves to its class is not held against a tp.
        assert vllm({**FULL, "intermediate_size": None}, tp=6).bytes_per_block

    def test_falcons_cache_stays_in_the_models_dtype(self) -> None:
        falcon = {"model_type": "falcon", "num_hidden_layers": 3, "hidden_size": 384, "num_attention_heads": 6}
        cache = vllm(falcon, kv_dtype="fp8")
        # One head of 64 numbers, keys and values.
        assert (cache.kv_dtype, cache.bytes_per_block) == ("auto", 3 * 16 * 2 * 64 * 2)

    def test_a_pool_of_less_than_a_block(self) -> None:
        cache = vllm(FULL, max_model_len=64)
        for pool in (0, 24576 - 1):
            assert (cache.num_blocks(pool), cache.max_concurrency(pool), cache.cache_tokens(pool)) == (0, 0.0, 0)
        # One block of 16 tokens is a quarter of a request.
        assert (cache.num_blocks(24576), cache.max_concurrency(24576), cache.cache_tokens(24576)) == (1, 0.25, 16)
        with pytest.raises(ValueError, match=r"pool_bytes \(-1\) must be an integer of at least 0"):
            cache.num_blocks(-1)

    def test_a_request_of_no_tokens(self) -> None:
        with pytest.raises(ValueError, match=r"tokens \(0\) must be an integer of at least 1"):
            vllm(FULL).planned_bytes(0)

    @pytest.mark.parametrize(
        ("config", "arguments", "message"),
        [
            ({"model_type": "dory"}, {"tp": 2}, r"tp must be 1, for vLLM does not split this model \(tp = 2\)"),
            ({**STRIDES, "head_dim": 256}, {}, r"head_dim must be 512, .* \(head_dim = 256\)"),
        ],
    )
    def test_what_a_model_type_requires(self, config: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            vllm(config, **arguments)

    def test_qwens_that_slide_on_some_layers(self) -> None:
        config = {
            **FULL,
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 1,
        }
        with pytest.raises(ValueError, match="max_window_layers makes some layers slide"):
            vllm(config)
