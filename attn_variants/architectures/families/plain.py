"""Decoders whose layers are all alike: keys and values of the whole context, or of a window where a config has one."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    HEADS,
    LATENT,
    OR_SPLIT,
    SPLIT,
    Computed,
    Default,
    Family,
    Nested,
    Rule,
    sizes,
)

MUST_SPLIT = {"head_dim * num_attention_heads == hidden_size": "head_dim must be hidden_size / num_attention_heads"}
SWITCHED: dict[str, Rule] = {"use_sliding_window": False, "sliding_window": Default(4096)}

FAMILIES: Mapping[str, Family | Nested] = {
    "apertus": Family(sizes(32, 4096, 32)),
    "apertus1p5_text": Family(sizes(32, 4096, 32)),
    "arcee": Family(sizes(32, 2560, 32)),
    "aria_text": Family(sizes(32, 4096, 32)),
    "bitnet": Family(sizes(30, 2560, 20, kv=Default(5, HEADS)), requires=MUST_SPLIT),
    "chameleon": Family(sizes(32, 4096, 32, kv=32, head_dim=Computed(SPLIT))),
    "cohere": Family(sizes(40, 8192, 64)),
    "cosmos3_edge_text": Family(sizes(28, 2048, 16, kv=Default(8, HEADS), head_dim=128)),
    "csm": Family(sizes(16, 2048, 32, kv=Default(8, HEADS))),
    "deepseek_ocr2_text": Family(sizes(32, 4096, 32, head_dim=Computed(SPLIT))),
    "diffllama": Family(
        sizes(16, 2048, 32),
        requires={
            "num_key_value_heads % 2 == 0": "num_key_value_heads must be even: attention is the difference of two"
        },
    ),
    "doge": Family(sizes(32, 1024, 8)),
    "emu3_text_model": Family(sizes(32, 4096, 32, kv=8)),
    "ernie4_5": Family(sizes(18, 1024, 16, kv=Default(2, HEADS), head_dim=Default(128, SPLIT))),
    "ernie4_5_moe": Family(sizes(28, 2560, 20, kv=4)),
    "ernie4_5_vl_moe_text": Family(sizes(28, 2560, 20, kv=4)),
    "evolla": Family(sizes(32, 4096, 32, kv=8)),
    "exaone": Family(sizes(32, 4096, 32, kv=Default(8, HEADS)), aliases={"num_layers": "num_hidden_layers"}),
    "flex_olmo": Family(sizes(32, 4096, 32)),
    "gemma": Family(sizes(28, 3072, 16, kv=16, head_dim=256)),
    "glm": Family(sizes(40, 4096, 32, kv=2, head_dim=128)),
    "glm4": Family(sizes(40, 4096, 32, kv=2, head_dim=128)),
    "glm4_moe": Family(sizes(46, 4096, 96, kv=8)),
    "glm4v_moe_text": Family(sizes(46, 4096, 96, kv=8)),
    "glm4v_text": Family(sizes(40, 4096, 32, kv=Default(2, HEADS))),
    "glm_image_text": Family(sizes(40, 4096, 32, kv=Default(2, HEADS))),
    "glm_ocr_text": Family(sizes(16, 1024, 16, kv=8)),
    "gradium_phonon_tts": Family(sizes(6, 768, 12)),
    "granite": Family(sizes(32, 4096, 32)),
    "granite4_vision_text": Family(sizes(32, 4096, 32)),
    "granite_docling_text": Family(sizes(28, 1024, 16, kv=Default(4, HEADS))),
    "granitemoe": Family(sizes(32, 4096, 32)),
    "granitemoeshared": Family(sizes(32, 4096, 32)),
    "helium": Family(sizes(24, 2560, 20, kv=20, head_dim=128)),
    "higgs_audio_v2": Family(sizes(28, 3072, 24, kv=8, head_dim=Default(128, SPLIT))),
    "hunyuan_v1_dense": Family(sizes(32, 4096, 32)),
    "hunyuan_v1_moe": Family(sizes(32, 4096, 32)),
    "hunyuan_vl_text": Family(sizes(32, 4096, 32)),
    "hy_v3": Family(sizes(80, 4096, 64, kv=8, head_dim=128)),
    "hyperclovax": Family(sizes(32, 4096, 32)),
    "internlm3": Family(sizes(48, 4096, 32, kv=Default(2, HEADS), head_dim=Default(128, SPLIT))),
    "iquestcoder": Family(sizes(80, 5120, 40, kv=Default(8, HEADS), head_dim=Default(128, SPLIT))),
    "jais2": Family(sizes(32, 3328, 26)),
    "jetmoe": Family(
        {
            "num_hidden_layers": 12,
            "num_key_value_heads": 16,
            "num_experts_per_tok": 2,
            "num_attention_heads": Computed("num_key_value_heads * num_experts_per_tok"),
            "head_dim": 128,
        },
        aliases={"kv_channels": "head_dim"},
    ),
    "kyutai_speech_to_text": Family(sizes(48, 2048, 32, sliding_window=375)),
    "llama": Family(sizes(32, 4096, 32)),
    "mimo": Family(sizes(32, 4096, 32, kv=Default(32, HEADS), **SWITCHED), layer="'full_attention'"),
    "minimax_m2": Family(sizes(62, 3072, 48, kv=8, head_dim=128)),
    "ministral3": Family(sizes(34, 4096, 32, kv=8, head_dim=128)),
    "mistral": Family(sizes(32, 4096, 32, kv=8, sliding_window=Default(4096))),
    "mixtral": Family(sizes(32, 4096, 32, kv=8)),
    "molmo2_text": Family(sizes(36, 4096, 32, kv=8, head_dim=128)),
    "moshi": Family(sizes(32, 4096, 32, sliding_window=3000)),
    "nanochat": Family(sizes(12, 768, 6)),
    "nemotron": Family(sizes(32, 6144, 48)),
    "olmo": Family(sizes(32, 4096, 32)),
    "olmo2": Family(sizes(32, 4096, 32)),
    "olmoe": Family(sizes(16, 2048, 16), requires=MUST_SPLIT),
    "paddleocr_vl_text": Family(sizes(18, 1024, 16, kv=Default(2, HEADS), head_dim=Default(128, SPLIT))),
    "phi": Family(sizes(24, 2048, 32)),
    "phi3": Family(sizes(32, 3072, 32)),
    "phi4_multimodal": Family(sizes(32, 3072, 32, kv=Default(8, HEADS))),
    "phimoe": Family(sizes(32, 4096, 32, kv=8)),
    "pocket_tts": Family(sizes(6, 1024, 16)),
    "qwen3_moe": Family(
        sizes(24, 2048, 32, kv=4, **SWITCHED),
        layer="'sliding_attention' if use_sliding_window and sliding_window is not None else 'full_attention'",
    ),
    "qwen3_omni_moe_text": Family(sizes(28, 2048, 28, kv=4)),
    "qwen3_vl_moe_text": Family(sizes(24, 2048, 16, kv=16)),
    "qwen3_vl_text": Family(sizes(32, 4096, 32, kv=Default(32, HEADS), head_dim=128)),
    "sarvam_moe": Family(sizes(19, 4096, 64, kv=4, head_dim=64)),
    "seed_oss": Family(sizes(64, 4096, 80, kv=Default(8, HEADS), head_dim=Default(128, SPLIT))),
    "solar_open": Family(sizes(48, 4096, 64, kv=8, head_dim=128)),
    "stablelm": Family(sizes(32, 2560, 32, kv=32), requires=MUST_SPLIT),
    "starcoder2": Family(sizes(30, 3072, 24, kv=2)),
    "voxtral_realtime_text": Family(sizes(32, 4096, 32, kv=8, sliding_window=Default(4096))),
}

UNNAMED = Family(
    {
        "num_key_value_heads": Default(
            "1 if multi_query else num_attention_heads", "1 if multi_query else num_attention_heads"
        ),
        "head_dim": OR_SPLIT,
        "multi_query": Default(False, False),
        "use_sliding_window": Default(True, True),
        "kv_lora_rank": Default(None),
        "q_lora_rank": Default(None),
        "max_window_layers": Default(None),
    },
    aliases={
        "n_layer": "num_hidden_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    },
    requires={
        "kv_lora_rank is not None or q_lora_rank is None": "q_lora_rank without kv_lora_rank is latent attention of an "
        "unknown kind: give kv_lora_rank, or the model_type",
        "max_window_layers is None or not use_sliding_window or sliding_window is None": "max_window_layers says which "
        "layers slide by a rule that only a model_type explains: give model_type",
    },
    layer="'latent_attention' if kv_lora_rank is not None else 'sliding_attention' if use_sliding_window and "
    "sliding_window is not None else 'chunked_attention' if attention_chunk_size is not None else 'full_attention'",
    kinds={"latent_attention": LATENT},
)
"""How a config without a model_type is read: plain attention, or plain MLA; its sizes have no defaults."""

UNEXPLAINED = (
    "attention_k_eq_v",
    "attn_config",
    "attn_layer",
    "block_configs",
    "block_types",
    "compress_",
    "conv_",
    "cross_attention",
    "full_attention_interval",
    "full_attn",
    "global_",
    "hybrid_",
    "index_",
    "indexer_",
    "is_encoder_decoder",
    "layers_block_type",
    "linear_",
    "local_",
    "mamba",
    "no_rope_layer",
    "num_global_",
    "num_kv_shared_layers",
    "sliding_window_pattern",
    "ssm_",
    "state_size",
    "swa_",
    "text_config",
)
"""Beginnings of fields that say something about the cache which only a model_type can explain."""
