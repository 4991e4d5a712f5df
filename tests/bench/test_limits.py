"""The least time of a step, against sizes worked out by hand."""

from dataclasses import replace

import pytest

from attn_variants import VARIANTS
from attn_variants.bench.batch_spec import BatchSpec
from attn_variants.bench.case import Sight, decoder_config, random_decoder
from attn_variants.bench.limits import (
    Operator,
    attention_widths,
    cache_bytes_read,
    least_seen,
    operator_limit,
    step_operators,
    weight_bytes_read,
)
from attn_variants.contract import CacheSpec
from attn_variants.decoder import Decoder
from tests import tiny

GEOMETRY = replace(tiny.GEOMETRY, hidden_size=48)
"""2 layers, 6 heads over 2 key/value heads of 8, MLP of 44, 50 tokens; MLA: see each test."""


def made(variant: str, sight: Sight | None = None, **changes: bool) -> Decoder:
    config = decoder_config(variant, GEOMETRY, sight)
    return random_decoder(replace(config, **changes), dtype="float32", device="cpu", seed=0)


def found(decoder: Decoder, name: str, *, batch: int, context: int, codec: str = "plain") -> Operator:
    operators = step_operators(decoder, BatchSpec(((batch, context),)), codec=codec)
    (operator,) = [one for one in operators if one.name == name]
    return operator


def test_the_attention_of_grouped_heads():
    # 6 query heads meet 101 keys and values of 8 numbers, in 3 rows; 2 heads of both are read, 100 tokens.
    attention = found(made("gqa"), "model.layers.1.attention", batch=3, context=100)
    assert attention.flops == 3 * 2 * 6 * 101 * (8 + 8)
    assert attention.bytes == 3 * 100 * 2 * (8 + 8) * 4


def test_the_attention_over_latents_is_absorbed():
    rank, rope = GEOMETRY.kv_lora_rank, GEOMETRY.qk_rope_head_dim
    attention = found(made("mla"), "model.layers.0.attention", batch=2, context=100)
    # The record is key, and its front the value; it is read once.
    assert attention.flops == 2 * 2 * 6 * 101 * (rank + rope + rank)
    assert attention.bytes == 2 * 100 * (rank + rope) * 4
    # Folding both halves of W into query and output multiplies each number of it once per row.
    up = found(made("mla"), "model.layers.0.self_attn.kv_b_proj", batch=2, context=100)
    assert up.flops == 2 * 2 * rank * 6 * (GEOMETRY.qk_nope_head_dim + GEOMETRY.v_head_dim)
    assert up.bytes == 4 * rank * 6 * (GEOMETRY.qk_nope_head_dim + GEOMETRY.v_head_dim)


def test_the_attention_over_expanded_latents():
    key, value = GEOMETRY.qk_nope_head_dim + GEOMETRY.qk_rope_head_dim, GEOMETRY.v_head_dim
    attention = found(made("mla-expanded"), "model.layers.0.attention", batch=1, context=100)
    assert attention.flops == 2 * 6 * 101 * (key + value)
    assert attention.bytes == 100 * 6 * (key + value) * 4


def test_a_window_is_all_that_is_read_and_multiplied():
    # Of a window of 8, seven tokens are cached, and so are two sinks.
    attention = found(made("gqa", Sight(window=8, sinks=2)), "model.layers.0.attention", batch=1, context=100)
    assert attention.flops == 2 * 6 * 10 * (8 + 8)
    assert attention.bytes == 9 * 2 * (8 + 8) * 4


@pytest.mark.parametrize(
    ("limits", "context", "steps", "seen"),
    [
        ({}, 100, 8, 100),
        ({"window": 8}, 5, 1, 5),
        ({"window": 8}, 100, 8, 7),
        # The token at 100 is the fifth of the chunk from 96 on; the one at 104 begins the next.
        ({"chunk": 8}, 100, 1, 4),
        ({"chunk": 8}, 100, 4, 4),
        ({"chunk": 8}, 100, 5, 0),
        ({"chunk": 8, "sinks": 3}, 100, 5, 3),
        ({"chunk": 8, "sinks": 3}, 5, 1, 5),
    ],
)
def test_how_many_cached_tokens_are_in_sight(limits, context, steps, seen):
    assert least_seen(CacheSpec(**limits), context, steps) == seen


def test_rows_of_a_ragged_batch_read_and_multiply_as_many_as_they_hold():
    rows = BatchSpec(((2, 5), (1, 30)))
    (attention,) = [one for one in step_operators(made("gqa"), rows) if one.name == "model.layers.1.attention"]
    assert attention.flops == 2 * 6 * (2 * 6 + 31) * (8 + 8)
    assert attention.bytes == (2 * 5 + 30) * 2 * (8 + 8) * 4
    assert cache_bytes_read(made("gqa"), rows) == 2 * attention.bytes
    # A window of 8 keeps 7 of the longest row's alone.
    assert cache_bytes_read(made("gqa", Sight(window=8)), rows) == 2 * (2 * 5 + 7) * 2 * (8 + 8) * 4


def test_codes_are_read_as_they_are_stored():
    plain, coded = (
        found(made("gqa"), "model.layers.0.attention", batch=2, context=100, codec=codec) for codec in ("plain", "int8")
    )
    # 8 codes and a bfloat16 scale for each head's key and value.
    assert coded.bytes == 2 * 100 * 2 * 2 * (8 + 2)
    assert coded.flops == plain.flops


def test_linear_layers_read_their_weights_once_and_multiply_them_for_every_row():
    down = found(made("gqa"), "model.layers.0.mlp.down_proj", batch=5, context=7)
    assert (down.bytes, down.flops) == (4 * 44 * 48, 5 * 2 * 44 * 48)
    head = found(made("gqa"), "lm_head", batch=5, context=7)
    assert (head.bytes, head.flops) == (4 * 50 * 48, 5 * 2 * 50 * 48)
    norm = found(made("gqa"), "model.norm", batch=5, context=7)
    assert (norm.bytes, norm.flops) == (4 * 48, 0)
    rows = found(made("gqa"), "model.embed_tokens", batch=5, context=7)
    assert (rows.bytes, rows.flops) == (4 * 5 * 48, 0)


def test_a_tied_head_is_read_once():
    names = [operator.name for operator in step_operators(made("gqa", tie_word_embeddings=True), BatchSpec(((2, 7),)))]
    assert "lm_head" in names
    assert "model.embed_tokens" not in names


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("codec", ["plain", "int8"])
def test_the_operators_bytes_are_the_steps(variant, codec):
    decoder, rows = made(variant), BatchSpec(((2, 30), (1, 7)))
    total = sum(operator.bytes for operator in step_operators(decoder, rows, codec=codec))
    assert total == weight_bytes_read(decoder, 3) + cache_bytes_read(decoder, rows, codec=codec)


def test_a_layer_that_shares_reads_its_owners_cache_again():
    config = decoder_config("gqa", GEOMETRY)
    second = replace(config.attention, kv_shared_layer=0)
    config = replace(config, attention=(config.attention, second))
    decoder = random_decoder(config, dtype="float32", device="cpu", seed=0)
    first, shared = (found(decoder, f"model.layers.{layer}.attention", batch=1, context=30) for layer in (0, 1))
    assert (shared.bytes, shared.flops) == (first.bytes, first.flops)
    assert cache_bytes_read(decoder, BatchSpec(((1, 30),))) == first.bytes


def test_each_operator_takes_the_longer_of_reading_and_multiplying():
    operators = [Operator("reads", bytes=300, flops=10), Operator("multiplies", bytes=100, flops=80)]
    # 300 / 100 s, and 80 / 20 s.
    assert operator_limit(operators, bandwidth=100, rate=20) == 3 + 4


def test_attention_is_asked_for_by_the_modules_themselves():
    widths = attention_widths(decoder_config("mla", GEOMETRY), 30)
    rank = GEOMETRY.kv_lora_rank
    assert widths == [[(6, rank + GEOMETRY.qk_rope_head_dim, rank)]] * 2
