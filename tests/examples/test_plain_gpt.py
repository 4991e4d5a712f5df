from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_variants.cache import assert_cache_shapes


@pytest.fixture(scope="module")
def found(example: Callable[[str], ModuleType]) -> Any:
    return example("plain_gpt").main()


@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_trains(found: Any, variant: str) -> None:
    losses = found[variant]["losses"]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_decodes_with_a_cache_as_without(found: Any, variant: str) -> None:
    uncached, cached = found[variant]["ids"]
    assert torch.equal(cached, uncached)
    assert found[variant]["error"] < 1e-5


# 2 layers x 43 tokens x 4 bytes, times 2 x 2 heads x 12, or a latent of 16 and a rope key of 4.
@pytest.mark.parametrize(("variant", "nbytes"), [("gqa", 2 * 43 * 4 * 48), ("mla", 2 * 43 * 4 * 20)])
def test_keeps_what_the_paper_says(found: Any, variant: str, nbytes: int) -> None:
    cache = found[variant]["cache"]
    assert cache.nbytes == nbytes
    assert_cache_shapes(cache, cache.specs)
