"""Multi-head latent attention: two orders of one computation, what is cached, the scale, and why RoPE stands apart."""

import math
from dataclasses import replace

import pytest
import torch

from attn_variants import (
    ExpandedMLAConfig,
    ExpandedMultiHeadLatentAttention,
    MLAConfig,
    MultiHeadLatentAttention,
    RopeConfig,
    mla,
)
from attn_variants.attend import backend
from attn_variants.cache import KVCache
from attn_variants.mla import crossover
from tests import reference
from tests.tiny import TOLERANCE, error, sharpen

PLAIN = MLAConfig(
    hidden_size=32, num_attention_heads=6, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=12
)
YARN = RopeConfig(
    rope_type="yarn",
    factor=40.0,
    original_max_position_embeddings=64,
    mscale=0.707,
    mscale_all_dim=1.0,
    interleaved=True,
)
OPTIONS = {
    "full-rank queries": PLAIN,
    "low-rank queries": replace(PLAIN, q_lora_rank=18),
    "biases": replace(PLAIN, q_lora_rank=18, attention_bias=True),
    "half-split pairs": replace(PLAIN, rope=RopeConfig()),
    "yarn": replace(PLAIN, rope=YARN),
    "half the rope part turns": replace(PLAIN, rope=RopeConfig(partial_rotary_factor=0.5)),
    "another eps": replace(PLAIN, q_lora_rank=18, rms_norm_eps=0.1),
    "values wider than keys": replace(PLAIN, v_head_dim=22),
    "values as wide as keys": replace(PLAIN, v_head_dim=14),
}
PATHS = {"absorbed": math.inf, "expanded": 0}
FLOAT64 = TOLERANCE[torch.float64]
options, paths = pytest.mark.parametrize("option", OPTIONS), pytest.mark.parametrize("path", PATHS)


def module_of(config, path=None, kind=MultiHeadLatentAttention, dtype=torch.float64):
    module = sharpen(kind(config).double()).to(dtype)
    if path is not None:
        module.absorbed_below = PATHS[path]
    return module


def random(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fed(module, x, *chunks, static=False):
    """The module's output over x, given to a cache in these chunks, and that cache."""
    store = KVCache([module.cache_spec], batch=len(x), capacity=x.shape[1], dtype=x.dtype, static=static)
    out = []
    for run in x.split(chunks, 1):
        step = store.step(len(x), run.shape[1])
        out.append(module(run, step, store.layers[0]))
        store.advance(step)
    return torch.cat(out, 1), store


@options
@paths
@pytest.mark.parametrize("static", [False, True])
def test_both_orders_of_every_option_are_the_textbook(option, path, static):
    module, x = module_of(OPTIONS[option], path), random(2, 7, 32)
    with torch.no_grad():
        alone = module(x)
    cached, _ = fed(module, x, 3, 1, 3, static=static)
    for row in range(2):
        textbook = reference.mla(reference.weights_of(module), module.config, x[row])
        assert error(alone[row], textbook) < FLOAT64
        assert error(cached[row], textbook) < FLOAT64


@pytest.mark.parametrize("prompt", [3, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_absorbed_is_expanded_for_a_prompt_and_for_chunks_after_it(prompt, dtype, name):
    x = random(2, prompt + 6, 32).to(dtype)
    with backend(name):
        absorbed, expanded = (fed(module_of(PLAIN, path, dtype=dtype), x, prompt, 1, 4, 1)[0] for path in PATHS)
    assert error(absorbed, expanded) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_a_long_prompt_is_the_textbook():
    module, x = module_of(PLAIN), random(1, 200, 32)
    with torch.no_grad():
        assert error(module(x)[0], reference.mla(reference.weights_of(module), PLAIN, x[0])) < FLOAT64


def test_one_cache_serves_both_orders_in_turn():
    module, x = module_of(PLAIN), random(1, 8, 32)
    store = KVCache([module.cache_spec], batch=1, capacity=8, dtype="float64")
    out = []
    for run, path in zip(x.split([3, 1, 2, 1, 1], 1), ["expanded", "absorbed"] * 2 + ["expanded"], strict=True):
        module.absorbed_below = PATHS[path]
        step = store.step(1, run.shape[1])
        with torch.no_grad():
            out.append(module(run, step, store.layers[0]))
        store.advance(step)
    assert error(torch.cat(out, 1)[0], reference.mla(reference.weights_of(module), PLAIN, x[0])) < FLOAT64


def test_passes_shorter_than_the_crossover_are_absorbed(monkeypatch):
    module, expansions = module_of(PLAIN), []
    expand = module.expand
    monkeypatch.setattr(module, "expand", lambda *parts: expansions.append(parts[0].shape) or expand(*parts))
    module.absorbed_below = 3
    for tokens, count in ((2, 0), (3, 1), (4, 2)):
        module(random(1, tokens, 32))
        assert len(expansions) == count


@pytest.mark.parametrize(("cached", "below"), [(0, 6), (14, 12)])
def test_by_default_a_pass_is_absorbed_below_a_measured_number_of_tokens(cached, below, monkeypatch):
    """Half as many tokens as there are keys, less a constant: 6 of 6 in a prompt, 12 of 26 over 14 cached tokens."""
    monkeypatch.setattr(mla, "MEASURED", 2)
    monkeypatch.setattr(mla, "crossover", lambda config, keys: 3 if keys <= 6 else (keys - 2) / 4)
    module, expansions = module_of(PLAIN), []
    expand = module.expand
    monkeypatch.setattr(module, "expand", lambda *parts: expansions.append(parts[0].shape) or expand(*parts))
    for tokens in (below - 1, below):
        store = KVCache([module.cache_spec], batch=1, capacity=40, dtype="float64")
        if cached:
            store.advance(store.step(1, cached))
        module(random(1, tokens, 32), store.step(1, tokens), store.layers[0])
        assert len(expansions) == (tokens == below)


def test_the_crossover_counts_multiplications():
    # DeepSeek-V3: R (N + V) = 512 * 256 = 131072, and (2 R + P) - (N + P + V) = 1088 - 320 = 768.
    config = MLAConfig(7168, 128)
    assert crossover(config, 10**12) == pytest.approx(131072 / 768)
    assert crossover(config, 512) == pytest.approx(512 * 131072 / (512 * 768 + 131072))
    # A prompt of n tokens: absorbed n n 1088 + n 131072, expanded n n 320 + n 131072, equal for none.
    assert crossover(config, 1) < 1
    assert crossover(config, 100) < 100
    narrow = replace(PLAIN, kv_lora_rank=8, v_head_dim=40)
    assert crossover(narrow, 10**6) == math.inf


def test_the_cache_holds_the_normed_latent_and_the_rotated_unnormed_rope_key_and_nothing_else():
    module, x = module_of(OPTIONS["another eps"]), random(2, 5, 32)
    _, store = fed(module, x, 5)
    assert list(store.tensors) == ["layers.0.kv"]
    stored = store.tensors["layers.0.kv"]
    assert stored.shape == (2, 1, 5, 20 + 4)
    assert store.nbytes == 2 * 5 * (20 + 4) * 8
    weights = reference.weights_of(module)
    for row in range(2):
        compressed = reference.linear(x[row], weights, "kv_a_proj_with_mqa")
        latent = reference.rms_norm(compressed[:, :20], weights["kv_a_layernorm.weight"], 0.1)
        assert error(stored[row, 0, :, :20], latent) < FLOAT64
        assert (
            error(stored[row, 0, :, 20:], reference.rotated(compressed[None, :, 20:], module.config.rope)[0]) < FLOAT64
        )


def test_the_expanded_cache_holds_every_head_s_keys_and_values():
    config = ExpandedMLAConfig(**vars(PLAIN))
    module, x = module_of(config, kind=ExpandedMultiHeadLatentAttention), random(2, 5, 32)
    out, store = fed(module, x, 3, 2)
    assert {name: tuple(tensor.shape) for name, tensor in store.tensors.items()} == {
        "layers.0.k": (2, 6, 5, 14),
        "layers.0.v": (2, 6, 5, 12),
    }
    assert store.nbytes == 2 * 5 * 6 * (14 + 12) * 8
    latent = module_of(PLAIN)
    assert latent.state_dict().keys() == module.state_dict().keys()
    assert error(out, fed(latent, x, 3, 2)[0]) < 1e-12


@pytest.mark.parametrize("q_lora_rank", [None, 18])
def test_parameters_bear_the_checkpoints_names_and_shapes(q_lora_rank):
    module = MultiHeadLatentAttention(replace(PLAIN, q_lora_rank=q_lora_rank, attention_bias=True))
    queries = {
        "q_a_proj.weight": (18, 32),
        "q_a_proj.bias": (18,),
        "q_a_layernorm.weight": (18,),
        "q_b_proj.weight": (6 * 14, 18),
    }
    assert {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} == {
        **(queries if q_lora_rank else {"q_proj.weight": (6 * 14, 32)}),
        "kv_a_proj_with_mqa.weight": (20 + 4, 32),
        "kv_a_proj_with_mqa.bias": (20 + 4,),
        "kv_a_layernorm.weight": (20,),
        "kv_b_proj.weight": (6 * (10 + 12), 20),
        "o_proj.weight": (32, 6 * 12),
        "o_proj.bias": (32,),
    }


@paths
def test_the_softmax_scale_is_that_of_nope_and_rope_together_in_both_orders(path, monkeypatch):
    """8 ** -0.5, neither 6 ** -0.5 of the nope part nor 4 ** -0.5 of the latent row."""
    scales, attend = [], mla.attend

    def recorded(*arguments, scale, **options):
        scales.append(scale)
        return attend(*arguments, scale=scale, **options)

    monkeypatch.setattr(mla, "attend", recorded)
    config = MLAConfig(3, 1, kv_lora_rank=2, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=1)
    module_of(config, path)(random(1, 2, 3))
    assert scales == [pytest.approx(8**-0.5)]


@paths
def test_gradients_flow_through_both_orders(path):
    module = module_of(replace(PLAIN, q_lora_rank=18), path)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def run(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [tensor.detach().requires_grad_() for tensor in (random(1, 3, 32), *parameters)]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def residual(keys, scores):
    """What is left, relatively, of the scores after the best single query against these keys."""
    best = torch.linalg.lstsq(keys, scores[:, None]).solution
    return float((keys @ best - scores[:, None]).norm() / scores.norm())


def test_plain_rope_on_expanded_keys_cannot_be_absorbed():
    """Absorption is one query over the cached latents that gives every score; RoPE on expanded keys leaves none.

    Score n is q^T R(n - m) W c_n. Without R it is (W^T q) . c_n, one query for all n. With R each n needs its own. The
    way out is a key of its own that turns and is cached after turning: the row (c_n, R(n) k_n) has one query again.
    """
    tokens, rank, dim = 60, 20, 8
    latents, up, query = random(tokens, rank), random(dim, rank, seed=2), random(dim, seed=3)
    keys = latents @ up.T
    turned = reference.rotated(keys[None], RopeConfig())[0]
    asked = reference.rotated(query[None, None], RopeConfig(), [tokens])[0, 0]
    assert residual(latents, keys @ query) < 1e-12
    assert residual(latents, turned @ asked) > 0.3

    apart = reference.rotated(random(1, tokens, 4, seed=4), RopeConfig())[0]
    turned_query = reference.rotated(random(1, 1, 4, seed=5), RopeConfig(), [tokens])[0, 0]
    decoupled = keys @ query + apart @ turned_query
    assert residual(torch.cat([latents, apart], 1), decoupled) < 1e-12
