"""Every variant x layout x codec x limit x situation, against the float64 textbook, row by row."""

import inspect
import itertools

import pytest

from attn_variants import VARIANTS
from attn_variants.cache import KVCache
from attn_variants.cache.layouts import STORES
from attn_variants.cache.quantize import CODECS, codec_named
from tests.cache.grid import LIMITS, Rows, layer
from tests.cache.situations import IN_THE_SMALLEST_RING, SITUATIONS

ONLY_FOR = {"fp8-mla": ("mla",)}
"""Codecs of one variant's record. Every other pair of a variant and a codec works on every layout."""

REFUSED = [(variant, codec) for codec, only in ONLY_FOR.items() for variant in VARIANTS if variant not in only]
# As many tokens share a scale as a page has.
SPELLED = [name if codec_named(name).together == 1 else f"{name}:5" for name in CODECS]
PAIRS = [pair for pair in itertools.product(VARIANTS, SPELLED) if pair not in REFUSED]
NAMES = [name for store in STORES for name in ([store] if ":" not in store else ["paged:1", "paged:5"])]
# Where all is seen a ring is full, and what a burst limits is seen by windows.
LAYOUTS = [pair for pair in itertools.product(NAMES, LIMITS) if pair != ("ring", "whole")]


@pytest.mark.parametrize(("store", "limit"), LAYOUTS)
@pytest.mark.parametrize(("variant", "codec"), PAIRS)
def test_every_situation_is_each_row_alone(tmp_path, variant, codec, store, limit):
    bursts = [(3, SITUATIONS), (1, IN_THE_SMALLEST_RING if LIMITS[limit] else [])]
    for burst, situation in ((burst, situation) for burst, situations in bursts for situation in situations):
        rows = Rows(layer(variant, limit, codec in ONLY_FOR), codec, store=store, burst=burst)
        try:
            if "path" in inspect.signature(situation).parameters:
                situation(rows, path=tmp_path / "saved")
            else:
                situation(rows)
            assert rows.check() > 3
        except Exception as failure:
            failure.add_note(f"{situation.__name__}, burst {burst}")
            raise


@pytest.mark.parametrize(("variant", "codec"), REFUSED)
def test_a_pair_that_cannot_be_is_refused_by_name(variant, codec):
    spec = layer(variant, "whole", wide=True).spec
    with pytest.raises(ValueError, match=f"codec {codec} is for a record of latent and k_rope, and record"):
        KVCache([spec], batch=1, capacity=4, codec=codec)
