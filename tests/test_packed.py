"""Packed copies of weights: the same products for a few rows, and unused where they are not the weight's."""

import copy

import pytest
import torch
from torch import nn

from attn_variants import packed
from attn_variants.packed import PackedLinear, pack_weights
from tests.tiny import TOLERANCE, decoder, error, expected

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch has no FBGEMM here"
)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """What is faster is not the matter here."""
    monkeypatch.setattr(packed, "_faster", lambda layers, packs, rows: True)


def layer(bias=False, scale=0.1, seed=0, inputs=48, outputs=37):
    generator = torch.Generator().manual_seed(seed)
    made = nn.Linear(inputs, outputs, bias=bias)
    for parameter in made.parameters():
        parameter.data = (scale * torch.randn(parameter.shape, generator=generator)).bfloat16()
    return made.requires_grad_(False)


def rows(count, width=48):
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(1)).bfloat16()


def used(made, x, monkeypatch):
    """The output, and whether the packed copy made it."""
    calls = []
    product = packed._product
    with monkeypatch.context() as patched:
        patched.setattr(packed, "_product", lambda *given: calls.append(1) or product(*given))
        with torch.inference_mode():
            return made(x), bool(calls)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [2, 5, 16])
@pytest.mark.parametrize("scale", [0.1, 1e-6, 100.0])
def test_a_packed_product_is_the_product(bias, count, scale, monkeypatch):
    made, x = layer(bias, scale), rows(count)
    assert pack_weights(made) == {"37 x 48": "packed"}
    out, packs = used(made, x, monkeypatch)
    assert packs
    wanted = x.double() @ made.weight.double().T + (made.bias.double() if bias else 0)
    # Half a unit of bfloat16; float32's sums; small weights to the next 2**-24.
    bound = 2**-8 * wanted.abs() + (2**-20 * scale * 48 + 2**-25 * 48) * 4
    assert ((out.double() - wanted).abs() <= bound).all()


def test_every_row_is_as_if_alone(monkeypatch):
    made, x = layer(), rows(16)
    pack_weights(made)
    whole, _ = used(made, x, monkeypatch)
    for count in range(2, 16):
        assert torch.equal(used(made, x[:, :count], monkeypatch)[0], whole[:, :count])


def test_one_row_and_many_meet_the_weight_itself(monkeypatch):
    made = layer()
    pack_weights(made)
    assert not used(made, rows(1), monkeypatch)[1]
    assert not used(made, rows(17), monkeypatch)[1]
    assert used(made, rows(16), monkeypatch)[1]
    out = made(rows(5).requires_grad_())
    assert out.requires_grad


def changed_in_place(made):
    made.weight.mul_(2)


def loaded(made):
    made.load_state_dict(layer(seed=5).state_dict(), assign=True)


@pytest.mark.parametrize("change", [changed_in_place, loaded, nn.Module.float])
def test_a_copy_of_another_weight_is_not_used(change, monkeypatch):
    made = layer()
    pack_weights(made)
    change(made)
    x = rows(5).to(made.weight.dtype)
    out, packs = used(made, x, monkeypatch)
    assert not packs
    assert torch.equal(out, nn.functional.linear(x, made.weight))
    # It can be packed again.
    assert pack_weights(made.bfloat16())
    assert used(made, rows(5), monkeypatch)[1]


def test_a_copied_model_has_no_packed_weights_and_the_same_state(monkeypatch):
    made = nn.Sequential(layer())
    before = list(made.state_dict())
    pack_weights(made)
    assert type(made[0]) is PackedLinear
    assert list(made.state_dict()) == before
    other = copy.deepcopy(made)
    assert not used(other, rows(5), monkeypatch)[1]
    assert torch.equal(other(rows(5)), nn.functional.linear(rows(5), made[0].weight))


def test_what_float16_does_not_hold_and_other_dtypes_are_left_alone():
    large = layer()
    large.weight[3, 4] = 1e5
    assert pack_weights(nn.Sequential(large, nn.Linear(4, 4))) == {}


def test_a_shape_that_is_no_faster_keeps_its_own(monkeypatch):
    monkeypatch.setattr(packed, "_faster", lambda layers, packs, rows: layers[0].out_features == 37)
    made = nn.Sequential(layer(), layer(inputs=37, outputs=8))
    assert pack_weights(made) == {"37 x 48": "packed", "8 x 37": "own"}
    assert [type(each) for each in made] == [PackedLinear, nn.Linear]


@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_a_packed_decoder_computes_the_same(variant, monkeypatch):
    model = copy.deepcopy(decoder(variant, torch.bfloat16))
    ids = [3, 1, 4, 1, 5]
    with torch.inference_mode():
        assert pack_weights(model)
        out, packs = used(model, torch.tensor([ids]), monkeypatch)
    assert packs
    assert error(out[0], expected(variant, ids, torch.bfloat16)) < TOLERANCE[torch.bfloat16]


def test_the_faster_is_found_by_measuring(monkeypatch):
    monkeypatch.undo()
    assert pack_weights(layer())["37 x 48"] in ("packed", "own")
