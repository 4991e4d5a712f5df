"""A ragged batch is really one: each row holds its own length, computes what it would alone, and is counted as such."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_variants.bench import passes as passes_module
from attn_variants.bench import throughput as module
from attn_variants.bench.batch_spec import BatchSpec
from attn_variants.bench.case import Sight, decoder_config, random_decoder
from attn_variants.bench.contest import Case, Settings
from attn_variants.bench.contestants import Ours
from attn_variants.bench.throughput import throughput_report
from tests import tiny

GEOMETRY = replace(tiny.GEOMETRY, hidden_size=48)
SPEC = BatchSpec(((2, 5), (1, 30)))
TOKEN = 2 * 2 * 2 * 8 * 4
"""Bytes of a token: 2 layers x (k and v) x 2 heads x 8 numbers x 4 bytes."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that need not be measured."""
    monkeypatch.setattr(module, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(module, "matmul_rates", lambda device, dtype: {dtype: 1e10})


def report(spec: BatchSpec = SPEC, variant: str = "gqa", sight: Sight | None = None, **settings: Any) -> Any:
    stores = settings.pop("stores", (("full", "plain"),))
    case = Case("tiny", variant, GEOMETRY, "float32", spec.batch, spec.longest, stores, sight or Sight(), spec)
    return throughput_report([case], Settings(**{"device": "cpu", "repeats": 2, "warmup": 1} | settings))


@pytest.mark.parametrize(
    ("store", "codec", "sight"),
    [
        ("full", "plain", Sight()),
        ("paged:4", "plain", Sight()),
        ("full", "int8", Sight()),
        ("paged:4", "int4-kivi:4", Sight()),
        ("ring", "plain", Sight(window=8)),
    ],
)
@pytest.mark.parametrize("passes", [16384, 8])
def test_every_row_computes_what_it_does_alone(store, codec, sight, passes, monkeypatch):
    """In one pass, and in several whose later ones bring 4 tokens to a row."""
    monkeypatch.setattr(passes_module, "PASS_TOKENS", passes)
    monkeypatch.setattr(passes_module, "PASS_MASK", 40 * 4)
    decoder = random_decoder(decoder_config("gqa", GEOMETRY, sight), dtype="float32", device="cpu", seed=1)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(GEOMETRY.vocab_size, (3, 30), generator=generator)
    spec = BatchSpec(((1, 6), (1, 30), (1, 5)))
    held: dict[str, Any] = {"capacity": 40, "store": store, "codec": codec}
    together = Ours(decoder, batch=3, ragged=spec, **held)
    # As long as the longest, so that prompts go through in the same passes.
    alone = [Ours(decoder, batch=1, ragged=BatchSpec(((1, length),)), **held) for length in (6, 30, 5)]
    with torch.inference_mode():
        wanted = [one.prefill(ids[row : row + 1]) for row, one in enumerate(alone)]
        given = together.prefill(ids)
        for _ in range(4):
            assert tiny.error(given, torch.cat(wanted)) < 1e-5
            token = given[:, -1].argmax(-1, keepdim=True)
            given = together.decode(token)
            wanted = [one.decode(token[row : row + 1]) for row, one in enumerate(alone)]
    assert together._cache.lengths.tolist() == [10, 34, 9]


def test_a_short_prompt_is_cut_to_what_is_given_and_cleared_again():
    decoder = random_decoder(decoder_config("gqa", GEOMETRY), dtype="float32", device="cpu", seed=1)
    contestant = Ours(decoder, batch=3, capacity=40, ragged=SPEC)
    with torch.inference_mode():
        contestant.prefill(torch.ones(3, 12, dtype=torch.int64))
        assert contestant._cache.lengths.tolist() == [5, 5, 12]
        contestant.clear()
        contestant.prefill(torch.ones(3, 30, dtype=torch.int64))
    assert contestant._cache.lengths.tolist() == [5, 5, 30]


@pytest.mark.parametrize("store", ["full", "paged:4"])
def test_random_entries_fill_each_row_to_its_length(store):
    decoder = random_decoder(decoder_config("gqa", GEOMETRY), dtype="float32", device="cpu", seed=1)
    contestant = Ours(decoder, batch=3, capacity=40, store=store, ragged=SPEC)
    with torch.inference_mode():
        contestant.fill(30, seed=0)
    cache = contestant._cache
    assert cache.lengths.tolist() == [5, 5, 30]
    written = [tensor.view(*tensor.shape[:-1], -1).any(-1).sum() for tensor in cache.tensors.values()]
    # Of each of 4 tensors, 40 tokens of 2 heads; all else is zero.
    assert [int(count) for count in written] == [2 * 40] * 4


@pytest.mark.parametrize("store", [("full", "plain"), ("ring", "plain"), ("paged:4", "int8"), ("full", "int8-kivi")])
@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_each_row_of_the_step_in_float64_is_over_what_that_row_holds(variant, store):
    config = decoder_config(variant, GEOMETRY, Sight(window=8))
    decoder = random_decoder(config, dtype="float32", device="cpu", seed=1)
    ids = torch.randint(GEOMETRY.vocab_size, (3, 30), generator=torch.Generator().manual_seed(3))
    held: dict[str, Any] = {"capacity": 38, "store": store[0], "codec": store[1], "rewinds": 8}
    ours = Ours(decoder, batch=3, ragged=SPEC, **held)
    with torch.inference_mode():
        ours.prefill(ids)
        given = ours.decode(ids[:, :1])
        ours.rewind(1)
        assert tiny.error(given.double(), ours.reference(ids[:, :1])) < 1e-5
        # Nothing was appended, and what was decoded is taken back as often as need be.
        for _ in range(2):
            assert torch.equal(ours.decode(ids[:, :1]), given)
            ours.rewind(1)
    assert ours._cache.lengths.tolist() == [5, 5, 30]


def test_bytes_are_those_of_the_rows_lengths():
    prefill, full, _, paged = report(stores=(("full", "plain"), ("paged:4", "plain"))).rows
    assert (full["batch_spec"], full["batch"], full["context"]) == ("2x5+1x30", 3, 30)
    assert full["cache_bytes_read"] == paged["cache_bytes_read"] == TOKEN * (5 + 5 + 30)
    # 8 tokens to come: each row has 38 slots of a full store; 4, 4 and 10 pages of 4, and page 0.
    assert full["cache_bytes"] == TOKEN * 3 * 38
    assert paged["cache_bytes"] == TOKEN * 4 * (4 + 4 + 10 + 1)
    # A prefill takes in 40 tokens, not the 90 that padding would make of them.
    assert prefill["tokens_per_s"] * prefill["ms_p50"] / 1e3 == pytest.approx(40)
    assert full["tokens_per_s"] * full["ms_p50"] / 1e3 == pytest.approx(3)
    read = full["weight_bytes"] + TOKEN * 40
    assert full["fraction_of_limit"] == pytest.approx(read / 1e9 / (full["ms_p50"] / 1e3))


def test_what_a_window_passes_over_is_not_counted():
    _, row = report(sight=Sight(window=8), stores=(("ring", "plain"),)).rows
    # The token itself is one of the window's 8, and is not read.
    assert row["cache_bytes_read"] == TOKEN * (5 + 5 + 7)


@pytest.mark.parametrize("variant", ["mla", "mqa"])
def test_ragged_rows_agree_between_stores(variant):
    found = report(variant=variant, stores=(("full", "plain"), ("paged:4", "plain"), ("full", "int8")), shuffled=True)
    assert found.failures == []
    assert all(row["reference_error"] <= row["reference_tolerance"] for row in found.rows)
    assert found.rows[1]["noise"] is not None
    assert [row["phase"] for row in found.rows] == ["prefill", "decode"] * 3


def test_a_table_names_the_rows_of_a_ragged_batch_alone():
    ragged = report().tables[0]
    assert "batch_spec 2x5+1x30" in ragged.title
    even = throughput_report([Case("tiny", "gqa", GEOMETRY, "float32", 2, 9)], Settings("cpu", repeats=1, warmup=1))
    assert even.rows[0]["batch_spec"] == "2x9"
    assert "batch_spec" not in even.tables[0].title


def test_a_peer_that_pads_takes_no_part(capsys):
    pytest.importorskip("transformers")
    rows = report(against="transformers").rows
    assert {row["peer"] for row in rows} == {"attn-variants"}
    assert "note: transformers takes no part in 2x5+1x30" in capsys.readouterr().err
