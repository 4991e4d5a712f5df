"""Where a weight's numbers lie in memory is nobody's business but the product's."""

import copy
import pickle

import pytest
import torch

from attn_variants import linear, turns
from attn_variants.linear import lay_out_weights, project, weights_by_columns
from tests import tiny


@pytest.fixture(params=["columns", "rows"])
def order(request, monkeypatch):
    monkeypatch.setattr(linear, "_columns_are_faster", lambda groups: request.param == "columns")
    return request.param


@pytest.fixture
def by_columns(monkeypatch):
    monkeypatch.setattr(linear, "_columns_are_faster", lambda groups: True)


class Pair(torch.nn.Module):
    """Two layers of one input, one of them with a bias."""

    same_input = (("left", "right"),)

    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(6, 3).double(), torch.nn.Linear(6, 4, bias=False).double()

    def forward(self, x):
        return project(x, self.left, self.right)


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla", "mla-expanded"])
def test_the_chosen_order_changes_strides_and_nothing_else(order, variant):
    model, ids = copy.deepcopy(tiny.decoder(variant)), torch.arange(8).view(2, 4)
    before, weights = model(ids), copy.deepcopy(model.state_dict())
    chosen = lay_out_weights(model)
    assert set(chosen.values()) == {order}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert model.lm_head.weight.is_contiguous() == (order == "rows")
    if variant.startswith("mla"):
        assert model.model.layers[0].self_attn.kv_b_proj.weight.is_contiguous()
    assert weights_by_columns(model) == (sorted(chosen) if order == "columns" else [])
    with torch.inference_mode():
        assert tiny.error(model(ids), before) < 1e-12
    model(ids).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.usefixtures("by_columns")
def test_layers_of_one_input_are_one_product(monkeypatch):
    pair, x = Pair(), torch.randn(2, 5, 6, dtype=torch.float64)
    assert lay_out_weights(pair) == {"3 + 4 x 6": "columns"}
    products = []
    monkeypatch.setattr(linear.F, "linear", lambda *given: products.append(given) or torch._C._nn.linear(*given))
    with torch.inference_mode():
        left, right = pair(x)
    assert [tuple(weight.shape) for _, weight in products] == [(7, 6)]
    assert torch.allclose(left, x @ pair.left.weight.T + pair.left.bias)
    assert torch.allclose(right, x @ pair.right.weight.T)


def moved(pair):
    return pair.float().double()


def assigned(pair):
    pair.load_state_dict({name: tensor.clone() for name, tensor in pair.state_dict().items()}, assign=True)
    return pair


def replaced(pair):
    pair.right.weight = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    return pair


def loaded(pair):
    pair.load_state_dict({name: tensor * 2 for name, tensor in pair.state_dict().items()})
    return pair


def trained(pair):
    sum(out.sum() for out in pair(torch.ones(1, 6, dtype=torch.float64))).backward()
    torch.optim.SGD(pair.parameters(), lr=0.1).step()
    return pair


def hooked(pair):
    pair.right.register_forward_hook(lambda layer, given, out: out + 1)
    return pair


def patched(pair):
    product = pair.right.forward
    pair.right.forward = lambda x: product(x) + 1
    return pair


def swapped(pair):
    pair.left = torch.nn.Sequential(torch.nn.Linear(6, 3).double())
    return pair


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda p: pickle.loads(pickle.dumps(p)),
        moved,
        assigned,
        replaced,
        loaded,
        trained,
        hooked,
        patched,
        swapped,
    ],
)
@pytest.mark.usefixtures("by_columns")
def test_what_happened_to_the_layers_since_is_in_their_product(change):
    pair, x = Pair(), torch.randn(2, 5, 6, dtype=torch.float64)
    lay_out_weights(pair)
    pair = change(pair)
    with torch.inference_mode():
        for out, layer in zip(pair(x), (pair.left, pair.right), strict=True):
            assert torch.allclose(out, layer(x))


@pytest.mark.usefixtures("by_columns")
def test_a_hook_on_every_module_sees_each_layer():
    pair, seen = Pair(), []
    lay_out_weights(pair)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda layer, given, out: seen.append(layer))
    try:
        with torch.inference_mode():
            pair(torch.ones(1, 6, dtype=torch.float64))
    finally:
        handle.remove()
    assert [layer for layer in seen if isinstance(layer, torch.nn.Linear)] == [pair.left, pair.right]


def test_the_choice_draws_no_random_number():
    torch.manual_seed(0)
    lay_out_weights(Pair())
    drawn = torch.rand(1)
    torch.manual_seed(0)
    Pair()
    assert torch.equal(drawn, torch.rand(1))


def test_rows_are_restored_when_they_turn_out_faster(monkeypatch):
    model = copy.deepcopy(tiny.decoder("gqa"))
    for faster in (True, False):
        monkeypatch.setattr(linear, "_columns_are_faster", lambda groups, faster=faster: faster)
        lay_out_weights(model)
        assert bool(weights_by_columns(model)) == faster


def test_an_embedding_keeps_its_rows(order):
    model = copy.deepcopy(tiny.decoder("gqa"))
    model.lm_head.weight = model.model.embed_tokens.weight
    lay_out_weights(model)
    assert model.lm_head.weight.is_contiguous()


def test_the_order_is_measured_and_named_by_shape():
    chosen = lay_out_weights(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)))
    assert chosen.keys() == {"6 x 4", "3 x 6"}
    assert set(chosen.values()) <= {"rows", "columns"}


@pytest.mark.parametrize(("rows", "columns", "faster"), [(2.0, 1.0, True), (1.0, 2.0, False), (1.0, 0.99, False)])
def test_columns_have_to_be_clearly_faster(monkeypatch, rows, columns, faster):
    times = iter([columns, rows] * turns.ROUNDS)
    monkeypatch.setattr(turns, "seconds", lambda work: next(times))
    assert linear._columns_are_faster([(torch.nn.Linear(4, 6),)]) == faster


def test_one_disturbed_round_does_not_choose(monkeypatch):
    times = iter([9.0, 1.0] + [1.0, 2.0] * (turns.ROUNDS - 1))
    monkeypatch.setattr(turns, "seconds", lambda work: next(times))
    assert linear._columns_are_faster([(torch.nn.Linear(4, 6),)])
