"""Samples share their prompt's pages: pools counted by hand, and never too small."""

import pytest

from attn_variants.generation import Lookup, Stopping, generate
from attn_variants.generation.asked import new_cache
from tests.generation.rounds import model_of, plain

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [7, 1, 8, 7, 1, 8, 7]]


def test_a_pool_has_the_prompts_whole_pages_once_and_the_rest_for_each_sample():
    """Pages of 4, 11 tokens and 9 slots more: 2 whole pages once; 5 in all, so 3 for each of 5 samples. Else 5 x 5."""
    options = {"burst": 1, "store": "paged:4", "codec": "plain"}
    (pool,) = new_cache(model_of("gqa"), PROMPTS[:1], [20], n=5, **options).pools
    assert pool.total == 2 + 5 * 3
    (pool,) = new_cache(model_of("gqa"), PROMPTS, [20, 9, 12], n=2, **options).pools
    assert pool.total == (2 + 0 + 1) + 2 * (3 + 3 + 2)


@pytest.mark.parametrize("page", [1, 3, 5, 7])
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("draft", [None, Lookup(3)])
@pytest.mark.parametrize("variant", ["gqa", "gqa-windowed"])
def test_the_pool_is_always_enough(variant, draft, n, page):
    model = model_of(variant)
    results = generate(
        model, PROMPTS, n=n, store=f"paged:{page}", draft=draft, stopping=[Stopping(k, eos=()) for k in (9, 1, 6)]
    )
    wanted = [plain(model, prompt, k) for prompt, k in zip(PROMPTS, (9, 1, 6), strict=True)]
    assert [list(result.ids) for result in results[::n]] == wanted
    assert [list(result.ids) for result in results[n - 1 :: n]] == wanted
