"""The weights of decoders whose MLPs are mixtures of experts, in some layers or all; see `weights`."""

from __future__ import annotations

from collections.abc import Mapping

from .families.latent import FULL_INDEXER
from .families.shared import GEMMA4_DIM, GEMMA4_HEADS
from .family import FALSE, LIST, NAME, TRUE, Default, Free
from .weight_parts import (
    ACROSS_HEADS,
    BEFORE_SHARED,
    BIASED,
    CHANNEL_DELTA,
    DEEPSEEK_EXPERTS,
    HASHED,
    INDEXER,
    LIGHTNING,
    LISTED,
    MAMBA2,
    MINIMAX_M3,
    MLA,
    NEVER_TIED,
    NUM_EXPERTS,
    PER_HEAD,
    PER_LAYER_INPUT,
    PER_LAYER_INPUTS,
    QUERIES_ALONE,
    QWEN_SHARED,
    RANK,
    SCORED,
    SHARED_WIDTH,
    STEP_HEADS,
    STEP_LISTED,
    STEPPED,
    TIED_BY_DEFAULT,
    V4_ATTENTION,
    V4_COMPRESSOR,
    V4_STREAMS,
    H,
    K,
    Weights,
    attention,
    deepseek,
    expert_sizes,
    experts,
    gated,
    gemma4,
    latent_heads,
    mixed,
    qwen_hybrid,
    sized,
    stepped_sizes,
)

EXPERT_WEIGHTS: Mapping[str, Weights] = {
    "deepseek_v2": deepseek(
        sized(102400, 11008, **latent_heads(rank=RANK), **expert_sizes(1407, 64, shared=2)),
        mlp=mixed(LISTED, experts(shared=SHARED_WIDTH, bias="mlp_bias"), gated(bias="mlp_bias")),
    ),
    "deepseek_v3": deepseek(sized(129280, 18432, **latent_heads(rank=RANK), **expert_sizes(2048, 256, dense=3))),
    "deepseek_v32": deepseek(
        sized(129280, 18432, index_n_heads=64, **latent_heads(), **expert_sizes(2048, 256, dense=3)),
        mixer=f"{MLA} + {INDEXER}",
    ),
    "deepseek_v4": Weights(
        {
            **expert_sizes(2048, 256),
            "vocab_size": 129280,
            "q_lora_rank": 1024,
            "num_hash_layers": Default(3, 3),
            "num_experts_per_tok": 6,
            "index_n_heads": 64,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "hc_mult": 4,
        },
        mixers={
            "sliding_attention": V4_ATTENTION,
            "heavily_compressed_attention": f"{V4_ATTENTION} + "
            + V4_COMPRESSOR.format(rate="hca", wide="head_dim", dim="head_dim"),
            "compressed_sparse_attention": " + ".join(
                (
                    V4_ATTENTION,
                    V4_COMPRESSOR.format(rate="csa", wide="2 * head_dim", dim="head_dim"),
                    V4_COMPRESSOR.format(rate="csa", wide="2 * index_head_dim", dim="index_head_dim"),
                    "linear(q_lora_rank, index_n_heads * index_head_dim) + linear(hidden_size, index_n_heads)",
                )
            ),
        },
        mlp=experts(shared="moe_intermediate_size")
        + f" + (vocab_size * num_experts_per_tok if {HASHED} else num_experts)",
        norms=f"2 * hidden_size + {V4_STREAMS}",
        outside="hidden_size + hc_mult * (hc_mult * hidden_size + 1) + 1",
        aliases=NUM_EXPERTS,
    ),
    "gemma3n_text": Weights(
        {
            "vocab_size": 262400,
            "intermediate_size": Free((int, list)),
            "attention_bias": FALSE,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "altup_num_inputs": 4,
            "laurel_rank": 64,
            **TIED_BY_DEFAULT,
        },
        mixer=f"({BIASED + PER_HEAD}) if {BEFORE_SHARED} else {QUERIES_ALONE}",
        mlp=gated("at(intermediate_size or 16384, i)"),
        norms="5 * hidden_size + altup_num_inputs ** 2 * (altup_num_inputs + 1) + (altup_num_inputs + 2) * hidden_size "
        f"+ 2 * hidden_size * laurel_rank + {PER_LAYER_INPUT}",
        outside=f"hidden_size + {PER_LAYER_INPUTS} + 2 * (altup_num_inputs - 1) * hidden_size ** 2",
    ),
    "gemma4_text": Weights(
        {
            "vocab_size": 262144,
            "intermediate_size": 9216,
            "attention_bias": FALSE,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": Default(256, 0),
            "enable_moe_block": FALSE,
            "use_double_wide_mlp": FALSE,
            "num_experts": Default(None, None),
            "moe_intermediate_size": Default(None, None),
            **TIED_BY_DEFAULT,
        },
        mixer=gemma4(K, "head_dim", "2"),
        mixers={"full_attention": gemma4(GEMMA4_HEADS, GEMMA4_DIM, "(1 if attention_k_eq_v else 2)")},
        mlp=gated(f"(1 if not use_double_wide_mlp or {BEFORE_SHARED} else 2) * intermediate_size")
        + f" + ({experts(router='(hidden_size + 1)')} + 4 * hidden_size if enable_moe_block else 0)",
        norms=f"4 * hidden_size + 1 + ({PER_LAYER_INPUT} if hidden_size_per_layer_input else 0)",
        outside=f"hidden_size + ({PER_LAYER_INPUTS} if hidden_size_per_layer_input else 0)",
    ),
    "glm4_moe": deepseek(
        sized(151552, 10944, use_qk_norm=FALSE, **expert_sizes(1408, 128, dense=1)),
        mixer=attention("attention_bias", "False") + " + (2 * head_dim if use_qk_norm else 0)",
    ),
    "glm4_moe_lite": deepseek(
        sized(154880, 10240, **latent_heads(192, 256, Default(768, None)), **expert_sizes(1536, 64, dense=1))
    ),
    "glm_moe_dsa": deepseek(
        sized(154880, 12288, index_n_heads=32, **latent_heads(192, 256, 2048), **expert_sizes(2048, 256, dense=3)),
        mixer=f"{MLA} + ({INDEXER} if {FULL_INDEXER} else 0)",
    ),
    "gpt_oss": Weights(
        {"vocab_size": 201088, "intermediate_size": 2880, "num_experts": 128, "attention_bias": TRUE},
        mixer=f"{BIASED} + {H}",
        mlp=f"num_experts * ({gated(bias='True')} + hidden_size + 1)",
        aliases=NUM_EXPERTS,
    ),
    "granitemoe": Weights(
        {"vocab_size": 32000, "intermediate_size": 11008, "num_experts": 8, "attention_bias": FALSE},
        mixer=BIASED,
        mlp=experts("intermediate_size"),
        aliases=NUM_EXPERTS,
    ),
    "kimi_k2": deepseek(sized(163840, 18432, **latent_heads(rank=RANK), **expert_sizes(2048, 384, dense=1))),
    "kimi_linear": Weights(
        {
            **sized(163840, 9216),
            **latent_heads(rank=Default(None)),
            **expert_sizes(1024, 256, dense=1),
            "routed_expert_hidden_size": Default(None),
            **NEVER_TIED,
        },
        mixer=MLA,
        mixers={"linear_attention": CHANNEL_DELTA},
        mlp=DEEPSEEK_EXPERTS,
        aliases={**NUM_EXPERTS, "num_shared_experts": "n_shared_experts"},
        requires={
            "routed_expert_hidden_size is None": "the weights of experts in a latent space, and what else Kimi K3 "
            "adds, are not described: give their bytes, or let --measure count them"
        },
    ),
    "llama4_text": Weights(
        {
            "vocab_size": 202048,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_experts": 16,
            "interleave_moe_layer_step": 1,
            "moe_layers": LIST,
            "attention_bias": FALSE,
        },
        mixer=BIASED,
        mlp=mixed(
            "(i in moe_layers if moe_layers is not None else (i + 1) % interleave_moe_layer_step == 0)",
            experts("intermediate_size", shared="intermediate_size"),
            gated("intermediate_size_mlp"),
        ),
        aliases=NUM_EXPERTS,
    ),
    "longcat_flash": Weights(
        {
            **latent_heads(),
            "vocab_size": 131072,
            "ffn_hidden_size": 12288,
            "moe_intermediate_size": 2048,
            "num_experts": 512,
            "zero_expert_num": Default(256, 0),
            "attention_bias": FALSE,
            "router_bias": FALSE,
        },
        mixer=f"2 * ({MLA})",
        mlp=f"2 * {gated('ffn_hidden_size')} + {experts()} + zero_expert_num * hidden_size "
        "+ (num_experts + zero_expert_num) * (2 if router_bias else 1)",
        norms="4 * hidden_size",
        aliases={"n_routed_experts": "num_experts", "expert_ffn_hidden_size": "moe_intermediate_size"},
    ),
    "mimo_v2_flash": deepseek(
        sized(152576, 16384, **expert_sizes(2048, 256, dense=1)),
        mixer=attention("attention_bias", "False", v_dim="v_head_dim"),
        mixers={
            "sliding_attention": attention("attention_bias", "False", kv_heads=f"2 * {K}", v_dim="v_head_dim")
            + f" + {H}"
        },
        mlp=mixed(LISTED, experts(router=SCORED)),
    ),
    "minimax": Weights(
        {"vocab_size": 32000, "intermediate_size": 14336, "num_experts": 8},
        mixer=attention(),
        mixers={"linear_attention": LIGHTNING},
        mlp=experts("intermediate_size"),
        aliases=NUM_EXPERTS,
    ),
    "minimax_m2": Weights(
        {"vocab_size": 200064, "intermediate_size": 1536, "num_experts": 256},
        mixer=attention() + ACROSS_HEADS,
        mlp=experts("intermediate_size", router=SCORED),
        aliases=NUM_EXPERTS,
    ),
    "minimax_m3": MINIMAX_M3,
    "minimax_m3_vl_text": MINIMAX_M3,
    "mixtral": Weights(
        {"vocab_size": 32000, "intermediate_size": 14336, "num_experts": 8},
        mixer=attention(),
        mlp=experts("intermediate_size"),
        aliases=NUM_EXPERTS,
    ),
    "nemotron_h": Weights(
        {
            **sized(131072, 21504),
            "use_bias": FALSE,
            "use_conv_bias": TRUE,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": Default(None, None),
            "num_experts": 8,
            **NEVER_TIED,
        },
        mixers={
            "linear_attention": MAMBA2,
            "full_attention": attention(),
            "mlp": "mlp(hidden_size, intermediate_size, mlp_bias)",
            "moe": "num_experts * (mlp(moe_latent_size or hidden_size, moe_intermediate_size) + hidden_size + 1) "
            "+ mlp(hidden_size, moe_shared_expert_intermediate_size, mlp_bias) "
            "+ (mlp(hidden_size, moe_latent_size, mlp_bias) if moe_latent_size is not None else 0)",
        },
        mlp="0",
        norms="hidden_size",
        aliases={**NUM_EXPERTS, "mamba_conv_bias": "use_conv_bias"},
    ),
    "qwen2_moe": Weights(
        {
            "vocab_size": 151936,
            "intermediate_size": 5632,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": TRUE,
            **stepped_sizes(1408, 60),
        },
        mixer=attention("qkv_bias", "False"),
        mlp=mixed(STEPPED, QWEN_SHARED),
        aliases=NUM_EXPERTS,
    ),
    "qwen3_5_moe_text": qwen_hybrid(
        {
            "vocab_size": 248320,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
        },
        mlp=QWEN_SHARED,
    ),
    "qwen3_moe": Weights(
        sized(151936, 6144, **stepped_sizes(768, 128)),
        mixer=BIASED + PER_HEAD,
        mlp=mixed(STEPPED, experts()),
        aliases=NUM_EXPERTS,
    ),
    "qwen3_next": qwen_hybrid(
        {
            "vocab_size": 151936,
            "intermediate_size": 5632,
            "shared_expert_intermediate_size": 512,
            **stepped_sizes(512, 512),
        },
        mlp=mixed(STEPPED, QWEN_SHARED),
    ),
    "qwen3_vl_moe_text": Weights(
        sized(151936, 5632, **stepped_sizes(1408, 60)),
        mixer=BIASED + PER_HEAD,
        mlp=mixed(STEPPED, experts()),
        aliases=NUM_EXPERTS,
    ),
    "solar_open": deepseek(
        {**expert_sizes(1280, 128), "vocab_size": 196608, "attention_bias": FALSE},
        mixer=attention("attention_bias", "False"),
        mlp=experts(shared=SHARED_WIDTH, router=SCORED),
    ),
    "step3p5": Weights(
        {
            **sized(128815, 11264),
            **expert_sizes(1280, 288, dense=3),
            "share_expert_dim": 1280,
            "moe_layers_enum": NAME,
            **NEVER_TIED,
        },
        mixer=attention("attention_bias", heads=STEP_HEADS) + PER_HEAD + f" + hidden_size * ({STEP_HEADS})",
        mlp=mixed(
            STEP_LISTED, experts(shared="share_expert_dim", router=SCORED, bias="mlp_bias"), gated(bias="mlp_bias")
        ),
        aliases={
            "n_routed_experts": "num_experts",
            "moe_num_experts": "num_experts",
            "share_expert_dims": "share_expert_dim",
        },
    ),
    "youtu": deepseek({**sized(128256, 6144, **latent_heads(rank=RANK)), **TIED_BY_DEFAULT}, mlp=gated()),
}
