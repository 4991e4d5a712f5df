"""vLLM's rules one by one, with small numbers worked by hand."""

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from attn_variants.cache.vllm import VllmCache
from attn_variants.cache.vllm.grouping import Group, grouped
from attn_variants.cache.vllm.pages import Kind, Page
from tests.cache.vllm_models import CHUNKS, DELTA, FULL, INDEXED, LATENTS, MIXED, STRIDES, TAILS, TOKEN, WINDOWS, vllm


class TestFullAttention:
    def test_a_block_is_sixteen_tokens_of_every_layer(self) -> None:
        assert vllm(FULL).bytes_per_block == 3 * 16 * TOKEN == 24576

    def test_a_request_takes_whole_blocks(self) -> None:
        cache = vllm(FULL)
        # 33 tokens lie in 3 blocks of 16.
        assert cache.planned_blocks(33) == cache.held_blocks(33) == (3,)
        assert cache.planned_bytes(33) == cache.held_bytes(33) == 3 * 24576

    def test_a_pool_has_as_many_blocks_as_fit_whole(self) -> None:
        cache = vllm(FULL, max_model_len=64)
        assert cache.num_blocks(10 * 24576 - 1) == 9
        # A request of 64 tokens takes 4 blocks, so 10 blocks admit 2.5 of them, 160 tokens.
        assert cache.max_concurrency(10 * 24576) == 2.5
        assert cache.cache_tokens(10 * 24576) == 160

    def test_keys_and_values_of_fp8_are_bytes(self) -> None:
        assert vllm(FULL, kv_dtype="fp8").bytes_per_block == 24576 // 2

    def test_a_scale_per_token_and_head_lies_in_the_cache(self) -> None:
        # Two heads, a key and a value of 64 bytes each, and four bytes of scale to each.
        assert vllm(FULL, kv_dtype="int8_per_token_head").bytes_per_block == 3 * 16 * 2 * 2 * (64 + 4)
        assert vllm(FULL, kv_dtype="int4_per_token_head").bytes_per_block == 3 * 16 * 2 * 2 * (32 + 4)

    def test_a_checkpoint_that_scales_its_cache_makes_auto_fp8(self) -> None:
        scheme = {"num_bits": 8, "type": "float", "dynamic": False}
        quantised = {**FULL, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}}
        assert vllm(quantised).kv_dtype == "fp8"
        assert vllm(quantised, kv_dtype="bfloat16").bytes_per_block == 24576
        # Attention over latents does not read that scheme.
        assert vllm({**LATENTS, "quantization_config": quantised["quantization_config"]}).kv_dtype == "auto"
        # A scheme of another method, or of none, is not read.
        assert vllm({**FULL, "quantization_config": {"kv_cache_scheme": "FP8"}}).kv_dtype == "auto"
        modelopt = {**FULL, "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}
        assert vllm(modelopt).kv_dtype == "fp8_e4m3"

    def test_wide_heads_in_fp8_are_read_64_tokens_at_a_time(self) -> None:
        wide = {**FULL, "head_dim": 512}
        assert vllm(wide, kv_dtype="fp8").groups[0].pages[0][0].block == 64
        assert vllm(wide).groups[0].pages[0][0].block == 16
        assert vllm(wide, kv_dtype="fp8", block_size=16).groups[0].pages[0][0].block == 16


class TestTensorParallel:
    def test_heads_are_split_over_ranks(self) -> None:
        assert vllm(FULL, tp=2).bytes_per_block == 24576 // 2

    def test_beyond_its_heads_every_rank_keeps_one(self) -> None:
        assert vllm(FULL, tp=6).bytes_per_block == vllm(FULL, tp=2).bytes_per_block

    def test_latents_are_whole_on_every_rank(self) -> None:
        assert vllm(LATENTS, tp=8).bytes_per_block == vllm(LATENTS).bytes_per_block

    @pytest.mark.parametrize(
        ("tp", "message"),
        [
            (4, r"num_attention_heads \(6\) must be a multiple of tp \(4\): give a tp that divides it"),
            (3, r"tp \(3\) must divide num_key_value_heads \(2\) or be a multiple of it"),
            (0, r"tp \(0\) must be an integer of at least 1"),
        ],
    )
    def test_a_split_that_leaves_a_remainder_is_refused(self, tp: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            vllm(FULL, tp=tp)

    def test_transformers_own_models_round_down(self) -> None:
        # Five heads over two ranks: two each.
        config = {**FULL, "num_attention_heads": 10, "num_key_value_heads": 5, "hidden_size": 640}
        assert vllm({**config, "model_type": "olmo2"}, tp=2).bytes_per_block == 24576
        with pytest.raises(ValueError, match=r"tp \(2\) must divide num_key_value_heads \(5\)"):
            vllm(config, tp=2)
        # But their projections must split evenly: 2 * 64 numbers do not over three ranks.
        with pytest.raises(ValueError, match=r"tp \(3\) must divide num_key_value_heads \(2\)"):
            vllm({**FULL, "model_type": "olmo2"}, tp=3)

    def test_transformers_own_kinds_of_layer_are_full_attention(self) -> None:
        """What vLLM's own code does not know of zaya and axk2 it keeps as keys and values alone."""
        zaya = {
            **FULL,
            "model_type": "zaya",
            "sliding_window": 40,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid"],
        }
        assert vllm(zaya).bytes_per_block == vllm(FULL).bytes_per_block
        assert len(vllm(zaya).groups) == 1
        axk2 = {**INDEXED, "model_type": "axk2", "qk_nope_head_dim": 32}
        # Two of eight heads, keys of 32 + 64 numbers and values as wide; no indexer's keys.
        assert vllm(axk2, tp=4).bytes_per_block == 5 * 16 * 2 * 2 * 96 * 2

    def test_gpt_oss_has_no_heads_to_repeat(self) -> None:
        config = {**FULL, "model_type": "gpt_oss", "sliding_window": 40}
        assert vllm(config, tp=2).bytes_per_block
        with pytest.raises(ValueError, match=r"tp \(6\) must be at most num_key_value_heads \(2\)"):
            vllm(config, tp=6)


class TestWindows:
    def test_admission_keeps_tokens_in_flight_and_one_block_more(self) -> None:
        # Without a step in advance 24 tokens are in flight: 40 - 1 + 24 = 63 tokens in 4 blocks, and one more.
        cache = vllm(WINDOWS, max_num_batched_tokens=24, async_scheduling=False)
        assert cache.planned_blocks(10**6) == (5,)
        # With one, 48 are: 40 - 1 + 48 = 87 tokens in 6 blocks, and one more.
        cache = vllm(WINDOWS, max_num_batched_tokens=24)
        assert cache.planned_blocks(10**6) == (7,)
        # Even one token may lie across the edge of a block.
        assert cache.planned_blocks(1) == (2,)

    def test_blocks_that_no_token_reads_any_more_are_freed(self) -> None:
        # The 100th token reads those from 60 on: of its 7 blocks the 3 below 48 are free.
        assert vllm(WINDOWS).held_blocks(100) == (4,)
        # 104 are computed before the 105th, which reads from 65 on: 4 of 7 blocks are free.
        assert vllm(WINDOWS).held_blocks(105) == (3,)

    def test_chunks_take_no_block_more(self) -> None:
        cache = vllm(CHUNKS, max_num_batched_tokens=24, async_scheduling=False)
        # 48 + 24 = 72 tokens in 5 blocks, in each of the three groups of chunked layers; the full one keeps all.
        assert cache.planned_blocks(160) == (5, 5, 5, 10)
        # The 100th token lies in the chunk that begins at 96: of 7 blocks 6 are free.
        assert cache.held_blocks(100) == (1, 1, 1, 7)

    def test_cohere_counts_the_tokens_before_the_current_one(self) -> None:
        cohere = {**MIXED, "model_type": "cohere2"}
        assert vllm(cohere).groups[0].pages[0][0].span == 41
        assert vllm(MIXED).groups[0].pages[0][0].span == 40

    def test_without_hybrid_groups_windows_keep_everything(self) -> None:
        cache = vllm(MIXED, disable_hybrid_kv_cache_manager=True)
        assert cache.bytes_per_block == 6 * 16 * TOKEN
        assert cache.planned_blocks(160) == cache.held_blocks(160) == (10,)


class TestGroups:
    def test_a_large_kind_is_split_into_groups_of_the_small_one(self) -> None:
        cache = vllm(MIXED)
        assert [group.layers for group in cache.groups] == [2, 2, 2]
        assert cache.bytes_per_block == 2 * 16 * TOKEN

    def test_kinds_of_about_one_size_are_not_split(self) -> None:
        # Of 5 and 4 layers, 5 < 1.5 * 4; a block costs five layers though the other group fills four.
        types = ["sliding_attention"] * 5 + ["full_attention"] * 4
        cache = vllm({**MIXED, "num_hidden_layers": 9, "layer_types": types})
        assert [group.layers for group in cache.groups] == [5, 4]
        assert cache.bytes_per_block == 5 * 16 * TOKEN

    def test_a_kind_is_split_evenly(self) -> None:
        # Seven layers in groups of at most three: 3, 2 and 2.
        assert [group.layers for group in split({Kind.FULL: (3, 8), Kind.SLIDING: (7, 8)})] == [3, 3, 2, 2]

    def test_smaller_pages_get_more_tokens(self) -> None:
        full, sliding = split({Kind.FULL: (2, 8), Kind.SLIDING: (2, 24)})
        # A token of 8 bytes beside one of 24: three times 16 tokens.
        assert full.pages[0][0].block == 48
        assert sliding.pages[0][0].block == 16
        assert full.bytes == sliding.bytes == 2 * 16 * 24

    def test_pages_that_do_not_divide_are_padded(self) -> None:
        full, _ = split({Kind.FULL: (2, 16), Kind.SLIDING: (2, 24)})
        assert full.pages[0][0].block == 16
        assert full.bytes == 2 * 16 * 24

    def test_latents_are_not_padded(self) -> None:
        with pytest.raises(ValueError, match="256 bytes of latents neither divides the largest page of 384 bytes"):
            split({Kind.FULL: (2, 16), Kind.SLIDING: (2, 24)}, latent=True)


def split(kinds: dict[Kind, tuple[int, int]], latent: bool = False) -> tuple[Group, ...]:
    """The groups of layers by kind: how many, and the bytes of a token."""
    layers = Counter(
        {Page(kind, "k", entry, 16, span=40, latent=latent): count for kind, (count, entry) in kinds.items()}
    )
    return grouped(layers, packed=False, disable_hybrid=False)


class TestLatents:
    def test_one_row_of_latent_and_rotated_key(self) -> None:
        assert vllm(LATENTS).bytes_per_block == 5 * 16 * (512 + 64) * 2

    def test_fp8_is_read_64_tokens_at_a_time(self) -> None:
        assert vllm(LATENTS, kv_dtype="fp8").bytes_per_block == 5 * 64 * (512 + 64)
        # Another kernel reads smaller blocks, if they are asked for.
        assert vllm(LATENTS, kv_dtype="fp8", block_size=16).bytes_per_block == 5 * 16 * (512 + 64)

    def test_an_indexer_keeps_a_key_of_its_own(self) -> None:
        # Its key has 128 bytes and four of scale, also beside latents in bfloat16.
        assert vllm(INDEXED).bytes_per_block == 5 * 64 * (576 * 2 + 132)

    @pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla"])
    def test_indexed_latents_in_fp8_are_records_of_656_bytes(self, name: str) -> None:
        # 512 numbers in fp8, four scales of four bytes, 64 numbers in bfloat16.
        assert 512 + 4 * 4 + 64 * 2 == 656
        assert vllm(INDEXED, kv_dtype=name).bytes_per_block == 5 * 64 * (656 + 132)

    def test_indexed_latents_in_fp8_e4m3_are_a_byte_a_number(self) -> None:
        assert vllm(INDEXED, kv_dtype="fp8_e4m3").bytes_per_block == 5 * 64 * (576 + 132)

    def test_sarvam_keeps_latents(self) -> None:
        sarvam = {**LATENTS, "model_type": "sarvam_mla"}
        assert vllm(sarvam, tp=8).bytes_per_block == 5 * 16 * (512 + 64) * 2

    def test_minicpm3_stores_the_keys_and_values_of_every_head(self) -> None:
        config = {**LATENTS, "model_type": "minicpm3", "qk_nope_head_dim": 32, "v_head_dim": 32}
        assert vllm(config, tp=4).bytes_per_block == 5 * 16 * 2 * 2 * (32 + 64) * 2


class TestStates:
    # A rank's tail of 2 * 2 * 32 + 4 * 64 = 384 channels for three tokens and 4 matrices of 64 x 32, in bfloat16.
    STATE = 2 * (384 * 3 + 4 * 64 * 32)
    TOKEN = 2 * 2 * 64 * 2

    def test_a_block_is_long_enough_to_hold_a_state(self) -> None:
        assert (self.STATE, self.TOKEN) == (18688, 512)
        # 18688 / 512 = 36.5 tokens, in multiples of 64 for the checkpoints inside a prefill.
        cache = vllm(DELTA)
        assert {page.block for group in cache.groups for page, _ in group.pages} == {64}
        # Two layers of attention to six of states: four groups of two.
        assert [group.layers for group in cache.groups] == [2, 2, 2, 2]
        assert cache.bytes_per_block == 2 * 64 * self.TOKEN

    def test_a_request_is_planned_three_states_and_holds_one(self) -> None:
        # In each of three groups the running state, the one before it, and a checkpoint.
        assert vllm(DELTA).planned_blocks(640) == (3, 3, 3, 10)
        assert vllm(DELTA).held_blocks(640) == (1, 1, 1, 10)

    def test_a_step_into_a_new_block_still_holds_the_state_before_it(self) -> None:
        assert vllm(DELTA).held_blocks(641) == (2, 2, 2, 11)

    def test_without_prefix_caching_there_is_one(self) -> None:
        cache = vllm(DELTA, enable_prefix_caching=False, max_model_len=1000)
        # 36.5 tokens in multiples of 16.
        assert cache.bytes_per_block == 2 * 48 * self.TOKEN
        assert cache.planned_blocks(480) == cache.held_blocks(480) == (1, 1, 1, 10)

    def test_a_given_block_size_is_a_unit(self) -> None:
        assert vllm(DELTA, block_size=128).bytes_per_block == 2 * 128 * self.TOKEN

    def test_states_split_by_heads(self) -> None:
        # Of a state of 9344 bytes 18.25 tokens' worth, but a rank has one head of two: 256 bytes a token.
        cache = vllm(DELTA, tp=2)
        assert cache.bytes_per_block == 2 * 64 * 256
        with pytest.raises(ValueError, match=r"tp \(8\) does not split the states: linear_num_value_heads \(4\)"):
            vllm(DELTA, tp=8)

    def test_states_of_float32_where_the_config_says_so(self) -> None:
        config = {**DELTA, "model_type": "qwen3_5_text"}
        assert state_bytes(vllm(config)) == self.STATE
        assert state_bytes(vllm({**config, "mamba_ssm_dtype": "float32"})) == 2 * 384 * 3 + 4 * 4 * 64 * 32

    def test_mamba2_gives_every_rank_a_group(self) -> None:
        config = {
            "model_type": "mamba2",
            "num_hidden_layers": 3,
            "hidden_size": 96,
            "expand": 2,
            "num_heads": 12,
            "head_dim": 16,
            "n_groups": 1,
            "state_size": 10,
            "conv_kernel": 4,
        }
        # 192 / 4 channels and a group's 2 * 10, for three tokens; 3 heads of 16 x 10; all in bfloat16.
        assert vllm(config, tp=4).bytes_per_block == 3 * 2 * ((48 + 20) * 3 + 3 * 16 * 10)
        with pytest.raises(ValueError, match="tp must divide n_groups, unless n_groups is 1"):
            vllm({**config, "n_groups": 3}, tp=4)

    def test_a_short_convolution_has_no_checkpoint(self) -> None:
        config = {
            **FULL,
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "conv", "full_attention"],
        }
        cache = vllm(config)
        # A tail of 384 channels for two tokens, padded to 16 tokens of attention.
        assert state_bytes(cache) == 2 * 384 * 2
        assert cache.bytes_per_block == 16 * TOKEN
        assert cache.planned_blocks(160) == (2, 2, 2, 10)


class TestTails:
    """Inkling's convolutions: two layers that slide over 16 heads, and one of 8 that does not, of 64 numbers each."""

    def test_tails_are_windows_of_the_kernels_length_beside_attention(self) -> None:
        cache = vllm(TAILS, max_num_batched_tokens=8)
        # A head's 2 * 64 numbers and twice its share of 1024: 128 + 2 * 64 = 256 and 128 + 2 * 128 = 384, in rows of
        # 256 and 512; both tails take 4 * 16 * 256 * 2 = 4 * 8 * 512 * 2 bytes, which 16 tokens of 16 heads take twice.
        assert 4 * 16 * 256 * 2 == 4 * 8 * 512 * 2 == 32768
        assert 16 * 16 * 2 * 64 * 2 == 65536
        # So tails get 8 tokens a block and the eight heads' 32; kinds of two layers are split in two.
        assert cache.bytes_per_block == 65536
        blocks = sorted((page.kind.value, page.block) for group in cache.groups for page, _ in group.pages)
        assert blocks == [("full", 32), *[("sliding", 8)] * 3, *[("sliding", 16)] * 2]
        # 16 tokens in flight: windows take ceil((31 + 16) / 16) + 1 blocks, tails ceil((3 + 16) / 8) + 1.
        assert sorted(cache.planned_blocks(64)) == [2, 4, 4, 4, 4, 4]

    def test_tails_stay_bfloat16(self) -> None:
        # Attention's blocks double, to fill pages of the same size: 32 tokens of 16 heads.
        cache = vllm(TAILS, kv_dtype="fp8")
        assert cache.bytes_per_block == 32768
        assert {page.block for group in cache.groups for page, _ in group.pages} == {4, 16, 32}

    def test_every_rank_keeps_whole_heads(self) -> None:
        assert vllm(TAILS, tp=8).bytes_per_block == 65536 // 8
        with pytest.raises(ValueError, match=r"tp \(16\) must be at most num_key_value_heads \(8\)"):
            vllm(TAILS, tp=16)

    def test_windows_of_two_lengths_have_no_one_form(self) -> None:
        with pytest.raises(ValueError, match="disable_hybrid_kv_cache_manager"):
            vllm(TAILS, disable_hybrid_kv_cache_manager=True)


def state_bytes(cache: VllmCache) -> int:
    return next(page.entry for group in cache.groups for page, _ in group.pages if page.kind is Kind.STATE)


class TestStrides:
    def test_caches_lie_side_by_side_in_blocks_of_256_tokens(self) -> None:
        pages = {(page.what, page.every): page for group in vllm(STRIDES).groups for page, _ in group.pages}
        # 64 entries of 584 bytes are 37376, in whole multiples of 576: 37440.
        assert pages["latents", 4].bytes == pages["window", 1].bytes == 65 * 576
        # 2 * 584 = 1168 bytes of two entries of 128 tokens in 3 * 576.
        assert pages["latents", 128].bytes == 3 * 576
        assert pages["index", 4].bytes == 15 * 576
        assert pages["tail", 1].bytes == 57 * 576

    def test_a_block_costs_the_largest_group(self) -> None:
        cache = vllm(STRIDES)
        # Tails repeat a pattern of two pages twice. In runs of two, three windows and one tail are padded by 1 + 1, in
        # runs of three by 0 + 1 + 2: so windows of two layers and of one; latents of all with indexers of two; tails.
        sizes = [2 * 65 * 576, 65 * 576, 2 * (65 + 15) * 576 + 3 * 576, 2 * (57 + 15) * 576, 57 * 576]
        assert sorted(group.bytes for group in cache.groups) == sorted(sizes)
        assert cache.bytes_per_block == max(sizes)

    def test_of_equal_paddings_the_longer_run_is_taken(self) -> None:
        # Two tails of one kind, three of another and five windows are padded by 2 in runs of two and of three.
        cache = vllm({**STRIDES, "num_hidden_layers": 5, "compress_ratios": [4, 4, 128, 128, 128]})
        windows = [group.layers for group in cache.groups if group.pages[0][0].what == "window"]
        assert windows == [3, 2]

    @pytest.mark.parametrize("name", ["bfloat16", "int8_per_token_head"])
    def test_its_cache_is_fp8(self, name: str) -> None:
        with pytest.raises(ValueError, match="is taken by no attention backend for heads of 512 numbers; give one of"):
            vllm(STRIDES, kv_dtype=name)


class TestLength:
    @pytest.mark.parametrize(
        ("rope", "length"),
        [
            ({}, 1000),
            ({"rope_type": "linear", "factor": 4.0}, 4000),
            ({"rope_type": "yarn", "factor": 4.0}, 1000),
            ({"type": "llama3", "factor": 8.0}, 1000),
        ],
    )
    def test_the_longest_request_is_the_configs(self, rope: dict[str, Any], length: int) -> None:
        cache = vllm({**FULL, "rope_scaling": rope})
        assert cache.max_concurrency(24576 * 1000) == 1000 / -(-length // 16)

    def test_without_positions_it_is_2048(self) -> None:
        cache = vllm({"model_type": "bloom", "n_layer": 3, "n_embed": 384, "n_head": 6})
        assert cache.max_concurrency(cache.bytes_per_block * 1000) == 1000 / 128

    def test_a_length_that_nothing_says_is_asked_for(self) -> None:
        config = {name: value for name, value in FULL.items() if name != "max_position_embeddings"}
        assert vllm(config).planned_bytes(1) == 24576
        with pytest.raises(ValueError, match="max_position_embeddings is missing: give it, or give max_model_len"):
            vllm(config).cache_tokens(10**9)


def test_sizing_imports_no_torch() -> None:
    code = (
        "import sys; from attn_variants.cache import model_cache; "
        "model_cache('llama-3.1-8b').vllm().planned_bytes(1); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
