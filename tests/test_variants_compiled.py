"""Every variant compiles whole: one graph for any number of tokens, and for every position of a static cache."""

import copy

import pytest
import torch
import torch._dynamo.testing

from tests.tiny import GEOMETRY, LONG, SHORT, TOLERANCE, append, decoder, error, kv_cache, variants

FLOAT64 = TOLERANCE[torch.float64]


@pytest.fixture
def graphs():
    """A backend that compiles nothing and counts the graphs it is given; the compiler forgets them afterwards."""
    torch._dynamo.reset()
    yield torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()


@variants
def test_one_graph_of_a_module_alone_serves_any_number_of_tokens(variant, graphs):
    module = decoder(variant).model.layers[0].self_attn
    module = copy.deepcopy(module)
    if hasattr(module, "absorbed_below"):
        module.absorbed_below = 0
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=graphs)
    with torch.no_grad():
        for tokens in range(3, 15):
            x = torch.randn(2, tokens, GEOMETRY.hidden_size, dtype=torch.float64)
            assert error(compiled(x), module(x)) < 1e-12
    assert graphs.frame_count == 1


@variants
def test_a_module_alone_compiles_whole(variant, graphs):
    module = decoder(variant).model.layers[0].self_attn
    x = torch.randn(2, 5, GEOMETRY.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        assert error(torch.compile(module, fullgraph=True, backend=graphs)(x), module(x)) < 1e-12
    assert graphs.frame_count == 1


@variants
def test_a_chunk_on_a_growing_cache_compiles_whole(variant, graphs):
    model = decoder(variant, layers=1)
    store = kv_cache(model)
    append(model, store, [LONG[:4], SHORT[:2]])
    eager = append(model, store.fork([0, 1]), [LONG[4:7], SHORT[2:5]])
    stack = torch.compile(model.model, fullgraph=True, backend=graphs)
    step = store.step(2, 3)
    with torch.no_grad():
        logits = model.lm_head(stack(torch.tensor([LONG[4:7], SHORT[2:5]]), step, store.layers))
    assert error(logits, torch.stack(eager)) < 1e-12


@variants
def test_one_compiled_step_serves_every_position_of_a_static_cache(variant, graphs):
    model = decoder(variant, layers=1)
    store, eager = kv_cache(model, static=True), kv_cache(model)
    append(model, store, [LONG[:4], SHORT[:2]])
    append(model, eager, [LONG[:4], SHORT[:2]])
    stack = torch.compile(model.model, fullgraph=True, backend=graphs)
    for t in range(4, 8):
        new = [LONG[t : t + 1], SHORT[t - 2 : t - 1]]
        step = store.step(2, 1)
        with torch.no_grad():
            logits = model.lm_head(stack(torch.tensor(new), step, store.layers))
        store.advance(step)
        assert error(logits, torch.stack(append(model, eager, new))) < 1e-12
    assert graphs.frame_count == 1
