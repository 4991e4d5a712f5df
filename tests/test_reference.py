"""The oracle itself, held to numbers worked by hand and to torch's own attention."""

import math

import pytest
import torch

from attn_variants import RopeConfig
from tests import reference


def test_two_keys_are_weighed_by_the_exponentials_of_their_scores():
    q, k, v = torch.tensor([[[0.0], [2.0]]]), torch.tensor([[[0.0], [math.log(3) / 2]]]), torch.tensor([[[1.0], [5.0]]])
    out = reference.attention(q.double(), k.double(), v.double(), scale=1.0)
    # The first token sees itself; the second weighs them 1 : 3.
    assert out[0, :, 0].tolist() == pytest.approx([1.0, (1 * 1 + 3 * 5) / 4])


def test_a_sink_takes_its_share_and_gives_nothing():
    zeros, v = torch.zeros(1, 1, 1, dtype=torch.float64), torch.tensor([[[8.0]]], dtype=torch.float64)
    out = reference.attention(zeros, zeros, v, scale=1.0, sink=torch.tensor([math.log(3.0)], dtype=torch.float64))
    assert out.item() == pytest.approx(2.0)


def test_attention_is_torchs():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((6, 5, 8), (2, 5, 8), (2, 5, 7))
    )
    out = reference.attention(q, k, v, scale=0.3)
    grouped = (tensor.repeat_interleave(3, 0)[None] for tensor in (k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q[None], *grouped, is_causal=True, scale=0.3)[0]
    assert torch.allclose(out, theirs, atol=1e-12)


@pytest.mark.parametrize(
    ("interleaved", "turned"),
    [(True, [-1.142640, 1.922076, 2.959851, 4.029800]), (False, [-1.984111, 1.959901, 2.462378, 4.019800])],
)
def test_rotation_is_the_one_worked_by_hand(interleaved, turned):
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    out = reference.rotated(x, RopeConfig(interleaved=interleaved), [1])
    assert out[0, 0].tolist() == pytest.approx(turned, abs=1e-6)
