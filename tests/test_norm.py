"""The norm against its equation, and the precision it computes in."""

import torch

from attn_variants.norm import RMSNorm
from tests import reference


def made(dtype, eps=1e-6):
    norm = RMSNorm(7, eps)
    norm.weight.data = 1 + 0.3 * torch.randn(7, generator=torch.Generator().manual_seed(0))
    return norm.to(dtype)


def test_three_and_four_have_a_root_mean_square_of_root_twelve_and_a_half():
    norm = RMSNorm(2, eps=0.0)
    assert torch.allclose(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / 12.5**0.5)


def test_the_norm_is_its_equation_in_float64():
    norm, x = made(torch.float64, eps=0.1), torch.randn(3, 2, 5, 7, dtype=torch.float64)
    assert torch.allclose(norm(x), reference.rms_norm(x, norm.weight, 0.1), rtol=0, atol=1e-12)


def test_eps_stands_under_the_root():
    norm = RMSNorm(4, eps=0.25)
    assert torch.equal(norm(torch.zeros(4)), torch.zeros(4))
    assert torch.allclose(norm(torch.full((4,), 0.5)), torch.full((4,), 0.5 / 0.5**0.5))


def test_half_precision_neither_overflows_nor_rounds_inside():
    for dtype, ulp in ((torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
        norm, x = made(dtype), (torch.randn(5, 7, generator=torch.Generator().manual_seed(1)) * 2000).to(dtype)
        out, exact = norm(x), reference.rms_norm(x.double(), norm.weight.double(), 1e-6)
        assert out.dtype == dtype
        assert ((out.double() - exact).abs() <= exact.abs() * ulp).all()


def test_the_weight_is_the_only_parameter_and_starts_at_one():
    assert {name: tensor.tolist() for name, tensor in RMSNorm(3).state_dict().items()} == {"weight": [1.0, 1.0, 1.0]}
