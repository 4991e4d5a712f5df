"""Decoders with multi-head latent attention: one latent and one rotated key per token, whatever the heads."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import LATENT, Default, Family, Kept, Layer, Nested, Rule, latent

from .states import CHANNEL_DELTA, LINEAR_CONV, LINEAR_HELD

MLA = {"full_attention": LATENT}

MLA_RECORD = LATENT.records[0]
FULL_INDEXER = (
    "(indexer_types[i] if indexer_types is not None else "
    "{'F': 'full', 'S': 'shared', 'full': 'full', 'shared': 'shared'}[index_topk_pattern[i]] "
    "if index_topk_pattern is not None else "
    "'full' if max(i - index_skip_topk_offset + 1, 0) % max(index_topk_freq, 1) == 0 else 'shared') == 'full'"
)
"""Whether layer `i` has an indexer of its own or reads the choice of an earlier one."""


def indexed(width: str = "index_head_dim", when: str | None = None, dtype: str | None = None) -> Layer:
    """MLA with the key of a sparse-attention indexer beside it."""
    return Layer((MLA_RECORD, (Kept("index_k", 1, width, dtype, sharded=False, when=when),)))


SCHEDULE: dict[str, Rule] = {
    "index_head_dim": 128,
    "indexer_types": Default(None),
    "index_topk_pattern": Default(None),
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}


def own(name: str) -> str:
    """A size of a sliding layer: given layer by layer, else with `swa_` before its name."""
    return f"({name} if per_layer_config is not None else swa_{name})"


ALL_INDEXED = "'indexed_attention'"
EVERY_FOURTH_INDEXER = "(indexer_types[i] if indexer_types is not None else 'shared' if i and (i - 1) % 4 else 'full') == 'full'"

FAMILIES: Mapping[str, Family | Nested] = {
    "axk1": Family(latent(61, 7168, 64), kinds=MLA),
    "axk2": Family(
        latent(48, 2048, 32, rank=128, rope=32, index_head_dim=128),
        layer=ALL_INDEXED,
        kinds={"indexed_attention": indexed()},
    ),
    "deepseek_v2": Family(latent(32, 4096, 32), kinds=MLA),
    "deepseek_v3": Family(latent(61, 7168, 128), kinds=MLA),
    "deepseek_v32": Family(
        latent(61, 7168, 128, index_head_dim=128), layer=ALL_INDEXED, kinds={"indexed_attention": indexed()}
    ),
    "dots3_note_text": Family(
        latent(
            46,
            5120,
            128,
            index_head_dim=128,
            use_dsa=Default(None),
            use_sliding_window=True,
            sliding_window=Default("sliding_window_size", "sliding_window_size"),
            sliding_window_size=512,
            swa_num_attention_heads=64,
            swa_kv_lora_rank=1024,
            swa_head_dim=256,
            swa_qk_nope_head_dim=192,
            swa_qk_rope_head_dim=Default("swa_head_dim - swa_qk_nope_head_dim"),
        ),
        # Older files call indexed layers full; newer ones give sliding layers their sizes one by one.
        layer="'sliding_attention' if use_sliding_window and i >= 2 and i % 4 != 1 else "
        "'full_attention' if use_dsa is False else 'indexed_attention'",
        listed="layer_types[i] if layer_types[i] == 'sliding_attention' or (use_dsa is None and per_layer_config is not "
        "None) else 'full_attention' if use_dsa is False else 'indexed_attention'",
        kinds={
            "full_attention": LATENT,
            "indexed_attention": indexed(dtype="float32"),
            "sliding_attention": Layer(
                (
                    (
                        Kept("latent", 1, own("kv_lora_rank"), sharded=False),
                        Kept("k_rope", 1, own("qk_rope_head_dim"), sharded=False),
                    ),
                ),
                window="sliding_window",
            ),
        },
        query_heads=f"{own('num_attention_heads')} if kinds[i] == 'sliding_attention' else num_attention_heads",
    ),
    "glm4_moe_lite": Family(latent(47, 2048, 20), kinds=MLA),
    "glm5_next_text": Family(
        latent(
            45,
            4096,
            64,
            rope=0,
            linear_head_dim=128,
            linear_num_heads=64,
            linear_conv_kernel_dim=4,
            **SCHEDULE,
            **LINEAR_CONV,
        ),
        aliases={
            "linear_attn_config.head_dim": "linear_head_dim",
            "linear_attn_config.num_heads": "linear_num_heads",
            "linear_attn_config.short_conv_kernel_size": "linear_conv_kernel_dim",
        },
        layer="'linear_attention' if i % 4 != 3 else 'indexed_attention'",
        listed="'indexed_attention' if layer_types[i] == 'full_attention' else layer_types[i]",
        kinds={
            "indexed_attention": Layer(
                (
                    (
                        Kept("latent", 1, "kv_lora_rank", sharded=False),
                        Kept("k_rope", 1, "qk_rope_head_dim", sharded=False, when="qk_rope_head_dim"),
                    ),
                    (Kept("index_k", 1, "2 * index_head_dim + 1", sharded=False, when=FULL_INDEXER),),
                )
            ),
            "linear_attention": CHANNEL_DELTA,
        },
        transformers=LINEAR_HELD,
    ),
    "glm_moe_dsa": Family(
        latent(78, 6144, 64, **SCHEDULE), layer=ALL_INDEXED, kinds={"indexed_attention": indexed(when=FULL_INDEXER)}
    ),
    "hy_v4": Family(
        latent(34, 2816, 32, index_head_dim=128, indexer_types=Default(None)),
        layer=ALL_INDEXED,
        kinds={"indexed_attention": indexed(when=EVERY_FOURTH_INDEXER)},
    ),
    "hy_v4_vl_text": Family(
        latent(78, 6144, 64, index_head_dim=128, indexer_types=Default(None)),
        layer=ALL_INDEXED,
        kinds={"indexed_attention": indexed(when=EVERY_FOURTH_INDEXER)},
    ),
    "kimi_k2": Family(latent(61, 7168, 64), kinds=MLA),
    "longcat_flash": Family(
        latent(28, 6144, 64),
        aliases={"num_layers": "num_hidden_layers"},
        kinds=MLA,
        slots="[layer for layer in layers for _ in range(2)]",
    ),
    "minicpm3": Family(latent(62, 2560, 40, rank=256, rope=32), kinds=MLA),
    "mistral4": Family(latent(36, 4096, 32, rank=256), kinds=MLA),
    "mistral_large4_text": Family(
        latent(
            72,
            6144,
            64,
            no_rope_layers=Default(None),
            no_rope_layer_interval=4,
            kv_source_layers=Default(None),
            **SCHEDULE,
        ),
        layer=ALL_INDEXED,
        kinds={
            "indexed_attention": Layer(
                (
                    (
                        Kept("latent", 1, "kv_lora_rank", sharded=False),
                        Kept(
                            "k_rope",
                            1,
                            "qk_rope_head_dim",
                            sharded=False,
                            when="no_rope_layers[i] if no_rope_layers is not None else (i + 1) % no_rope_layer_interval",
                        ),
                    ),
                    (Kept("index_k", 1, "index_head_dim", sharded=False, when=FULL_INDEXER),),
                )
            )
        },
        shares="kv_source_layers[i] if kv_source_layers is not None and kv_source_layers[i] != i else None",
    ),
    "sarvam_mla": Family(latent(32, 4096, 64), kinds=MLA),
    "youtu": Family(latent(32, 2048, 16), kinds=MLA),
}
