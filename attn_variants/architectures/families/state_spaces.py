"""Mamba and its hybrids: a state of constant size per channel or head, behind a short convolution."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    FULL,
    HEADS,
    LIST,
    NAME,
    NONE,
    Computed,
    Default,
    Family,
    Held,
    KeptState,
    Layer,
    Nested,
    Rule,
    sizes,
)


def convolution(kernel: str) -> tuple[dict[str, Rule], Held]:
    """The field `conv_tail`, how many tokens a convolution of that kernel remembers; transformers keeps one more."""
    return {"conv_tail": Computed(f"{kernel} - 1")}, Held({"conv_tail": Computed(kernel)})


def mamba1(inner: str, state: str, heads: str | None = None) -> tuple[KeptState, KeptState]:
    """Mamba (arXiv 2312.00752): the tail of the convolution, and `state` float32 numbers, for each inner channel."""
    axes = (inner,) if heads is None else (heads, f"{inner} / {heads}")
    return (
        KeptState("conv", (inner, "conv_tail"), sharded=((inner, heads or inner),)),
        KeptState("ssm", (*axes, state), "float32", sharded=((axes[0], axes[0]),)),
    )


def mamba2(inner: str, groups: str, state: str, heads: str) -> tuple[KeptState, KeptState]:
    """Mamba-2 (arXiv 2405.21060): the convolution runs over x, B and C, and the state has heads."""
    shared = f"2 * {groups} * {state}"
    return (
        KeptState("conv", (f"{inner} + {shared}", "conv_tail"), sharded=((inner, heads), (shared, groups))),
        KeptState("ssm", (heads, f"{inner} / {heads}", state), "float32", sharded=((heads, heads),)),
    )


EXPANDED = "(mamba_expand * hidden_size)"
MAMBA = mamba1("intermediate_size", "state_size")
MAMBA2 = mamba2("(expand * hidden_size)", "n_groups", "state_size", "num_heads")
JAMBA = mamba1(EXPANDED, "mamba_d_state")
BAMBA = mamba2(EXPANDED, "mamba_n_groups", "mamba_d_state", "mamba_n_heads")
FALCON_H1 = mamba2("mamba_d_ssm", "mamba_n_groups", "mamba_d_state", "mamba_n_heads")
ZAMBA = mamba1(EXPANDED, "mamba_d_state", "n_mamba_heads")
ZAMBA2 = mamba2(EXPANDED, "mamba_ngroups", "mamba_d_state", "n_mamba_heads")
NEMOTRON_H = mamba2("(mamba_num_heads * mamba_head_dim)", "n_groups", "ssm_state_size", "mamba_num_heads")

PURE_CONV, PURE_HELD = convolution("conv_kernel")
HYBRID_CONV, HYBRID_HELD = convolution("mamba_d_conv")

PURE_FIELDS: dict[str, Rule] = {
    "num_hidden_layers": 32,
    "hidden_size": 768,
    "expand": 2,
    "intermediate_size": Default("expand * hidden_size"),
    "state_size": 16,
    "conv_kernel": 4,
    **PURE_CONV,
}
HYBRID_FIELDS: dict[str, Rule] = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, **HYBRID_CONV}
BAMBA_FIELDS = HYBRID_FIELDS | {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
TWICE = "2 * hidden_size / num_attention_heads"
ALL_STATES = "'linear_attention'"

PURE = Family(PURE_FIELDS, layer=ALL_STATES, kinds={"linear_attention": Layer(states=MAMBA)}, transformers=PURE_HELD)

FAMILIES: Mapping[str, Family | Nested] = {
    "bamba": Family(
        sizes(32, 4096, 32, kv=Default(8, HEADS), attn_layer_indices=LIST) | BAMBA_FIELDS,
        layer="'full_attention' if i in (attn_layer_indices or []) else 'linear_attention'",
        kinds={"linear_attention": Layer(states=BAMBA)},
        transformers=HYBRID_HELD,
    ),
    "falcon_h1": Family(
        sizes(32, 4096, 32, kv=Default(8, HEADS))
        | BAMBA_FIELDS
        | {"mamba_d_ssm": Default(1024, "mamba_expand * hidden_size")},
        layer="'hybrid'",
        kinds={"hybrid": FULL.with_states(*FALCON_H1)},
        transformers=HYBRID_HELD,
    ),
    "falcon_mamba": PURE,
    "granitemoehybrid": Family(
        sizes(32, 4096, 32) | BAMBA_FIELDS,
        aliases={"layers_block_type": "layer_types"},
        layer=ALL_STATES,
        kinds={"linear_attention": Layer(states=BAMBA)},
        transformers=HYBRID_HELD,
    ),
    "jamba": Family(
        sizes(32, 4096, 32, kv=8, attn_layer_period=8, attn_layer_offset=4) | HYBRID_FIELDS,
        layer="'full_attention' if i % attn_layer_period == attn_layer_offset else 'linear_attention'",
        kinds={"linear_attention": Layer(states=JAMBA)},
        transformers=HYBRID_HELD,
    ),
    "mamba": PURE,
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
            **PURE_CONV,
        },
        requires={"expand * hidden_size == num_heads * head_dim": "expand * hidden_size must be num_heads * head_dim"},
        layer=ALL_STATES,
        kinds={"linear_attention": Layer(states=MAMBA2)},
        transformers=PURE_HELD,
    ),
    "nemotron_h": Family(
        sizes(4, 4096, 32, kv=8, head_dim=128, hybrid_override_pattern=NAME)
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
        | PURE_CONV,
        aliases={
            "layers_block_type": "layer_types",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
        },
        count="len(layer_types if layer_types is not None else hybrid_override_pattern or 'ME*-')",
        layer="{'M': 'linear_attention', '*': 'full_attention', '-': 'mlp', 'E': 'moe'}"
        "[(hybrid_override_pattern or 'ME*-')[i]]",
        kinds={"linear_attention": Layer(states=NEMOTRON_H), "mlp": NONE, "moe": NONE},
        transformers=PURE_HELD,
    ),
    "zamba": Family(
        sizes(76, 3712, 16, kv=16, head_dim=Default(TWICE, TWICE))
        | HYBRID_FIELDS
        | {"attn_layer_period": 6, "attn_layer_offset": 4, "n_mamba_heads": 2},
        aliases={"layers_block_type": "layer_types", "attention_head_dim": "head_dim"},
        layer="'hybrid' if i == 2 or (i > 2 and (i - 3) % attn_layer_period == attn_layer_offset) "
        "else 'linear_attention'",
        kinds={"hybrid": FULL.with_states(*ZAMBA), "linear_attention": Layer(states=ZAMBA)},
        transformers=HYBRID_HELD,
    ),
    "zamba2": Family(
        sizes(54, 2560, 32, head_dim=Computed(TWICE))
        | HYBRID_FIELDS
        | {"n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 64},
        aliases={"layers_block_type": "layer_types"},
        layer="'hybrid' if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else 'linear_attention'",
        kinds={"hybrid": FULL.with_states(*ZAMBA2), "linear_attention": Layer(states=ZAMBA2)},
        transformers=HYBRID_HELD,
    ),
}
