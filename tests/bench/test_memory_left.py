"""What does not fit is known before it is made: by the memory that is left and the bytes that are asked for."""

from dataclasses import replace

import pytest

from attn_variants.bench import memory_left as module
from attn_variants.bench.case import Sight, decoder_config
from attn_variants.bench.contest import Case, Settings
from attn_variants.bench.estimate import Estimate
from attn_variants.bench.memory_left import memory_left
from attn_variants.bench.progress import spoken
from attn_variants.bench.room import fitting, numbers_of, weights_refused
from tests import tiny

GEOMETRY = replace(tiny.GEOMETRY, hidden_size=48)
TOKEN = 2 * 2 * 2 * 8 * 4
BOTH = (("full", "plain"), ("paged:4", "plain"))
V2 = ("memory.max", "memory.current", "inactive_file")


def test_this_machine_says_what_is_left():
    left = memory_left("cpu")
    assert left is not None
    assert 0 < left < 2**50


def test_a_sixteenth_is_kept_back_of_the_least_that_is_said(monkeypatch):
    monkeypatch.setattr(module, "_available", lambda: 3200)
    monkeypatch.setattr(module, "_allowed", lambda: 1600)
    assert memory_left("cpu") == 1500
    monkeypatch.setattr(module, "_allowed", lambda: None)
    assert memory_left("cpu") == 3000
    monkeypatch.setattr(module, "_available", lambda: None)
    assert memory_left("cpu") is None


@pytest.mark.parametrize(("limit", "left"), [("1000", 1000 - 700 + 250), ("600", 600 - 700 + 250), ("max", None)])
def test_a_control_group_leaves_its_limit_but_for_what_is_used_and_not_cached(tmp_path, limit, left):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 450\ninactive_file 250\n")
    assert module._group(tmp_path, *V2) == left


def test_a_control_group_that_says_nothing_sets_no_limit(tmp_path):
    assert module._group(tmp_path, *V2) is None


def fits(left: int | None, *, stores: tuple[tuple[str, str], ...] = BOTH, peers: int = 0, compiled: bool = False):
    """18 slots for a context of 10 and a turn of 8 steps: a full store of 4608 bytes and one of 1 + 5 pages of 4."""
    case = Case("tiny", "gqa", GEOMETRY, "float32", 1, 10, stores)
    settings = Settings("cpu", repeats=1, warmup=1, random_cache=True, compiled=compiled)
    return fitting(case, settings, decoder_config("gqa", GEOMETRY).cache_specs, peers, left)


FULL, PAGED = 18 * TOKEN, 6 * 4 * TOKEN
WORKING = 10 * (2 * 2 * 8 * (4 + 8) + 6 * 3 * 8) + 15_000 * (4 + 8)
"""The step in float64: 10 tokens of 32 numbers and 6 scores, and half of the weights of 2 layers, as is and widened."""


def test_what_fits_to_the_byte_is_kept():
    case, _, refused = fits(WORKING + FULL + PAGED)
    assert (case.stores, refused) == (BOTH, {})
    assert fits(None)[2] == {}


def test_what_fits_alone_and_not_beside_the_others_is_said_to():
    case, _, refused = fits(WORKING + FULL + PAGED - 1)
    assert case.stores == BOTH[:1]
    assert refused == {BOTH[1]: "out of memory: needs 6 KiB of 5.999 KiB beside the others; measure it alone"}


def test_what_fits_never_is_given_with_all_it_needs():
    case, _, refused = fits(WORKING + FULL)
    assert case.stores == BOTH[:1]
    # 185,280 and 6,144 bytes, of 4,608.
    assert refused == {BOTH[1]: "out of memory: needs 186.9 KiB of 185.4 KiB"}


def test_compiled_steps_have_a_cache_of_their_own():
    assert fits(WORKING + 2 * FULL, stores=BOTH[:1], compiled=True)[2] == {}
    assert list(fits(WORKING + 2 * FULL - 1, stores=BOTH[:1], compiled=True)[2]) == [BOTH[0]]


def test_a_ring_that_goes_back_by_copy_has_room_for_its_copies():
    """8 slots of a window: one cache in use, one as it was filled, and the next that is made of that."""
    case = Case("tiny", "gqa", GEOMETRY, "float32", 1, 10, (("ring", "plain"),), Sight(window=8))
    settings = Settings("cpu", repeats=1, warmup=1, random_cache=True)
    specs = decoder_config("gqa", GEOMETRY, case.sight).cache_specs
    assert fitting(case, settings, specs, 0, WORKING + 3 * 8 * TOKEN)[2] == {}
    assert list(fitting(case, settings, specs, 0, WORKING + 3 * 8 * TOKEN - 1)[2]) == [("ring", "plain")]


def test_a_peer_brings_all_its_caches_or_none():
    _, peer, refused = fits(WORKING + 3 * FULL, stores=BOTH[:1], peers=2)
    assert (peer, refused) == (True, {})
    case, peer, refused = fits(WORKING + 3 * FULL - 1, stores=BOTH[:1], peers=2)
    assert (case.stores, peer, list(refused)) == (BOTH[:1], False, [None])


def test_weights_are_drawn_in_float32_and_rounded():
    config = decoder_config("gqa", GEOMETRY)
    attention = 48 * (6 + 2 + 2) * 8 + 6 * 8 * 48
    numbers = 2 * (attention + 3 * 48 * 44 + 2 * 48) + 48 + 2 * 50 * 48
    assert numbers_of(config) == numbers
    assert weights_refused(config, "float32", 4 * numbers) is None
    assert weights_refused(config, "bfloat16", 6 * numbers) is None
    refusal = weights_refused(config, "bfloat16", 6 * numbers - 1)
    assert refusal is not None
    assert refusal == "out of memory: the weights alone need 175.8 KiB of 175.8 KiB while they are made"


def test_the_estimate_is_the_model_at_the_pace_of_what_is_done():
    settings = Settings("cpu", repeats=5, warmup=3, random_cache=True)
    specs = decoder_config("gqa", GEOMETRY).cache_specs
    estimate = Estimate(settings, bandwidth=1e6)
    case = Case("tiny", "gqa", GEOMETRY, "float32", 2, 100)
    step = (4 * 1000 + 2 * 100 * TOKEN) / 1e6
    # 6 warm-up steps, 5 turns of 8, and two looks at the cores per turn; in the second seat one turn more.
    assert estimate.case(case, specs, 1000) == pytest.approx(94 * step + 10 * 0.05)
    # A prompt of 2 x 100 tokens at 1e7 operations a second, 5 times.
    prompted = Estimate(replace(settings, random_cache=False), bandwidth=1e6).case(case, specs, 1000)
    assert prompted == pytest.approx(94 * step + 10 * 0.05 + 5 * 2 * 1000 * 200 / 1e7)
    assert estimate.left([1.0, 2.0]) is None
    estimate.done(2.0, 5.0)
    estimate.done(2.0, 3.0)
    assert estimate.left([1.0, 2.0]) == 3 * 8 / 4
    assert estimate.case(replace(case, stores=()), specs, 1000) == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "1 s"), (0.2, "1 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (7200, "2 h"), (12000, "3 h 20 min")],
)
def test_seconds_are_said_roughly(seconds, words):
    assert spoken(seconds) == words
