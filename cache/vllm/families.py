"""What is particular to a model_type in vLLM, as data. One that is not named here has ordinary attention.

Formulas are those of the architectures (`attn_variants.architectures.formula`), over the config's fields, `tp`, and the
names in `Rules.defaults`; `/` divides exactly or refuses. File names are vLLM's, below vllm/model_executor/ where no
folder is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .kernels import INDEXED, INDEXED_LATENT, STRIDED, Kernel
from .pages import Kind


@dataclass(frozen=True)
class States:
    """The states of a layer per sequence and rank.

    conv:       numbers of the convolution's tail, in the model's dtype.
    state:      numbers of the recurrent state, in `dtype`, a formula whose None is the model's.
    aligned:    with prefix caching, blocks are multiples of this many tokens (get_prefill_checkpoint_alignment).
    checkpoint: whether a state inside a prefill can be exported, which takes a block (num_prefill_checkpoint_blocks).
    requires:   formulas that must hold, each with what to say when it does not.
    """

    conv: str
    state: str = "0"
    dtype: str = "None"
    aligned: int = 1
    checkpoint: str = "False"
    requires: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Listed:
    """One of several caches of a layer: bytes of an entry, tokens per block (None: the model's) and per entry."""

    kind: Kind
    what: str
    entry: str
    block: str | None = None
    every: int = 1
    span: str | None = None


@dataclass(frozen=True)
class Rules:
    """What vLLM does otherwise for a model_type.

    windows:   kinds of layer whose window is another than the architecture's; a formula that comes to None is none.
    states:    its layers with states.
    indexer:   bytes per token of an indexer's key.
    head_dim:  width of keys and values that are stored by head although the model's own code keeps latents.
    replicates: whether a key/value head may be kept by several ranks.
    uneven:    whether a tp that neither divides the key/value heads nor is a multiple of them is taken, rounding down.
    alike:     whether layers of different kinds are refused.
    alibi:     whether attention has linear biases, which no kernel reads from fp8.
    own_dtype: whether its cache stays in the model's dtype, whatever is asked for.
    kernels:   its attention backends, where they are not those of grouped or latent attention.
    strided:   caches by kind of layer, of a model that pools its tokens.
    beside:    caches by kind of layer that lie beside its attention, in place of states.
    requires:  formulas that must hold, each with what to say when it does not.
    defaults:  fields that no family knows, and what they are where config.json is silent.
    """

    windows: Mapping[str, str] = field(default_factory=dict)
    states: States | None = None
    indexer: str | None = None
    head_dim: str | None = None
    replicates: bool = True
    uneven: bool = False
    alike: bool = False
    alibi: bool = False
    own_dtype: bool = False
    kernels: tuple[Kernel, ...] | None = None
    strided: Mapping[str, tuple[Listed, ...]] = field(default_factory=dict)
    beside: Mapping[str, tuple[Listed, ...]] = field(default_factory=dict)
    requires: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)


def mamba1(inner: str, state: str, kernel: str) -> States:
    """Mamba: channels over ranks (mamba1_state_shape, layers/mamba/mamba_utils.py); it exports no checkpoint."""
    return States(f"{inner} / tp * ({kernel} - 1)", f"{inner} / tp * {state}")


def mamba2(inner: str, groups: str, state: str, heads: str, kernel: str, dtype: str = "None") -> States:
    """Mamba-2: heads over ranks, and one group of B and C for each rank at least (mamba2_state_shape)."""
    return States(
        f"({inner} + 2 * ({groups} if {groups} % tp == 0 else tp) * {state}) / tp * ({kernel} - 1)",
        f"{heads} / tp * ({inner} / {heads}) * {state}",
        dtype,
        checkpoint="True",
        requires={f"{groups} % tp == 0 or {groups} == 1": f"tp must divide {groups}, unless {groups} is 1"},
    )


DELTA = States(
    "(2 * linear_num_key_heads * linear_key_head_dim + linear_num_value_heads * linear_value_head_dim) / tp"
    " * (linear_conv_kernel_dim - 1)",
    "linear_num_value_heads / tp * linear_value_head_dim * linear_key_head_dim",
)
"""Gated delta rule (gated_delta_net_state_shape)."""
QWEN_DELTA = replace(DELTA, aligned=64, checkpoint="True")
"""FlashInfer's prefill, which Hopper runs, exports states at multiples of 64 tokens (qwen_gdn_linear_attn.py)."""
CHANNEL_DELTA = States(
    "3 * linear_num_heads * linear_head_dim / tp * (linear_conv_kernel_dim - 1)",
    "linear_num_heads / tp * linear_head_dim * linear_head_dim",
    "'float32'",
    # FlashKDA exports states, and runs where the gate is bounded and of full rank (models/kimi_k3/nvidia/kda.py).
    checkpoint="linear_attn_config is not None and linear_attn_config.get('use_full_rank_gate', False) "
    "and linear_attn_config.get('gate_lower_bound') is not None and linear_head_dim == 128",
)
"""Kimi delta attention (kda_state_shape)."""

EXPANDED = "(mamba_expand * hidden_size)"
ALL_ALIKE = Rules(alike=True)
"""Qwen2Model refuses to serve a window on some of its layers (models/qwen2.py)."""
SPARSE_LATENT = Rules(kernels=INDEXED_LATENT, indexer="index_head_dim + index_head_dim // 128 * 4")
"""The indexer's key in fp8, a scale of four bytes for each 128 (vllm/models/deepseek_v32/attention.py)."""
M3 = Rules(kernels=INDEXED, indexer="2 * index_head_dim")
"""The indexer's key stays bfloat16 (vllm/models/minimax_m3/common/indexer.py)."""
QWEN3_5 = Rules(
    states=replace(QWEN_DELTA, dtype="mamba_ssm_dtype"),
    defaults={"mamba_ssm_dtype": "None"},
)

V4_LATENT_BYTES = "448 + 2 * 64 + 8"
"""448 numbers in fp8, 64 rotated ones in bfloat16, and scales (vllm/models/deepseek_v4/attention.py)."""
V4_ALIGN = 576
V4_WINDOW = Listed(Kind.SLIDING, "window", V4_LATENT_BYTES, block="64", span="sliding_window")
V4 = Rules(
    kernels=STRIDED,
    strided={
        "sliding_attention": (V4_WINDOW,),
        "compressed_sparse_attention": (
            V4_WINDOW,
            Listed(Kind.FULL, "index", "index_head_dim + index_head_dim // 128 * 4", every=4),
            # Numbers and gates of two overlapping strides, in float32 (vllm/models/deepseek_v4/compressor.py).
            Listed(Kind.SLIDING, "index tail", "2 * 2 * 4 * index_head_dim", block="4", span="8"),
            Listed(Kind.FULL, "latents", V4_LATENT_BYTES, every=4),
            Listed(Kind.SLIDING, "tail", "2 * 2 * 4 * head_dim", block="4", span="8"),
        ),
        "heavily_compressed_attention": (
            V4_WINDOW,
            Listed(Kind.FULL, "latents", V4_LATENT_BYTES, every=128),
            Listed(Kind.SLIDING, "tail", "2 * 4 * head_dim", block="8", span="128"),
        ),
    },
    requires={
        "head_dim == 512": "head_dim must be 512, the only width that its kernels read",
        "compress_rate_csa == 4 and compress_rate_hca == 128": "strides must be of 4 and 128 tokens",
    },
)

EXPANDED_LATENTS = Rules(
    head_dim="qk_nope_head_dim + qk_rope_head_dim",
    defaults={"qk_nope_head_dim": "64"},
)
"""Keys and values of every head, values padded to the width of keys."""
WRAPPED = Rules(uneven=True)
"""A model of transformers, whose attention vLLM replaces (models/transformers/base.py)."""


def inkling_tail(heads: str, dim: str) -> tuple[Listed, ...]:
    """The tails of a layer's four convolutions, in bfloat16, as one window of the kernel's length.

    Keys, values and two shares of the hidden size lie by heads, each head's in a row of 2**n numbers
    (vllm/models/inkling/nvidia/sconv_swa_attn.py).
    """
    row = f"(1 << (2 * {dim} + 2 * (hidden_size // {heads}) - 1).bit_length())"
    return (
        Listed(
            Kind.SLIDING, f"tails of {heads}", f"2 * {heads} // tp * {row}", "conv_kernel_size", span="conv_kernel_size"
        ),
    )


RULES: Mapping[str, Rules] = {
    # transformers' code, whose latents vLLM does not recognise, as of youtu; its indexer's keys are not kept.
    "axk2": EXPANDED_LATENTS,
    "bloom": Rules(alibi=True),
    # Its window counts the tokens before the current one (models/commandr.py, cohere2_moe.py).
    "cohere2": Rules(windows={"sliding_attention": "sliding_window + 1"}),
    "cohere2_moe": Rules(windows={"sliding_attention": "sliding_window + 1"}),
    "deepseek_v32": SPARSE_LATENT,
    "deepseek_v4": V4,
    "dory": Rules(requires={"tp == 1": "tp must be 1, for vLLM does not split this model"}),
    # Its attention is not told of kv_dtype (models/falcon.py).
    "falcon": Rules(own_dtype=True),
    "falcon_h1": Rules(
        states=mamba2("mamba_d_ssm", "mamba_n_groups", "mamba_d_state", "mamba_n_heads", "mamba_d_conv")
    ),
    "falcon_mamba": Rules(states=mamba1("intermediate_size", "state_size", "conv_kernel")),
    "glm_moe_dsa": SPARSE_LATENT,
    # It divides its key/value heads by tp and keeps none where there are too few (models/gpt_oss.py).
    "gpt_oss": Rules(replicates=False),
    "granitemoehybrid": Rules(
        states=mamba2(EXPANDED, "mamba_n_groups", "mamba_d_state", "mamba_n_heads", "mamba_d_conv")
    ),
    # A rank keeps whole heads of the tails, so there are no more ranks than heads.
    "inkling_text": Rules(
        replicates=False,
        beside={
            "hybrid": inkling_tail("num_key_value_heads", "head_dim"),
            "hybrid_sliding": inkling_tail("swa_num_key_value_heads", "swa_head_dim"),
        },
    ),
    "jamba": Rules(states=mamba1(EXPANDED, "mamba_d_state", "mamba_d_conv")),
    "kimi_linear": Rules(states=CHANNEL_DELTA, defaults={"linear_attn_config": "None"}),
    "lfm2": Rules(states=States("conv_dim / tp * (conv_L_cache - 1)"), defaults={"conv_dim": "hidden_size"}),
    "lfm2_moe": Rules(states=States("hidden_size / tp * (conv_L_cache - 1)")),
    "mamba": Rules(states=mamba1("intermediate_size", "state_size", "conv_kernel")),
    "mamba2": Rules(states=mamba2("(expand * hidden_size)", "n_groups", "state_size", "num_heads", "conv_kernel")),
    # Its window is sliding_window_size as it stands (models/mimo_v2.py); the architecture's is one more.
    "mimo_v2_flash": Rules(
        windows={
            "sliding_attention": "sliding_window - 1 if sliding_window_size is None else sliding_window_size",
        }
    ),
    # It expands its latents (models/minicpm3.py).
    "minicpm3": EXPANDED_LATENTS,
    "minimax_m3": M3,
    "minimax_m3_vl_text": M3,
    # Attention slides where there is a window, and states are float32 unless config.json says otherwise.
    "nemotron_h": Rules(
        windows={"full_attention": "sliding_window"},
        states=mamba2(
            "(mamba_num_heads * mamba_head_dim)",
            "n_groups",
            "ssm_state_size",
            "mamba_num_heads",
            "conv_kernel",
            "mamba_ssm_cache_dtype",
        ),
        defaults={"mamba_ssm_cache_dtype": "'float32'"},
    ),
    "olmo_hybrid": Rules(states=DELTA),
    # A window on some layers is not applied (models/qwen2_moe.py reads the model's, which is then none).
    "qwen2_moe": Rules(windows={"sliding_attention": "None"}),
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": Rules(states=QWEN_DELTA),
    # transformers' code, whose latents vLLM does not recognise.
    "youtu": replace(EXPANDED_LATENTS, defaults={"qk_nope_head_dim": "128"}),
    # transformers' code, of which vLLM keeps neither tails of convolutions nor windows.
    "zaya": replace(WRAPPED, windows={"hybrid_sliding": "None"}, beside={"hybrid": (), "hybrid_sliding": ()}),
    "zamba2": Rules(states=mamba2(EXPANDED, "mamba_ngroups", "mamba_d_state", "n_mamba_heads", "mamba_d_conv")),
    **dict.fromkeys(
        ("mimo", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text"), ALL_ALIKE
    ),
    **dict.fromkeys(
        (
            "arcee",
            "biogpt",
            "bitnet",
            "codegen",
            "ctrl",
            "cwm",
            "doge",
            "dots1",
            "flex_olmo",
            "glm",
            "gpt_bigcode",
            "gpt_neox",
            "helium",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "jais2",
            "jetmoe",
            "kolibri1",
            "mellum",
            "ministral",
            "moshi",
            "nanochat",
            "olmo",
            "olmo2",
            "olmo3",
            "persimmon",
            "phi",
            "seed_oss",
            "smollm3",
            "solar_open",
            "starcoder2",
            "vaultgemma",
        ),
        WRAPPED,
    ),
}

_ENCODER = "it is an encoder, for which vLLM keeps no KV cache"
_TRANSLATION = "it is the decoder of an encoder-decoder model, which vLLM does not serve alone"
_NO_CODE = "vLLM has no code of its own for it, and its layers do not go through transformers' attention interface"
_OWN_RULES = "vLLM gives it caches by rules of its own, which are not described here"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "modernbert-decoder",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "git",
            "marian",
            "mbart",
            "musicgen_decoder",
            "musicgen_melody_decoder",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "trocr",
            "whisper",
        ),
        _TRANSLATION,
    ),
    **dict.fromkeys(
        (
            "bamba",
            "cpmant",
            "diffllama",
            "gpt_neo",
            "gpt_neox_japanese",
            "lara_mini",
            "lfm3",
            "minimax",
            "mllama_text_model",
            "mpt",
            "openai-gpt",
            "recurrent_gemma",
            "rwkv",
            "xglm",
            "xlm",
            "xlnet",
            "xlstm",
            "zamba",
        ),
        _NO_CODE,
    ),
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "dots3_note_text",
            "glm5_next_text",
            "hy_v4",
            "hy_v4_vl_text",
            "inkling2_loop_text",
            "inkling2_text",
            "mistral4",
            "mistral_large4_text",
            "qwen4_exp_text",
        ),
        _OWN_RULES,
    ),
}
"""Model types whose figures are not given, and why."""
