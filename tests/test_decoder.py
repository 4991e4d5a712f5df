"""The decoder: shapes, ties, its last logits, and what it refuses before it changes anything."""

import pytest
import torch

from attn_variants import Decoder, DecoderConfig, GQAConfig
from tests import reference
from tests.tiny import TOLERANCE, append, decoder, error, expected, kv_cache, same, sharpen, snapshot

FLOAT64 = TOLERANCE[torch.float64]
SMALL = DecoderConfig(50, 2, 44, GQAConfig(32, 6, 2, 8))
IDS = torch.tensor([[3, 14, 15], [9, 26, 5]])


def test_parameters_bear_the_checkpoints_names():
    names = set(Decoder(DecoderConfig(50, 1, 44, GQAConfig(32, 6, 2, 8), mlp_bias=True)).state_dict())
    layer = "model.layers.0."
    assert names == {
        "model.embed_tokens.weight",
        f"{layer}input_layernorm.weight",
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        f"{layer}post_attention_layernorm.weight",
        *(f"{layer}mlp.{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")),
        "model.norm.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize("changes", [{"mlp_bias": True}, {"rms_norm_eps": 0.1}, {"tie_word_embeddings": True}], ids=str)
def test_options_are_the_textbooks(changes):
    model = sharpen(Decoder(DecoderConfig(50, 2, 44, GQAConfig(32, 6, 2, 8), **changes)).double())
    with torch.no_grad():
        logits = model(IDS)
    for row in range(2):
        assert (
            error(logits[row], reference.decoder("gqa", reference.weights_of(model), model.config, IDS[row])) < FLOAT64
        )


def test_a_tied_head_is_the_embedding_itself():
    tied = Decoder(DecoderConfig(50, 1, 44, GQAConfig(36, 6), tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert tied.to(torch.float64).lm_head.weight is tied.model.embed_tokens.weight
    free = Decoder(DecoderConfig(50, 1, 44, GQAConfig(36, 6)))
    assert free.lm_head.weight is not free.model.embed_tokens.weight


def test_the_last_logits_are_each_row_s_newest_real_token():
    model = decoder("gqa")
    ids = torch.tensor([[3, 14, 15, 9], [27, 18, 28, 1]])
    with torch.no_grad():
        assert error(model(ids, last=True), model(ids)[:, -1:]) < 1e-12
        for padding in ({"counts": [2, 4]}, {"mask": torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]])}):
            every, last = model(ids, **padding), model(ids, **padding, last=True)
            assert last.shape == (2, 1, 50)
            newest = [1, 3] if "counts" in padding else [3, 2]
            assert error(last[:, 0], every[[0, 1], newest]) < 1e-12


def test_the_last_logits_of_a_cached_step_are_its_newest_real_tokens():
    model, store = decoder("gqa"), kv_cache(decoder("gqa"), batch=3)
    append(model, store, [[1, 2], [3], [4, 5]])
    with torch.no_grad():
        last = model(torch.tensor([[6, 7, 8], [9, 0, 0], [0, 0, 0]]), store, counts=[3, 1, 0], last=True)
    assert error(last[0], expected("gqa", [1, 2, 6, 7, 8])[-1:]) < FLOAT64
    assert error(last[1], expected("gqa", [3, 9])[-1:]) < FLOAT64
    assert last[2].isfinite().all()


def test_dtype_and_device_are_the_weights():
    model = Decoder(SMALL).to(torch.bfloat16)
    assert (model.dtype, model.device) == (torch.bfloat16, torch.device("cpu"))
    assert model(IDS).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (
            torch.zeros(3, dtype=torch.long),
            {},
            r"ids must be int64 or int32 of shape \(B, T\), got torch.int64 of shape \(3,\)",
        ),
        (torch.zeros(2, 3), {}, r"ids must be int64 or int32 of shape \(B, T\), got torch.float32 of shape \(2, 3\)"),
        (torch.zeros(2, 3, dtype=torch.bool), {}, r"ids must be int64 or int32 of shape \(B, T\), got torch.bool"),
        (torch.zeros(2, 3, dtype=torch.int16), {}, r"ids must be int64 or int32 of shape \(B, T\), got torch.int16"),
        (torch.zeros(2, 0, dtype=torch.long), {}, r"of shape \(2, 0\)"),
        (torch.zeros(0, 3, dtype=torch.long), {}, r"of shape \(0, 3\)"),
        (IDS, {"counts": [1]}, r"counts has 1 rows, the tokens have 2"),
        (IDS, {"counts": [1, 4]}, r"counts \[1, 4\] must lie between 0 and the 3 tokens"),
        (IDS, {"mask": torch.ones(2, 4)}, r"mask has shape \(2, 4\), the tokens have \(2, 3\)"),
        (IDS, {"counts": [1, 1], "mask": torch.ones(2, 3)}, "not both"),
    ],
)
def test_ids_and_padding_that_do_not_fit_are_refused(ids, options, message):
    model, store = decoder("gqa"), kv_cache(decoder("gqa"))
    append(model, store, [[1], [2]])
    before = snapshot(store)
    for cache in (None, store):
        with pytest.raises(ValueError, match=message):
            model(ids, cache, **options)
    assert same(before, snapshot(store))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0], r"the tokens have 2 rows, the cache.* 1"),
        (None, r"the tokens have 2 rows, the cache.* 4.*rows="),
        ([0, 0], r"rows \[0, 0\] must be distinct"),
        ([0, 4], r"rows \[0, 4\] must be some of 0 to 3"),
        ([-1, 0], r"rows \[-1, 0\] must be some of 0 to 3"),
        ([], r"rows \[\] must be some of 0 to 3"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows, message):
    model, store = decoder("gqa"), kv_cache(decoder("gqa"), batch=4)
    before = snapshot(store)
    with pytest.raises(ValueError, match=message):
        model(IDS, store, rows=rows)
    assert same(before, snapshot(store))


def test_rows_without_a_cache_are_refused():
    with pytest.raises(ValueError, match="rows name rows of a cache, and there is none"):
        decoder("gqa")(IDS, rows=[0, 1])


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_of_another_number_of_layers_is_refused_before_anything_is_written(layers):
    store = kv_cache(decoder("gqa", layers=layers))
    before = snapshot(store)
    with pytest.raises(ValueError, match=rf"the cache has {layers} layers, the decoder 2: make the KVCache from this"):
        decoder("gqa")(IDS, store)
    assert same(before, snapshot(store))


def test_ids_are_int64_or_int32():
    with torch.no_grad():
        assert torch.equal(decoder("gqa")(IDS.int()), decoder("gqa")(IDS))


def test_the_tensor_part_of_a_pass_is_the_whole_pass():
    model, store, twin = decoder("gqa"), kv_cache(decoder("gqa")), kv_cache(decoder("gqa"))
    with torch.no_grad():
        step = store.step(2, 3, counts=[2, 3])
        logits = model.compute(IDS, step, store.layers, last=True)
        store.advance(step)
        assert torch.equal(logits, model(IDS, twin, counts=[2, 3], last=True))
    assert same(snapshot(store), snapshot(twin))
