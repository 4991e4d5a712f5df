"""Gradients of every variant: right, through the pass itself, and never through a cache."""

import torch
from torch import nn

from attn_variants import VARIANTS
from tests.tiny import GEOMETRY, LONG, TOLERANCE, decoder, error, kv_cache, sharpen, variants

FLOAT64 = TOLERANCE[torch.float64]


@variants
def test_gradients_of_inputs_and_weights(variant):
    config = VARIANTS[variant].config.from_geometry(GEOMETRY)
    module = sharpen(VARIANTS[variant].module(config).double())
    names, parameters = zip(*module.named_parameters(), strict=True)
    x = torch.randn(2, 3, GEOMETRY.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [tensor.detach().requires_grad_() for tensor in (x, *parameters)]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@variants
def test_a_prompt_through_a_cache_has_the_gradients_of_one_without(variant):
    model, ids = decoder(variant), torch.tensor([LONG])
    weights = list(model.parameters())
    plain = torch.autograd.grad(model(ids).square().sum(), weights)
    cached = torch.autograd.grad(model(ids, kv_cache(model, batch=1)).square().sum(), weights)
    assert all(error(a, b) < 1e-9 for a, b in zip(cached, plain, strict=True))


@variants
def test_a_cache_keeps_numbers_and_no_graph(variant):
    model = decoder(variant)
    store = kv_cache(model, batch=1)
    model(torch.tensor([LONG[:3]]), store)
    model(torch.tensor([LONG[3:4]]), store)
    model(torch.tensor([LONG[4:6]]), store).sum().backward()
    assert not any(tensor.requires_grad for tensor in store.tensors.values())


@variants
def test_training_mode_changes_nothing(variant):
    module = decoder(variant).model.layers[0].self_attn
    x = torch.randn(1, 4, GEOMETRY.hidden_size, dtype=torch.float64)
    assert isinstance(module, nn.Module)
    with torch.no_grad():
        assert torch.equal(module.train()(x), module.eval()(x))
