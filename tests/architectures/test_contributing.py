"""The model that CONTRIBUTING.md adds in five steps is added by them."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from attn_variants.architectures import family, parameter_count, reader, weight_parts
from attn_variants.cache import model_cache
from attn_variants.cache.vllm import rows
from attn_variants.cache.vllm.families import Rules

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Add a published model in five steps\n")[1].split("\n## ")[0]
FAMILY, WEIGHTS, VLLM, PRESET = (
    textwrap.dedent(block) for block in re.findall(r"^ +```(?:python|json)\n(.*?)^ +```$", SECTION, re.M | re.S)
)


def entry(block, names):
    return eval("{" + block + "}", dict(names))


@pytest.fixture
def newcomer(monkeypatch):
    """The preset's config, after steps 1 to 3."""
    monkeypatch.setattr(reader, "FAMILIES", entry(FAMILY, vars(family)))
    monkeypatch.setattr(parameter_count, "WEIGHTS", entry(WEIGHTS, vars(weight_parts)))
    monkeypatch.setattr(rows, "RULES", entry(VLLM, {"Rules": Rules}))
    return model_cache(json.loads("{" + PRESET.strip().removesuffix(",") + "}")["newcomer-8b"]["config"])


def test_its_cache_is_32768_bytes_per_token_past_its_windows(newcomer):
    assert newcomer.bytes_per_token(context=2000) == 32_768
    assert newcomer.bytes(context=2000) == 32_768 * 2000 + 24 * 2 * 8 * 128 * 2 * 1024


def test_its_weights_are_counted(newcomer):
    """A layer: 2 x 32 + 2 x 8 heads of 128 by 4096, three matrices of 4096 by 14336, two norms."""
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 + 2 * 4096
    assert newcomer.weights("bfloat16") == 2 * (32 * layer + 2 * 151_936 * 4096 + 4096)


def test_its_windows_are_a_token_longer_in_vllm(newcomer):
    (window,) = {page.span for group in newcomer.vllm().groups for page, _ in group.pages if page.span}
    assert window == 1025
