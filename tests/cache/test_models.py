"""What a published model's cache costs: every policy, format and split, and what fits into a budget."""

import itertools

import pytest

from attn_variants.architectures import PRESETS
from attn_variants.cache import cache_bytes, ideal_bytes, model_cache
from attn_variants.cache.quantize import CODECS, format_of

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MISTRAL = {**TINY, "model_type": "mistral", "sliding_window": 8}

# Policies


def test_a_window_of_8_is_8_tokens_to_read_and_7_or_8_to_keep():
    m, token = model_cache(MISTRAL), 4 * 2 * 2 * 16 * 2
    assert m.bytes(context=20) == 8 * token
    assert m.bytes(context=20, policy="transformers") == 7 * token
    assert m.bytes(context=20, policy="transformers", store="static") == 8 * token
    assert m.bytes(context=20, policy="allocated") == 20 * token
    assert [m.bytes(context=5, policy=policy) for policy in ("ideal", "transformers", "allocated")] == [5 * token] * 3


@pytest.mark.parametrize("name", PRESETS)
def test_the_policies_agree_with_the_accounting_of_layers(name):
    m = model_cache(name)
    assert m.bytes(context=4097, batch=3) == ideal_bytes(m.layers, batch=3, context=4097)
    try:
        reserved = cache_bytes(m.layers, batch=3, capacity=4097)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error).split("(")[0]):
            m.bytes(context=4097, batch=3, policy="allocated")
    else:
        assert m.bytes(context=4097, batch=3, policy="allocated") == reserved


def test_vllm_counts_whole_blocks_of_its_pool():
    m = model_cache("gpt-oss-20b")
    pool = m.vllm(tp=2)
    asked = {"context": 1000, "policy": "vllm", "tp": 2}
    assert m.bytes(**asked, batch=3) == 3 * pool.held_bytes(1000)
    assert m.bytes(**asked, store="planned") == pool.planned_bytes(1000)
    assert m.bytes_over_ranks(**asked) == 2 * pool.held_bytes(1000)
    most = m.max_context(budget=10**9, policy="vllm", tp=2)
    assert pool.held_bytes(most) <= 10**9 < pool.held_bytes(most + 1)
    assert m.bytes(context=1000, policy="vllm", kv_dtype="fp8") == m.vllm(kv_dtype="fp8").held_bytes(1000)


def test_a_hybrid_has_fixed_bytes_and_bytes_per_token():
    """Qwen3-Next: 36 layers keep states, 12 keep K = 2 heads of 256."""
    m = model_cache("qwen3-next-80b-a3b")
    conv, delta = (2 * 16 * 128 + 32 * 128) * 3 * 2, 32 * 128 * 128 * 4
    assert m.bytes_fixed() == 36 * (conv + delta)
    assert m.bytes_per_token(context=1000) == 12 * 2 * 2 * 256 * 2
    assert m.bytes(context=1000) == m.bytes_fixed() + 1000 * m.bytes_per_token(context=5)


def test_growth_is_that_of_the_layers_that_still_grow():
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    m = model_cache({**MISTRAL, "model_type": "olmo3", "layer_types": kinds})
    assert m.bytes_per_token(context=5) == 4 * 128
    assert m.bytes_per_token(context=8) == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "idael"}, r"unknown policy 'idael'; did you mean ideal\?"),
        ({"store": "full"}, r"store \('full'\): policy 'ideal' asks what attention reads"),
        ({"policy": "transformers", "store": "full"}, "unknown cache of transformers 'full'"),
        ({"policy": "allocated", "store": "heap"}, "unknown store 'heap'"),
        ({"policy": "transformers", "kv_dtype": "fp8"}, "kv_dtype 'fp8': policy 'transformers' holds plain dtypes"),
        ({"policy": "allocated", "kv_dtype": "fp8"}, "kv_dtype 'fp8': policy 'allocated' holds plain dtypes"),
        ({"policy": "vllm", "pp": 2}, "policy 'vllm' is sized for ranks of tp alone"),
        ({"policy": "vllm", "store": "full"}, "unknown count of vLLM 'full'"),
        ({"policy": "vllm", "kv_dtype": "q8_0"}, "q8_0"),
        ({"batch": 0}, r"batch \(0\) must be an integer of at least 1"),
        ({"context": -1}, r"context \(-1\) must be an integer of at least 0"),
        ({"kv_dtype": "fp9"}, r"unknown kv_dtype 'fp9'; did you mean"),
    ],
)
def test_questions_that_have_no_answer_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        model_cache(TINY).bytes(**{"context": 10} | options)


# Formats


@pytest.mark.parametrize(
    ("kv_dtype", "per_head"),
    [
        ("float32", 128 * 4),
        ("bf16", 128 * 2),
        ("fp8", 128),
        ("fp8_e4m3", 128),
        ("fp8-token-head", 128 + 4),
        ("int8", 128 + 2),
        ("int8:64", 128 + 2 * 2),
        ("int4", 64 + 4),
        ("int4:64", 64 + 2 * 4),
        ("q8_0", 4 * 34),
        ("q4_0", 4 * 18),
        ("q4_1", 4 * 20),
        ("q5_0", 4 * 22),
        ("q5_1", 4 * 24),
        ("iq4_nl", 4 * 18),
    ],
)
def test_a_format_counts_its_scales(kv_dtype, per_head):
    m = model_cache({**TINY, "head_dim": 128})
    assert m.bytes(context=7, batch=3, kv_dtype=kv_dtype) == 4 * 2 * 2 * per_head * 7 * 3


def test_a_residual_stays_in_the_model_s_dtype():
    """One layer and head, D = 128, T = 1024: 2 * (896 * (64 + 2 * 4) + 128 * 256) bytes."""
    one = {**TINY, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 128}
    assert model_cache(one).bytes(context=1024, kv_dtype="int4:64:128") == 194_560
    assert model_cache(one).bytes(context=100, kv_dtype="int4:64:128") == 2 * 100 * 256


def test_the_fp8_record_of_a_latent_is_656_bytes_and_its_indexer_s_key_132():
    assert model_cache("deepseek-v3").bytes(context=1, kv_dtype="fp8-mla") == 61 * 656
    assert model_cache("deepseek-v3.2").bytes(context=1, kv_dtype="fp8_ds_mla") == 61 * (656 + 132)
    assert model_cache("deepseek-v3").bytes(context=1, kv_dtype="fp8") == 61 * 576
    with pytest.raises(ValueError, match="'fp8-mla' is a format of MLA's latent, and this model caches k"):
        model_cache("llama-3.1-8b").bytes(context=1, kv_dtype="fp8-mla")


def test_a_format_leaves_states_in_the_model_s_dtype():
    m = model_cache("qwen3-next-80b-a3b")
    assert m.bytes_fixed(kv_dtype="fp8") == m.bytes_fixed() == m.bytes_fixed(kv_dtype="int4:64")
    assert m.bytes_fixed(kv_dtype="float32") > m.bytes_fixed()


@pytest.mark.parametrize(("said", "itemsize"), [({"torch_dtype": "float32"}, 4), ({"dtype": "float16"}, 2), ({}, 2)])
def test_auto_is_the_dtype_of_the_config(said, itemsize):
    assert model_cache({**TINY, **said}).bytes(context=1, kv_dtype="auto") == 4 * 2 * 2 * 16 * itemsize


@pytest.mark.parametrize(
    ("kv_dtype", "message"),
    [
        ("int4:12", "'int4:12' takes groups of 12, which do not divide the 16 numbers of k"),
        ("q8_0", "'q8_0' takes groups of 32, which do not divide the 16 numbers of k"),
        ("q8_0:16", "'q8_0:16': only int8, int4, int8-kivi, int4-kivi take a group"),
        ("int8:x", "'int8:x': give the size of a group"),
        ("int8:0", "'int8:0': give the size of a group"),
        ("int8:8:8:8", "give the size of a group and then of the residual"),
        ("int64", "unknown kv_dtype 'int64'"),
        ("", "unknown kv_dtype ''"),
    ],
)
def test_formats_that_do_not_work_out_are_refused(kv_dtype, message):
    with pytest.raises(ValueError, match=message):
        model_cache(TINY).bytes(context=1, kv_dtype=kv_dtype)


def test_a_dtype_of_the_config_that_is_no_name_is_refused():
    with pytest.raises(ValueError, match=r"torch_dtype \(16\) must be a string"):
        model_cache({**TINY, "torch_dtype": 16}).bytes(context=1, kv_dtype="auto")


# Splits


@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_heads_are_split_and_then_replicated(tp, heads):
    """K = 2: 25,600 bytes a rank at tp 4, and 102,400 over all, twice what one rank holds alone."""
    m = model_cache(TINY)
    assert m.bytes(context=100, tp=tp) == 4 * 2 * heads * 16 * 2 * 100
    assert m.bytes_over_ranks(context=100, tp=tp) == max(1, tp // 2) * 51_200


def test_llama_70b_over_16_ranks():
    m = model_cache("llama-3.1-70b")
    assert m.bytes_per_token(context=1, tp=16) == 40_960
    assert m.bytes_per_token(context=1, tp=8) == 40_960
    assert m.bytes_per_token(context=1, tp=4) == 81_920


@pytest.mark.parametrize("tp", [2, 8, 16])
def test_a_latent_is_whole_on_every_rank(tp):
    m = model_cache("deepseek-v3.2")
    assert m.bytes(context=10, tp=tp) == m.bytes(context=10)
    assert m.bytes_over_ranks(context=10, tp=tp) == tp * m.bytes(context=10)


def test_states_are_split_by_their_heads_and_shared_parts_replicated():
    """Bamba: 128 heads of 64 over one group of 256, convolution tail 3."""
    m = model_cache({"model_type": "bamba", "num_hidden_layers": 1, "attn_layer_indices": [], "vocab_size": 8})
    assert m.bytes_fixed() == (8192 + 512) * 3 * 2 + 8192 * 256 * 4
    assert m.bytes_fixed(tp=4) == (2048 + 512) * 3 * 2 + 2048 * 256 * 4


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"tp": 3}, r"tp \(3\) must divide num_attention_heads \(8\)"),
        ({"tp": 16}, r"tp \(16\) must divide num_attention_heads \(8\)"),
        ({"tp": 0}, r"tp \(0\) must be an integer of at least 1"),
        ({"pp": 5}, r"pp \(5\) must be at most the number of layers \(4\)"),
        ({"cp": -1}, r"cp \(-1\) must be"),
        ({"dp": 1.5}, r"dp \(1\.5\) must be"),
    ],
)
def test_splits_that_do_not_work_out_are_refused(split, message):
    with pytest.raises(ValueError, match=message):
        model_cache(TINY).bytes(context=1, **split)


def test_a_tp_between_the_heads_is_refused_naming_both():
    with pytest.raises(ValueError, match=r"tp \(4\) must divide the heads of k \(6\) or be a multiple of it"):
        model_cache({**TINY, "num_attention_heads": 12, "num_key_value_heads": 6}).bytes(context=1, tp=4)


def test_stages_sequences_and_tokens_are_split_as_even_as_can_be():
    m, token = model_cache(TINY), 2 * 2 * 16 * 2
    assert m.bytes(context=10, batch=5, pp=3) == 2 * token * 10 * 5
    assert m.bytes(context=10, batch=5, dp=2) == 4 * token * 10 * 3
    assert m.bytes(context=10, batch=5, cp=4) == 4 * token * 3 * 5
    for split in ({"pp": 3}, {"dp": 2}, {"cp": 4}, {"pp": 2, "dp": 3, "cp": 3}):
        assert m.bytes_over_ranks(context=10, batch=5, **split) == m.bytes(context=10, batch=5)
    assert m.bytes_over_ranks(context=10, batch=5, tp=8, pp=2, cp=3) == 4 * m.bytes(context=10, batch=5)


def test_a_layer_that_runs_twice_has_both_its_caches_on_its_stage():
    """LongCat: 3 layers of 2 caches each, so stages of 2 layers and 1, and none that holds half a layer."""
    m = model_cache({"model_type": "longcat_flash", "num_layers": 3})
    cache = (512 + 64) * 2 * 10
    assert [m.bytes(context=10, pp=pp) for pp in (1, 2, 3)] == [6 * cache, 4 * cache, 2 * cache]
    with pytest.raises(ValueError, match=r"pp \(4\) must be at most the number of layers \(3\)"):
        m.bytes(context=10, pp=4)


def test_a_stage_cannot_read_the_cache_of_another():
    """Gemma-3n: layers 20 to 34 read the caches of layers 18 and 19."""
    m = model_cache("gemma-3n-e4b")
    assert m.bytes(context=10, pp=2) == 18 * 2 * 2 * 256 * 2 * 10
    with pytest.raises(ValueError, match=r"pp \(3\) puts layer 24 on another stage than layer 19, whose cache"):
        m.bytes(context=10, pp=3)


# Budgets


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gemma-3-27b", "deepseek-v3", "qwen3-next-80b-a3b", "deepseek-v4-flash"]
)
def test_what_just_fits_fits_and_one_more_does_not(name):
    m, budget = model_cache(name), 40 * 2**30
    most = m.max_context(budget=budget, batch=7)
    assert m.bytes(context=most, batch=7) <= budget < m.bytes(context=most + 1, batch=7)
    batch = m.max_batch(budget=budget, context=30_000)
    assert m.bytes(context=30_000, batch=batch) <= budget < m.bytes(context=30_000, batch=batch + 1)
    exact = m.bytes(context=30_000, batch=batch)
    assert m.max_batch(budget=exact, context=30_000) == batch
    assert m.max_batch(budget=exact - 1, context=30_000) == batch - 1


def test_every_shorter_context_fits_too_where_growth_is_a_saw_tooth():
    m = model_cache("deepseek-v4-flash")
    sizes = [m.bytes(context=context) for context in range(1, 1200)]
    assert any(after < before for before, after in itertools.pairwise(sizes))
    for budget in (sizes[130], sizes[500], sizes[777] + 1, sizes[1000] - 1):
        grown = next((context for context, size in enumerate(sizes, 1) if size > budget), None)
        assert m.max_context(budget=budget) == grown - 1


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v4-flash", "llama-4-scout", "qwen3-next-80b-a3b"])
def test_every_shorter_request_fits_too_where_vllm_frees_blocks(name):
    """Windows, chunks and states give up blocks, so a request may hold less after a token than before it."""
    m, asked = model_cache(name), {"policy": "vllm", "kv_dtype": "auto"}
    sizes = [m.pricing(**asked).fullest(1, context) for context in range(1, 9_000)]
    falls = [context for context, (before, after) in enumerate(itertools.pairwise(sizes), 1) if after < before]
    assert falls
    for context in (falls[0], falls[-1] + 1, 8_500):
        budget = max(sizes[:context]) - 1
        grown = next(context for context, size in enumerate(sizes, 1) if size > budget)
        assert m.max_context(budget=budget, **asked) == grown - 1


def test_growth_by_blocks_and_strides_has_a_mean():
    """TINY: 512 bytes a token, in blocks of 16; DeepSeek-V4-Flash pools 4 and 128 tokens."""
    m = model_cache(TINY)
    asked = {"policy": "vllm", "kv_dtype": "auto"}
    assert [m.bytes_per_token(context=context, **asked) for context in (15, 16, 17)] == [0, 16 * 512, 0]
    assert [m.bytes_per_token_mean(context=context, **asked) for context in (15, 16, 17)] == [512] * 3
    assert m.bytes_per_token_mean(context=100) == m.bytes_per_token(context=100) == 512
    pooled = model_cache("deepseek-v4-flash")
    grown = pooled.bytes(context=10_000 + 128) - pooled.bytes(context=10_000)
    assert pooled.bytes_per_token_mean(context=10_000) == grown / 128


def test_a_model_that_stops_growing_takes_any_context():
    m = model_cache(MISTRAL)
    assert m.max_context(budget=8 * 512) is None
    assert m.max_context(budget=8 * 512 - 1) == 7
    assert m.max_context(budget=511) == 0
    assert model_cache({**MISTRAL, "sliding_window": 1}).max_batch(budget=5 * 512, context=9) == 5


@pytest.mark.parametrize("codec", [*CODECS, "int8:32", "int4:sym", "int8:asym:rope"])
@pytest.mark.parametrize("store", ["full", "ring", "paged:16"])
def test_what_our_stores_reserve_is_priced_to_the_byte_in_every_codec(store, codec):
    priced = 0
    for name in PRESETS:
        cache = model_cache(name)
        asked = {"batch": 3, "context": 1000, "policy": "allocated", "store": store}
        try:
            reserved = {
                dtype: cache_bytes(cache.layers, batch=3, capacity=1000, store=store, codec=codec, dtype=dtype)
                for dtype in ("float32", cache.dtype)
            }
        except ValueError:
            with pytest.raises(ValueError, match=r"codec|kv_dtype|store"):
                cache.bytes(**asked, codec=codec)
            continue
        priced += 1
        for dtype, wanted in reserved.items():
            assert cache.bytes(**asked, kv_dtype=dtype, codec=codec) == wanted
        assert cache.bytes(**asked, kv_dtype=format_of(codec, cache.dtype)) == reserved[cache.dtype]
    assert priced


@pytest.mark.parametrize("kv_dtype", ["fp8", "q8_0", "int8:32:128"])
def test_a_format_that_no_codec_of_ours_stores_is_not_allocated(kv_dtype):
    known = "int8, int4, int8-kivi, int4-kivi, fp8-token-head, fp8-mla; give one of these"
    with pytest.raises(ValueError, match=f"kv_dtype '{kv_dtype}': policy 'allocated' holds plain dtypes and .*{known}"):
        model_cache("llama-3.1-8b").bytes(context=100, policy="allocated", kv_dtype=kv_dtype)


def test_a_codec_codes_plain_numbers_of_our_stores():
    cache = model_cache("llama-3.1-8b")
    with pytest.raises(ValueError, match="kv_dtype 'int4' is coded already: give codec 'int8' a plain one"):
        cache.bytes(context=100, kv_dtype="int4", codec="int8")
    with pytest.raises(ValueError, match="codec 'int8' is one of our stores; policy 'vllm' takes a kv_dtype"):
        cache.bytes(context=100, policy="vllm", codec="int8")
