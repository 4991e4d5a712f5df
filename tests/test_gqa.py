"""Grouped-query attention and its ends: options, shapes, and the scale."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attn_variants import (
    GQAConfig,
    GroupedQueryAttention,
    MHAConfig,
    MQAConfig,
    MultiHeadAttention,
    MultiQueryAttention,
    RopeConfig,
)
from attn_variants.cache import KVCache
from tests import reference
from tests.tiny import TOLERANCE, error, sharpen

SIZES = {"hidden_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
PLAIN = GQAConfig(**SIZES)
YARN = RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
OPTIONS = {
    "plain": PLAIN,
    "biases": replace(PLAIN, attention_bias=True, output_bias=True),
    "biases on queries, keys and values": replace(PLAIN, attention_bias=True),
    "normed queries and keys": replace(PLAIN, qk_norm=True, rms_norm_eps=0.1),
    "all of them": replace(PLAIN, qk_norm=True, attention_bias=True, output_bias=True),
    "no rope": replace(PLAIN, rope=None),
    "interleaved": replace(PLAIN, rope=RopeConfig(interleaved=True)),
    "a quarter turns": replace(PLAIN, rope=RopeConfig(partial_rotary_factor=0.25)),
    "yarn": replace(PLAIN, rope=YARN),
    "multi-head": MHAConfig(32, 6, head_dim=8),
    "multi-query": MQAConfig(32, 6, head_dim=8),
    "head_dim from hidden_size": GQAConfig(36, 6, 3, rope=RopeConfig(rope_theta=100.0)),
}
FLOAT64 = TOLERANCE[torch.float64]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("static", [False, True])
def test_every_option_is_the_textbook_alone_and_cached(option, static):
    config = OPTIONS[option]
    module = sharpen(GroupedQueryAttention(config).double())
    x = torch.randn(2, 7, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    store = KVCache([module.cache_spec], batch=2, capacity=9, dtype="float64", static=static)
    out = []
    with torch.no_grad():
        alone = module(x)
        for start, stop in pairwise((0, 3, 4, 7)):
            step = store.step(2, stop - start)
            out.append(module(x[:, start:stop], step, store.layers[0]))
            store.advance(step)
    for row in range(2):
        textbook = reference.gqa(reference.weights_of(module), config, x[row])
        assert error(alone[row], textbook) < FLOAT64
        assert error(torch.cat(out, 1)[row], textbook) < FLOAT64


def test_what_is_cached_is_the_rotated_key_and_the_plain_value():
    config = OPTIONS["all of them"]
    module, x = sharpen(GroupedQueryAttention(config).double()), torch.randn(1, 5, 32, dtype=torch.float64)
    store = KVCache([module.cache_spec], batch=1, capacity=6, dtype="float64")
    with torch.no_grad():
        module(x, store.step(1, 5), store.layers[0])
    weights = reference.weights_of(module)
    k = reference.heads_of(reference.linear(x[0], weights, "k_proj"), 2)
    k = reference.rotated(reference.rms_norm(k, weights["k_norm.weight"], config.rms_norm_eps), config.rope)
    v = reference.heads_of(reference.linear(x[0], weights, "v_proj"), 2)
    assert error(store.tensors["layers.0.k"][0, :, :5], k) < FLOAT64
    assert error(store.tensors["layers.0.v"][0, :, :5], v) < FLOAT64
    assert not store.tensors["layers.0.k"][0, :, 5:].any()


@pytest.mark.parametrize(
    ("kv_heads", "kind"), [(6, MultiHeadAttention), (2, GroupedQueryAttention), (1, MultiQueryAttention)]
)
def test_parameters_bear_the_checkpoints_names_and_shapes(kv_heads, kind):
    module = kind(replace(PLAIN, num_key_value_heads=kv_heads, attention_bias=True, output_bias=True, qk_norm=True))
    assert {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} == {
        "q_proj.weight": (48, 32),
        "q_proj.bias": (48,),
        "k_proj.weight": (kv_heads * 8, 32),
        "k_proj.bias": (kv_heads * 8,),
        "v_proj.weight": (kv_heads * 8, 32),
        "v_proj.bias": (kv_heads * 8,),
        "o_proj.weight": (32, 48),
        "o_proj.bias": (32,),
        "q_norm.weight": (8,),
        "k_norm.weight": (8,),
    }


def test_options_that_are_off_have_no_parameters():
    names = set(GroupedQueryAttention(PLAIN).state_dict())
    assert names == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
    assert set(GroupedQueryAttention(replace(PLAIN, attention_bias=True)).state_dict()) == names | {
        "q_proj.bias",
        "k_proj.bias",
        "v_proj.bias",
    }


def test_a_head_dim_that_is_not_hidden_over_heads_reaches_module_and_cache_alike():
    module = GroupedQueryAttention(GQAConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32))
    store = KVCache([module.cache_spec], batch=1, capacity=8)
    assert tuple(store.tensors["layers.0.k"].shape) == (1, 2, 8, 32)
    assert (module.q_proj.out_features, module.o_proj.in_features) == (128, 128)
    with torch.no_grad():
        assert module(torch.randn(1, 5, 64), store.step(1, 5), store.layers[0]).shape == (1, 5, 64)


def test_the_scale_is_that_of_the_head_and_not_of_the_hidden_size():
    assert GroupedQueryAttention(GQAConfig(hidden_size=64, num_attention_heads=4)).scale == 0.25
    assert GroupedQueryAttention(GQAConfig(hidden_size=64, num_attention_heads=4, head_dim=64)).scale == 0.125


def test_the_ends_refuse_other_counts_of_heads():
    with pytest.raises(ValueError, match=r"num_key_value_heads \(2\) equal to num_attention_heads \(6\); use Grouped"):
        MultiHeadAttention(PLAIN)
    with pytest.raises(ValueError, match=r"num_key_value_heads \(2\) to be 1; use GroupedQueryAttention"):
        MultiQueryAttention(PLAIN)


def test_multi_head_attention_is_grouped_with_repeated_projections():
    """A grouped module equals a multi-head one whose keys and values are each group's, side by side."""
    grouped = sharpen(GroupedQueryAttention(PLAIN).double())
    whole = MultiHeadAttention(replace(PLAIN, num_key_value_heads=6)).double()
    weights = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = weights[name].view(2, 8, 32).repeat_interleave(3, 0).reshape(48, 32)
    whole.load_state_dict(weights)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        assert error(whole(x), grouped(x)) < 1e-12
