"""Decoders that choose the keys they read: indexers beside grouped keys, and DeepSeek-V4's pooled entries."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    FULL,
    LIST,
    OBJECT,
    SLIDING,
    Default,
    Family,
    Held,
    Kept,
    KeptState,
    KeptStride,
    Layer,
    Nested,
    sizes,
)

from .linear import DELTA, LINEAR_HELD, qwen_fields


def whole(name: str, dim: str, dtype: str | None = None) -> Kept:
    """One vector that every tensor-parallel rank keeps whole."""
    return Kept(name, 1, dim, dtype, sharded=False)


HEAVILY_COMPRESSED = KeptStride(
    every="compress_rate_hca",
    pooled=(whole("compressed", "head_dim"),),
    pending=(whole("pending_kv", "head_dim"), whole("pending_gate", "head_dim")),
)
COMPRESSED_SPARSE = KeptStride(
    every="compress_rate_csa",
    pooled=(whole("compressed", "head_dim"), whole("index_k", "index_head_dim")),
    pending=(
        whole("pending_kv", "2 * head_dim"),
        whole("pending_gate", "2 * head_dim"),
        whole("pending_index_kv", "2 * index_head_dim"),
        whole("pending_index_gate", "2 * index_head_dim"),
    ),
    overlap=(
        whole("overlap_kv", "head_dim"),
        whole("overlap_gate", "head_dim", "float32"),
        whole("overlap_index_kv", "index_head_dim"),
        whole("overlap_index_gate", "index_head_dim", "float32"),
    ),
)
"""DeepSeek-V4's two compressors (arXiv 2606.19348): strides of 128 apart, and of 4 that overlap, with an indexer."""
V4_WINDOW = ((whole("kv", "head_dim"),),)

MINIMAX_M3 = Family(
    sizes(60, 6144, 64, kv=4, head_dim=128, index_head_dim=128, sparse_attention_freq=LIST),
    aliases={
        "sparse_attention_config.sparse_index_dim": "index_head_dim",
        "sparse_attention_config.sparse_attention_freq": "sparse_attention_freq",
    },
    layer="'minimax_m3_sparse' if sparse_attention_freq is not None and sparse_attention_freq[i] else 'full_attention'",
    kinds={"minimax_m3_sparse": Layer((*FULL.records, (whole("index_k", "index_head_dim"),)))},
)

FAMILIES: Mapping[str, Family | Nested] = {
    "deepseek_v4": Family(
        sizes(43, 4096, 64, kv=1, head_dim=512, sliding_window=128, index_head_dim=128)
        | {
            "compress_ratios": LIST,
            "compress_rates": OBJECT,
            "compress_rate_csa": 4,
            "compress_rate_hca": 128,
        },
        aliases={
            "compress_rates.compressed_sparse_attention": "compress_rate_csa",
            "compress_rates.heavily_compressed_attention": "compress_rate_hca",
        },
        # One ratio more than layers: the last is a layer of multi-token prediction.
        layer="{0: 'sliding_attention', 4: 'compressed_sparse_attention', 128: 'heavily_compressed_attention'}"
        "[compress_ratios[i]] if compress_ratios is not None else "
        "'compressed_sparse_attention' if i > 2 and i % 2 else 'heavily_compressed_attention'",
        trailing=True,
        kinds={
            "sliding_attention": Layer(V4_WINDOW, window="sliding_window"),
            "heavily_compressed_attention": Layer(V4_WINDOW, window="sliding_window", stride=HEAVILY_COMPRESSED),
            "compressed_sparse_attention": Layer(V4_WINDOW, window="sliding_window", stride=COMPRESSED_SPARSE),
        },
        # Keys are values, but its plain sliding layers keep both.
        transformers=Held(kinds={"sliding_attention": SLIDING}),
    ),
    "minimax_m3": MINIMAX_M3,
    "minimax_m3_vl_text": MINIMAX_M3,
    "qwen4_exp_text": Family(
        {
            **qwen_fields(40, 2048, kv=2),
            "indexer_kv_heads": Default(1, 1),
            "indexer_head_dim": Default(None),
            "ple_layer_ids": LIST,
            "hc_count": 4,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
        },
        requires={"indexer_head_dim is not None": "indexer_head_dim is missing: it is the width of the indexer's keys"},
        layer="'linear_attention' if (i + 1) % full_attention_interval else 'indexed_attention'",
        listed="'indexed_attention' if layer_types[i] == 'full_attention' else layer_types[i]",
        kinds={
            "indexed_attention": Layer(
                (
                    *FULL.records,
                    (Kept("index_k", "indexer_kv_heads", "indexer_head_dim", sharded=False),),
                    # Positions of all indexers, three a token, beside the first.
                    (Kept("positions", 3, 1, "int64", sharded=False, when="kinds.index('indexed_attention') == i"),),
                )
            ),
            "linear_attention": DELTA.with_states(
                KeptState(
                    "ple_conv",
                    ("hc_count * hidden_size", "(ple_conv_kernel_size - 1) * ngram_size"),
                    when="i + 1 in (ple_layer_ids or [])",
                ),
                KeptState("ngram", ("ngram_size - 1",), "int64", when="i + 1 in (ple_layer_ids or [])"),
            ),
        },
        transformers=LINEAR_HELD,
    ),
}
