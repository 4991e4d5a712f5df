"""Decoders of the years before grouped queries, and encoders and translation models run as decoders."""

from __future__ import annotations

from collections.abc import Mapping

from attn_variants.architectures.family import (
    FULL,
    HEADS,
    LIST,
    OR_HEADS,
    SPLIT,
    Computed,
    Default,
    Family,
    Held,
    Kept,
    KeptState,
    Layer,
    Nested,
    grouped,
    multi_head,
    sizes,
)

GPT2 = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
MPT = {
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
KOSMOS = {
    "layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
}


def translation(layers: int, hidden: int, heads: int) -> Family:
    """The decoder of a translation model, alone; `num_hidden_layers` and its like speak of the encoder there."""
    return Family(
        {
            "decoder_layers": layers,
            "d_model": hidden,
            "decoder_attention_heads": heads,
            "num_hidden_layers": Computed("decoder_layers"),
            "num_attention_heads": Computed("decoder_attention_heads"),
            "num_key_value_heads": Computed("decoder_attention_heads"),
            "head_dim": Computed("d_model / decoder_attention_heads"),
        },
    )


FAMILIES: Mapping[str, Family | Nested] = {
    "bart": translation(12, 1024, 16),
    "bert": Family(multi_head(12, 768, 12)),
    "bert-generation": Family(multi_head(24, 1024, 16)),
    "big_bird": Family(multi_head(12, 768, 12)),
    "bigbird_pegasus": translation(16, 1024, 16),
    "biogpt": Family(multi_head(24, 1024, 16)),
    "blenderbot": translation(24, 2560, 32),
    "blenderbot-small": translation(8, 512, 16),
    "bloom": Family(
        multi_head(2, 64, 8),
        aliases={"n_layer": "num_hidden_layers", "n_embed": "hidden_size", "n_head": "num_attention_heads"},
    ),
    "camembert": Family(multi_head(12, 768, 12)),
    "codegen": Family(multi_head(28, 4096, 16), aliases=GPT2),
    "ctrl": Family(multi_head(48, 1280, 16), aliases=GPT2),
    "data2vec-text": Family(multi_head(12, 768, 12)),
    "dbrx": Family(
        sizes(24, 2048, 16, kv=1, head_dim=Computed(SPLIT)),
        aliases={**MPT, "attn_config.kv_n_heads": "num_key_value_heads"},
    ),
    "electra": Family(multi_head(12, 256, 4)),
    "ernie": Family(multi_head(12, 768, 12)),
    "falcon": Family(
        sizes(
            32,
            4544,
            71,
            kv=Computed("num_kv_heads if new_decoder_architecture or not multi_query else 1"),
            head_dim=Computed(SPLIT),
            num_kv_heads=OR_HEADS,
            multi_query=True,
            new_decoder_architecture=Default(False, False),
        ),
        aliases={"n_embed": "hidden_size"},
        # Its cache holds the keys after they were repeated for every query head.
        transformers=Held(
            {
                "num_key_value_heads": Computed(
                    "num_attention_heads if new_decoder_architecture else 1 if multi_query else num_kv_heads"
                )
            }
        ),
    ),
    "git": Family(multi_head(6, 768, 12)),
    "gpt-sw3": Family(multi_head(12, 768, 12), aliases=GPT2),
    "gpt2": Family(multi_head(12, 768, 12), aliases=GPT2),
    "gpt_bigcode": Family(
        sizes(
            12,
            768,
            12,
            kv=Computed("1 if multi_query else num_attention_heads"),
            head_dim=Computed(SPLIT),
            multi_query=True,
        ),
        aliases=GPT2,
    ),
    "gpt_neo": Family(
        multi_head(24, 2048, 16, window_size=256, attention_types=LIST),
        aliases={"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
        layer="'sliding_attention' if runs(attention_types or [[['global', 'local'], 12]], num_hidden_layers)[i] "
        "== 'local' else 'full_attention'",
        kinds={"sliding_attention": grouped(window="window_size")},
        transformers=Held(layer="'full_attention'"),
    ),
    "gpt_neox": Family(multi_head(44, 6144, 64)),
    "gpt_neox_japanese": Family(multi_head(32, 2560, 32)),
    "gptj": Family(multi_head(28, 4096, 16), aliases=GPT2),
    "idefics": Family(multi_head(32, 4096, 32)),
    "imagegpt": Family(multi_head(24, 512, 8), aliases=GPT2),
    "kosmos_2_text_model": Family(multi_head(24, 2048, 32), aliases=KOSMOS),
    "kosmos_2_5_text_model": Family(multi_head(24, 1536, 16), aliases=KOSMOS),
    "marian": translation(12, 1024, 16),
    "mbart": translation(12, 1024, 16),
    "megatron-bert": Family(multi_head(24, 1024, 16)),
    "musicgen_decoder": Family(multi_head(24, 1024, 16)),
    "musicgen_melody_decoder": Family(multi_head(24, 1024, 16)),
    "mvp": translation(12, 1024, 16),
    "mpt": Family(multi_head(24, 2048, 16), aliases=MPT),
    "openai-gpt": Family(multi_head(12, 768, 12), aliases=GPT2, transformers=Held(layer="'none'")),
    "opt": Family(multi_head(12, 768, 12)),
    "pegasus": translation(12, 1024, 16),
    "persimmon": Family(multi_head(36, 4096, 64)),
    "plbart": translation(6, 768, 12),
    "prophetnet": Family(
        {
            "num_decoder_layers": 12,
            "hidden_size": 1024,
            "num_decoder_attention_heads": 16,
            "num_hidden_layers": Computed("num_decoder_layers"),
            "num_attention_heads": Computed("num_decoder_attention_heads"),
            "num_key_value_heads": Computed(HEADS),
            "head_dim": Computed(SPLIT),
        },
    ),
    "rembert": Family(multi_head(32, 1152, 18)),
    "roberta": Family(multi_head(12, 768, 12)),
    "roberta-prelayernorm": Family(multi_head(12, 768, 12)),
    "roc_bert": Family(multi_head(12, 768, 12)),
    "roformer": Family(multi_head(12, 768, 12)),
    "trocr": translation(12, 1024, 16),
    "whisper": translation(4, 384, 6),
    "xglm": Family(
        multi_head(24, 1024, 16),
        aliases={
            "num_layers": "num_hidden_layers",
            "d_model": "hidden_size",
            "attention_heads": "num_attention_heads",
        },
    ),
    "xlm-roberta": Family(multi_head(12, 768, 12)),
    "xlm-roberta-xl": Family(multi_head(36, 2560, 32)),
    "xmod": Family(multi_head(12, 768, 12)),
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
                *(
                    KeptState(name, (HEADS, "prompt_length", "dim_head"), sharded=((HEADS, HEADS),))
                    for name in ("prompt_k", "prompt_v")
                )
            )
        },
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
