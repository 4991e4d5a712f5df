"""Decoders with states of constant size: linear attention, delta rules, state spaces, convolutions; alone or in hybrids.

A recurrent state stays float32 in a bfloat16 model where it says so; a convolution remembers its kernel's length less one,
of which transformers keeps one token more.
"""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    FULL,
    HEADS,
    LATENT,
    NONE,
    OR_HEADS,
    SLIDING,
    Computed,
    Default,
    Family,
    Held,
    Kept,
    KeptState,
    Layer,
    Nested,
    Rule,
    latent,
    sizes,
)


def convolution(kernel: str) -> tuple[dict[str, Rule], Held]:
    """The field `conv_tail` of a convolution's memory, and what transformers makes of it."""
    return {"conv_tail": Computed(f"{kernel} - 1")}, Held({"conv_tail": Computed(kernel)})


def state_space(channels: str, inner: str | tuple[str, ...], state: str) -> tuple[KeptState, KeptState]:
    """Mamba: the tail of `channels` and a state of `state` numbers for each of the `inner` ones."""
    axes = (inner,) if isinstance(inner, str) else inner
    return KeptState("conv", (channels, "conv_tail")), KeptState("ssm", (*axes, state), "float32")


def mamba2(inner: str, groups: str, state: str, heads: str) -> tuple[KeptState, KeptState]:
    """Mamba-2: the convolution runs over x, B and C; the state has `heads` heads."""
    return state_space(f"{inner} + 2 * {groups} * {state}", (heads, f"{inner} / {heads}"), state)


DELTA = Layer(
    states=(
        KeptState(
            "conv",
            (
                "2 * linear_num_key_heads * linear_key_head_dim + linear_num_value_heads * linear_value_head_dim",
                "conv_tail",
            ),
        ),
        KeptState("delta", ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"), "float32"),
    )
)
"""Gated delta rule: a key-by-value matrix for every value head."""
CHANNEL_DELTA = Layer(
    states=(
        KeptState("conv", ("3 * linear_num_heads * linear_head_dim", "conv_tail")),
        KeptState("delta", ("linear_num_heads", "linear_head_dim", "linear_head_dim"), "float32"),
    )
)
"""Delta rule with a decay per key channel (Kimi delta attention)."""
SHORT_CONV = Layer(states=(KeptState("conv", ("hidden_size", "conv_tail")),))

MAMBA = state_space("intermediate_size", "intermediate_size", "state_size")
JAMBA = state_space("mamba_expand * hidden_size", "mamba_expand * hidden_size", "mamba_d_state")
BAMBA = mamba2("(mamba_expand * hidden_size)", "mamba_n_groups", "mamba_d_state", "mamba_n_heads")
FALCON_H1 = mamba2("mamba_d_ssm", "mamba_n_groups", "mamba_d_state", "mamba_n_heads")
ZAMBA = state_space(
    "mamba_expand * hidden_size", ("n_mamba_heads", "mamba_expand * hidden_size / n_mamba_heads"), "mamba_d_state"
)
ZAMBA2 = mamba2("(mamba_expand * hidden_size)", "mamba_ngroups", "mamba_d_state", "n_mamba_heads")
NEMOTRON_H = state_space(
    "mamba_num_heads * mamba_head_dim + 2 * n_groups * ssm_state_size",
    ("mamba_num_heads", "mamba_head_dim"),
    "ssm_state_size",
)
MAMBA_CONV, MAMBA_HELD = convolution("conv_kernel")
HYBRID_CONV, HYBRID_HELD = convolution("mamba_d_conv")
LINEAR_CONV, LINEAR_HELD = convolution("linear_conv_kernel_dim")
SHORT_TAIL, SHORT_HELD = convolution("conv_L_cache")
INKLING_CONV, INKLING_HELD = convolution("conv_kernel_size")

FULL_EVERY_INTERVAL = "'linear_attention' if (i + 1) % full_attention_interval else 'full_attention'"


def delta_sizes(layers: int, hidden: int, heads: int, kv: int, value_heads: int, key_heads: int = 16) -> dict[str, Rule]:
    """Qwen's hybrids: attention with a head dim of 256, the delta rule with one of 128."""
    return sizes(
        layers,
        hidden,
        heads,
        kv=kv,
        head_dim=256,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        **LINEAR_CONV,
    )


def inkling_sizes(layers: int, hidden: int, heads: int, window: int, swa_kv: int, **more: Rule) -> dict[str, Rule]:
    """Inkling's layers have convolutions beside attention, and sliding layers key/value heads of their own."""
    return sizes(
        layers,
        hidden,
        heads,
        kv=8,
        head_dim=128,
        swa_num_attention_heads=heads,
        swa_num_key_value_heads=swa_kv,
        swa_head_dim=128,
        sliding_window_size=window,
        conv_kernel_size=4,
        **INKLING_CONV,
        **more,
    )


def _inkling_kinds() -> dict[str, Layer]:
    kinds = {}
    for kind, swa, window in (("hybrid", "", None), ("hybrid_sliding", "swa_", "sliding_window_size")):
        heads, dim = f"{swa}num_key_value_heads", f"{swa}head_dim"
        states = (
            KeptState("conv_k", (f"{heads} * {dim}", "conv_tail"), "float32"),
            KeptState("conv_v", (f"{heads} * {dim}", "conv_tail"), "float32"),
            KeptState("conv_attention", ("hidden_size", "conv_tail"), "float32"),
            KeptState("conv_mlp", ("hidden_size", "conv_tail"), "float32"),
        )
        kinds[kind] = Layer(((Kept("k", heads, dim),), (Kept("v", heads, dim),)), states, window)
    return kinds


INKLING_ALIASES = {
    "sliding_window": "sliding_window_size",
    "sconv_kernel_size": "conv_kernel_size",
    "loop_config.core_start": "loop_layer_index_start",
    "loop_config.core_end": "loop_layer_index_end",
    "loop_config.num_passes": "loop_num_passes",
}
INKLING_HEADS = "swa_num_attention_heads if kinds[i] == 'hybrid_sliding' else num_attention_heads"

ZAYA = (
    KeptState(
        "conv", ("(num_attention_heads + num_key_value_heads) * head_dim", "cca_time0 + cca_time1 - 2")
    ),
    KeptState("value", ("num_key_value_heads * head_dim / 2",)),
)

FAMILIES: Mapping[str, Family | Nested] = {
    "bailing_hybrid": Family(
        latent(
            42,
            2560,
            32,
            head_dim=128,
            linear_head_dim=Default("head_dim", "head_dim"),
            linear_num_heads=Computed(HEADS),
            short_conv_kernel_size=4,
            linear_conv_kernel_dim=Computed("short_conv_kernel_size"),
            layer_group_size=6,
            **LINEAR_CONV,
        ),
        layer="'linear_attention' if (i + 1) % layer_group_size else 'full_attention'",
        kinds={"full_attention": LATENT, "linear_attention": CHANNEL_DELTA},
        transformers=LINEAR_HELD,
    ),
    "bamba": Family(
        sizes(
            32,
            4096,
            32,
            kv=Default(8, HEADS),
            attn_layer_indices=Default(None),
            mamba_n_heads=128,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
            mamba_expand=2,
            **HYBRID_CONV,
        ),
        layer="'full_attention' if i in (attn_layer_indices or []) else 'linear_attention'",
        kinds={"linear_attention": Layer(states=BAMBA)},
        transformers=HYBRID_HELD,
    ),
    "falcon_h1": Family(
        sizes(
            32,
            4096,
            32,
            kv=Default(8, HEADS),
            mamba_d_ssm=Default(1024, "mamba_expand * hidden_size"),
            mamba_expand=2,
            mamba_n_heads=128,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
            **HYBRID_CONV,
        ),
        layer="'hybrid'",
        kinds={"hybrid": FULL.with_states(*FALCON_H1)},
        transformers=HYBRID_HELD,
    ),
    "falcon_mamba": Family(
        {
            "num_hidden_layers": 32,
            "hidden_size": 768,
            "expand": 2,
            "intermediate_size": Default("expand * hidden_size"),
            "state_size": 16,
            "conv_kernel": 4,
            **MAMBA_CONV,
        },
        layer="'linear_attention'",
        kinds={"linear_attention": Layer(states=MAMBA)},
        transformers=MAMBA_HELD,
    ),
    "granitemoehybrid": Family(
        sizes(
            32,
            4096,
            32,
            mamba_n_heads=128,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
            mamba_expand=2,
            **HYBRID_CONV,
        ),
        aliases={"layers_block_type": "layer_types"},
        layer="'linear_attention'",
        kinds={"linear_attention": Layer(states=BAMBA)},
        transformers=HYBRID_HELD,
    ),
    "inkling_text": Family(
        inkling_sizes(66, 6144, 64, 512, 16, local_layer_ids=Default(None)),
        aliases=INKLING_ALIASES,
        layer="'hybrid_sliding' if (i in local_layer_ids if local_layer_ids is not None else (i + 1) % 6) else 'hybrid'",
        kinds=_inkling_kinds(),
        query_heads=INKLING_HEADS,
        transformers=INKLING_HELD,
    ),
    "inkling2_text": Family(
        inkling_sizes(48, 4608, 48, 1024, 8),
        aliases=INKLING_ALIASES,
        layer="'hybrid_sliding' if (i + 1) % 6 else 'hybrid'",
        kinds=_inkling_kinds(),
        query_heads=INKLING_HEADS,
        transformers=INKLING_HELD,
    ),
    "inkling2_loop_text": Family(
        inkling_sizes(
            24, 2304, 24, 1024, 8, loop_layer_index_start=6, loop_layer_index_end=18, loop_num_passes=3
        ),
        aliases=INKLING_ALIASES,
        layer="'hybrid_sliding' if (i + 1) % 6 else 'hybrid'",
        kinds=_inkling_kinds(),
        query_heads=INKLING_HEADS,
        slots="layers[:loop_layer_index_start] + layers[loop_layer_index_start:loop_layer_index_end] * loop_num_passes "
        "+ layers[loop_layer_index_end:]",
        transformers=INKLING_HELD,
    ),
    "jamba": Family(
        sizes(
            32,
            4096,
            32,
            kv=8,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            **HYBRID_CONV,
        ),
        layer="'full_attention' if i % attn_layer_period == attn_layer_offset else 'linear_attention'",
        kinds={"linear_attention": Layer(states=JAMBA)},
        transformers=HYBRID_HELD,
    ),
    "kimi_linear": Family(
        latent(
            27,
            2304,
            32,
            linear_head_dim=128,
            linear_num_heads=32,
            linear_conv_kernel_dim=4,
            full_attn_layers=Default(None),
            kda_layers=Default(None),
            **LINEAR_CONV,
        ),
        aliases={
            "linear_attn_config.head_dim": "linear_head_dim",
            "linear_attn_config.num_heads": "linear_num_heads",
            "linear_attn_config.short_conv_kernel_size": "linear_conv_kernel_dim",
            "linear_attn_config.full_attn_layers": "full_attn_layers",
            "linear_attn_config.kda_layers": "kda_layers",
        },
        # The lists count from 1.
        layer="'full_attention' if (i + 1 in full_attn_layers if full_attn_layers is not None and kda_layers is not None "
        "else i > 0 and i % 4 == 0) else 'linear_attention'",
        kinds={"full_attention": LATENT, "linear_attention": CHANNEL_DELTA},
        transformers=LINEAR_HELD,
    ),
    "lara_mini": Family(
        sizes(
            34,
            1024,
            16,
            kv=4,
            head_dim=128,
            sliding_window=512,
            linear_num_key_heads=8,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            **LINEAR_CONV,
        ),
        layer="['linear_attention', 'sliding_attention', 'linear_attention', 'full_attention', 'sliding_attention'][i % 5]",
        kinds={"linear_attention": DELTA},
        transformers=LINEAR_HELD,
    ),
    "lfm2": Family(
        sizes(32, 2560, 32, kv=8, conv_L_cache=3, full_attn_idxs=Default(None), **SHORT_TAIL),
        layer="'full_attention' if full_attn_idxs is None or i in full_attn_idxs else 'conv'",
        kinds={"conv": SHORT_CONV},
        transformers=SHORT_HELD,
    ),
    "lfm2_moe": Family(
        sizes(32, 2048, 32, kv=8, conv_L_cache=3, **SHORT_TAIL),
        requires={"layer_types is not None": "layer_types is missing, and this model_type has no rule for it: give it"},
        kinds={"conv": SHORT_CONV},
        transformers=SHORT_HELD,
    ),
    "lfm3": Family(
        sizes(24, 2048, 16, kv=4, head_dim=128, sliding_window=Default(256), conv_L_cache=7, **SHORT_TAIL),
        layer="'full_attention' if i % 4 == 2 else 'sliding_attention' if i % 4 == 0 and i > 0 else 'conv'",
        kinds={"conv": SHORT_CONV},
        transformers=SHORT_HELD,
    ),
    "mamba": Family(
        {
            "num_hidden_layers": 32,
            "hidden_size": 768,
            "expand": 2,
            "intermediate_size": Default("expand * hidden_size"),
            "state_size": 16,
            "conv_kernel": 4,
            **MAMBA_CONV,
        },
        layer="'linear_attention'",
        kinds={"linear_attention": Layer(states=MAMBA)},
        transformers=MAMBA_HELD,
    ),
    "mamba2": Family(
        {
            "num_hidden_layers": 64,
            "hidden_size": 4096,
            "expand": 2,
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
            **MAMBA_CONV,
        },
        requires={"expand * hidden_size == num_heads * head_dim": "expand * hidden_size must be num_heads * head_dim"},
        layer="'linear_attention'",
        kinds={
            "linear_attention": Layer(
                states=state_space(
                    "expand * hidden_size + 2 * n_groups * state_size", ("num_heads", "head_dim"), "state_size"
                )
            )
        },
        transformers=MAMBA_HELD,
    ),
    "minimax": Family(
        sizes(32, 4096, 32, kv=8),
        layer="'linear_attention' if i % 2 else 'full_attention'",
        kinds={"linear_attention": Layer(states=(KeptState("lightning", (HEADS, "head_dim", "head_dim")),))},
    ),
    "nemotron_h": Family(
        sizes(
            Computed(
                "len(layer_types) if layer_types is not None else len(hybrid_override_pattern or 'ME*-')"
            ),
            4096,
            32,
            kv=8,
            head_dim=128,
            hybrid_override_pattern=Default(None),
            mamba_num_heads=128,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
            **MAMBA_CONV,
        ),
        aliases={
            "layers_block_type": "layer_types",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
        },
        layer="{'M': 'linear_attention', '*': 'full_attention', '-': 'mlp', 'E': 'moe'}"
        "[(hybrid_override_pattern or 'ME*-')[i]]",
        kinds={"linear_attention": Layer(states=NEMOTRON_H), "mlp": NONE, "moe": NONE},
        transformers=MAMBA_HELD,
    ),
    "olmo_hybrid": Family(
        sizes(
            32,
            3840,
            30,
            linear_num_key_heads=OR_HEADS,
            linear_num_value_heads=OR_HEADS,
            linear_key_head_dim=Default(
                "3 * hidden_size // (4 * linear_num_key_heads)", "3 * hidden_size // (4 * linear_num_key_heads)"
            ),
            linear_value_head_dim=Default("2 * linear_key_head_dim", "2 * linear_key_head_dim"),
            linear_conv_kernel_dim=4,
            **LINEAR_CONV,
        ),
        layer="'full_attention' if i % 4 == 3 or (num_hidden_layers < 4 and i == num_hidden_layers - 1) "
        "else 'linear_attention'",
        kinds={"linear_attention": DELTA},
        transformers=LINEAR_HELD,
    ),
    "qwen3_5_moe_text": Family(
        delta_sizes(40, 2048, 16, kv=2, value_heads=32),
        layer=FULL_EVERY_INTERVAL,
        kinds={"linear_attention": DELTA},
        transformers=LINEAR_HELD,
    ),
    "qwen3_5_text": Family(
        delta_sizes(32, 4096, 16, kv=4, value_heads=32),
        layer=FULL_EVERY_INTERVAL,
        kinds={"linear_attention": DELTA},
        transformers=LINEAR_HELD,
    ),
    "qwen3_next": Family(
        delta_sizes(48, 2048, 16, kv=2, value_heads=32),
        layer=FULL_EVERY_INTERVAL,
        kinds={"linear_attention": DELTA},
        transformers=LINEAR_HELD,
    ),
    "recurrent_gemma": Family(
        sizes(
            26,
            2560,
            10,
            lru_width=Default("hidden_size", "hidden_size"),
            attention_window_size=2048,
            conv1d_width=4,
            block_types=Default(None),
        ),
        aliases={"sliding_window": "attention_window_size"},
        layer="'linear_attention' if (block_types or ['recurrent', 'recurrent', 'attention'])"
        "[i % len(block_types or [0, 0, 0])] == 'recurrent' else 'sliding_attention'",
        kinds={
            "sliding_attention": Layer(SLIDING.records, window="attention_window_size"),
            "linear_attention": Layer(
                states=(KeptState("conv", ("lru_width", "conv1d_width - 1")), KeptState("lru", ("lru_width",), "float32"))
            ),
        },
    ),
    "rwkv": Family(
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "attention_hidden_size": Default("hidden_size", "hidden_size"),
        },
        layer="'linear_attention'",
        kinds={
            "linear_attention": Layer(
                states=(KeptState("shift", (2, "hidden_size")), KeptState("wkv", (3, "attention_hidden_size"), "float32"))
            )
        },
    ),
    "xlstm": Family(
        {
            "num_hidden_layers": Default("num_blocks", "num_blocks"),
            "num_blocks": Default(32, 32),
            "hidden_size": 4096,
            "num_heads": 8,
            "qk_dim_factor": 0.5,
            "v_dim_factor": 1.0,
            "qk_dim": Computed("round_up(hidden_size * qk_dim_factor, 64)"),
            "v_dim": Computed("round_up(hidden_size * v_dim_factor, 64)"),
        },
        aliases={"embedding_dim": "hidden_size"},
        layer="'linear_attention'",
        kinds={
            "linear_attention": Layer(
                states=(
                    KeptState("matrix", ("num_heads", "qk_dim / num_heads", "v_dim / num_heads")),
                    KeptState("normaliser", ("num_heads", "qk_dim / num_heads")),
                    KeptState("maximum", ("num_heads", 1)),
                )
            )
        },
        # One counter of eight bytes.
        transformers=Held(once=8),
    ),
    "zamba": Family(
        sizes(
            76,
            3712,
            16,
            kv=16,
            head_dim=Default("2 * hidden_size / num_attention_heads", "2 * hidden_size / num_attention_heads"),
            attn_layer_period=6,
            attn_layer_offset=4,
            n_mamba_heads=2,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            **HYBRID_CONV,
        ),
        aliases={"layers_block_type": "layer_types", "attention_head_dim": "head_dim"},
        layer="'hybrid' if i == 2 or (i > 2 and (i - 3) % attn_layer_period == attn_layer_offset) else 'linear_attention'",
        kinds={"hybrid": FULL.with_states(*ZAMBA), "linear_attention": Layer(states=ZAMBA)},
        transformers=HYBRID_HELD,
    ),
    "zamba2": Family(
        sizes(
            54,
            2560,
            32,
            head_dim=Computed("2 * hidden_size / num_attention_heads"),
            n_mamba_heads=8,
            mamba_ngroups=1,
            mamba_d_state=64,
            mamba_d_conv=4,
            mamba_expand=2,
            **HYBRID_CONV,
        ),
        aliases={"layers_block_type": "layer_types"},
        layer="'hybrid' if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else 'linear_attention'",
        kinds={"hybrid": FULL.with_states(*ZAMBA2), "linear_attention": Layer(states=ZAMBA2)},
        transformers=HYBRID_HELD,
    ),
    "zaya": Family(
        sizes(40, 2048, 8, kv=2, head_dim=128, sliding_window=Default(None), cca_time0=2, cca_time1=2),
        layer="'hybrid'",
        kinds={"hybrid": FULL.with_states(*ZAYA), "hybrid_sliding": SLIDING.with_states(*ZAYA)},
    ),
}
