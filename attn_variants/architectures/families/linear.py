"""Linear attention and delta rules: a matrix per head, whatever the context; alone or between attention layers."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    HEADS,
    LATENT,
    LIST,
    OR_HEADS,
    Computed,
    Default,
    Family,
    Held,
    KeptState,
    Layer,
    Nested,
    Rule,
    grouped,
    latent_sizes,
    sizes,
)

from .state_spaces import ALL_STATES, convolution

KEY_HEADS, VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
KEYS, VALUES = f"2 * {KEY_HEADS} * linear_key_head_dim", f"{VALUE_HEADS} * linear_value_head_dim"
DELTA = Layer(
    states=(
        KeptState("conv", (f"{KEYS} + {VALUES}", "conv_tail"), sharded=((KEYS, KEY_HEADS), (VALUES, VALUE_HEADS))),
        KeptState(
            "delta",
            (VALUE_HEADS, "linear_key_head_dim", "linear_value_head_dim"),
            "float32",
            sharded=((VALUE_HEADS, VALUE_HEADS),),
        ),
    )
)
"""Gated delta rule (arXiv 2412.06464): a key-by-value matrix for every value head."""
LINEAR_HEADS = "linear_num_heads"
ALL_CHANNELS = f"3 * {LINEAR_HEADS} * linear_head_dim"
CHANNEL_DELTA = Layer(
    states=(
        KeptState("conv", (ALL_CHANNELS, "conv_tail"), sharded=((ALL_CHANNELS, LINEAR_HEADS),)),
        KeptState(
            "delta",
            (LINEAR_HEADS, "linear_head_dim", "linear_head_dim"),
            "float32",
            sharded=((LINEAR_HEADS, LINEAR_HEADS),),
        ),
    )
)
"""Kimi delta attention (arXiv 2510.26692): the same with a decay per key channel."""

LIGHTNING = Layer(states=(KeptState("lightning", (HEADS, "head_dim", "head_dim"), sharded=((HEADS, HEADS),)),))
"""Lightning attention (arXiv 2405.17381): a key-by-value matrix for every head, in the model's dtype."""
MLSTM_HEADS = (("num_heads", "num_heads"),)

LINEAR_CONV, LINEAR_HELD = convolution("linear_conv_kernel_dim")
DELTA_FIELDS: dict[str, Rule] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    **LINEAR_CONV,
}
CHANNEL_DELTA_FIELDS: dict[str, Rule] = {
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    **LINEAR_CONV,
}
LINEAR_CONFIG = {
    "linear_attn_config.head_dim": "linear_head_dim",
    "linear_attn_config.num_heads": "linear_num_heads",
    "linear_attn_config.short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Where files on the hub keep the sizes of Kimi's delta attention."""
EVERY_INTERVAL = "'linear_attention' if (i + 1) % full_attention_interval else 'full_attention'"
THREE_QUARTERS = "3 * hidden_size // (4 * linear_num_key_heads)"


def qwen_fields(layers: int, hidden: int, kv: int) -> dict[str, Rule]:
    """Qwen's hybrids: attention at every fourth layer, with heads of 256 numbers."""
    return sizes(layers, hidden, 16, kv=kv, head_dim=256, full_attention_interval=4) | DELTA_FIELDS


def qwen(layers: int, hidden: int, kv: int) -> Family:
    """A Qwen hybrid by its sizes."""
    return Family(
        qwen_fields(layers, hidden, kv),
        layer=EVERY_INTERVAL,
        kinds={"linear_attention": DELTA},
        transformers=LINEAR_HELD,
    )


FAMILIES: Mapping[str, Family | Nested] = {
    "bailing_hybrid": Family(
        latent_sizes(42, 2560, 32, head_dim=128, short_conv_kernel_size=4, layer_group_size=6)
        | CHANNEL_DELTA_FIELDS
        | {
            "linear_head_dim": Default("head_dim", "head_dim"),
            "linear_num_heads": Computed(HEADS),
            "linear_conv_kernel_dim": Computed("short_conv_kernel_size"),
        },
        layer="'linear_attention' if (i + 1) % layer_group_size else 'full_attention'",
        kinds={"full_attention": LATENT, "linear_attention": CHANNEL_DELTA},
        transformers=LINEAR_HELD,
    ),
    "kimi_linear": Family(
        latent_sizes(27, 2304, 32, full_attn_layers=LIST, kda_layers=LIST) | CHANNEL_DELTA_FIELDS,
        aliases={
            **LINEAR_CONFIG,
            "linear_attn_config.full_attn_layers": "full_attn_layers",
            "linear_attn_config.kda_layers": "kda_layers",
        },
        requires={
            "layer_types is not None or full_attn_layers is None or kda_layers is None "
            "or sorted(full_attn_layers + kda_layers) == list(range(1, num_hidden_layers + 1))": "kda_layers and "
            "full_attn_layers must name every layer once, from 1 to num_hidden_layers"
        },
        # The lists count from 1.
        layer="'full_attention' if (i > 0 and i % 4 == 0 if full_attn_layers is None or kda_layers is None "
        "else i + 1 in full_attn_layers) else 'linear_attention'",
        kinds={"full_attention": LATENT, "linear_attention": CHANNEL_DELTA},
        transformers=LINEAR_HELD,
    ),
    "lara_mini": Family(
        sizes(34, 1024, 16, kv=4, head_dim=128, sliding_window=512)
        | DELTA_FIELDS
        | {"linear_num_key_heads": 8, "linear_num_value_heads": 16},
        layer="'full_attention' if i % 5 == 3 else 'sliding_attention' if i % 5 in (1, 4) else 'linear_attention'",
        kinds={"linear_attention": DELTA},
        transformers=LINEAR_HELD,
    ),
    "minimax": Family(
        sizes(32, 4096, 32, kv=8),
        layer="'linear_attention' if i % 2 else 'full_attention'",
        kinds={"linear_attention": LIGHTNING},
    ),
    "olmo_hybrid": Family(
        sizes(32, 3840, 30)
        | DELTA_FIELDS
        | {
            "linear_num_key_heads": OR_HEADS,
            "linear_num_value_heads": OR_HEADS,
            "linear_key_head_dim": Default(THREE_QUARTERS, THREE_QUARTERS),
            "linear_value_head_dim": Default("2 * linear_key_head_dim", "2 * linear_key_head_dim"),
        },
        layer="'full_attention' if i % 4 == 3 or (num_hidden_layers < 4 and i == num_hidden_layers - 1) "
        "else 'linear_attention'",
        kinds={"linear_attention": DELTA},
        transformers=LINEAR_HELD,
    ),
    "qwen3_5_moe_text": qwen(40, 2048, kv=2),
    "qwen3_5_text": qwen(32, 4096, kv=4),
    "qwen3_next": qwen(48, 2048, kv=2),
    "recurrent_gemma": Family(
        sizes(26, 2560, 10, lru_width=Default("hidden_size", "hidden_size"), conv1d_width=4, block_types=LIST)
        | {"attention_window_size": 2048},
        aliases={"sliding_window": "attention_window_size"},
        layer="'linear_attention' if (block_types or ['recurrent', 'recurrent', 'attention'])"
        "[i % len(block_types or [0, 0, 0])] == 'recurrent' else 'sliding_attention'",
        kinds={
            "sliding_attention": grouped(window="attention_window_size"),
            "linear_attention": Layer(
                states=(
                    KeptState("conv", ("lru_width", "conv1d_width - 1"), sharded=(("lru_width", HEADS),)),
                    KeptState("lru", ("lru_width",), "float32", sharded=(("lru_width", HEADS),)),
                )
            ),
        },
    ),
    "rwkv": Family(
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "attention_hidden_size": Default("hidden_size", "hidden_size"),
        },
        layer=ALL_STATES,
        kinds={
            "linear_attention": Layer(
                states=(
                    KeptState("shift", (2, "hidden_size")),
                    KeptState(
                        "wkv",
                        ("attention_hidden_size", 3),
                        "float32",
                        sharded=(("attention_hidden_size", "attention_hidden_size"),),
                    ),
                )
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
        layer=ALL_STATES,
        kinds={
            "linear_attention": Layer(
                states=(
                    KeptState("matrix", ("num_heads", "qk_dim / num_heads", "v_dim / num_heads"), sharded=MLSTM_HEADS),
                    KeptState("normaliser", ("num_heads", "qk_dim / num_heads"), sharded=MLSTM_HEADS),
                    KeptState("maximum", ("num_heads", 1), sharded=MLSTM_HEADS),
                )
            )
        },
        # Its cache is as long as `num_hidden_layers`, 32 even beside fewer blocks, with one counter of eight bytes.
        transformers=Held({"num_hidden_layers": Default(32, "num_blocks")}, once=8),
    ),
}
