"""Decoders with multi-head latent attention: one latent and one rotated key per token, whatever the heads."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    LATENT,
    LIST,
    Default,
    Family,
    Free,
    Kept,
    Nested,
    Rule,
    latent_layer,
    latent_sizes,
)

from .linear import CHANNEL_DELTA, CHANNEL_DELTA_FIELDS, LINEAR_CONFIG, LINEAR_HELD

MLA = {"full_attention": LATENT}

FULL_INDEXER = (
    "(indexer_types[i] if indexer_types is not None else "
    "{'F': 'full', 'S': 'shared', 'full': 'full', 'shared': 'shared'}[index_topk_pattern[i]] "
    "if index_topk_pattern is not None else "
    "'full' if max(i - index_skip_topk_offset + 1, 0) % max(index_topk_freq, 1) == 0 else 'shared') == 'full'"
)
"""Whether layer `i` has an indexer of its own or reads the choice of an earlier one."""


def index_key(width: str = "index_head_dim", when: str | None = None, dtype: str | None = None) -> Kept:
    """The one key per token by which an indexer chooses what is read (DeepSeek sparse attention, arXiv 2512.02556)."""
    return Kept("index_k", 1, width, dtype, sharded=False, when=when)


SCHEDULE: dict[str, Rule] = {
    "index_head_dim": 128,
    "indexer_types": LIST,
    "index_topk_pattern": Free((list, str)),
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}


def own(name: str) -> str:
    """A size of a sliding layer: given layer by layer, else with `swa_` before its name."""
    return f"({name} if per_layer_config is not None else swa_{name})"


ALL_INDEXED = "'indexed_attention'"
EVERY_FOURTH_INDEXER = (
    "(indexer_types[i] if indexer_types is not None else 'shared' if i and (i - 1) % 4 else 'full') == 'full'"
)

FAMILIES: Mapping[str, Family | Nested] = {
    "axk1": Family(latent_sizes(61, 7168, 64), kinds=MLA),
    "axk2": Family(
        latent_sizes(48, 2048, 32, rank=128, rope=32, index_head_dim=128),
        layer=ALL_INDEXED,
        kinds={"indexed_attention": latent_layer(index=index_key())},
    ),
    "deepseek_v2": Family(latent_sizes(32, 4096, 32), kinds=MLA),
    "deepseek_v3": Family(latent_sizes(61, 7168, 128), kinds=MLA),
    "deepseek_v32": Family(
        latent_sizes(61, 7168, 128, index_head_dim=128),
        layer=ALL_INDEXED,
        kinds={"indexed_attention": latent_layer(index=index_key())},
    ),
    "dots3_note_text": Family(
        latent_sizes(46, 5120, 128, index_head_dim=128, use_dsa=Free((bool,)), use_sliding_window=True)
        | {
            "sliding_window": Default("sliding_window_size", "sliding_window_size"),
            "sliding_window_size": 512,
            "swa_num_attention_heads": 64,
            "swa_kv_lora_rank": 1024,
            "swa_head_dim": 256,
            "swa_qk_nope_head_dim": 192,
            "swa_qk_rope_head_dim": Default("swa_head_dim - swa_qk_nope_head_dim"),
        },
        # Older files call indexed layers full; newer ones give sliding layers their sizes one by one.
        layer="'sliding_attention' if use_sliding_window and i >= 2 and i % 4 != 1 else "
        "'full_attention' if use_dsa is False else 'indexed_attention'",
        listed="layer_types[i] if layer_types[i] == 'sliding_attention' or "
        "(use_dsa is None and per_layer_config is not None) else "
        "'full_attention' if use_dsa is False else 'indexed_attention'",
        kinds={
            "full_attention": LATENT,
            "indexed_attention": latent_layer(index=index_key(dtype="float32")),
            "sliding_attention": latent_layer(own("kv_lora_rank"), own("qk_rope_head_dim"), window="sliding_window"),
        },
        query_heads=f"{own('num_attention_heads')} if kinds[i] == 'sliding_attention' else num_attention_heads",
    ),
    "glm4_moe_lite": Family(latent_sizes(47, 2048, 20), kinds=MLA),
    "glm5_next_text": Family(
        latent_sizes(45, 4096, 64, rope=0) | CHANNEL_DELTA_FIELDS | SCHEDULE | {"linear_num_heads": 64},
        aliases=LINEAR_CONFIG,
        layer="'linear_attention' if i % 4 != 3 else 'indexed_attention'",
        listed="'indexed_attention' if layer_types[i] == 'full_attention' else layer_types[i]",
        kinds={
            "indexed_attention": latent_layer(
                rope_when="qk_rope_head_dim", index=index_key("2 * index_head_dim + 1", FULL_INDEXER)
            ),
            "linear_attention": CHANNEL_DELTA,
        },
        transformers=LINEAR_HELD,
    ),
    "glm_moe_dsa": Family(
        latent_sizes(78, 6144, 64) | SCHEDULE,
        layer=ALL_INDEXED,
        kinds={"indexed_attention": latent_layer(index=index_key(when=FULL_INDEXER))},
    ),
    "hy_v4": Family(
        latent_sizes(34, 2816, 32, index_head_dim=128, indexer_types=LIST),
        layer=ALL_INDEXED,
        kinds={"indexed_attention": latent_layer(index=index_key(when=EVERY_FOURTH_INDEXER))},
    ),
    "hy_v4_vl_text": Family(
        latent_sizes(78, 6144, 64, index_head_dim=128, indexer_types=LIST),
        layer=ALL_INDEXED,
        kinds={"indexed_attention": latent_layer(index=index_key(when=EVERY_FOURTH_INDEXER))},
    ),
    "kimi_k2": Family(latent_sizes(61, 7168, 64), kinds=MLA),
    "longcat_flash": Family(
        latent_sizes(28, 6144, 64),
        aliases={"num_layers": "num_hidden_layers"},
        kinds=MLA,
        slots="sorted(layers * 2)",
    ),
    "minicpm3": Family(latent_sizes(62, 2560, 40, rank=256, rope=32), kinds=MLA),
    "mistral4": Family(latent_sizes(36, 4096, 32, rank=256), kinds=MLA),
    "mistral_large4_text": Family(
        latent_sizes(72, 6144, 64, no_rope_layers=LIST, no_rope_layer_interval=4, kv_source_layers=LIST) | SCHEDULE,
        layer=ALL_INDEXED,
        kinds={
            "indexed_attention": latent_layer(
                rope_when="(i + 1) % no_rope_layer_interval if no_rope_layers is None else no_rope_layers[i]",
                index=index_key(when=FULL_INDEXER),
            )
        },
        shares="kv_source_layers[i] if kv_source_layers is not None and kv_source_layers[i] != i else None",
    ),
    "sarvam_mla": Family(latent_sizes(32, 4096, 64), kinds=MLA),
    "youtu": Family(latent_sizes(32, 2048, 16), kinds=MLA),
}
