"""At equal memory: the largest batch that fits, to the byte, and what is said when none does."""

import json
from dataclasses import replace
from typing import Any

import pytest

from attn_variants.bench import throughput as throughput_module
from attn_variants.bench.budget import Reserved, equal_memory, filling
from attn_variants.bench.case import Sight, decoder_config, random_decoder
from attn_variants.bench.cli import main
from attn_variants.bench.contest import TURN_STEPS, Case, Settings
from attn_variants.bench.contestants import Compiled, Ours
from tests import tiny

GEOMETRY = replace(tiny.GEOMETRY, hidden_size=48)
SIZES = [
    word
    for name in ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size")
    for word in (f"--{name.replace('_', '-')}", str(getattr(GEOMETRY, name)))
]
SHORT = Settings("cpu", repeats=1, warmup=1)
TOKENS = 20 + TURN_STEPS
ONE = 2 * 2 * 2 * 8 * 4 * TOKENS
"""Bytes of a sequence at context 20: 2 layers x (k and v) x 2 heads x 8 numbers x 4 bytes, and the steps to come."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ceiling that need not be measured over a gigabyte each time."""
    monkeypatch.setattr(throughput_module, "read_bandwidth", lambda device: 1e9)


def case(variant: str = "gqa", context: int = 20, **fields: Any) -> Case:
    return Case("tiny", variant, GEOMETRY, "float32", 1, context, **fields)


@pytest.mark.parametrize(("spare", "batch"), [(0, 5), (ONE - 1, 5), (ONE, 6)])
def test_the_largest_batch_fills_the_budget_to_the_byte(spare, batch):
    (found,) = filling(5 * ONE + spare, [case()], SHORT)
    assert (found.batch, found.budget) == (batch, 5 * ONE + spare)


def test_a_smaller_cache_holds_more_sequences_and_stores_of_one_batch_take_turns():
    # int8 holds 8 codes and a float16 scale for 8 numbers of 4 bytes; pages of 28 hold what a full store does.
    stores = (("full", "plain"), ("full", "int8"), (f"paged:{TOKENS}", "int8"), ("ring", "plain"))
    plain, coded, paged = filling(6 * ONE, [case(stores=stores)], SHORT)
    assert (plain.batch, plain.stores) == (6, (("full", "plain"), ("ring", "plain")))
    assert (coded.batch, coded.stores) == (6 * 32 // 10, (("full", "int8"),))
    # Page 0 is nobody's, and is paid for.
    assert (paged.batch, paged.stores) == (18, ((f"paged:{TOKENS}", "int8"),))


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("codec", ["plain", "int8", "int4-kivi"])
@pytest.mark.parametrize("store", ["full", "ring", "paged:4"])
@pytest.mark.parametrize("sight", [Sight(), Sight(window=7, sinks=2)], ids=str)
def test_what_is_counted_is_what_the_contestant_allocates(store, codec, batch, shuffled, sight, monkeypatch):
    # So few that a prompt comes in passes, and a ring holds one.
    monkeypatch.setattr("attn_variants.bench.passes.PASS_TOKENS", 24)
    config = decoder_config("gqa", GEOMETRY, sight)
    decoder = random_decoder(config, dtype="float32", device="cpu", seed=0)
    sizes: dict[str, Any] = {"capacity": TOKENS, "store": store, "codec": codec}
    for rewinds in (0, TURN_STEPS):
        options = {"dtype": "float32", "rewinds": rewinds}
        counted = Reserved(config.cache_specs, **sizes, **options, shuffled=shuffled).bytes(batch)
        made = Ours(decoder, batch=batch, **sizes, shuffled=shuffled, rewinds=rewinds)
        assert made.cache_bytes == counted
        if not shuffled and not store.startswith("paged"):
            counted = Reserved(config.cache_specs, **sizes, **options, static=True).bytes(batch)
            assert Compiled(decoder, batch=batch, **sizes, rewinds=rewinds).cache_bytes == counted


def test_a_ring_whose_bytes_fall_as_rows_are_added_is_filled_as_far_as_it_goes(monkeypatch):
    # 24 tokens in a pass over all rows, at least one of each: a ring of window 2 holds as many and one more.
    monkeypatch.setattr("attn_variants.bench.passes.PASS_TOKENS", 24)
    slot = 2 * 2 * 2 * 8 * 4
    reserved = Reserved(
        decoder_config("gqa", GEOMETRY, Sight(window=2)).cache_specs, TOKENS, "ring", "plain", "float32"
    )
    slots = {rows: rows * (1 + max(1, 24 // rows)) for rows in range(1, 40)}
    assert [reserved.bytes(rows) for rows in slots] == [slot * count for count in slots.values()]
    assert slots[13] < slots[12]
    for held in range(25, 60):
        best = max(rows for rows, count in slots.items() if count <= held)
        assert reserved.largest_batch(slot * held) == best


def test_a_budget_without_room_for_one_names_the_least_that_all_need(capsys):
    flags = ["--variant", "mha,gqa,mqa", "--context", "10,20", "--repeats", "1", "--warmup", "1"]
    assert main(["throughput", *SIZES, *flags, "--budget", f"{ONE}"]) == 2
    printed = capsys.readouterr()
    # MHA has 6 heads in the place of 2.
    assert printed.err == (
        f"error: --budget ({ONE:,} bytes) holds not one sequence of mha float32 in full plain at context 20, and 1 "
        f"more do not fit: give at least {3 * ONE:,} ({3 * ONE / 1024:.4g} KiB), or a shorter --context\n"
    )
    assert printed.out == ""


@pytest.mark.parametrize(("flag", "value"), [("--batch", "2"), ("--batch-spec", "2x8")])
def test_a_budget_and_a_batch_exclude_each_other(flag, value, capsys):
    assert main(["throughput", *SIZES, "--budget", "1MiB", flag, value]) == 2
    assert f"--budget and {flag} exclude each other" in capsys.readouterr().err


def test_a_sweep_at_a_budget_goes_on_where_it_was(tmp_path, capsys):
    path = tmp_path / "sweep.jsonl"
    flags = ["--variant", "gqa", "--store", "full,paged:4", "--codec", "int8,plain", "--repeats", "1", "--warmup", "1"]
    flags += ["--output", str(path), "--resume", "--budget"]
    assert main(["throughput", *SIZES, *flags, str(4 * ONE), "--context", "20"]) == 0
    first = path.read_text()
    assert main(["throughput", *SIZES, *flags, str(4 * ONE), "--context", "12,20"]) == 0
    assert path.read_text().startswith(first)
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    specs, done = dict.fromkeys(row["batch_spec"] for row in rows), dict.fromkeys(row["batch_spec"] for row in rows[:8])
    assert {row["context"] for row in rows[:8]} == {20}
    assert f"{len(done)} of {len(specs)} cases are in the record already" in capsys.readouterr().err
    assert main(["throughput", *SIZES, *flags, str(5 * ONE), "--context", "12,20"]) == 2
    assert f"was measured with budget {4 * ONE}, and this would be {5 * ONE}" in capsys.readouterr().err


def test_a_budget_is_a_size(capsys):
    assert main(["throughput", *SIZES, "--budget", "much"]) == 2
    assert "--budget (much) must be bytes or a number with a unit" in capsys.readouterr().err


def test_a_peers_cache_is_not_fitted_to_a_budget(capsys):
    assert main(["throughput", *SIZES, "--budget", "1MiB", "--against", "transformers"]) == 2
    assert "--budget fills stores of ours" in capsys.readouterr().err


def test_each_is_measured_at_its_batch_within_the_budget(capsys):
    flags = ["--variant", "gqa,mqa", "--context", "20", "--repeats", "1", "--warmup", "1", "--format", "json"]
    assert main(["throughput", *SIZES, *flags, "--budget", str(4 * ONE + 1)]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["phase"] == "decode"]
    assert [(row["variant"], row["batch"], row["budget"]) for row in rows] == [
        ("gqa", 4, 4 * ONE + 1),
        ("mqa", 8, 4 * ONE + 1),
    ]
    for row in rows:
        assert row["cache_bytes"] == 4 * ONE
        assert row["tokens_per_s"] * row["ms_p50"] / 1e3 == pytest.approx(row["batch"])


def line(variant: str, batch: int, tokens_per_s: float, context: int = 8) -> dict[str, Any]:
    named = {"subject": "tiny", "variant": variant, "sees": "all", "dtype": "float32", "by": "ours, eager"}
    sized = {"store": "full", "codec": "plain", "context": context, "cache_bytes": 60, "budget": 64}
    return named | sized | {"batch": batch, "tokens_per_s": tokens_per_s, "ms_p50": 1.0, "unquiet": False}


def test_what_a_smaller_cache_buys_is_told_beside_how_much_smaller_it_is():
    table = equal_memory(
        [line("mqa", 12, 90.0), line("mha", 2, 30.0), line("mha", 1, 20.0, 16), line("mqa", 6, 50.0, 16)]
    )
    assert [(row["batch_ratio"], row["speed_ratio"]) for row in table.rows] == [(6, 3), (1, 1), (1, 1), (6, 2.5)]
    refused = line("mha", 1, 0.0) | {"error": "out of memory", "tokens_per_s": None, "ms_p50": None, "unquiet": False}
    assert equal_memory([line("mqa", 12, 90.0), refused]).rows == equal_memory([line("mqa", 12, 90.0)]).rows
    headings = [column.heading for column in table.columns]
    assert headings == ["variant", "context", "cache", "batch", "x batch", "step ms", "tok/s", "x tok/s"]
    assert table.title.startswith("Decode tokens/s at equal memory, each cache within 64 B, subject tiny")
