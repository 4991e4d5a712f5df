"""Bytes and shapes of every variant against the papers' closed formulas, worked by hand as integers."""

import re

import pytest
import torch

from attn_variants import (
    VARIANTS,
    CacheSpec,
    Decoder,
    DecoderConfig,
    Entry,
    ExpandedMLAConfig,
    Geometry,
    GQAConfig,
    MHAConfig,
    MLAConfig,
    MQAConfig,
    Record,
    State,
)
from attn_variants.cache import (
    KVCache,
    assert_cache_shapes,
    bytes_per_token,
    cache_bytes,
    cache_shapes,
    ideal_bytes,
)
from tests.tiny import GEOMETRY, append, decoder, kv_cache

# At GEOMETRY: 6 heads over 2, head_dim 8, latent 20, rope 4, nope 10, value 12. Shapes at batch 3 and capacity 7.
BY_HAND = {
    "mha": (96, {"k": (3, 6, 7, 8), "v": (3, 6, 7, 8)}),
    "gqa": (32, {"k": (3, 2, 7, 8), "v": (3, 2, 7, 8)}),
    "mqa": (16, {"k": (3, 1, 7, 8), "v": (3, 1, 7, 8)}),
    "mla": (24, {"kv": (3, 1, 7, 24)}),
    "mla-expanded": (156, {"k": (3, 6, 7, 14), "v": (3, 6, 7, 12)}),
}


def test_every_variant_is_worked_by_hand():
    assert BY_HAND.keys() == VARIANTS.keys()


@pytest.mark.parametrize("variant", BY_HAND)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_declared_allocated_and_hand_worked_bytes_and_shapes_are_equal(variant, dtype):
    numbers, shapes = BY_HAND[variant]
    bytes_each = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    specs = decoder(variant).cache_specs
    wanted = {f"layers.{layer}.{name}": (shape, dtype) for layer in (0, 1) for name, shape in shapes.items()}
    assert cache_shapes(specs, batch=3, capacity=7, dtype=dtype) == wanted

    cache = KVCache(specs, batch=3, capacity=7, dtype=dtype)
    assert {name: (tuple(tensor.shape), str(tensor.dtype)[6:]) for name, tensor in cache.tensors.items()} == wanted
    total = 2 * 3 * 7 * numbers * bytes_each
    assert cache_bytes(specs, batch=3, capacity=7, dtype=dtype) == total
    assert cache.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in cache.tensors.values()) == total
    assert ideal_bytes(specs, batch=3, context=7, dtype=dtype) == total
    assert bytes_per_token(specs, context=7, dtype=dtype) == 2 * numbers * bytes_each


@pytest.mark.parametrize("variant", BY_HAND)
def test_a_filled_cache_is_as_large_as_an_empty_one(variant):
    store = kv_cache(decoder(variant), batch=2, capacity=7)
    append(decoder(variant), store, [[1, 2, 3, 4, 5], [6, 7]])
    append(decoder(variant), store, [[8, 9], [10]])
    assert store.nbytes == 2 * 2 * 7 * BY_HAND[variant][0] * 8
    assert store.bytes_used == 2 * (7 + 3) * BY_HAND[variant][0] * 8


# Published sizes: layers, config, bytes per token in bfloat16.
PUBLISHED = {
    # 2 * 36 * 8 * 128 * 2; with head_dim taken as hidden / heads it would be 92160.
    "Qwen3-4B": (36, GQAConfig(2560, 32, 8, 128), 147_456),
    "Llama-3-8B": (32, GQAConfig(4096, 32, 8), 131_072),
    "Llama-2-7B": (32, MHAConfig(4096, 32), 524_288),
    "StarCoder": (40, MQAConfig(6144, 48), 20_480),
    "DeepSeek-V3": (61, MLAConfig(7168, 128, 512, 128, 64, 128), 70_272),
    "DeepSeek-V3 expanded": (61, ExpandedMLAConfig(7168, 128, 512, 128, 64, 128), 4_997_120),
    "DeepSeek-V2-Lite": (27, MLAConfig(2048, 16, 512, 128, 64, 128), 31_104),
    "DeepSeek-V2-Lite expanded": (27, ExpandedMLAConfig(2048, 16, 512, 128, 64, 128), 276_480),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_cost_what_their_papers_say(model):
    layers, config, per_token = PUBLISHED[model]
    specs = (config.cache_spec(),) * layers
    assert bytes_per_token(specs, context=1000) == per_token
    assert cache_bytes(specs, batch=8, capacity=8192) == 8 * 8192 * per_token
    cache = KVCache(specs, batch=2, capacity=64, dtype="bfloat16", device="meta")
    assert cache.nbytes == 2 * 64 * per_token


def test_a_full_context_of_deepseek_v3_is_ten_gibibytes():
    specs = (MLAConfig(7168, 128).cache_spec(),) * 61
    assert cache_bytes(specs, batch=1, capacity=163_840) == 11_513_364_480
    assert ideal_bytes(specs, batch=1, context=163_840) == 11_513_364_480


def test_a_latent_cache_is_seventy_one_times_smaller_than_its_expansion():
    latent, expanded = (config(7168, 128).cache_spec().numel_per_token for config in (MLAConfig, ExpandedMLAConfig))
    assert (latent, expanded) == (576, 40_960)
    assert expanded // latent == 71


def test_the_head_axis_of_a_grouped_cache_is_the_groups():
    specs = (GQAConfig(64, 8, 2).cache_spec(),)
    assert cache_shapes(specs, batch=1, capacity=5)["layers.0.k"] == ((1, 2, 5, 8), "bfloat16")


def test_bytes_grow_with_kv_heads_and_with_nothing_else_of_the_model():
    four, one = (cache_bytes((GQAConfig(64, 4, heads, 16).cache_spec(),), batch=1, capacity=9) for heads in (4, 1))
    assert four == 4 * one


def test_the_layers_of_a_geometry_add_up():
    config = DecoderConfig.from_geometry(Geometry(), VARIANTS["gqa"].config)
    # 32 layers * 2 * 8 * 128 numbers * 2 bytes * batch 8 * 8192 tokens: 8 GiB.
    assert cache_bytes(config.cache_specs, batch=8, capacity=8192) == 8 * 2**30


WINDOWED = CacheSpec(records=(Record.of(Entry("k", 2, 16)), Record.of(Entry("v", 2, 16))), window=4)
WHOLE = CacheSpec(records=WINDOWED.records)


def test_a_window_caps_what_is_read_and_a_full_store_reserves_all_of_it():
    specs = (WINDOWED,) * 5 + (WHOLE,)
    assert ideal_bytes(specs, batch=1, context=1) == 768
    assert ideal_bytes(specs, batch=3, context=10) == 3 * 128 * (5 * 4 + 10)
    assert cache_bytes(specs, batch=3, capacity=10) == 3 * 128 * 6 * 10
    assert [bytes_per_token(specs, context=context) for context in (0, 3, 4, 100)] == [768, 768, 128, 128]


def test_states_count_once_a_sequence_and_shared_layers_count_nothing():
    specs = (WHOLE, CacheSpec(states=(State("s", (2, 3), dtype="float32"), State("c", (5,)))), CacheSpec(shares=0))
    assert ideal_bytes(specs, batch=2, context=3) == 2 * (3 * 128 + 6 * 4 + 5 * 2)
    assert bytes_per_token(specs, context=3) == 128


def test_an_entry_s_own_dtype_counts():
    specs = (CacheSpec(records=(Record.of(Entry("k", 2, 8)), Record.of(Entry("v", 2, 12, dtype="int8")))),)
    assert cache_bytes(specs, batch=1, capacity=3, dtype="float32") == 3 * (16 * 4 + 24)
    assert ideal_bytes(specs, batch=1, context=3, dtype="float32") == 3 * (16 * 4 + 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "bf16"])
def test_a_dtype_goes_by_any_of_its_names(dtype):
    assert cache_bytes((WHOLE,), batch=1, capacity=1, dtype=dtype) == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, r"batch \(0\) must be a"),
        ({"capacity": -1}, r"capacity \(-1\) must be a"),
        ({"capacity": 2.5}, r"capacity \(2\.5\) must be a"),
        ({"store": "ful"}, r"unknown store 'ful'; did you mean full\?"),
        ({"codec": "plian"}, r"unknown codec 'plian'; did you mean plain"),
        ({"dtype": "bloat16"}, r"unknown dtype 'bloat16'; did you mean bfloat16"),
    ],
)
def test_sizes_and_names_that_make_no_cache_are_refused(options, message):
    sizes = {"batch": 1, "capacity": 2} | options
    for function in (cache_shapes, cache_bytes):
        with pytest.raises(ValueError, match=message):
            function((WHOLE,), **sizes)


@pytest.mark.parametrize("name", ["batch", "context"])
@pytest.mark.parametrize("value", [-1, 2.5, True])
def test_ideal_bytes_of_no_size_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} \({value!r}\)"):
        ideal_bytes((WHOLE,), **{"batch": 1, "context": 1} | {name: value})


def test_a_cache_of_the_declared_shapes_passes():
    for variant in VARIANTS:
        specs = decoder(variant).cache_specs
        assert_cache_shapes(KVCache(specs, batch=3, capacity=7, dtype="bfloat16"), specs)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"batch": 2}, "layers.0.k is (2, 2, 7, 8) in bfloat16, the specs declare (3, 2, 7, 8) in bfloat16"),
        ({"capacity": 8}, "layers.0.k is (3, 2, 8, 8) in bfloat16, the specs declare (3, 2, 7, 8) in bfloat16"),
        ({"dtype": "float32"}, "layers.0.k is (3, 2, 7, 8) in float32, the specs declare (3, 2, 7, 8) in bfloat16"),
        (
            {"specs": decoder("mha").cache_specs},
            "layers.0.k is (3, 6, 7, 8) in bfloat16, the specs declare (3, 2, 7, 8) in",
        ),
        (
            {"specs": decoder("mla").cache_specs},
            "the cache lacks tensors ['layers.0.k', 'layers.0.v', 'layers.1.k', 'layers",
        ),
        (
            {"specs": decoder("gqa", layers=1).cache_specs},
            "the cache lacks tensors ['layers.1.k', 'layers.1.v'] and has []",
        ),
        ({"specs": decoder("gqa", layers=3).cache_specs}, "lacks tensors [] and has ['layers.2.k', 'layers.2.v']"),
    ],
)
def test_a_cache_of_other_shapes_fails_and_both_are_named(other, message):
    specs = decoder("gqa").cache_specs
    sizes = {"batch": 3, "capacity": 7, "dtype": "bfloat16"}
    cache = KVCache(**{"specs": specs} | sizes | other)
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_cache_shapes(cache, specs, **sizes)


def test_a_cache_of_one_s_own_is_asserted_by_its_tensors():
    specs = (CacheSpec(records=(Record.of(Entry("latent", 1, 24)),)),)
    mine = {"layers.0.latent": torch.zeros(2, 1, 5, 24)}
    assert_cache_shapes(mine, specs, batch=2, capacity=5, dtype="float32")
    with pytest.raises(
        AssertionError, match=r"layers.0.latent is \(2, 1, 5, 24\) in float32, the specs declare .* bfloat16"
    ):
        assert_cache_shapes(mine, specs, batch=2, capacity=5)
    mine["layers.0.latent"] = torch.zeros(2, 6, 5, 24)
    with pytest.raises(
        AssertionError, match=r"is \(2, 6, 5, 24\) in float32, the specs declare \(2, 1, 5, 24\) in float32"
    ):
        assert_cache_shapes(mine, specs, batch=2, capacity=5, dtype="float32")
    mine["layers.0.latent"] = torch.zeros(2, 1, 5, 24, dtype=torch.bool)
    with pytest.raises(AssertionError, match="in bool, the specs declare"):
        assert_cache_shapes(mine, specs, batch=2, capacity=5, dtype="float32")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoder_declares_what_its_config_declares(variant):
    config = DecoderConfig.from_geometry(GEOMETRY, VARIANTS[variant].config)
    model = Decoder(config)
    assert model.cache_specs == config.cache_specs == tuple(layer.self_attn.cache_spec for layer in model.model.layers)


def test_a_fork_counts_the_pool_it_lives_on_by_formula_too():
    """Pools of 3 rows of 5 pages and of 3 of 3, the page that is nobody's besides, of 2 slots of 2 * 8 numbers."""
    k = Record.of(Entry("k", 2, 8))
    specs = [CacheSpec(records=(k,)), CacheSpec(records=(k,), window=4)]
    cache = KVCache(specs, batch=3, capacity=9, dtype="float32", store="paged:2", codec="plain")
    for one in (cache, cache.fork([0]), cache.fork([0, 1]).fork([1, 1, 0, 0])):
        assert one.bytes.formula == one.bytes.allocated == one.nbytes == (16 + 10) * 2 * 16 * 4
        assert_cache_shapes(one, specs)
