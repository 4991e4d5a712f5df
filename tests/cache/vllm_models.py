"""Small models of each kind that vLLM keeps otherwise, for its rules to be worked by hand."""

from typing import Any

from attn_variants.cache import model_cache
from attn_variants.cache.vllm import VllmCache

FULL = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1000,
}
TOKEN = 2 * 2 * 64 * 2
"""Bytes of one token in one layer: keys and values of two heads of 64 numbers in bfloat16."""
WINDOWS = {**FULL, "model_type": "mistral", "sliding_window": 40}
MIXED = {
    **FULL,
    "model_type": "gemma2",
    "num_hidden_layers": 6,
    "sliding_window": 40,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2,
}
CHUNKS = {
    **FULL,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "attention_chunk_size": 48,
    "no_rope_layers": [1, 1, 1, 0],
}
LATENTS: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 5,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
INDEXED = {**LATENTS, "model_type": "deepseek_v32", "index_head_dim": 128}
DELTA = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
STRIDES: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
    "compress_ratios": [4, 4, 128],
}
TAILS: dict[str, Any] = {
    "model_type": "inkling_text",
    "num_hidden_layers": 3,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "swa_num_key_value_heads": 16,
    "head_dim": 64,
    "swa_head_dim": 64,
    "local_layer_ids": [0, 1],
    "sliding_window_size": 32,
    "conv_kernel_size": 4,
}


def vllm(config: dict[str, Any], **arguments: Any) -> VllmCache:
    return model_cache(config).vllm(**arguments)
