"""Rotary angles and rotations: against the float64 reference, transformers' own tables, and numbers worked by hand."""

import math
from dataclasses import replace

import pytest
import torch

from attn_variants import GQAConfig, GroupedQueryAttention, RopeConfig, fresh_step
from attn_variants.cache import KVCache
from attn_variants.contract import Step
from attn_variants.rope import attention_factor, inverse_frequencies, rotary_table, rotate
from tests import reference
from tests.tiny import error

YARN = RopeConfig(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096)
KINDS = {
    "default": RopeConfig(),
    "theta 500000": RopeConfig(rope_theta=500000.0),
    "linear": RopeConfig(rope_type="linear", factor=4.0),
    "llama 3.1": RopeConfig(
        rope_theta=500000.0, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192
    ),
    "llama 3.2": RopeConfig(
        rope_theta=500000.0, rope_type="llama3", factor=32.0, original_max_position_embeddings=8192,
        low_freq_factor=2.0, high_freq_factor=8.0,
    ),
    "yarn": YARN,
    "yarn with mscales": replace(YARN, mscale=0.707, mscale_all_dim=1.0),
    "yarn with equal mscales": replace(YARN, mscale=1.0, mscale_all_dim=1.0),
    "yarn with mscale alone": replace(YARN, mscale=0.707),
    "yarn untruncated": replace(YARN, truncate=False, rope_theta=150000.0, factor=32.0),
    "yarn with a factor of its own": replace(YARN, attention_factor=0.5),
    "yarn with other betas": replace(YARN, beta_fast=1.0, beta_slow=1.0, factor=32.0, rope_theta=50000.0),
    "yarn in a short context": replace(YARN, original_max_position_embeddings=32, factor=4.0),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


def step_at(*positions: int) -> Step:
    return Step(positions=torch.tensor([positions]), lengths=torch.tensor([max(positions) + 1]))


@kinds
@pytest.mark.parametrize("dim", [4, 64, 128])
def test_frequencies_are_the_textbooks(kind, dim):
    given = inverse_frequencies(KINDS[kind], dim)
    assert given.dtype == torch.float32
    wanted = torch.tensor(reference.frequencies(KINDS[kind], dim), dtype=torch.float64)
    assert ((given.double() - wanted).abs() / wanted).max() < 1e-6


@kinds
def test_cos_and_sin_are_the_textbooks(kind):
    config, positions = KINDS[kind], torch.tensor([[0, 1, 257], [31, 4095, 100000]])
    cos, sin = rotary_table(config, 64, positions)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (2, 3, 32)
    angles = positions[..., None].double() * torch.tensor(reference.frequencies(config, 64), dtype=torch.float64)
    # A float32 angle of 100000 radians is right to about 0.004.
    bound = 1e-6 + 1.2e-7 * positions[..., None] * reference.magnitude(config)
    assert ((cos.double() - angles.cos() * reference.magnitude(config)).abs() < bound).all()
    assert ((sin.double() - angles.sin() * reference.magnitude(config)).abs() < bound).all()


@kinds
def test_frequencies_are_transformers_to_the_bit(kind):
    transformers = pytest.importorskip(
        "transformers", reason="the tables of transformers are compared where it is installed"
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, names = KINDS[kind], {
        "linear": ("factor",),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
                 "attention_factor", "truncate"),
    }  # fmt: skip
    parameters = {"rope_type": config.rope_type, "rope_theta": config.rope_theta}
    parameters |= {name: getattr(config, name) for name in names.get(config.rope_type, ())}
    theirs = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters={name: value for name, value in parameters.items() if value is not None},
    )  # fmt: skip
    if config.rope_type == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        table = LlamaRotaryEmbedding(theirs)
        frequencies, factor = table.inv_freq, table.attention_scaling
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_type](theirs, "cpu")
    assert torch.equal(inverse_frequencies(config, 64), frequencies)
    assert attention_factor(config) == pytest.approx(factor, rel=1e-12)


def test_yarns_two_mscales():
    # factor 40: 0.1 * 0.707 * ln 40 + 1 = 1.260804 and 0.1 * ln 40 + 1 = 1.368888.
    assert attention_factor(YARN) == pytest.approx(1.368888, abs=1e-6)
    assert attention_factor(replace(YARN, mscale=0.707, mscale_all_dim=1.0)) == pytest.approx(0.921042, abs=1e-6)
    assert attention_factor(replace(YARN, mscale=1.0, mscale_all_dim=1.0)) == 1.0
    assert attention_factor(replace(YARN, factor=1.0)) == 1.0
    assert replace(YARN, mscale=0.707, mscale_all_dim=1.0).softmax_mscale() == pytest.approx(1.368888**2, abs=1e-5)
    assert replace(YARN, mscale=0.707).softmax_mscale() == 1.0
    assert replace(YARN, mscale=0.707, mscale_all_dim=0.0).softmax_mscale() == 1.0
    assert RopeConfig(mscale_all_dim=1.0).softmax_mscale() == 1.0


@pytest.mark.parametrize(
    ("interleaved", "turned"),
    [(True, [-1.142640, 1.922076, 2.959851, 4.029800]), (False, [-1.984111, 1.959901, 2.462378, 4.019800])],
)
def test_pairs_are_neighbours_or_half_a_head_apart(interleaved, turned):
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    assert rotate(x, step_at(1), RopeConfig(interleaved=interleaved)).flatten().tolist() == pytest.approx(
        turned, abs=1e-6
    )


@kinds
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("part", [1.0, 0.5, 0.25])
def test_a_rotation_is_the_textbooks(kind, interleaved, part):
    config = replace(KINDS[kind], interleaved=interleaved, partial_rotary_factor=part)
    x, positions = torch.randn(1, 3, 4, 16, dtype=torch.float64), (0, 7, 3, 300)
    # 300 radians in float32 are right to 2e-5.
    assert error(rotate(x, step_at(*positions), config)[0], reference.rotated(x[0], config, positions)) < 4e-5


def test_a_partial_rotation_pairs_within_its_part_and_leaves_the_rest():
    x = torch.arange(1.0, 9.0).view(1, 1, 1, 8)
    out = rotate(x, step_at(1), RopeConfig(partial_rotary_factor=0.5)).flatten().tolist()
    cos, sin, slow_cos, slow_sin = math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)
    assert out == pytest.approx(
        [1 * cos - 3 * sin, 2 * slow_cos - 4 * slow_sin, 3 * cos + 1 * sin, 4 * slow_cos + 2 * slow_sin, 5, 6, 7, 8]
    )


def test_position_zero_turns_nothing_and_no_rope_is_no_rotation():
    x = torch.randn(1, 2, 1, 8)
    assert torch.equal(rotate(x, step_at(0), RopeConfig()), x)
    assert rotate(x, step_at(5), None) is x


def test_a_score_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    for interleaved in (False, True):
        config = RopeConfig(interleaved=interleaved)
        scores = [
            (rotate(q, step_at(m), config) * rotate(k, step_at(n), config)).sum()
            for m, n in ((9, 4), (105, 100), (5, 0))
        ]
        assert torch.allclose(torch.stack(scores), scores[0], atol=1e-5)
        assert abs(scores[0] - (rotate(q, step_at(4), config) * rotate(k, step_at(9), config)).sum()) > 1e-3


def test_both_pairings_give_the_same_scores_on_permuted_heads():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    paired = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    halves = [rotate(x[..., paired], step_at(m), RopeConfig()) for x, m in ((q, 11), (k, 4))]
    pairs = [rotate(x, step_at(m), RopeConfig(interleaved=True)) for x, m in ((q, 11), (k, 4))]
    assert torch.allclose((halves[0] * halves[1]).sum(), (pairs[0] * pairs[1]).sum())


def test_rows_turn_by_their_own_positions():
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64)
    step = Step(positions=torch.tensor([[0, 1], [40, 41]]), lengths=torch.tensor([2, 42]))
    together = rotate(x, step, RopeConfig())
    for row, positions in enumerate(([0, 1], [40, 41])):
        assert error(together[row], reference.rotated(x[row], RopeConfig(), positions)) < 1e-5


def test_a_bfloat16_model_turns_by_float32_angles():
    """bfloat16 holds neither 257 nor most frequencies: only the finished cos and sin may be rounded."""
    config, positions = RopeConfig(), (256, 257, 4095)
    ones = torch.zeros(1, 1, 3, 128, dtype=torch.bfloat16)
    ones[..., :64] = 1  # a vector of ones in the first halves turns into (cos, sin)
    turned = rotate(ones, step_at(*positions), config)
    cos, sin = rotary_table(config, 128, torch.tensor([positions]))
    assert torch.equal(turned[:, 0], torch.cat([cos, sin], -1).bfloat16())
    assert not torch.equal(turned[:, :, 0], turned[:, :, 1])


def test_casting_a_module_to_bfloat16_leaves_its_angles_alone():
    config = GQAConfig(hidden_size=32, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    module = GroupedQueryAttention(config).to(torch.bfloat16)
    assert not list(module.buffers())
    module.k_proj.weight.data.zero_()
    module.k_proj.weight.data[:4, 0] = 1  # every key is (1, 1, 1, 1, 0, 0, 0, 0) before RoPE
    module.k_proj.weight.data[8:12, 0] = 1
    cache = KVCache([module.cache_spec], batch=1, capacity=258, dtype="bfloat16")
    x = torch.zeros(1, 258, 32, dtype=torch.bfloat16)
    x[..., 0] = 1
    with torch.no_grad():
        module(x, cache.step(1, 258), cache.layers[0])
    cos, sin = rotary_table(RopeConfig(), 8, torch.arange(258)[None])
    assert torch.equal(cache.tensors["layers.0.k"][0, 1], torch.cat([cos, sin], -1)[0].bfloat16())


@pytest.mark.parametrize("name", ["dynamic", "longrope", "su", "proportional", "mrope", "Default", ""])
def test_an_unknown_kind_is_refused_by_name(name):
    with pytest.raises(
        ValueError, match=rf"rope_type '{name}' is not supported; supported are default, linear, llama3, yarn"
    ):
        RopeConfig(rope_type=name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": 0.0}, r"rope_theta \(0\.0\) must be positive"),
        ({"rope_theta": -1.0}, r"rope_theta \(-1\.0\) must be positive"),
        ({"rope_theta": math.nan}, r"rope_theta \(nan\) must be positive"),
        ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor \(0\.0\) must be above 0 and at most 1"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor \(1\.5\)"),
        ({"rope_type": "linear", "factor": 0.5}, r"factor \(0\.5\) of rope_type 'linear' must be at least 1"),
        ({"rope_type": "linear", "factor": math.nan}, r"factor \(nan\)"),
        ({"rope_type": "llama3", "factor": 8.0}, r"original_max_position_embeddings \(None\)"),
        ({"rope_type": "yarn", "factor": 8.0}, r"original_max_position_embeddings \(None\)"),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": -4096}, r"embeddings \(-4096\)"),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "high_freq_factor": 1.0},
            r"high_freq_factor \(1\.0\)",
        ),
    ],
)
def test_parameters_that_make_no_angles_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**fields)


@pytest.mark.parametrize(("head_dim", "part"), [(7, 1.0), (10, 0.5), (2, 0.5), (1, 1.0)])
def test_an_odd_rotary_part_is_refused(head_dim, part):
    with pytest.raises(ValueError, match=rf"head_dim \({head_dim}\).* = \d, must be even and at least 2"):
        RopeConfig(partial_rotary_factor=part).rotary_dim(head_dim)
    with pytest.raises(ValueError, match="must be even"):
        GQAConfig(hidden_size=32, num_attention_heads=2, head_dim=head_dim, rope=RopeConfig(partial_rotary_factor=part))


def test_layers_of_one_step_share_one_table():
    step = fresh_step(2, 3)
    rotate(torch.zeros(2, 6, 3, 8), step, RopeConfig())
    (table,) = step.tables.values()
    rotate(torch.zeros(2, 2, 3, 8), step, RopeConfig())
    assert list(step.tables.values()) == [table]


def test_layers_of_one_step_may_turn_by_angles_of_their_own():
    """Another base, another width, another pairing or another dtype is another table."""
    step, x = step_at(2, 5), torch.randn(1, 2, 2, 8, dtype=torch.float64)
    for config in (RopeConfig(), RopeConfig(rope_theta=100.0), RopeConfig(interleaved=True)):
        for width in (8, 4):
            assert (
                error(rotate(x[..., :width], step, config)[0], reference.rotated(x[0, ..., :width], config, (2, 5)))
                < 1e-6
            )
    assert rotate(x.bfloat16(), step, RopeConfig()).dtype == torch.bfloat16
    assert rotate(x.float(), step, RopeConfig()).dtype == torch.float32
