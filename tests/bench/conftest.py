"""Saved checkpoints for the tests of the command that run a model."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.bench.saved_models import letters, save_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose 256 tokens are bytes, so that characters come in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return save_model(tmp_path / "bytes", tokenizer, seed=2)


@pytest.fixture
def speaker(tmp_path: Path) -> Path:
    """A folder whose tokens are the printable characters of ASCII."""
    return save_model(tmp_path / "letters", letters(), seed=3)
