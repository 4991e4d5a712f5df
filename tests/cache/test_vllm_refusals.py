"""What vLLM refuses, and what is not known of it, is refused in one line."""

from typing import Any

import pytest

from tests.cache.vllm_models import FULL, STRIDES, vllm


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

    def test_falcons_cache_stays_in_the_models_dtype(self) -> None:
        falcon = {"model_type": "falcon", "num_hidden_layers": 3, "hidden_size": 384, "num_attention_heads": 6}
        cache = vllm(falcon, kv_dtype="fp8")
        # One head of 64 numbers, keys and values.
        assert (cache.kv_dtype, cache.bytes_per_block) == ("auto", 3 * 16 * 2 * 64 * 2)

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
