"""The registry: what it lists, what it refuses, and that listing costs no torch."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

from attn_variants import VARIANTS, Geometry, GQAConfig
from attn_variants.names import unknown
from attn_variants.registry import variant_named, variant_of


def test_the_first_variants_are_there_under_their_names():
    assert list(VARIANTS)[:5] == ["mha", "gqa", "mqa", "mla", "mla-expanded"]
    assert all(name == variant.name for name, variant in VARIANTS.items())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_resolves_to_its_config_and_its_module(name):
    variant = variant_named(name)
    config = variant.config.from_geometry(Geometry(hidden_size=32, heads=6, kv_heads=2, head_dim=8, kv_lora_rank=20))
    assert variant_of(config) is variant
    module = variant.module(config)
    assert isinstance(module, nn.Module)
    assert module.cache_spec == config.cache_spec()
    assert variant.summary


def test_an_unknown_variant_is_refused_with_the_nearest_and_with_all():
    with pytest.raises(
        ValueError, match=r"unknown variant 'mlaa'; did you mean mla.*\(known: mha, gqa, mqa, mla, mla-exp"
    ):
        variant_named("mlaa")
    with pytest.raises(ValueError, match=r"unknown variant 'zzz' \(known: mha"):
        variant_named("zzz")
    with pytest.raises(ValueError, match="unknown variant ''"):
        variant_named("")


def test_a_config_of_no_registered_variant_is_refused_by_name():
    @dataclass(frozen=True)
    class Foreign(GQAConfig):
        pass

    with pytest.raises(ValueError, match="Foreign is no registered variant's config; add its line"):
        variant_of(Foreign(32, 4))


def test_unknown_names_the_close_ones():
    assert unknown("colour", "blu", ["blue", "red"]) == "unknown colour 'blu'; did you mean blue? (known: blue, red)"
    assert unknown("colour", "x", ["blue", "red"]) == "unknown colour 'x' (known: blue, red)"


def test_listing_variants_and_sizing_their_caches_imports_no_torch():
    program = """
import sys
from attn_variants import VARIANTS, Geometry
from attn_variants.cache import bytes_per_token, cache_bytes, cache_shapes, ideal_bytes
for variant in VARIANTS.values():
    specs = (variant.config.from_geometry(Geometry()).cache_spec(),) * 2
    cache_shapes(specs, batch=1, capacity=8), cache_bytes(specs, batch=1, capacity=8)
    ideal_bytes(specs, batch=1, context=8), bytes_per_token(specs, context=8)
assert not {"torch", "numpy", "pandas"} & sys.modules.keys(), "heavy imports"
"""
    root = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, env={**os.environ, "PYTHONPATH": root})
