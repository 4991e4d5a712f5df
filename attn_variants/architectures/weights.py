"""The weights of decoders by model_type, as data: `parameter_count.Weights` says what the parts of an entry mean.

Defaults are those of transformers 5.24's config classes, as in `families`. What is written out below as an entry's
formula was read off the parameters of that library's model, which the tests count again. Adding a model is adding one
entry; a part that other models have too has a name here.
"""

from __future__ import annotations

from collections.abc import Mapping

from .families.latent import FULL_INDEXER
from .families.linear import ALL_CHANNELS, KEYS, LINEAR_HEADS, VALUE_HEADS, VALUES
from .families.shared import GEMMA4_DIM, GEMMA4_HEADS
from .family import FALSE, LIST, SPLIT, TRUE, Computed, Default, Free, Rule
from .parameter_count import TIED, Weights

H, K = "num_attention_heads", "num_key_value_heads"


def attention(
    bias: str = "False",
    out_bias: str | None = None,
    *,
    heads: str = H,
    kv_heads: str = K,
    dim: str = "head_dim",
    v_dim: str | None = None,
    queries: str = "1",
) -> str:
    """Grouped-query attention's four projections; the fourth has the bias of the others unless its own is given.

    queries: how often the queries' width comes out of their projection; twice where half of it gates the output.
    """
    q, k = f"({heads}) * ({dim})", f"({kv_heads}) * ({dim})"
    v, out = f"({kv_heads}) * ({v_dim or dim})", f"({heads}) * ({v_dim or dim})"
    return (
        f"linear(hidden_size, {queries} * {q}, {bias}) + linear(hidden_size, {k}, {bias}) "
        f"+ linear(hidden_size, {v}, {bias}) + linear({out}, hidden_size, {out_bias or bias})"
    )


def gated(inner: str = "intermediate_size", bias: str = "False") -> str:
    """An MLP with a gate."""
    return f"gated_mlp(hidden_size, {inner}, {bias})"


def experts(
    inner: str = "moe_intermediate_size",
    *,
    shared: str = "0",
    gate: str = "0",
    router: str = "hidden_size",
    bias: str = "False",
) -> str:
    """Routed experts, `router` numbers for each to be chosen by, and a shared MLP of width `shared`, weighed by `gate`.

    Widths and numbers are formulas, and so is whether the shared MLP has biases.
    """
    shared_mlp = f" + ({gated(shared, bias)} + {gate} if {shared} else 0)" if shared != "0" else ""
    return f"num_experts * ({gated(inner)} + {router}){shared_mlp}"


def mixed(sparse: str, of_experts: str, dense: str | None = None) -> str:
    """Experts in the layers for which the formula `sparse` holds, a dense MLP in the others."""
    return f"({of_experts}) if {sparse} else ({dense or gated()})"


BIASED = attention("attention_bias")
PER_HEAD = " + 2 * head_dim"
"""Norms of queries and keys, shared by the heads."""
ACROSS_HEADS = f" + ({H} + {K}) * head_dim"
"""Norms of queries and keys as wide as all their heads."""
LAYER_NORM = "2 * hidden_size"
"""A norm with a bias."""
TWO_LAYER_NORMS = "4 * hidden_size"

MLA_QUERIES = f"{H} * (qk_nope_head_dim + qk_rope_head_dim)"
MLA = (
    f"(linear(hidden_size, q_lora_rank, attention_bias) + q_lora_rank + linear(q_lora_rank, {MLA_QUERIES}) "
    f"if q_lora_rank is not None else linear(hidden_size, {MLA_QUERIES})) "
    "+ linear(hidden_size, kv_lora_rank + qk_rope_head_dim, attention_bias) + kv_lora_rank "
    f"+ linear(kv_lora_rank, {H} * (qk_nope_head_dim + v_head_dim)) "
    f"+ linear({H} * v_head_dim, hidden_size, attention_bias)"
)
"""Latent attention: queries straight or by way of a rank of their own, keys and values out of the latent."""
INDEXER = (
    "linear(q_lora_rank, index_n_heads * index_head_dim) + linear(hidden_size, index_head_dim) + 2 * index_head_dim "
    "+ linear(hidden_size, index_n_heads)"
)

GATED_ATTENTION = attention("attention_bias", queries="2") + PER_HEAD
DELTA = (
    f"linear(hidden_size, {KEYS} + 2 * {VALUES} + 2 * {VALUE_HEADS}) "
    f"+ ({KEYS} + {VALUES}) * linear_conv_kernel_dim + 2 * {VALUE_HEADS} + linear_value_head_dim "
    f"+ linear({VALUES}, hidden_size)"
)
"""Gated delta net: projections of q, k, v, gate, decay and step; convolution, decays and steps; norm; output."""
CHANNEL_DELTA = (
    f"linear(hidden_size, {ALL_CHANNELS} + 2 * linear_head_dim + {LINEAR_HEADS}) "
    f"+ {ALL_CHANNELS} * linear_conv_kernel_dim + 2 * linear(linear_head_dim, {LINEAR_HEADS} * linear_head_dim) "
    f"+ {LINEAR_HEADS} * linear_head_dim + {LINEAR_HEADS} + linear_head_dim "
    f"+ linear({LINEAR_HEADS} * linear_head_dim, hidden_size)"
)
"""Kimi delta attention: the same with forget and output gates of low rank."""
LIGHTNING = f"linear(hidden_size, 4 * {H} * head_dim) + {H} * head_dim + linear({H} * head_dim, hidden_size)"
MAMBA_INNER, MAMBA_SIDE = "mamba_num_heads * mamba_head_dim", "2 * n_groups * ssm_state_size"
MAMBA2 = (
    f"linear(hidden_size, 2 * {MAMBA_INNER} + {MAMBA_SIDE} + mamba_num_heads, use_bias) "
    f"+ ({MAMBA_INNER} + {MAMBA_SIDE}) * (conv_kernel + (1 if use_conv_bias else 0)) + 3 * mamba_num_heads "
    f"+ {MAMBA_INNER} + linear({MAMBA_INNER}, hidden_size, use_bias)"
)

V4_COMPRESSOR = "compress_rate_{rate} * {wide} + 2 * linear(hidden_size, {wide}) + {dim}"
V4_ATTENTION = (
    f"{H} + linear(hidden_size, q_lora_rank) + q_lora_rank + linear(q_lora_rank, {H} * head_dim) "
    "+ linear(hidden_size, head_dim) + head_dim "
    f"+ linear({H} * head_dim / o_groups, o_groups * o_lora_rank) + linear(o_groups * o_lora_rank, hidden_size)"
)
HASHED = "(mlp_layer_types[i] == 'hash_moe' if mlp_layer_types is not None else i < num_hash_layers)"
"""Whether layer `i` looks the experts of a token up in a table instead of scoring them."""
V4_STREAMS = "2 * ((hc_mult + 2) * hc_mult * (hc_mult * hidden_size + 1) + 3)"
"""DeepSeek-V4's mixing of parallel residual streams, before attention and before the experts."""

BEFORE_SHARED = "i < num_hidden_layers - num_kv_shared_layers"


def queries_alone(dim: str = "head_dim") -> str:
    """What attention has left in a layer that reads the keys and values of another."""
    return (
        f"(linear(hidden_size, {H} * ({dim}), attention_bias) + ({dim}) "
        f"+ linear({H} * ({dim}), hidden_size, attention_bias))"
    )


QUERIES_ALONE = queries_alone()
PER_LAYER_INPUT = "(2 * hidden_size_per_layer_input + 1) * hidden_size"
PER_LAYER_INPUTS = "(num_hidden_layers * (vocab_size_per_layer_input + hidden_size) + 1) * hidden_size_per_layer_input"
"""Gemma's second embedding, with a vector for every layer and token, and its way into a layer."""


def gemma4(kv_heads: str, dim: str, projections: str) -> str:
    """Gemma 4's attention: queries everywhere, keys and values in the layers that keep them."""
    keys = f"{projections} * linear(hidden_size, ({kv_heads}) * ({dim}), attention_bias) + ({dim})"
    return f"{queries_alone(dim)} + ({keys} if {BEFORE_SHARED} else 0)"


STEP_HEADS = (
    "num_sliding_attention_heads if kinds[i] == 'sliding_attention' and num_sliding_attention_heads is not None "
    "else num_attention_heads"
)

TIED_BY_DEFAULT: dict[str, Rule] = {TIED: TRUE}
NEVER_TIED: dict[str, Rule] = {TIED: Computed("False")}
TIED_AROUND = frozenset(
    {
        "deepseek_vl",
        "deepseek_vl_hybrid",
        "fun_asr_nano",
        "glmasr",
        "got_ocr2",
        "granite_speech",
        "granite_speech_plus",
        "internvl",
        "janus",
        "kimi_k25",
        "lighton_ocr",
        "minicpm_ocr",
        "mistral3",
        "moss_transcribe_diarize",
        "ovis2",
        "pp_chart2table",
        "qwen3_asr",
    }
)
"""Models of pictures or sound that tie their decoder's head, where nothing is said, though the decoder alone does not."""

NUM_EXPERTS = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
LISTED = "(mlp_layer_types[i] != 'dense' if mlp_layer_types is not None else i >= first_k_dense_replace)"
"""Whether layer `i` has experts, by the list that newer files have or the count of dense layers that older ones do."""
STEPPED = "num_experts > 0 and i not in (mlp_only_layers or []) and (i + 1) % decoder_sparse_step == 0"


def sized(vocab: int, inner: int, **more: Rule) -> dict[str, Rule]:
    """Vocabulary and MLP width, and more by name."""
    return {"vocab_size": vocab, "intermediate_size": inner, "attention_bias": FALSE, "mlp_bias": FALSE, **more}


def latent_heads(nope: int = 128, v: Rule = 128, rank: Rule = 1536) -> dict[str, Rule]:
    """The sizes of latent attention that the cache does not show."""
    return {"qk_nope_head_dim": nope, "v_head_dim": v, "q_lora_rank": rank}


def expert_sizes(inner: int, count: int, dense: int = 0, shared: int = 1) -> dict[str, Rule]:
    """Routed experts of DeepSeek's kind, after `dense` layers without."""
    return {
        "moe_intermediate_size": inner,
        "num_experts": count,
        "n_shared_experts": Default(shared, 0),
        "first_k_dense_replace": dense,
        "mlp_layer_types": LIST,
    }


def stepped_sizes(inner: int, count: int) -> dict[str, Rule]:
    """Routed experts of Qwen's kind, in every `decoder_sparse_step`-th layer."""
    return {
        "moe_intermediate_size": inner,
        "num_experts": count,
        "decoder_sparse_step": 1,
        "mlp_only_layers": LIST,
    }


SHARED_WIDTH = "n_shared_experts * moe_intermediate_size"
SCORED = "(hidden_size + 1)"
"""A router that adds a bias to every expert's score, by which the load is balanced."""
DEEPSEEK_EXPERTS = mixed(LISTED, experts(shared=SHARED_WIDTH, router=SCORED))
RANK = Default(1536, None)


def llama(vocab: int, inner: int, mixer: str = BIASED, **more: Rule) -> Weights:
    """Llama's layer: attention, an MLP with a gate, a norm before each."""
    return Weights(sized(vocab, inner, **more), mixer=mixer, mlp=gated(bias="mlp_bias"))


def plain(vocab: int, inner: int, mixer: str = attention(), **more: Rule) -> Weights:
    """The same with an MLP that knows no bias, and attention with one where `mixer` says so."""
    return Weights({"vocab_size": vocab, "intermediate_size": inner, **more}, mixer=mixer, mlp=gated())


def gemma(vocab: int, inner: int, mixer: str = BIASED, norms: str = "4 * hidden_size") -> Weights:
    """Gemma's layer, tied, from Gemma 2 on with norms after attention and MLP too."""
    return Weights(sized(vocab, inner) | TIED_BY_DEFAULT, mixer=mixer, mlp=gated(), norms=norms)


def deepseek(
    sizes: Mapping[str, Rule],
    mixer: str = MLA,
    mlp: str = DEEPSEEK_EXPERTS,
    mixers: Mapping[str, str] | None = None,
) -> Weights:
    """DeepSeek's layer: latent attention, then experts routed and shared."""
    return Weights(sizes, mixer=mixer, mixers=mixers or {}, mlp=mlp, aliases=NUM_EXPERTS)


def qwen_hybrid(sizes: Mapping[str, Rule], mlp: str) -> Weights:
    """Attention with gated output between delta nets."""
    return Weights(
        {"attention_bias": FALSE, **sizes}, mixer=GATED_ATTENTION, mixers={"linear_attention": DELTA}, mlp=mlp
    )


QWEN_BIASED = attention("True", "False")
QWEN_SHARED = experts(shared="shared_expert_intermediate_size", gate="hidden_size")
MINIMAX_M3 = Weights(
    {
        **expert_sizes(3072, 128),
        "vocab_size": 200064,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "index_n_heads": 4,
        "moe_layer_freq": LIST,
    },
    mixer=attention() + PER_HEAD,
    mixers={
        "minimax_m3_sparse": attention()
        + PER_HEAD
        + " + linear(hidden_size, (index_n_heads + 1) * index_head_dim) + 2 * index_head_dim"
    },
    mlp=mixed(
        "(mlp_layer_types[i] != 'dense' if mlp_layer_types is not None "
        "else moe_layer_freq is None or moe_layer_freq[i])",
        experts("intermediate_size", shared="shared_intermediate_size", router=SCORED),
        gated("dense_intermediate_size"),
    ),
    aliases={**NUM_EXPERTS, "sparse_attention_config.sparse_num_index_heads": "index_n_heads"},
)

WEIGHTS: Mapping[str, Weights] = {
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
        mlp=f"{experts(shared='moe_intermediate_size')} + (vocab_size * num_experts_per_tok if {HASHED} else num_experts)",
        norms=f"2 * hidden_size + {V4_STREAMS}",
        outside="hidden_size + hc_mult * (hc_mult * hidden_size + 1) + 1",
        aliases=NUM_EXPERTS,
    ),
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
    "glm": plain(151552, 13696, mixer=attention("attention_bias", "False"), attention_bias=TRUE),
    "glm4": Weights(
        sized(151552, 13696, attention_bias=TRUE),
        mixer=attention("attention_bias", "False"),
        mlp=gated(),
        norms="4 * hidden_size",
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
    "gpt_oss": Weights(
        {"vocab_size": 201088, "intermediate_size": 2880, "num_experts": 128, "attention_bias": TRUE},
        mixer=f"{BIASED} + {H}",
        mlp=f"num_experts * ({gated(bias='True')} + hidden_size + 1)",
        aliases=NUM_EXPERTS,
    ),
    "granite": llama(32000, 11008),
    "granitemoe": Weights(
        {"vocab_size": 32000, "intermediate_size": 11008, "num_experts": 8, "attention_bias": FALSE},
        mixer=BIASED,
        mlp=experts("intermediate_size"),
        aliases=NUM_EXPERTS,
    ),
    "hunyuan_v1_dense": plain(290943, 11008, mixer=BIASED + PER_HEAD, attention_bias=FALSE),
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
            "routed_expert_hidden_size is None": "the weights of experts in a latent space, and what else Kimi K3 adds, "
            "are not described: give their bytes, or let --measure count them"
        },
    ),
    "llama": llama(32000, 11008),
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
    "mimo": plain(151680, 11008, mixer=attention("attention_bias", "False"), attention_bias=TRUE),
    "mimo_v2_flash": deepseek(
        sized(152576, 16384, **expert_sizes(2048, 256, dense=1)),
        mixer=attention("attention_bias", "False", v_dim="v_head_dim"),
        mixers={
            "sliding_attention": attention("attention_bias", "False", kv_heads=f"2 * {K}", v_dim="v_head_dim")
            + f" + {H}"
        },
        mlp=mixed(LISTED, experts(router=SCORED)),
    ),
    "minicpm3": Weights(
        {**sized(73448, 6400, **latent_heads(64, Default(SPLIT, SPLIT), Default(768, None))), **TIED_BY_DEFAULT},
        mixer=MLA,
        mlp=gated(bias="mlp_bias"),
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
    "ministral": plain(32000, 14336),
    "ministral3": plain(131072, 14336),
    "mistral": plain(32000, 14336),
    "mixtral": Weights(
        {"vocab_size": 32000, "intermediate_size": 14336, "num_experts": 8},
        mixer=attention(),
        mlp=experts("intermediate_size"),
        aliases=NUM_EXPERTS,
    ),
    "nemotron": Weights(
        sized(256000, 24576),
        mixer=BIASED,
        mlp="mlp(hidden_size, intermediate_size, mlp_bias)",
        norms=TWO_LAYER_NORMS,
        outside=LAYER_NORM,
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
    "qwen2_vl_text": plain(152064, 29568, mixer=QWEN_BIASED),
    "qwen3": plain(151936, 22016, mixer=BIASED + PER_HEAD, attention_bias=FALSE),
    "qwen3_5_moe_text": qwen_hybrid(
        {
            "vocab_size": 248320,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
        },
        mlp=QWEN_SHARED,
    ),
    "qwen3_5_text": qwen_hybrid({"vocab_size": 248320, "intermediate_size": 12288}, mlp=gated()),
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
    "qwen3_vl_text": plain(151936, 22016, mixer=BIASED + PER_HEAD, attention_bias=FALSE),
    "seed_oss": llama(
        155136,
        27648,
        mixer=attention("attention_bias", "attention_out_bias"),
        attention_bias=TRUE,
        attention_out_bias=FALSE,
    ),
    "smollm3": llama(128256, 11008, tie_word_embeddings=TRUE),
    "solar_open": deepseek(
        {**expert_sizes(1280, 128), "vocab_size": 196608, "attention_bias": FALSE},
        mixer=attention("attention_bias", "False"),
        mlp=experts(shared=SHARED_WIDTH, router=SCORED),
    ),
    "starcoder2": Weights(
        {"vocab_size": 49152, "intermediate_size": 12288, "use_bias": TRUE, **TIED_BY_DEFAULT},
        mixer=attention("use_bias"),
        mlp="mlp(hidden_size, intermediate_size, use_bias)",
        norms=TWO_LAYER_NORMS,
        outside=LAYER_NORM,
    ),
    "step3p5": Weights(
        {
            **sized(128815, 11264),
            **expert_sizes(1280, 288, dense=3),
            "share_expert_dim": 1280,
            "moe_layers_enum": Free((str, list)),
            **NEVER_TIED,
        },
        mixer=attention("attention_bias", heads=STEP_HEADS) + PER_HEAD + f" + hidden_size * ({STEP_HEADS})",
        mlp=mixed(LISTED, experts(shared="share_expert_dim", router=SCORED, bias="mlp_bias"), gated(bias="mlp_bias")),
        aliases={
            "n_routed_experts": "num_experts",
            "moe_num_experts": "num_experts",
            "share_expert_dims": "share_expert_dim",
        },
        requires={
            "moe_layers_enum is None or mlp_layer_types is not None": "moe_layers_enum is an older spelling that is "
            "not read: give mlp_layer_types, a list of 'dense' and 'sparse'"
        },
    ),
    "youtu": deepseek({**sized(128256, 6144, **latent_heads(rank=RANK)), **TIED_BY_DEFAULT}, mlp=gated()),
}
