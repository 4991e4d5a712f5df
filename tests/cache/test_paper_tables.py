"""Figures of caches that papers, reports and posts print, recomputed from their inputs by our accounting.

An entry of the table has a recipe here, which declares what is remembered and asks for its bytes, or a reason in
`attn_variants.bench.printed`. In a recipe `given` is the entry's inputs.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from attn_variants.architectures import preset
from attn_variants.architectures.strided import StridedSpec, strided_entries
from attn_variants.bench.printed import PRINTED
from attn_variants.cache import bytes_per_token, ideal_bytes, model_cache
from attn_variants.cache.accounting import kept_entries, layer_bytes
from attn_variants.cache.formats import Format, format_named
from attn_variants.cache.parallel import Split
from attn_variants.contract import CacheSpec, Entry, Record, State

TABLE = Path(__file__).parents[1] / "data" / "paper_tables.json"
ENTRIES = {entry["id"]: entry for entry in json.loads(TABLE.read_text(encoding="utf-8"))}
GB, MIB, GIB = 10**9, 2**20, 2**30
MILLION, LONG = 2**20, 2**17
"""A million tokens and 128k, as they are meant where they are printed."""


# What layers remember.


def declared(*entries, **more):
    return CacheSpec(tuple(Record.of(entry) for entry in entries), **more)


def gqa(heads, dim, **more):
    return declared(Entry("k", heads, dim), Entry("v", heads, dim), **more)


def latent(rank, rope, heads=1):
    """One latent for all heads, or several (GLA, MLRA), and one rotated key."""
    return declared(Entry("latent", heads, rank // heads, sharded=heads > 1), Entry("k_rope", 1, rope, sharded=False))


def gta(heads, dim, rope):
    """Keys and values tied, and one rotated key."""
    return declared(Entry("kv", heads, dim), Entry("k_rope", 1, rope, sharded=False))


def tpa(heads, dim, key_rank, value_rank):
    """Factors over heads and factors over numbers, for keys and for values."""
    return declared(
        *(Entry(f"a_{name}", heads, rank) for name, rank in (("k", key_rank), ("v", value_rank))),
        *(Entry(f"b_{name}", rank, dim, sharded=False) for name, rank in (("k", key_rank), ("v", value_rank))),
    )


def pooled(every, *entries):
    """One of each per so many tokens (DeepSeek-V4)."""
    return StridedSpec(stride=every, pooled=entries)


def octets(name, count):
    """What a packed record takes, in bytes."""
    return Entry(name, 1, count, dtype="uint8")


# What is asked of them.


def rank_bytes(spec, tp=1, form=None):
    """One token in one layer on one of `tp` ranks."""
    return layer_bytes(spec, kept_entries(spec, 1), form or format_named("bfloat16"), Split(tp))


def in_head_dims(spec, dim, tp=1):
    return rank_bytes(spec, tp) / (2 * dim)


def grows_by(specs):
    """Bytes per token in the long run, over 128 tokens, which every stride here divides."""
    return (ideal_bytes(specs, batch=1, context=LONG + 128) - ideal_bytes(specs, batch=1, context=LONG)) / 128


def published(name, context=None, **options):
    """Bytes of a published model: of a sequence, or without a context of one more token of a long one."""
    cache = model_cache(name)
    if context is None:
        return cache.bytes_per_token(context=LONG, **options)
    return cache.bytes(context=context, **options)


def at_context(given, specs, dtype="fp8"):
    return ideal_bytes(specs, batch=1, context=given["context"], dtype=dtype)


def by_rank(make, given):
    assert given["bytes"] == 2
    return rank_bytes(make(given), given["tp"])


def of_gqa(given):
    return gqa(given.get("kv_heads", given["n_heads"]), given["head_dim"])


def of_gta(given):
    return gta(given["tied_kv_heads"], given["head_dim"], given["rope_dim"])


def of_gla(given):
    return latent(given["latent_heads"] * given["latent_dim"], given["rope_dim"], given["latent_heads"])


def of_mla(given):
    return latent(given["kv_lora_rank"], given["rope_dim"])


def in_kib(given):
    """Layers of grouped keys and values, per token."""
    return bytes_per_token([gqa(given["kv_heads"], given["head_dim"])] * given["kv_layers"], context=LONG) / 1024


def shared_across_layers(given):
    """CLA: the first layers' caches are the later ones'; which ones does not matter."""
    own, rest = given["kv_layers"], given["total_layers"] - given["kv_layers"]
    spec = gqa(given["kv_heads"], given["head_dim"])
    return bytes_per_token([spec] * own + [replace(spec, shares=0)] * rest, context=1)


def step3_latent(given):
    return at_context(given, [latent(given["latent"] - 64, 64)] * given["layers"])


def step3_grouped(given):
    return at_context(given, [gqa(given["kv_heads"], given["head_dim"])] * given["layers"])


def step3_lightning(given):
    """The state is read and written."""
    full = [gqa(given["kv_heads"], given["head_dim"])] * given["full_layers"]
    state = State("lightning", (given["n_heads"], given["head_dim"], given["head_dim"]), "float32")
    linear = [CacheSpec(states=(state,))] * given["linear_layers"]
    return at_context(given, full, "bfloat16") + 2 * at_context(given, linear, "bfloat16")


def step3_chunked(given):
    """Only full layers at two bytes and full chunks at one give the figure."""
    spec = partial(gqa, given["kv_heads"], given["head_dim"])
    chunked = [spec(chunk=given["chunk"])] * given["chunked_layers"]
    return at_context(given, [spec()] * given["full_layers"], "bfloat16") + at_context(given, chunked)


def linear_state(heads, dim, layers, dtype):
    """A delta state of these heads and the last three inputs of three convolutions of its width."""
    states = (State("delta", (heads, dim, dim), dtype), State("conv", (3 * heads * dim, 3), dtype))
    return ideal_bytes([CacheSpec(states=states)] * layers, batch=1, context=0) / MIB


def v4_ratio(csa, hca, context=MILLION):
    """Packed records of both, long against them the windows: of 576 and 68 bytes, against V3.2's 656 and 132."""
    state = octets("state", 576)
    v4 = [pooled(4, state, octets("index_k", 68))] * csa + [pooled(128, state)] * hca
    return ideal_bytes(v4, batch=1, context=context) / published("deepseek-v3.2", context, kv_dtype="fp8-mla")


def v4_with_short_index(context):
    """Indexer keys at one byte a number."""
    state = Entry("state", 1, 512)
    layers = [pooled(4, state, octets("index_k", 128))] * 30 + [pooled(128, state)] * 31
    return ideal_bytes(layers, batch=1, context=context) / GIB


def sparse_tokens(given):
    """NSA reads pooled tokens, chosen blocks, of which there are as many as a window would hold, and a window."""
    pools = strided_entries(pooled(given["d"], Entry("k", 1, 1)), given["context"])
    spans = (given["sel_block"] * given["n_sel"], given["window"])
    return sum(count for _, count in pools) + sum(
        CacheSpec(window=span).visible_tokens(given["context"]) for span in spans
    )


def at_bits(specs, bits):
    """One token, in numbers of so many bits without scales."""
    form = Format(f"{bits} bits", bits)
    return sum(rank_bytes(spec, form=form) for spec in specs)


def compression(given):
    """DeepSeek-V2 in 6 bits against DeepSeek-67B in 16."""
    assert (given["v2"]["bits"], given["ds67b"]["bits"]) == (6, 16)
    return 1 - at_bits(model_cache("deepseek-v2").layers, 6) / at_bits(model_cache("deepseek-67b").layers, 16)


def int4_of_latent(given):
    whole = model_cache("llama-2-7b").layers[0]
    kept = declared(Entry("latent", 1, int(whole.numel_per_token * given["mla_keep"])))
    return 1 - at_bits([kept], 4) / at_bits([whole], 16)


def rolling(given):
    """Every layer of Mistral-7B has the window; without one it keeps all."""
    assert given["window"] == preset("mistral-7b-v0.1")["sliding_window"]
    bounded = model_cache("mistral-7b-v0.1").layers
    free = [replace(spec, window=None) for spec in bounded]
    return ideal_bytes(free, batch=1, context=given["context"]) / published("mistral-7b-v0.1", given["context"])


def hybrid_saving(given):
    """Against the same model with latents in every layer."""
    latents = [spec for spec in model_cache("kimi-linear-48b-a3b").layers if spec.records]
    assert len(latents) == given["mla_layers"]
    return 1 - published("kimi-linear-48b-a3b") / bytes_per_token(latents[:1] * given["layers"], context=LONG)


def llama_2_70b_multi_head(context):
    config = preset("llama-2-70b")
    return published(config | {"num_key_value_heads": config["num_attention_heads"]}, context)


def elements(spec, layers=1):
    return spec.numel_per_token * layers


def grouped(heads, dim, layers):
    return bytes_per_token([gqa(heads, dim)] * layers, context=LONG)


RECIPES = {
    3: lambda given: elements(latent(given["kv_lora_rank"], given["qk_rope_head_dim"])) / given["head_dim"],
    **dict.fromkeys(
        (5, 7), lambda given: elements(latent(given["kv_lora_rank"], given["qk_rope_head_dim"]), given["layers"])
    ),
    6: lambda given: elements(gqa(given["n_heads"], given["head_dim"]), given["layers"]),
    8: lambda given: elements(latent(512, 64), 27) / elements(gqa(16, 128), 27),
    9: lambda given: elements(latent(512, 64), 60) / elements(gqa(56, 128), 60),
    10: compression,
    19: lambda given: published("qwen2.5-72b") / published("deepseek-v3"),
    20: lambda given: published("llama-3.1-405b") / published("deepseek-v3"),
    21: lambda given: published("opt-13b") / 1024,
    22: lambda given: published("opt-13b", given["seq"]) / GIB,
    **dict.fromkeys((23, 24, 25, 26, 27), partial(by_rank, of_gqa)),
    **dict.fromkeys((29, 30, 31), partial(by_rank, of_gta)),
    **dict.fromkeys((32, 34), partial(by_rank, of_gla)),
    35: partial(by_rank, of_mla),
    **dict.fromkeys(
        (38, 40), lambda given: in_head_dims(gta(given["kv_heads"], 128, given["rope_dim"]), 128, given["tp"])
    ),
    **dict.fromkeys((39, 41), lambda given: in_head_dims(gqa(given["kv_heads"], 128), 128, given["tp"])),
    **dict.fromkeys((51, 57, 60, 61, 64, 65, 66, 70), shared_across_layers),
    **dict.fromkeys((71, 73, 89, 91), step3_latent),
    **dict.fromkeys((77, 85, 87, 93, 95, 101, 103, 105), step3_grouped),
    **dict.fromkeys((81, 99), step3_lightning),
    97: step3_chunked,
    109: lambda given: in_head_dims(of_mla(given), 128, given["tp"]),
    112: lambda given: in_head_dims(latent(512, given["rope_dim"], heads=2), 128, given["tp"]),
    114: lambda given: in_head_dims(latent(512, given["rope_dim"], heads=4), 128, given["tp"]),
    123: lambda given: elements(gqa(given["n_heads"], given["head_dim"])),
    124: lambda given: elements(gqa(given["kv_heads"], given["head_dim"])),
    126: lambda given: elements(of_gta(given)),
    127: lambda given: elements(gqa(1, given["head_dim"])),
    **dict.fromkeys(
        (128, 203), lambda given: elements(tpa(given["n_heads"], given["head_dim"], given["R_K"], given["R_V"]))
    ),
    129: lambda given: elements(of_mla(given)),
    131: lambda given: (
        1 - elements(declared(Entry("latent", 1, given["kept"]))) / elements(model_cache("llama-2-7b").layers[0])
    ),
    133: int4_of_latent,
    134: lambda given: elements(latent(512, 64)) / elements(model_cache("llama-3-8b").layers[0]),
    136: lambda given: published("qwen3-32b", given["tokens"]) / GIB,
    137: lambda given: published("llama-3.1-70b", given["tokens"]) / GIB,
    138: lambda given: published("gpt2") / 1024,
    139: lambda given: published("qwen3-0.6b") / 1024,
    **dict.fromkeys((140, 142, 143), in_kib),
    141: lambda given: published("gpt-oss-120b") / 1024,
    145: lambda given: published("kimi-k3") / 1024,
    146: lambda given: bytes_per_token([latent(512, 64)] * given["layers"], context=LONG) / 1024,
    147: lambda given: (
        grows_by(
            [pooled(4, Entry("state", 1, given["head_dim"]))] * given["csa"]
            + [pooled(128, Entry("state", 1, given["head_dim"]))] * given["hca"]
        )
        / 1024
    ),
    151: lambda given: published("deepseek-v3.2", MILLION) / GIB,
    155: lambda given: published("deepseek-v3", given["context"]) / GIB,
    156: lambda given: grouped(4, 128, 60) * given["context"] / GIB,
    157: lambda given: grouped(4, 256, 23) * given["context"] / GIB,
    158: lambda given: linear_state(given["heads"], given["dk"], given["layers"], "bfloat16"),
    160: lambda given: linear_state(given["v_heads"], given["d"], given["layers"], "float32"),
    161: lambda given: v4_ratio(given["csa"], given["hca"]),
    162: lambda given: v4_ratio(given["csa"], given["hca"]),
    165: lambda given: published("deepseek-v3", given["context"]) / GIB,
    166: lambda given: v4_with_short_index(given["context"]),
    168: lambda given: rank_bytes(latent(512, 64), form=format_named("fp8-mla")),
    169: lambda given: format_named("fp8-mla").token_bytes(Entry("index_k", 1, given["index_head_dim"])),
    176: lambda given: published("llama-2-70b") / 1024,
    179: lambda given: llama_2_70b_multi_head(given["context"]) / GB,
    181: lambda given: published("qwen3-8b", given["context"]),
    183: lambda given: published("qwen3-4b") / 1024,
    184: lambda given: published("llama-3-8b") / 1024,
    185: lambda given: published("gpt2-xl") / 1024,
    186: lambda given: published("llama-2-7b") / MIB,
    187: lambda given: published("llama-3.1-8b", given["context"]) / GIB,
    190: rolling,
    191: hybrid_saving,
    **dict.fromkeys((199, 200, 201), sparse_tokens),
}


@pytest.mark.parametrize("number", RECIPES)
def test_a_printed_figure_follows_from_its_inputs(number):
    entry = ENTRIES[number]
    assert RECIPES[number](entry["inputs"]) == pytest.approx(entry["value"], rel=entry["rel_tol"]), entry["claim"]


def test_every_figure_is_recomputed_or_has_a_reason_and_none_has_both():
    assert sorted([*RECIPES, *(figure.number for figure in PRINTED)]) == sorted(ENTRIES)


@pytest.mark.parametrize("figure", PRINTED, ids=lambda figure: str(figure.number))
def test_a_figure_with_a_reason_is_listed_as_it_was_printed(figure):
    entry = ENTRIES[figure.number]
    listed = (figure.source, figure.claim, figure.value, figure.unit)
    assert listed == (entry["source"], entry["claim"], entry["value"], entry["unit"])
    assert figure.reason


@pytest.mark.parametrize("figure", [figure for figure in PRINTED if figure.preset], ids=lambda figure: figure.preset)
def test_gemma_3_s_column_is_above_even_a_cache_without_windows(figure):
    """So no reading of its inputs gives it: neither the windows' cache nor the one at full length."""
    printed = figure.value * GB
    assert published(figure.preset, figure.context, policy="allocated") < 0.9 * printed
    assert 5 < printed / published(figure.preset, figure.context) < 7
