"""Small random models of the transformers classes whose folders a decoder is loaded from; all axes differ."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 12}
LATENT = {
    **SIZES,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 14,
    "first_k_dense_replace": 3,
}
SOME_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LATE_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}

MODELS = {
    "llama": ("Llama", GROUPED),
    "llama-tied": ("Llama", {**GROUPED, "tie_word_embeddings": True}),
    "llama-biased": ("Llama", {**GROUPED, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "mistral-windows": ("Mistral", {**GROUPED, "sliding_window": 4}),
    "ministral-some-windows": ("Ministral", {**GROUPED, **SOME_WINDOWS}),
    "qwen2-late-windows": ("Qwen2", {**GROUPED, "head_dim": 8, **LATE_WINDOWS}),
    "qwen3-some-windows": ("Qwen3", {**GROUPED, "use_sliding_window": True, **SOME_WINDOWS}),
    "qwen2": ("Qwen2", {**GROUPED, "head_dim": 8, "use_sliding_window": False}),
    "qwen3": ("Qwen3", {**GROUPED, "tie_word_embeddings": True}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "q_lora_rank": 18, "rope_parameters": YARN}),
}


def random_model(name):
    """One of `MODELS`, its biases and norms random as well: zeros and ones would hide that they are not loaded."""
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def error(found, expected):
    """max|d| / max|ref|, in float64."""
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).abs().max() / expected.abs().max()).item()
