"""Decoders of whose layers some keep no cache of their own, or several: shared caches, skipped attention, loops."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    LIST,
    NAME,
    NONE,
    SPLIT,
    Computed,
    Default,
    Family,
    Free,
    Nested,
    grouped,
    multi_head,
    sizes,
)

from .windowed import ALL_FULL

SHARED_TAIL = (
    "last(kinds[i], kinds, num_hidden_layers - num_kv_shared_layers) "
    "if i >= num_hidden_layers - num_kv_shared_layers else None"
)
"""Gemma's rule: the last layers read the cache of the last layer of their kind before them."""


GEMMA4_HEADS = (
    "num_global_key_value_heads if per_layer_config is None and attention_k_eq_v "
    "and num_global_key_value_heads is not None else num_key_value_heads"
)
DIFFUSION_HEADS = (
    "num_global_key_value_heads if per_layer_config is None and num_global_key_value_heads is not None "
    "else num_key_value_heads"
)
GEMMA4_DIM = "global_head_dim if per_layer_config is None else head_dim"
"""Full layers have a head dim and key/value heads of their own; newer files give those layer by layer."""


def gemma4(window: int, full_heads: str = GEMMA4_HEADS) -> Family:
    """Gemma 4: every sixth layer full, and always the last."""
    return Family(
        sizes(30, 2304, 8, kv=4, head_dim=256, sliding_window=window, num_kv_shared_layers=0)
        | {
            "attention_k_eq_v": False,
            "global_head_dim": 512,
            "num_global_key_value_heads": Default(None),
            "use_bidirectional_attention": Free((bool, str)),
        },
        layer="'full_attention' if (i + 1) % 6 == 0 or i == num_hidden_layers - 1 else 'sliding_attention'",
        listed="'full_attention' if i == num_hidden_layers - 1 else layer_types[i]",
        kinds={
            "full_attention": grouped(full_heads, GEMMA4_DIM),
            "sliding_attention": grouped(
                window="sliding_window // 2 + 1 if use_bidirectional_attention == 'all' else sliding_window"
            ),
        },
        shares=SHARED_TAIL,
    )


NAS_HEADS = "num_attention_heads / block_configs[i]['attention']['n_heads_in_group']"

FAMILIES: Mapping[str, Family | Nested] = {
    "diffusion_gemma_text": gemma4(window=512, full_heads=DIFFUSION_HEADS),
    "dory": Family(
        sizes(36, 2560, 16, kv=4, head_dim=256, sliding_window=1024)
        | {
            "n_input_layers": 8,
            "n_output_layers": 8,
            "n_recurrent_layers": Default(None),
            "n_recurrent_loops": 2,
            "recurrent_kv_cache_mode": NAME,
            # Released files list attention and MLP apart, and count both.
            "parts": Computed("2 if layer_types is not None and 'mlp' in layer_types else 1"),
            "n_in": Computed("n_input_layers // parts"),
            "n_core": Computed(
                "n_recurrent_layers // parts if n_recurrent_layers is not None "
                "else num_hidden_layers // parts - n_in - n_output_layers // parts"
            ),
            "loops": Computed("1 if recurrent_kv_cache_mode == 'last_loop' else n_recurrent_loops"),
        },
        requires={
            "num_hidden_layers == n_input_layers + n_output_layers + "
            "(num_hidden_layers - n_input_layers - n_output_layers if n_recurrent_layers is None "
            "else n_recurrent_layers)": "n_input_layers, n_recurrent_layers and n_output_layers must add up to "
            "num_hidden_layers"
        },
        count="num_hidden_layers // parts",
        layer="'sliding_attention' if (i + 1) % 4 else 'full_attention'",
        listed="layer_types[i * parts]",
        trailing=True,
        slots="layers[:n_in] + layers[n_in:n_in + n_core] * loops + layers[n_in + n_core:]",
    ),
    "gemma3n_text": Family(
        sizes(35, 2048, 8, kv=2, head_dim=256, sliding_window=512, num_kv_shared_layers=15),
        layer="'full_attention' if (i + 1) % 5 == 0 else 'sliding_attention'",
        shares=SHARED_TAIL,
    ),
    "gemma4_text": gemma4(window=512),
    "gemma4_unified_text": gemma4(window=1024),
    "hrm_text": Family(
        multi_head(16, 1536, 12, num_layers_per_stack=Default(None), H_cycles=2, L_cycles=3) | {"head_dim": 128},
        # A saved file counts every run of a stack as layers of its own.
        count="num_layers_per_stack if num_layers_per_stack is not None else num_hidden_layers",
        layer=ALL_FULL,
        slots="layers * (H_cycles * (L_cycles + 1))",
    ),
    "mllama_text_model": Family(
        sizes(40, 4096, 32, kv=8, head_dim=Computed(SPLIT), cross_attention_layers=LIST),
        # Cross-attention reads pictures; with text alone it keeps nothing.
        layer="'cross_attention' if i in (cross_attention_layers if cross_attention_layers is not None else "
        "[3, 8, 13, 18, 23, 28, 33, 38]) else 'full_attention'",
        kinds={"cross_attention": NONE},
    ),
    "nemotron-nas": Family(
        sizes(80, 8192, 64, kv=Default(None, None), block_configs=LIST),
        requires={"block_configs is not None": "block_configs is missing: it says which layers have attention"},
        layer="'none' if block_configs[i]['attention']['no_op'] or "
        "block_configs[i]['attention'].get('replace_with_linear') else 'full_attention'",
        kinds={"full_attention": grouped(NAS_HEADS)},
    ),
}
