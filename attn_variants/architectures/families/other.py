"""Decoders that keep something none of the others do: pooled strides, shared caches, layers run in loops, prefixes."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    FULL,
    HEADS,
    NONE,
    SLIDING,
    Computed,
    Default,
    Family,
    Held,
    Kept,
    KeptState,
    KeptStride,
    Layer,
    Nested,
    multi_head,
    sizes,
)

from .states import DELTA, LINEAR_CONV, LINEAR_HELD, delta_sizes
from .windowed import ALL_FULL

SHARED_TAIL = (
    "last(kinds[i], kinds, num_hidden_layers - num_kv_shared_layers) "
    "if i >= num_hidden_layers - num_kv_shared_layers else None"
)
"""Gemma's rule: the last layers read the cache of the last layer of their kind before them."""

GEMMA4_FULL = Layer(
    (
        (
            Kept(
                "k",
                "num_key_value_heads if per_layer_config is not None or not attention_k_eq_v "
                "or num_global_key_value_heads is None else num_global_key_value_heads",
                "head_dim if per_layer_config is not None else global_head_dim",
            ),
        ),
        (
            Kept(
                "v",
                "num_key_value_heads if per_layer_config is not None or not attention_k_eq_v "
                "or num_global_key_value_heads is None else num_global_key_value_heads",
                "head_dim if per_layer_config is not None else global_head_dim",
            ),
        ),
    )
)
"""Full layers have a head dim and key/value heads of their own; newer files give those layer by layer."""


def gemma4(window: int) -> Family:
    """Gemma 4: every sixth layer full, and always the last."""
    return Family(
        sizes(
            30,
            2304,
            8,
            kv=4,
            head_dim=256,
            sliding_window=window,
            num_kv_shared_layers=0,
            attention_k_eq_v=False,
            global_head_dim=512,
            num_global_key_value_heads=Default(None),
            use_bidirectional_attention=Default(None),
        ),
        layer="'full_attention' if (i + 1) % 6 == 0 or i == num_hidden_layers - 1 else 'sliding_attention'",
        listed="'full_attention' if i == num_hidden_layers - 1 else layer_types[i]",
        kinds={
            "full_attention": GEMMA4_FULL,
            "sliding_attention": Layer(
                SLIDING.records,
                window="sliding_window // 2 + 1 if use_bidirectional_attention == 'all' else sliding_window",
            ),
        },
        shares=SHARED_TAIL,
    )


def pooled(rate: str, width: str = "", overlap: bool = False) -> KeptStride:
    """DeepSeek-V4: one entry of every `rate` tokens, made of the keys and the gates of each."""
    entries = ("compressed", "head_dim"), *((("index", "index_head_dim"),) if overlap else ())
    wide = "2 * " if overlap else ""
    return KeptStride(
        every=rate,
        pooled=tuple(Kept(name, 1, dim, sharded=False) for name, dim in entries),
        pending=tuple(
            Kept(f"{name}_{part}", 1, f"{wide}{dim}", sharded=False) for name, dim in entries for part in ("kv", "gate")
        ),
        overlap=tuple(
            Kept(f"{name}_last_{part}", 1, dim, dtype, sharded=False)
            for name, dim in entries
            for part, dtype in (("kv", None), ("gate", "float32"))
        )
        if overlap
        else (),
    )


V4_WINDOW = ((Kept("kv", 1, "head_dim", sharded=False),),)

FAMILIES: Mapping[str, Family | Nested] = {
    "cpmant": Family(
        {
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "dim_head": 128,
            "prompt_length": 32,
            "num_key_value_heads": Computed(HEADS),
            "head_dim": Computed("dim_head"),
        },
        layer="'prompted_attention'",
        kinds={
            "prompted_attention": FULL.with_states(
                KeptState("prompt_k", ("prompt_length", HEADS, "dim_head")),
                KeptState("prompt_v", ("prompt_length", HEADS, "dim_head")),
            )
        },
    ),
    "deepseek_v4": Family(
        sizes(
            43,
            4096,
            64,
            kv=1,
            head_dim=512,
            sliding_window=128,
            index_head_dim=128,
            compress_ratios=Default(None),
            compress_rates=Default(None),
            compress_rate_csa=4,
            compress_rate_hca=128,
        ),
        aliases={
            "compress_rates.compressed_sparse_attention": "compress_rate_csa",
            "compress_rates.heavily_compressed_attention": "compress_rate_hca",
        },
        # One ratio more than layers: the last is a layer of multi-token prediction.
        layer="{0: 'sliding_attention', 4: 'compressed_sparse_attention', 128: 'heavily_compressed_attention'}"
        "[compress_ratios[i]] if compress_ratios is not None else "
        "'compressed_sparse_attention' if i > 2 and i % 2 else 'heavily_compressed_attention'",
        listed="list(layer_types)[i]",
        kinds={
            "sliding_attention": Layer(V4_WINDOW, window="sliding_window"),
            "heavily_compressed_attention": Layer(
                V4_WINDOW, window="sliding_window", stride=pooled("compress_rate_hca")
            ),
            "compressed_sparse_attention": Layer(
                V4_WINDOW, window="sliding_window", stride=pooled("compress_rate_csa", overlap=True)
            ),
        },
        # Keys are values, but its plain sliding layers keep both.
        transformers=Held(kinds={"sliding_attention": SLIDING}),
    ),
    "dory": Family(
        sizes(
            36,
            2560,
            16,
            kv=4,
            head_dim=256,
            sliding_window=1024,
            n_input_layers=8,
            n_output_layers=8,
            n_recurrent_layers=Default(None),
            n_recurrent_loops=2,
            recurrent_kv_cache_mode=Default(None),
            # Released files list attention and MLP apart, and count both.
            parts=Computed("2 if layer_types is not None and 'mlp' in layer_types else 1"),
            n_in=Computed("n_input_layers // parts"),
            n_core=Computed(
                "n_recurrent_layers // parts if n_recurrent_layers is not None "
                "else num_hidden_layers // parts - n_in - n_output_layers // parts"
            ),
            loops=Computed("1 if recurrent_kv_cache_mode == 'last_loop' else n_recurrent_loops"),
        ),
        count="num_hidden_layers // parts",
        layer="'sliding_attention' if (i + 1) % 4 else 'full_attention'",
        listed="layer_types[i * parts]",
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
        multi_head(16, 1536, 12, num_layers_per_stack=Default(None), H_cycles=2, L_cycles=3)
        | {"head_dim": 128},
        # A saved file counts every run of a stack as layers of its own.
        count="num_layers_per_stack if num_layers_per_stack is not None else num_hidden_layers",
        layer=ALL_FULL,
        slots="layers * (H_cycles * (L_cycles + 1))",
    ),
    "minimax_m3_vl_text": Family(
        sizes(60, 6144, 64, kv=4, head_dim=128, index_head_dim=128, sparse_attention_freq=Default(None)),
        aliases={
            "sparse_attention_config.sparse_index_dim": "index_head_dim",
            "sparse_attention_config.sparse_attention_freq": "sparse_attention_freq",
        },
        layer="'minimax_m3_sparse' if sparse_attention_freq is not None and sparse_attention_freq[i] else 'full_attention'",
        kinds={
            "minimax_m3_sparse": Layer((*FULL.records, (Kept("index_k", 1, "index_head_dim", sharded=False),)))
        },
    ),
    "mllama_text_model": Family(
        sizes(
            40,
            4096,
            32,
            kv=8,
            head_dim=Computed("hidden_size / num_attention_heads"),
            cross_attention_layers=Default(None),
        ),
        # Cross-attention reads pictures; with text alone it keeps nothing.
        layer="'cross_attention' if i in (cross_attention_layers if cross_attention_layers is not None else "
        "[3, 8, 13, 18, 23, 28, 33, 38]) else 'full_attention'",
        kinds={"cross_attention": NONE},
    ),
    "muse_spark_text": Family(
        sizes(62, 8192, 128, kv=16, head_dim=64, sliding_window=2048),
        layer="'full_attention' if (num_hidden_layers - 1 - i) % 4 == 0 else 'sliding_attention'",
    ),
    "muse_glimmer_text": Family(
        sizes(52, 6656, 32, kv=2, head_dim=128, sliding_window=2048),
        layer="'full_attention' if (num_hidden_layers - 1 - i) % 4 == 0 else 'sliding_attention'",
    ),
    "nemotron-nas": Family(
        sizes(80, 8192, 64, kv=Default(None, None), block_configs=Default(None)),
        requires={"block_configs is not None": "block_configs is missing: it says which layers have attention"},
        layer="'none' if block_configs[i]['attention']['no_op'] or "
        "block_configs[i]['attention'].get('replace_with_linear') else 'full_attention'",
        kinds={
            "full_attention": Layer(
                (
                    (Kept("k", "num_attention_heads / block_configs[i]['attention']['n_heads_in_group']", "head_dim"),),
                    (Kept("v", "num_attention_heads / block_configs[i]['attention']['n_heads_in_group']", "head_dim"),),
                )
            )
        },
    ),
    "qwen4_exp_text": Family(
        {
            **delta_sizes(40, 2048, 16, kv=2, value_heads=32),
            "indexer_kv_heads": Default(1, 1),
            "indexer_head_dim": Default(None),
            "ple_layer_ids": Default(None),
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
        listed="list(layer_types)[i]",
        query_heads="num_sliding_attention_heads if kinds[i] == 'sliding_attention' and "
        "num_sliding_attention_heads is not None else num_attention_heads",
    ),
    "xlm": Family(
        multi_head(12, 2048, 16),
        aliases={"n_layers": "num_hidden_layers", "emb_dim": "hidden_size", "n_heads": "num_attention_heads"},
    ),
    "xlnet": Family(
        {"n_layer": 24, "d_model": 1024, "mem_len": 512, "num_hidden_layers": Computed("n_layer")},
        # It remembers hidden states, from which every pass makes keys and values anew.
        layer="'memory'",
        kinds={"memory": Layer(((Kept("hidden", 1, "d_model", sharded=False),),), window="mem_len + 1")},
        query_heads="1",
    ),
}
