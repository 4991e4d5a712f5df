"""Decoders of whose layers some see a window or a chunk, and some the whole context."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    HEADS,
    LIST,
    SPLIT,
    Computed,
    Default,
    Family,
    Nested,
    Rule,
    grouped,
    multi_head,
    sizes,
)

FULL_EVERY_PATTERN = "'sliding_attention' if (i + 1) % sliding_window_pattern else 'full_attention'"
FULL_EVERY_SECOND = "'sliding_attention' if (i + 1) % 2 else 'full_attention'"
FULL_EVERY_FOURTH_FROM_FIRST = "'full_attention' if i % 4 == 0 else 'sliding_attention'"
ALL_FULL = "'full_attention'"

SWITCHED_LATE = (
    "'sliding_attention' if use_sliding_window and sliding_window is not None and i >= max_window_layers "
    "else 'full_attention'"
)
"""Qwen's rule: the layers from `max_window_layers` on slide, if the switch is on."""
SWITCHED_WINDOW = {
    "sliding_attention": grouped(window="sliding_window if use_sliding_window else None"),
}


def _switched(window: int, late: int) -> dict[str, Rule]:
    return {"use_sliding_window": False, "sliding_window": Default(window), "max_window_layers": late}


QWEN2_VL = Family(
    sizes(
        80,
        8192,
        64,
        kv=Default(8, HEADS),
        head_dim=Computed(SPLIT),
        **_switched(4096, 80),
    ),
    layer=SWITCHED_LATE,
    kinds=SWITCHED_WINDOW,
)

FAMILIES: Mapping[str, Family | Nested] = {
    "afmoe": Family(
        sizes(32, 2048, 16, head_dim=128, sliding_window=Default(1024), global_attn_every_n_layers=4),
        layer="'sliding_attention' if (i + 1) % global_attn_every_n_layers else 'full_attention'",
    ),
    "beam": Family(
        sizes(52, 5120, 48, kv=8, head_dim=128, sliding_window=Default(512)),
        layer="'full_attention' if (i + 1) % 6 == 0 or i == num_hidden_layers - 1 else 'sliding_attention'",
    ),
    "cohere2": Family(
        sizes(40, 8192, 64, sliding_window=Default(4096), sliding_window_pattern=4),
        layer=FULL_EVERY_PATTERN,
    ),
    "cohere2_moe": Family(
        sizes(
            40,
            8192,
            64,
            head_dim=128,
            sliding_window=Default(4096),
            sliding_window_pattern=4,
            prefix_dense_sliding_window_pattern=1,
            first_k_dense_replace=0,
        ),
        layer="'sliding_attention' if ("
        "(i + 1) % prefix_dense_sliding_window_pattern if i < first_k_dense_replace "
        "else (i - first_k_dense_replace + 1) % sliding_window_pattern) else 'full_attention'",
    ),
    "cohere_compass_text": Family(sizes(40, 8192, 64, sliding_window=Default(4096)), layer=ALL_FULL),
    "cwm": Family(sizes(64, 6144, 48, kv=8, head_dim=128, sliding_window=8192), layer=FULL_EVERY_FOURTH_FROM_FIRST),
    "dots1": Family(
        sizes(62, 4608, 32, kv=Default(32, HEADS), sliding_window=Default(4096), max_window_layers=62),
        layer="'sliding_attention' if sliding_window is not None and i >= max_window_layers else 'full_attention'",
    ),
    "exaone4": Family(
        sizes(32, 4096, 32, kv=32, sliding_window=Default(4096), sliding_window_pattern=4),
        layer="'sliding_attention' if sliding_window is not None and (i + 1) % sliding_window_pattern "
        "else 'full_attention'",
    ),
    "exaone_moe": Family(
        sizes(32, 4096, 32, kv=32, sliding_window=4096, sliding_window_pattern=4), layer=FULL_EVERY_PATTERN
    ),
    "flint": Family(
        sizes(49, 2048, 32, kv=4, head_dim=128, sliding_window=513),
        layer="'full_attention' if i < 2 or i % 4 == 1 or i == num_hidden_layers - 1 else 'sliding_attention'",
    ),
    "gemma2": Family(sizes(26, 2304, 8, kv=4, head_dim=256, sliding_window=Default(4096)), layer=FULL_EVERY_SECOND),
    "gemma3_text": Family(
        sizes(
            26,
            2304,
            8,
            kv=4,
            head_dim=256,
            sliding_window=Default(4096),
            sliding_window_pattern=6,
            use_bidirectional_attention=Default(False, False),
        ),
        layer=FULL_EVERY_PATTERN,
        kinds={
            "sliding_attention": grouped(
                window="sliding_window // 2 + 1 if use_bidirectional_attention else sliding_window"
            )
        },
    ),
    "gpt_oss": Family(sizes(36, 2880, 64, kv=8, head_dim=64, sliding_window=Default(128)), layer=FULL_EVERY_SECOND),
    "granite_swa": Family(
        sizes(24, 2560, 20, kv=Default(4, HEADS), sliding_window=Default(128)),
        layer=FULL_EVERY_FOURTH_FROM_FIRST,
    ),
    "granitemoe_swa": Family(sizes(32, 4096, 32, sliding_window=Default(128)), layer=FULL_EVERY_FOURTH_FROM_FIRST),
    "kolibri1": Family(
        sizes(50, 2560, 48, kv=4, head_dim=128, sliding_window=Default(513)),
        layer="'full_attention' if (i + 1) % 5 == 0 else 'sliding_attention'",
    ),
    "laguna": Family(
        sizes(40, 2048, 48, kv=8, head_dim=128, sliding_window=512, num_attention_heads_per_layer=LIST),
        layer=ALL_FULL,
        query_heads="num_attention_heads_per_layer[i] if num_attention_heads_per_layer else num_attention_heads",
    ),
    "llama4_text": Family(
        sizes(
            48,
            5120,
            40,
            kv=8,
            head_dim=128,
            attention_chunk_size=Default(8192),
            no_rope_layers=LIST,
            no_rope_layer_interval=4,
        ),
        layer="'chunked_attention' if attention_chunk_size is not None and "
        "(no_rope_layers[i] if no_rope_layers else (i + 1) % no_rope_layer_interval) else 'full_attention'",
    ),
    "mellum": Family(sizes(28, 2304, 32, kv=4, head_dim=128, sliding_window=Default(1024)), layer=ALL_FULL),
    "mimo_v2_flash": Family(
        sizes(48, 4096, 64, kv=4, head_dim=192, v_head_dim=128, sliding_window=129, sliding_window_size=Default(None)),
        layer="'full_attention' if i == 0 or (i + 1) % 6 == 0 else 'sliding_attention'",
        kinds={
            "full_attention": grouped(v_dim="v_head_dim"),
            "sliding_attention": grouped(
                "2 * num_key_value_heads",
                v_dim="v_head_dim",
                window="sliding_window if sliding_window_size is None else sliding_window_size + 1",
            ),
        },
    ),
    "ministral": Family(sizes(32, 4096, 32, kv=8, sliding_window=Default(4096))),
    "modernbert-decoder": Family(
        multi_head(22, 768, 12, local_attention=128, global_attn_every_n_layers=3),
        layer="'sliding_attention' if i % global_attn_every_n_layers else 'full_attention'",
        kinds={
            "sliding_attention": grouped(window="local_attention // 2 if sliding_window is None else sliding_window")
        },
    ),
    "olmo3": Family(
        sizes(32, 4096, 32, sliding_window=Default(4096)),
        layer="'sliding_attention' if (i + 1) % 4 else 'full_attention'",
    ),
    "qwen2": Family(
        sizes(32, 4096, 32, kv=Default(32, HEADS), **_switched(4096, 28)),
        layer=SWITCHED_LATE,
        kinds=SWITCHED_WINDOW,
    ),
    "qwen2_5_omni_text": Family(
        sizes(28, 3584, 28, kv=Default(4, HEADS), **_switched(32768, 28)),
        layer=SWITCHED_LATE,
        kinds=SWITCHED_WINDOW,
    ),
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen2_moe": Family(
        sizes(24, 2048, 16, kv=16, **_switched(4096, 28)),
        layer="'sliding_attention' if use_sliding_window and i % 2 == 0 and i < max_window_layers "
        "else 'full_attention'",
        kinds=SWITCHED_WINDOW,
    ),
    "qwen2_vl_text": QWEN2_VL,
    "qwen3": Family(
        sizes(32, 4096, 32, kv=Default(32, HEADS), head_dim=128, **_switched(4096, 28)),
        layer=SWITCHED_LATE,
        kinds=SWITCHED_WINDOW,
    ),
    "smollm3": Family(
        sizes(
            36,
            2048,
            16,
            kv=Default(4, HEADS),
            use_sliding_window=False,
            sliding_window=Default(None),
            no_rope_layers=LIST,
            no_rope_layer_interval=4,
        ),
        layer="'sliding_attention' if use_sliding_window and sliding_window is not None and not "
        "(no_rope_layers[i] if no_rope_layers is not None else (i + 1) % no_rope_layer_interval) else 'full_attention'",
        kinds=SWITCHED_WINDOW,
    ),
    "vaultgemma": Family(sizes(26, 2304, 8, kv=4, head_dim=256, sliding_window=Default(4096)), layer=FULL_EVERY_SECOND),
    "muse_spark_text": Family(
        sizes(62, 8192, 128, kv=16, head_dim=64, sliding_window=2048),
        layer="'full_attention' if (num_hidden_layers - 1 - i) % 4 == 0 else 'sliding_attention'",
    ),
    "muse_glimmer_text": Family(
        sizes(52, 6656, 32, kv=2, head_dim=128, sliding_window=2048),
        layer="'full_attention' if (num_hidden_layers - 1 - i) % 4 == 0 else 'sliding_attention'",
    ),
    "step3p5": Family(
        sizes(
            45,
            4096,
            64,
            kv=8,
            head_dim=128,
            sliding_window=Default(None),
            num_sliding_attention_heads=Default(None),
        ),
        aliases={
            "num_attention_groups": "num_key_value_heads",
            "attention_other_setting.num_attention_heads": "num_sliding_attention_heads",
        },
        layer=ALL_FULL,
        # The list may go on with layers of multi-token prediction.
        trailing=True,
        query_heads="num_sliding_attention_heads if kinds[i] == 'sliding_attention' and "
        "num_sliding_attention_heads is not None else num_attention_heads",
    ),
}
