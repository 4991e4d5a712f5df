"""Ceilings are the best that was found. No test looks at how fast anything was."""

from typing import Any

import pytest
import torch

from attn_variants.bench import ceilings
from attn_variants.bench.measure import Timings


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each timed piece of work takes, in turn; the last for all that follow."""
    takes = [1.0]

    def time(timings: Timings, device: str, work: Any) -> float:
        work()
        timings.wall.append(takes.pop(0) if len(takes) > 1 else takes[0])
        return timings.wall[-1]

    monkeypatch.setattr(Timings, "time", time)
    return takes


def test_memory_is_read_at_the_larger_of_two_rates(monkeypatch, seconds):
    monkeypatch.setattr(ceilings, "READ_SHAPE", (30, 50))
    # A warm-up and five rounds of the product, then of the sum, whose best is 0.25 s.
    seconds[:] = [0.1, 2.0, 3.0, 0.5, 2.0, 2.0, 0.1, 9.0, 0.25, 9.0]
    assert ceilings.read_bandwidth("cpu") == 30 * 50 * 4 / 0.25


def test_the_matrix_that_is_read_is_larger_than_a_gigabyte():
    rows, columns = ceilings.READ_SHAPE
    assert 1e9 < rows * columns * 4 < 1.2e9


def test_products_grow_until_one_takes_long(monkeypatch, seconds):
    monkeypatch.setitem(ceilings.SIZES, "cpu", (4, 8, 16))
    seconds[:] = [*[0.01] * 7, 0.5]
    # 2 * 4^3 FLOPs in a hundredth of a second; then 2 * 8^3 in half a one, which is the last.
    assert ceilings.matmul_rates("cpu", "float32") == {"float32": 128 / 0.01}
    seconds[:] = [0.5]
    assert ceilings.matmul_rates("cpu", "bfloat16") == {"bfloat16": 128 / 0.5, "float32": 128 / 0.5}


def test_what_is_multiplied_is_random(monkeypatch):
    monkeypatch.setitem(ceilings.SIZES, "cpu", (8,))
    products = []
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda *both: products.append(both) or multiply(*both))
    ceilings.matmul_rates("cpu", "bfloat16")
    assert {tensor.dtype for both in products for tensor in both} == {torch.bfloat16, torch.float32}
    assert all(tensor.float().std() > 0.5 for both in products for tensor in both)
