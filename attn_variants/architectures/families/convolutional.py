"""Decoders with short convolutions in place of attention, or beside it in the same layer."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    FULL,
    HEADS,
    LIST,
    SLIDING,
    Default,
    Family,
    KeptState,
    Layer,
    Nested,
    Rule,
    grouped,
    sizes,
)

from .state_spaces import convolution

SHORT_CONV = Layer(states=(KeptState("conv", ("hidden_size", "conv_tail"), sharded=(("hidden_size", "hidden_size"),)),))
LFM_CONV, LFM_HELD = convolution("conv_L_cache")
INKLING_CONV, INKLING_HELD = convolution("conv_kernel_size")

ZAYA = (
    KeptState(
        "conv",
        ("(num_attention_heads + num_key_value_heads) * head_dim", "cca_time0 + cca_time1 - 2"),
        sharded=(("num_attention_heads * head_dim", HEADS), ("num_key_value_heads * head_dim", "num_key_value_heads")),
    ),
    KeptState(
        "value",
        ("num_key_value_heads * head_dim / 2",),
        sharded=(("num_key_value_heads * head_dim / 2", "num_key_value_heads"),),
    ),
)


def _inkling(prefix: str, window: str | None) -> Layer:
    """Attention with convolutions on keys, values and both residual branches; sliding layers have their own heads."""
    heads, dim = f"{prefix}num_key_value_heads", f"{prefix}head_dim"
    keys = f"{heads} * {dim}"
    return grouped(heads, dim, window=window).with_states(
        *(KeptState(name, (keys, "conv_tail"), "float32", sharded=((keys, heads),)) for name in ("conv_k", "conv_v")),
        *(KeptState(name, ("hidden_size", "conv_tail"), "float32") for name in ("conv_in", "conv_out")),
    )


def _inkling_fields(layers: int, hidden: int, heads: int, window: int, swa_kv: int) -> dict[str, Rule]:
    return (
        sizes(layers, hidden, heads, kv=8, head_dim=128, sliding_window_size=window, conv_kernel_size=4)
        | {"swa_num_attention_heads": heads, "swa_num_key_value_heads": swa_kv, "swa_head_dim": 128}
        | INKLING_CONV
    )


def inkling(fields: dict[str, Rule], layer: str, slots: str = "layers") -> Family:
    """An Inkling model."""
    return Family(
        fields,
        aliases={
            "sliding_window": "sliding_window_size",
            "sconv_kernel_size": "conv_kernel_size",
            "loop_config.core_start": "loop_layer_index_start",
            "loop_config.core_end": "loop_layer_index_end",
            "loop_config.num_passes": "loop_num_passes",
        },
        layer=layer,
        kinds={"hybrid": _inkling("", None), "hybrid_sliding": _inkling("swa_", "sliding_window_size")},
        query_heads="swa_num_attention_heads if kinds[i] == 'hybrid_sliding' else num_attention_heads",
        slots=slots,
        transformers=INKLING_HELD,
    )


EVERY_SIXTH_FULL = "'hybrid_sliding' if (i + 1) % 6 else 'hybrid'"

FAMILIES: Mapping[str, Family | Nested] = {
    "inkling_text": inkling(
        _inkling_fields(66, 6144, 64, window=512, swa_kv=16) | {"local_layer_ids": LIST},
        layer="'hybrid_sliding' if ((i + 1) % 6 if local_layer_ids is None else i in local_layer_ids) else 'hybrid'",
    ),
    "inkling2_text": inkling(_inkling_fields(48, 4608, 48, window=1024, swa_kv=8), layer=EVERY_SIXTH_FULL),
    "inkling2_loop_text": inkling(
        _inkling_fields(24, 2304, 24, window=1024, swa_kv=8)
        | {"loop_layer_index_start": 6, "loop_layer_index_end": 18, "loop_num_passes": 3},
        layer=EVERY_SIXTH_FULL,
        slots="layers[:loop_layer_index_start] + layers[loop_layer_index_start:loop_layer_index_end] * loop_num_passes "
        "+ layers[loop_layer_index_end:]",
    ),
    "lfm2": Family(
        sizes(32, 2560, 32, kv=8, conv_L_cache=3, full_attn_idxs=LIST) | LFM_CONV,
        layer="'full_attention' if full_attn_idxs is None or i in full_attn_idxs else 'conv'",
        kinds={"conv": SHORT_CONV},
        transformers=LFM_HELD,
    ),
    "lfm2_moe": Family(
        sizes(32, 2048, 32, kv=8, conv_L_cache=3) | LFM_CONV,
        requires={"layer_types is not None": "layer_types is missing, and this model_type has no rule for it: give it"},
        kinds={"conv": SHORT_CONV},
        transformers=LFM_HELD,
    ),
    "lfm3": Family(
        sizes(24, 2048, 16, kv=4, head_dim=128, sliding_window=Default(256), conv_L_cache=7) | LFM_CONV,
        layer="'full_attention' if i % 4 == 2 else 'sliding_attention' if i % 4 == 0 and i > 0 else 'conv'",
        kinds={"conv": SHORT_CONV},
        transformers=LFM_HELD,
    ),
    "zaya": Family(
        sizes(40, 2048, 8, kv=2, head_dim=128, sliding_window=Default(None), cca_time0=2, cca_time1=2),
        layer="'hybrid'",
        kinds={"hybrid": FULL.with_states(*ZAYA), "hybrid_sliding": SLIDING.with_states(*ZAYA)},
    ),
}
