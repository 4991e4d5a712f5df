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
# Where all is seen a ring is full.
LAYOUTS = [
    (store, static, limit)
    for store, static, limit in itertools.product(NAMES, (False, True), LIMITS)
    if (store, limit) != ("ring", "whole") and not (static and "paged" in store)
]


@pytest.mark.parametrize(("store", "static", "limit"), LAYOUTS)
@pytest.mark.parametrize("codec", SPELLED)
def test_every_situation_is_each_row_alone(tmp_path, codec, store, static, limit):
    """of every variant: they are the layers of one cache, so that each step is made once for all of them."""
    layers = [layer(variant, limit, codec in ONLY_FOR) for variant, other in PAIRS if other == codec]
    bursts = [(3, IN_THE_SMALLEST_RING if static else SITUATIONS)]
    # A full store knows no burst, but for tokens that wait to be coded together.
    if LIMITS[limit] and not static and (store != "full" or codec_named(codec).together > 1):
        bursts.append((1, IN_THE_SMALLEST_RING))
    for burst, situation in ((burst, situation) for burst, situations in bursts for situation in situations):
        rows = Rows(layers, codec, store=store, burst=burst, static=static)
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
