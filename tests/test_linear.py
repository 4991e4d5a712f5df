"""Where a weight's numbers lie in memory is nobody's business but the product's."""

import copy

import pytest
import torch

from attn_variants import linear
from attn_variants.linear import lay_out_weights, weights_by_columns
from tests import tiny


@pytest.fixture(params=["columns", "rows"])
def order(request, monkeypatch):
    monkeypatch.setattr(linear, "_columns_are_faster", lambda weights: request.param == "columns")
    return request.param


@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_the_chosen_order_changes_strides_and_nothing_else(order, variant):
    model, ids = copy.deepcopy(tiny.decoder(variant)), torch.arange(8).view(2, 4)
    before, weights = model(ids), copy.deepcopy(model.state_dict())
    chosen = lay_out_weights(model)
    assert set(chosen.values()) == {order}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert model.lm_head.weight.is_contiguous() == (order == "rows")
    if variant == "mla":
        assert model.model.layers[0].self_attn.kv_b_proj.weight.is_contiguous()
    assert len(weights_by_columns(model)) == (len(chosen) if order == "columns" else 0)
    assert tiny.error(model(ids), before) < 1e-12
    model(ids).sum().backward()
    assert model.lm_head.weight.grad is not None


def test_rows_are_restored_when_they_turn_out_faster(monkeypatch):
    model = copy.deepcopy(tiny.decoder("gqa"))
    for faster in (True, False):
        monkeypatch.setattr(linear, "_columns_are_faster", lambda weights, faster=faster: faster)
        lay_out_weights(model)
        assert bool(weights_by_columns(model)) == faster


def test_an_embedding_keeps_its_rows(order):
    model = copy.deepcopy(tiny.decoder("gqa"))
    model.lm_head.weight = model.model.embed_tokens.weight
    lay_out_weights(model)
    assert model.lm_head.weight.is_contiguous()


def test_the_order_is_measured_and_named_by_shape():
    chosen = lay_out_weights(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)))
    assert chosen.keys() == {(6, 4), (3, 6)}
    assert set(chosen.values()) <= {"rows", "columns"}


@pytest.mark.parametrize(("rows", "columns", "faster"), [(2.0, 1.0, True), (1.0, 2.0, False), (1.0, 0.99, False)])
def test_columns_have_to_be_clearly_faster(monkeypatch, rows, columns, faster):
    times = iter([rows, columns] * linear.ROUNDS)
    monkeypatch.setattr(linear, "_seconds", lambda work: next(times))
    assert linear._columns_are_faster([torch.ones(6, 4)]) == faster
