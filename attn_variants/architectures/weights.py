"""The weights of decoders by model_type, as data: `weight_parts.Weights` says what the parts of an entry mean.

Defaults are those of transformers 5.24's config classes, as in `families`. What an entry adds up was read off the
parameters of that library's models, which the tests count again. Adding a model is adding one entry; a part that other
models have too has a name in `weight_parts`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .expert_weights import EXPERT_WEIGHTS
from .family import FALSE, SPLIT, TRUE, Default
from .weight_parts import (
    ACROSS_HEADS,
    BIASED,
    LAYER_NORM,
    MLA,
    PER_HEAD,
    QWEN_BIASED,
    TIED_BY_DEFAULT,
    TWO_LAYER_NORMS,
    H,
    K,
    Weights,
    attention,
    gated,
    gemma,
    latent_heads,
    llama,
    plain,
    qwen_hybrid,
    sized,
)

DENSE_WEIGHTS: Mapping[str, Weights] = {
    "arcee": Weights(sized(32000, 18432), mixer=BIASED, mlp="mlp(hidden_size, intermediate_size, mlp_bias)"),
    "bloom": Weights(
        {"vocab_size": 250880, **TIED_BY_DEFAULT},
        mixer=attention("True"),
        mlp="mlp(hidden_size, 4 * hidden_size, True)",
        norms=TWO_LAYER_NORMS,
        outside=TWO_LAYER_NORMS,
    ),
    "cohere": Weights(
        sized(256000, 22528, use_qk_norm=FALSE) | TIED_BY_DEFAULT,
        mixer=BIASED + f" + (({H} + {K}) * head_dim if use_qk_norm else 0)",
        mlp=gated(),
        norms="hidden_size",
    ),
    "cohere2": Weights(sized(256000, 22528) | TIED_BY_DEFAULT, mixer=BIASED, mlp=gated(), norms="hidden_size"),
    "ernie4_5": Weights(
        {"vocab_size": 103424, "intermediate_size": 3072, "use_bias": FALSE, **TIED_BY_DEFAULT},
        mixer=attention("use_bias"),
        mlp=gated(bias="use_bias"),
    ),
    "exaone4": Weights({"vocab_size": 102400, "intermediate_size": 16384}, mixer=attention() + PER_HEAD, mlp=gated()),
    "falcon": Weights(
        {
            "vocab_size": 65024,
            "ffn_hidden_size": Default("4 * hidden_size", "4 * hidden_size"),
            "bias": FALSE,
            "parallel_attn": TRUE,
            "num_ln_in_parallel_attn": Default(None, None),
            **TIED_BY_DEFAULT,
        },
        mixer="linear(hidden_size, hidden_size + 2 * (num_kv_heads if new_decoder_architecture else 1 if multi_query "
        f"else {H}) * head_dim, bias) + linear(hidden_size, hidden_size, bias)",
        mlp="mlp(hidden_size, ffn_hidden_size, bias)",
        norms="4 * hidden_size if not parallel_attn or num_ln_in_parallel_attn == 2 "
        "or (num_ln_in_parallel_attn is None and new_decoder_architecture) else 2 * hidden_size",
        outside=LAYER_NORM,
    ),
    "gemma": gemma(256000, 24576, norms="2 * hidden_size"),
    "gemma2": gemma(256000, 9216),
    "gemma3_text": gemma(262208, 9216, mixer=BIASED + PER_HEAD),
    "glm": plain(151552, 13696, mixer=attention("attention_bias", "False"), attention_bias=TRUE),
    "glm4": Weights(
        sized(151552, 13696, attention_bias=TRUE),
        mixer=attention("attention_bias", "False"),
        mlp=gated(),
        norms="4 * hidden_size",
    ),
    "gpt2": Weights(
        {
            "vocab_size": 50257,
            "max_position_embeddings": 1024,
            "n_inner": Default("4 * hidden_size", "4 * hidden_size"),
            **TIED_BY_DEFAULT,
        },
        mixer=attention("True"),
        mlp="mlp(hidden_size, n_inner, True)",
        norms=TWO_LAYER_NORMS,
        outside=f"max_position_embeddings * hidden_size + {LAYER_NORM}",
    ),
    "gpt_neox": Weights(
        {"vocab_size": 50432, "intermediate_size": 24576, "attention_bias": TRUE},
        mixer=BIASED,
        mlp="mlp(hidden_size, intermediate_size, True)",
        norms=TWO_LAYER_NORMS,
        outside=LAYER_NORM,
    ),
    "granite": llama(32000, 11008),
    "hunyuan_v1_dense": plain(290943, 11008, mixer=BIASED + PER_HEAD, attention_bias=FALSE),
    "llama": llama(32000, 11008),
    "mimo": plain(151680, 11008, mixer=attention("attention_bias", "False"), attention_bias=TRUE),
    "minicpm3": Weights(
        {**sized(73448, 6400, **latent_heads(64, Default(SPLIT, SPLIT), Default(768, None))), **TIED_BY_DEFAULT},
        mixer=MLA,
        mlp=gated(bias="mlp_bias"),
    ),
    "ministral": plain(32000, 14336),
    "ministral3": plain(131072, 14336),
    "mistral": plain(32000, 14336),
    "nemotron": Weights(
        sized(256000, 24576),
        mixer=BIASED,
        mlp="mlp(hidden_size, intermediate_size, mlp_bias)",
        norms=TWO_LAYER_NORMS,
        outside=LAYER_NORM,
    ),
    "olmo": Weights(
        {"vocab_size": 50304, "intermediate_size": 11008, "attention_bias": FALSE},
        mixer=BIASED,
        mlp=gated(),
        norms="0",
        outside="0",
    ),
    "olmo2": plain(50304, 11008, mixer=BIASED + ACROSS_HEADS, attention_bias=FALSE),
    "olmo3": plain(50304, 11008, mixer=BIASED + ACROSS_HEADS, attention_bias=FALSE),
    "opt": Weights(
        {
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "ffn_dim": 3072,
            "enable_bias": TRUE,
            "layer_norm_elementwise_affine": TRUE,
            "word_embed_proj_dim": Default("hidden_size", "hidden_size"),
            "do_layer_norm_before": TRUE,
            "_remove_final_layer_norm": FALSE,
            **TIED_BY_DEFAULT,
        },
        mixer=attention("enable_bias"),
        mlp="mlp(hidden_size, ffn_dim, enable_bias)",
        norms="4 * hidden_size if layer_norm_elementwise_affine else 0",
        outside="(max_position_embeddings + 2) * hidden_size "
        "+ (2 * hidden_size * word_embed_proj_dim if word_embed_proj_dim != hidden_size else 0) + (2 * hidden_size "
        "if do_layer_norm_before and not _remove_final_layer_norm and layer_norm_elementwise_affine else 0)",
        embedding="vocab_size * word_embed_proj_dim",
        head="vocab_size * word_embed_proj_dim",
    ),
    "phi": Weights(
        {"vocab_size": 51200, "intermediate_size": 8192, "qk_layernorm": FALSE},
        mixer=attention("True") + f" + (4 * (hidden_size // {H}) if qk_layernorm else 0)",
        mlp="mlp(hidden_size, intermediate_size, True)",
        norms=LAYER_NORM,
        # A tied head keeps its bias.
        outside=f"{LAYER_NORM} + vocab_size",
    ),
    "phi3": plain(32064, 8192),
    "qwen2": plain(151936, 22016, mixer=QWEN_BIASED),
    "qwen2_5_vl_text": plain(152064, 29568, mixer=QWEN_BIASED),
    "qwen2_vl_text": plain(152064, 29568, mixer=QWEN_BIASED),
    "qwen3": plain(151936, 22016, mixer=BIASED + PER_HEAD, attention_bias=FALSE),
    "qwen3_5_text": qwen_hybrid({"vocab_size": 248320, "intermediate_size": 12288}, mlp=gated()),
    "qwen3_vl_text": plain(151936, 22016, mixer=BIASED + PER_HEAD, attention_bias=FALSE),
    "seed_oss": llama(
        155136,
        27648,
        mixer=attention("attention_bias", "attention_out_bias"),
        attention_bias=TRUE,
        attention_out_bias=FALSE,
    ),
    "smollm3": llama(128256, 11008, tie_word_embeddings=TRUE),
    "starcoder2": Weights(
        {"vocab_size": 49152, "intermediate_size": 12288, "use_bias": TRUE, **TIED_BY_DEFAULT},
        mixer=attention("use_bias"),
        mlp="mlp(hidden_size, intermediate_size, use_bias)",
        norms=TWO_LAYER_NORMS,
        outside=LAYER_NORM,
    ),
}

WEIGHTS: Mapping[str, Weights] = {**DENSE_WEIGHTS, **EXPERT_WEIGHTS}
