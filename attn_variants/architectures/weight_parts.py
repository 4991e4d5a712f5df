"""What an entry of `weights` says, and the parts it is built from: formulas that several model types share.

A formula gives numbers, and names fields of config.json as the families' formulas do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .families.linear import ALL_CHANNELS, KEYS, LINEAR_HEADS, VALUE_HEADS, VALUES
from .family import FALSE, LIST, TRUE, Computed, Default, Rule

TIED = "tie_word_embeddings"
H, K = "num_attention_heads", "num_key_value_heads"


@dataclass(frozen=True)
class Weights:
    """One model_type's weights. Formulas give numbers; those of a layer may name `i`, `kinds` and `layers`.

    fields:   what fields mean that the cache does not depend on, as in `Family`.
    aliases:  other names of these.
    requires: formulas that must hold, each with what to say when it does not.
    mixer:    attention, or what a layer has in its place.
    mixers:   the same for kinds of layers that have another.
    mlp:      the layer's MLP or experts.
    norms:    the layer's norms that act on the hidden state.
    outside:  what comes besides layers, embedding and head: the final norm, positions.
    embedding, head: these two, the head where it is not tied.
    """

    fields: Mapping[str, Rule]
    mlp: str
    mixer: str = "0"
    mixers: Mapping[str, str] = field(default_factory=dict)
    norms: str = "2 * hidden_size"
    outside: str = "hidden_size"
    embedding: str = "vocab_size * hidden_size"
    head: str = "vocab_size * hidden_size"
    aliases: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, str] = field(default_factory=dict)


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
"""Models of pictures or sound that tie the head where nothing is said, though their decoder alone does not."""

NUM_EXPERTS = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
LISTED = "(mlp_layer_types[i] != 'dense' if mlp_layer_types is not None else i >= first_k_dense_replace)"
"""Whether layer `i` has experts, by the list that newer files have or the count of dense layers that older ones do."""
STEP_LISTED = f"({LISTED} if moe_layers_enum is None else '%d' % i in moe_layers_enum.replace(' ', '').split(','))"
"""The same for Step, whose older files number the layers with experts: `3,4,5`."""
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
