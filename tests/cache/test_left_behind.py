"""What was rewound, or written by a step that was never advanced, is as though it had never been: a NaN too."""

import pytest
import torch

from attn_variants import CacheSpec, Entry, Record
from attn_variants.attend import attend
from attn_variants.cache import KVCache
from tests.tiny import same, snapshot

RECORDS = (Record.of(Entry("k", 2, 6)), Record.of(Entry("v", 2, 6)))
LAYOUTS = {
    "full": {"store": "full"},
    "static": {"store": "full", "static": True},
    "ring": {"store": "ring", "window": 6, "sinks": 1},
    "pages": {"store": "paged:16"},
    "small pages": {"store": "paged:4", "window": 6},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
codecs = pytest.mark.parametrize("codec", ["plain", "int8", "fp8", "int4-kivi:4"])


def made(layout, codec):
    options = dict(LAYOUTS[layout])
    limits = {name: options.pop(name) for name in ("window", "sinks") if name in options}
    spec = CacheSpec(records=RECORDS, **limits)
    return KVCache([spec], batch=2, capacity=20, dtype="float32", codec=codec, burst=4, **options)


def fed(cache, tokens, seed, *, nan=None, counts=None, rows=None):
    """A step that is given random entries, in row `nan` NaNs; what attention reads of it."""
    generator = torch.Generator().manual_seed(seed)
    batch = 2 if rows is None else len(rows)
    q, k, v = torch.randn(3, batch, 2, tokens, 6, generator=generator)
    if nan is not None:
        k[nan], v[nan] = torch.nan, torch.nan
    step = cache.step(batch, tokens, counts=counts, rows=rows)
    return step, attend(q, cache.layers[0].append(step, k=k, v=v), ("k", "v"), scale=0.4)


def gone_on(cache):
    """Outputs of steps that read unequal rows through masks."""
    outs = []
    for seed, counts in ((7, [1, 3]), (8, None), (9, [2, 1])):
        step, out = fed(cache, 3, seed, counts=counts)
        cache.advance(step)
        outs.append(out)
    return outs


@layouts
@codecs
@pytest.mark.parametrize("way", ["rewound", "never advanced", "never advanced on empty rows"])
def test_a_nan_that_was_taken_back_is_gone(layout, codec, way):
    clean, cache = made(layout, codec), made(layout, codec)
    for one in (clean, cache):
        if "empty" not in way:
            one.advance(fed(one, 3, 1)[0])
    step, _ = fed(cache, 3, 2, nan=0)
    if way == "rewound":
        cache.advance(step)
        cache.rewind(3)
    for wanted, out in zip(gone_on(clean), gone_on(cache), strict=True):
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)


@layouts
@codecs
def test_a_row_that_shares_what_was_rewound_is_given_no_nan(layout, codec):
    """The page's end, and what waits to be coded, held tokens that the new row never had."""
    cache = made(layout, codec)
    cache.advance(fed(cache, 3, 1, rows=[0])[0])
    cache.advance(fed(cache, 3, 2, nan=0, rows=[0])[0])
    cache.rewind([3, 0])
    cache.share(0, [1])
    cache.free([0])
    _, out = fed(cache, 2, 3, rows=[1])
    assert out.isfinite().all()


def test_a_nan_that_another_row_of_the_page_still_holds_stays():
    """The twin's page is its own from its next step on, and zeroed there alone."""
    cache = made("pages", "plain")
    cache.advance(fed(cache, 3, 1)[0])
    cache.advance(fed(cache, 3, 2, nan=0)[0])
    twin = cache.fork([0, 1])
    twin.rewind(3)
    before = snapshot(cache)["layers.0.k"]
    step, out = fed(twin, 2, 3)
    assert out.isfinite().all()
    twin.advance(step)
    held = before.isnan()
    assert held.any()
    assert cache.tensors["layers.0.k"][held].isnan().all()


@layouts
@pytest.mark.parametrize("change", ["advance", "another step", "rewind", "reorder", "free", "fork", "share"])
def test_a_step_that_is_over_is_not_written(layout, change):
    """Its slots may be other tokens' by now."""
    cache = made(layout, "plain")
    cache.advance(fed(cache, 5, 1, rows=[0])[0])
    step = cache.step(1, 1, rows=[0])
    {
        "advance": lambda: cache.advance(step),
        "another step": lambda: cache.step(1, 1, rows=[1]),
        "rewind": lambda: cache.rewind(0),
        "reorder": lambda: cache.reorder([1, 0]),
        "free": lambda: cache.free([0]),
        "fork": lambda: cache.fork([0]),
        "share": lambda: cache.share(0, [1]),
    }[change]()
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"this step is over: it was advanced, or its cache was changed since; make"):
        cache.layers[0].append(step, k=torch.ones(1, 2, 1, 6), v=torch.ones(1, 2, 1, 6))
    assert same(before, snapshot(cache))


@layouts
@pytest.mark.parametrize("change", ["reorder", "fork"])
def test_rows_changed_in_inference_mode_go_on_outside(layout, change):
    cache = made(layout, "plain")
    cache.advance(fed(cache, 5, 1)[0])
    with torch.inference_mode():
        cache = cache.fork([1, 0]) if change == "fork" else cache
        if change == "reorder":
            cache.reorder([1, 0])
    assert all(out.isfinite().all() for out in gone_on(cache))
