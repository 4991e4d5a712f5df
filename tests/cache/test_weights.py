"""Bytes of a model's weights: its parameters at a dtype."""

import pytest

from attn_variants.cache import model_cache

LLAMA_3_1_8B = 8_030_261_248


def test_weights_are_parameters_at_a_dtype() -> None:
    model = model_cache("llama-3.1-8b")
    assert model.weights("bfloat16") == model.weights() == 2 * LLAMA_3_1_8B
    assert model.weights("fp32") == 4 * LLAMA_3_1_8B
    assert model.weights("float8_e4m3fn") == LLAMA_3_1_8B


def test_auto_is_the_models_own_dtype() -> None:
    config = dict(model_cache("smollm2-135m").config, torch_dtype="float32")
    assert model_cache(config).weights() == 4 * 134_515_008


def test_unknown_dtypes_and_undescribed_models_are_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        model_cache("llama-3.1-8b").weights("q4_0")
    with pytest.raises(ValueError, match="weights of model_type 'mamba2' are not described: give their bytes"):
        model_cache({"model_type": "mamba2"}).weights()
