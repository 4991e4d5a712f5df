"""Packed copies of weights: the same products for a few rows, and unused where they are not the weight's."""

import copy

import pytest
import torch
from torch import nn

from attn_variants import linear, packed
from attn_variants.linear import lay_out_weights
from attn_variants.packed import PackedLinear, pack_weights, packed_for
from tests.tiny import TOLERANCE, decoder, error, expected

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch has no FBGEMM here"
)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """What is faster is not the matter here: copies for a few rows are, and for one they are not."""
    monkeypatch.setattr(packed, "_faster", lambda layers, products, rows: rows > 1)


def layer(bias=False, scale=0.1, seed=0, inputs=48, outputs=37, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    made = nn.Linear(inputs, outputs, bias=bias)
    for parameter in made.parameters():
        parameter.data = (scale * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return made.requires_grad_(False)


def rows(count, width=48, dtype=torch.bfloat16):
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def used(made, x, monkeypatch):
    """The output, and whether packed copies made any of it."""
    found = []

    def noted(layer, x):
        found.append(packed_for(layer, x))
        return found[-1]

    with monkeypatch.context() as patched:
        patched.setattr(packed, "packed_for", noted)
        with torch.inference_mode():
            return made(x), any(found)


@dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [2, 5, 16])
@pytest.mark.parametrize("scale", [0.1, 1e-6, 100.0])
def test_a_packed_product_is_the_product(dtype, bias, count, scale, monkeypatch):
    made, x = layer(bias, scale, dtype=dtype), rows(count, dtype=dtype)
    assert pack_weights(made) == {"37 x 48": "packed"}
    out, packs = used(made, x, monkeypatch)
    assert packs
    assert (out.dtype, out.shape) == (dtype, (1, count, 37))
    wanted = x.double() @ made.weight.double().T + (made.bias.double() if bias else 0)
    # Half a unit of the dtype, float16's smallest too; float32's sums; of bfloat16, small weights to the next 2**-24.
    unit = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    steps = {torch.float32: 0, torch.bfloat16: 2**-25 * 48 * 4, torch.float16: 2**-24}[dtype]
    bound = unit * wanted.abs() + 2**-20 * scale * 48 * 4 + steps
    assert ((out.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_row_is_as_if_alone(dtype, monkeypatch):
    made, x = layer(dtype=dtype), rows(16, dtype=dtype)
    pack_weights(made)
    whole, _ = used(made, x, monkeypatch)
    for count in range(2, 16):
        assert torch.equal(used(made, x[:, :count], monkeypatch)[0], whole[:, :count])


@pytest.mark.parametrize(
    ("dtype", "faster", "taken"),
    [
        (torch.bfloat16, {1, 5, 64}, [1, 2, 16, 17, 80]),
        (torch.bfloat16, {5, 64}, [2, 16, 17, 80]),
        (torch.bfloat16, {5}, [2, 16]),
        (torch.float16, {64}, [80]),  # for prompts alone
        (torch.bfloat16, {1}, [1, 2, 16]),
        (torch.float32, {1, 5, 64}, [2, 16, 17, 80]),  # weights laid out for one row are as fast
        (torch.float32, {5}, [2, 16]),
        (torch.float32, {1, 64}, []),  # not worth the memory
    ],
)
def test_a_copy_is_for_the_rows_that_it_is_faster_for(dtype, faster, taken, monkeypatch):
    monkeypatch.setattr(packed, "_faster", lambda layers, products, rows: rows in faster)
    made = layer(dtype=dtype)
    found = pack_weights(made, 1 if faster == {1} else 5)
    assert found == {"37 x 48": "packed" if taken else "own"}
    for count in (1, 2, 16, 17, 80):
        assert used(made, rows(count, dtype=dtype), monkeypatch)[1] == (count in taken), count


@dtypes
def test_gradients_and_autocast_meet_the_weight_itself(dtype, monkeypatch):
    made, x = layer(dtype=dtype), rows(5, dtype=dtype)
    pack_weights(made)
    assert made(x.clone().requires_grad_()).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        out, packs = used(made, x, monkeypatch)
    assert not packs
    assert out.dtype == torch.bfloat16


def test_layers_of_one_input_are_read_together_by_one_row_and_packed_by_few(monkeypatch):
    """SwiGLU's two: by columns for one row, each its copy for five."""
    monkeypatch.setattr(linear, "_columns_are_faster", lambda groups: True)
    model = copy.deepcopy(decoder("gqa", torch.float32)).requires_grad_(False)
    lay_out_weights(model)
    assert set(pack_weights(model).values()) == {"packed"}
    joint = []
    side_by_side = linear._side_by_side
    monkeypatch.setattr(linear, "_side_by_side", lambda layers: joint.append(side_by_side(layers)) or joint[-1])
    for ids, together in (([3], True), ([3, 1, 4, 1, 5], False)):
        joint.clear()
        with torch.inference_mode():
            out = model(torch.tensor([ids]))
        assert (len(joint) > 0 and all(each is not None for each in joint)) == together
        assert error(out[0], expected("gqa", ids, torch.float32)) < TOLERANCE[torch.float32]


def changed_in_place(made):
    made.weight.mul_(2)


def loaded(made):
    made.load_state_dict(layer(bias=True, seed=5).state_dict(), assign=True)


def with_another_bias(made):
    made.bias.mul_(2)


@pytest.mark.parametrize("change", [changed_in_place, loaded, with_another_bias, nn.Module.half])
def test_a_copy_of_another_weight_is_not_used(change, monkeypatch):
    made = layer(bias=True)
    pack_weights(made)
    change(made)
    x = rows(5).to(made.weight.dtype)
    out, packs = used(made, x, monkeypatch)
    assert not packs
    assert torch.equal(out, nn.functional.linear(x, made.weight, made.bias))
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
    assert pack_weights(nn.Sequential(large, nn.Linear(4, 4).double())) == {}


def test_a_shape_that_is_no_faster_keeps_its_own(monkeypatch):
    monkeypatch.setattr(packed, "_faster", lambda layers, products, rows: layers[0].out_features == 37)
    made = nn.Sequential(layer(), layer(inputs=37, outputs=8))
    assert pack_weights(made) == {"37 x 48": "packed", "8 x 37": "own"}
    assert [type(each) for each in made] == [PackedLinear, nn.Linear]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_a_packed_decoder_computes_the_same(variant, dtype, monkeypatch):
    model = copy.deepcopy(decoder(variant, dtype))
    ids = [3, 1, 4, 1, 5]
    with torch.inference_mode():
        assert pack_weights(model)
        out, packs = used(model, torch.tensor([ids]), monkeypatch)
    assert packs
    assert error(out[0], expected(variant, ids, dtype)) < TOLERANCE[dtype]


def test_one_row_of_float32_needs_no_copy():
    assert pack_weights(layer(dtype=torch.float32), 1) == {}


def test_packing_for_other_rows_takes_copies_away_that_are_slower_for_these(monkeypatch):
    made = layer()
    pack_weights(made, 5)
    monkeypatch.setattr(packed, "_faster", lambda layers, products, rows: False)
    assert pack_weights(made, 16) == {"37 x 48": "own"}
    assert type(made) is nn.Linear
    assert not used(made, rows(5), monkeypatch)[1]


def test_the_faster_is_found_by_measuring(monkeypatch):
    monkeypatch.undo()
    assert pack_weights(layer())["37 x 48"] in ("packed", "own")
