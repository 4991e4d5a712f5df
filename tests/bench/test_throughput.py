"""Speeds are recorded with all that is needed to recompute them. No test looks at how fast anything was."""

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from attn_variants import VARIANTS, Decoder
from attn_variants.attend import BACKENDS
from attn_variants.backends.request import Request
from attn_variants.bench import contest as contest_module
from attn_variants.bench import passes, throughput_rows
from attn_variants.bench import throughput as module
from attn_variants.bench.case import PRESET_GEOMETRIES, Sight, decoder_config, random_decoder
from attn_variants.bench.cli import main
from attn_variants.bench.contest import Case, Settings
from attn_variants.bench.contestants import Compiled, Ours
from attn_variants.bench.limits import weight_bytes_read
from attn_variants.bench.measure import Quiet, Timings, largest_allocation, quantile
from attn_variants.bench.peers import Transformers, transformers_twin
from attn_variants.bench.tables import as_text
from attn_variants.bench.throughput import throughput_report
from attn_variants.cache.quantize import ByEntry
from tests import tiny

ROOT = Path(__file__).parents[2]
GEOMETRY = replace(tiny.GEOMETRY, hidden_size=48)
SIZES = [
    word
    for name in ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size")
    for word in (f"--{name.replace('_', '-')}", str(getattr(GEOMETRY, name)))
]
FIELDS = {
    *("subject", "variant", "peer", "store", "codec", "dtype", "device", "threads", "batch", "context", "phase"),
    *("tokens_per_s", "ms_p50", "ms_p95", "samples", "cache_bytes", "weight_bytes", "read_bandwidth"),
    *("fraction_of_limit", "cpu_over_wall", "unquiet", "load_average", "matmul_rate", "operator_limit_ms", "noise"),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ceiling that need not be measured over a gigabyte each time."""
    monkeypatch.setattr(module, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(module, "matmul_rates", lambda device, dtype: {dtype: 1e10, "float32": 1e11})


def report(variant: str = "gqa", *, contexts: tuple[int, ...] = (20,), batch: int = 2, **settings: Any) -> Any:
    named = {name: settings.pop(name) for name in ("stores", "sight") if name in settings}
    cases = [Case("tiny", variant, GEOMETRY, "float32", batch, context, **named) for context in contexts]
    return throughput_report(cases, Settings(**{"device": "cpu", "repeats": 2, "warmup": 1} | settings))


def test_a_record_holds_every_sample_and_its_figures_follow_from_them():
    prefill, decode = report().rows
    for row, tokens in ((prefill, 2 * 20), (decode, 2)):
        assert row.keys() >= FIELDS
        assert row["ms_p50"] == quantile(row["samples"], 0.5)
        assert row["ms_p95"] == quantile(row["samples"], 0.95)
        # tokens per second times the time is the tokens: a prompt's are counted, not its passes.
        assert row["tokens_per_s"] * row["ms_p50"] / 1e3 == pytest.approx(tokens)
    assert prefill["phase"] == "prefill"
    assert prefill["fraction_of_limit"] is None
    assert decode["phase"] == "decode"
    assert len(decode["samples"]) == 2 * contest_module.TURN_STEPS
    assert len(prefill["samples"]) == 2
    assert decode["turns"] == [contest_module.TURN_STEPS] * 2
    assert prefill["turns"] == [1, 1]
    # Two turns are too few for an interval, and sixteen steps for a 99th percentile.
    assert decode["ms_p50_interval"] is decode["ms_p99"] is None
    assert prefill["noise"] is None


def test_an_interval_and_the_noise_can_be_worked_out_again_from_the_record():
    _, row = report(batch=1, repeats=6).rows
    steps = contest_module.TURN_STEPS
    turns = [statistics.median(row["samples"][start : start + steps]) for start in range(0, 6 * steps, steps)]
    assert row["ms_p50_interval"] == [min(turns), max(turns)]
    ratio = row["ms_p50"] / statistics.median(row["noise_samples"])
    assert row["noise"] == pytest.approx(max(ratio, 1 / ratio) - 1)
    assert len(row["noise_samples"]) == 6 * steps
    assert row["noise_cache"] == "own"


def test_where_memory_is_short_both_seats_take_turns_on_one_cache(monkeypatch):
    monkeypatch.setattr(contest_module, "memory_left", lambda device: 1000)
    found = report()
    assert found.failures == []
    assert found.rows[1]["noise_cache"] == "same"
    assert len(found.rows[1]["noise_samples"]) == len(found.rows[1]["samples"])


def test_a_thousand_steps_have_a_99th_percentile(monkeypatch):
    monkeypatch.setattr(throughput_rows, "FOR_P99", 16)
    row = report().rows[1]
    assert row["ms_p99"] == quantile(row["samples"], 0.99)


def test_the_fraction_of_the_limit_can_be_worked_out_again_from_the_record():
    _, row = report(contexts=(20,)).rows
    # 2 layers x (k and v) x 2 heads x 8 numbers x 4 bytes x 2 sequences x 20 tokens
    assert row["cache_bytes_read"] == 2 * 2 * 2 * 8 * 4 * 2 * 20
    seconds = row["ms_p50"] / 1e3
    read = row["weight_bytes"] + row["cache_bytes_read"]
    assert row["fraction_of_limit"] == pytest.approx(read / row["read_bandwidth"] / seconds)
    assert row["limit_ms"] == pytest.approx(read / row["read_bandwidth"] * 1e3)
    assert row["operator_limit_ms"] >= row["limit_ms"]
    assert row["fraction_of_operator_limit"] == pytest.approx(row["operator_limit_ms"] / row["ms_p50"])
    # What is possible in a dtype is the larger rate.
    assert row["matmul_rate"] == row["matmul_rates"]["float32"]


def test_weights_that_a_step_reads_leave_out_the_embedding_but_for_its_tokens_rows():
    config = decoder_config("gqa", GEOMETRY)
    vocab, hidden, mlp = 50, 48, 44
    attention = hidden * (6 + 2 + 2) * 8 + 6 * 8 * hidden
    layers = 2 * (attention + 3 * hidden * mlp + 2 * hidden) + hidden
    untied = random_decoder(config, dtype="float32", device="cpu", seed=0)
    assert weight_bytes_read(untied, batch=3) == 4 * (layers + vocab * hidden + 3 * hidden)
    tied = random_decoder(replace(config, tie_word_embeddings=True), dtype="bfloat16", device="cpu", seed=0)
    assert weight_bytes_read(tied, batch=3) == 2 * (layers + vocab * hidden)


STORES = [("full", "plain"), ("ring", "plain"), ("paged:4", "plain"), ("full", "int8-kivi"), ("ring", "int8-kivi")]


@pytest.mark.parametrize("store", STORES)
def test_every_step_is_timed_near_the_context(monkeypatch, store):
    held: dict[int, list[int]] = {}
    time = Timings.time

    def recorded(timings: Timings, device: str, work: Any) -> float:
        owner = getattr(work, "__self__", None)
        if isinstance(owner, contest_module.Measured):
            held.setdefault(id(owner), []).append(int(owner.contestant._cache.lengths[0]))
        return time(timings, device, work)

    monkeypatch.setattr(Timings, "time", recorded)
    report(contexts=(50,), repeats=3, warmup=5, stores=(store,), sight=Sight(window=8))
    turn = list(range(50, 50 + contest_module.TURN_STEPS))
    first, second = held.values()
    # Warm-up of ten steps, then three turns; the other seat's three turns.
    assert first == turn + turn[:2] + 3 * turn
    assert second == 3 * turn


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("sight", [Sight(), Sight(window=8)])
def test_transformers_takes_its_steps_back(cache, sight):
    pytest.importorskip("transformers")
    decoder = random_decoder(decoder_config("gqa", GEOMETRY, sight), dtype="float32", device="cpu", seed=1)
    contestant = Transformers(transformers_twin(decoder), cache=cache, capacity=24)
    ids = torch.randint(GEOMETRY.vocab_size, (2, 20))
    with torch.inference_mode():
        contestant.prefill(ids[:, :16])
        turns = []
        for _ in range(2):
            turns.append(torch.cat([contestant.decode(ids[:, at : at + 1]) for at in range(16, 20)]))
            contestant.rewind(4)
    assert torch.equal(*turns)


@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_a_peer_on_the_same_weights_takes_its_turns_and_its_best_setting_is_reported(variant):
    pytest.importorskip("transformers")
    found = report(variant, against="transformers")
    assert found.failures == []
    assert [(row["peer"], row["phase"]) for row in found.rows] == [
        ("attn-variants", "prefill"),
        ("attn-variants", "decode"),
        ("transformers", "prefill"),
        ("transformers", "decode"),
    ]
    row = found.rows[3]
    caches = {setting.split(", ")[1] for setting in [row["setting"], *row["slower_settings_ms_p50"]]}
    assert caches == {"dynamic cache", "static cache"}
    assert row["ms_p50"] <= min(row["slower_settings_ms_p50"].values())
    assert row["weight_bytes"] == found.rows[1]["weight_bytes"]
    (line, _) = found.tables[0].rows
    assert line["ratio"] == pytest.approx(found.rows[1]["tokens_per_s"] / row["tokens_per_s"])


def test_a_peer_that_computes_something_else_fails_the_run(monkeypatch):
    pytest.importorskip("transformers")

    def other_weights(decoder: nn.Module) -> nn.Module:
        twin = transformers_twin(decoder)
        # Its tensors are ours, so it gets one of its own.
        twin.model.norm.weight = nn.Parameter(twin.model.norm.weight.flip(0))
        return twin

    monkeypatch.setattr(module, "transformers_twin", other_weights)
    assert any("computes other logits" in failure for failure in report(against="transformers").failures)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_and_ours_decode_the_same_tokens(variant, cache):
    pytest.importorskip("transformers")
    decoder = random_decoder(decoder_config(variant, GEOMETRY), dtype="float32", device="cpu", seed=1)
    ids = torch.randint(GEOMETRY.vocab_size, (2, 9))
    ours = Ours(decoder, batch=2, capacity=14)
    theirs = Transformers(transformers_twin(decoder), cache=cache, capacity=14)
    with torch.inference_mode():
        # A contestant that is cleared starts again from nothing.
        for contestant in (ours, theirs):
            contestant.prefill(ids[:, 4:])
            contestant.clear()
        assert tiny.error(theirs.prefill(ids), ours.prefill(ids)) < 1e-5
        for way in theirs.ways:
            theirs.choose(way)
            assert tiny.error(theirs.decode(ids[:, :1]), ours.decode(ids[:, :1])) < 1e-5
    if variant != "mla-expanded" and cache == "static":
        assert theirs.cache_bytes == ours.cache_bytes


COMPILED = """
import torch
from attn_variants.bench.case import SMALL, decoder_config, random_decoder
from attn_variants.bench.contestants import Compiled, Ours
from dataclasses import replace

decoder = random_decoder(decoder_config("gqa", replace(SMALL, layers=1)), dtype="float32", device="cpu", seed=1)
ids = torch.randint(SMALL.vocab_size, (2, 9))
eager, compiled = (kind(decoder, batch=2, capacity=14) for kind in (Ours, Compiled))
with torch.inference_mode():
    passes = [(compiled.prefill(ids), eager.prefill(ids))]
    passes += [(compiled.decode(ids[:, :1]), eager.decode(ids[:, :1])) for _ in range(3)]
print(max(float((given - wanted).abs().max() / wanted.abs().max()) for given, wanted in passes))
"""


@pytest.mark.slow
def test_compiled_steps_compute_what_eager_ones_do():
    # In a process of its own: the compiler loads setuptools, which fails where a test before has loaded distutils.
    ran = subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert float(ran.stdout.splitlines()[-1]) < 1e-5


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
def test_no_decode_step_allocates_a_tensor_of_the_caches_length(variant):
    # One head of one record of the cache is 16 or more bytes per slot.
    decoder = random_decoder(decoder_config(variant, GEOMETRY), dtype="float32", device="cpu", seed=0)
    ids = torch.randint(GEOMETRY.vocab_size, (1, 2000))
    contestant = Ours(decoder, batch=1, capacity=2010)
    with torch.inference_mode():
        contestant.prefill(ids)
        largest = largest_allocation("cpu", lambda: contestant.decode(ids[:, :1]))
    assert 0 < largest < 2000 * 16


def test_a_dynamic_cache_is_seen_to_copy_itself():
    pytest.importorskip("transformers")
    decoder = random_decoder(decoder_config("gqa", GEOMETRY), dtype="float32", device="cpu", seed=0)
    ids = torch.randint(GEOMETRY.vocab_size, (1, 2000))
    contestant = Transformers(transformers_twin(decoder), cache="dynamic", capacity=0)
    with torch.inference_mode():
        contestant.prefill(ids)
        largest = largest_allocation("cpu", lambda: contestant.decode(ids[:, :1]))
    assert largest >= 2001 * 2 * 8 * 4


def test_the_largest_allocation_is_the_largest_and_not_the_sum():
    def work() -> Tensor:
        return torch.ones(1000) + torch.ones(3000)[:1000]

    assert largest_allocation("cpu", work) == 3000 * 4


def test_quantiles_lie_between_neighbours():
    assert quantile([7.0], 0.95) == 7.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([float(value) for value in range(101)], 0.95) == 95.0


def test_cores_that_others_used_make_a_run_unquiet():
    quiet, torn = Quiet(), Quiet()
    for probe, share in ((quiet, 0.95), (torn, 0.85)):
        probe._timings.wall.append(1.0)
        probe._timings.cpu = share * torch.get_num_threads()
    assert not quiet.unquiet
    assert torn.unquiet


def test_contexts_are_columns_of_a_second_table():
    table = report(contexts=(5, 9)).tables[1]
    assert [column.heading for column in table.columns] == ["by", "at 5", "at 9"]
    assert table.title == "Decode tokens/s, subject tiny, variant gqa, dtype float32, batch 2, store full, codec plain"
    assert len(table.rows) == 1


def test_the_command_measures_what_its_lists_name(capsys):
    lists = ["--variant", "mqa,gqa", "--context", "4", "--context", "6", "--batch", "1,2", "--dtype", "fp32"]
    short = ["--repeats", "1", "--warmup", "1", "--format", "json"]
    assert main(["throughput", *SIZES, *lists, *short]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    cases = [(row["variant"], row["batch"], row["context"]) for row in rows if row["phase"] == "decode"]
    assert cases == [(name, batch, context) for name in ("mqa", "gqa") for batch in (1, 2) for context in (4, 6)]
    assert {row["dtype"] for row in rows} == {"float32"}
    assert {row["subject"] for row in rows} == {"as given"}


def test_preset_geometries_are_the_published_sizes():
    (llama, llama_sizes), (mla, mla_sizes) = PRESET_GEOMETRIES["llama-100m"], PRESET_GEOMETRIES["mla-130m"]
    assert (llama, mla) == ("gqa", "mla")
    # Both untied: an embedding and a head of 32000 rows each.
    with torch.device("meta"):
        sizes = [
            sum(parameter.numel() for parameter in Decoder(decoder_config(name, geometry)).parameters())
            for name, geometry in ((llama, llama_sizes), (mla, mla_sizes))
        ]
    attention = 768 * 12 * 64 * 2 + 768 * 4 * 64 * 2
    assert sizes[0] == 12 * (attention + 3 * 768 * 2048 + 2 * 768) + 768 + 2 * 32000 * 768
    latent = 1024 * 16 * 192 + 1024 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 1024
    assert sizes[1] == 8 * (latent + 3 * 1024 * 2816 + 2 * 1024) + 1024 + 2 * 32000 * 1024


@pytest.mark.cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gpu_is_waited_for(variant):
    prefill, decode = report(variant, device="cuda").rows
    assert prefill["device"] == decode["device"] == "cuda"
    assert decode["largest_allocation"] > 0


def test_every_compiled_case_is_compiled(monkeypatch):
    """torch counts the graphs of all decoders together, and gives up at eight."""
    compiler = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    decoder = random_decoder(decoder_config("gqa", GEOMETRY), dtype="float32", device="cpu", seed=0)
    with torch.inference_mode():
        for extra in range(10):
            contestant = Compiled(decoder, batch=1, capacity=10 + extra)
            contestant.prefill(torch.ones(1, 4, dtype=torch.int64))
            contestant.decode(torch.ones(1, 1, dtype=torch.int64))
    assert compiler.frame_count == 10


def test_a_long_prompt_goes_through_in_passes_whose_masks_are_bounded(monkeypatch):
    """Two rows of 50: 20 tokens in the first pass, then as many as have no more than 300 entries of a mask."""
    monkeypatch.setattr(passes, "PASS_TOKENS", 20)
    monkeypatch.setattr(passes, "PASS_MASK", 300)
    ids, seen = torch.arange(100).view(2, 50), []

    def forward(piece):
        seen.append(piece)
        return piece[:, -1:]

    assert passes.in_passes(forward, ids, 50).tolist() == [[49], [99]]
    assert torch.equal(torch.cat(seen, dim=1), ids)
    assert [piece.shape[1] for piece in seen] == [10] + [3] * 13 + [1]


def test_stores_of_one_decoder_take_turns_and_are_compared_with_the_full_one():
    stores = (("full", "plain"), ("paged:4", "plain"), ("full", "int8"))
    found = report(stores=stores, shuffled=True)
    assert found.failures == []
    rows = found.rows[1::2]
    assert [(row["store"], row["codec"], row["shuffled"]) for row in rows] == [
        ("full", "plain", False),
        ("paged:4", "plain", True),
        ("full", "int8", False),
    ]
    full, paged, coded = rows
    assert full["over_full"] is None
    for row in (paged, coded):
        assert row["over_full"] == pytest.approx(row["ms_p50"] / full["ms_p50"])
    # 20 tokens and a turn of 8 to come: 7 pages for each of 2 rows, twice, and page 0; 2 layers, k and v, 2 heads.
    assert paged["cache_bytes"] == 2 * 2 * 2 * 8 * 4 * 4 * (2 * 2 * 7 + 1)
    assert coded["cache_bytes"] == 2 * 2 * 2 * (8 + 2) * 2 * 28
    assert "step / full's" in [column.heading for column in found.tables[0].columns]
    assert "step / full's" not in [column.heading for column in report().tables[0].columns]


def test_a_shuffled_pool_is_not_read_in_the_order_of_its_memory():
    decoder = random_decoder(decoder_config("gqa", GEOMETRY), dtype="float32", device="cpu", seed=0)
    contestant = Ours(decoder, batch=1, capacity=64, store="paged:4", shuffled=True)
    with torch.inference_mode():
        contestant.prefill(torch.ones(1, 60, dtype=torch.int64))
    (layout,) = contestant._cache._layouts.values()
    assert len(layout.tables[0]) == 15
    assert sorted(layout.tables[0]) != list(range(1, 16))
    assert layout.tables[0] != sorted(layout.tables[0])


def test_a_window_is_measured_on_a_ring_and_over_passes(monkeypatch):
    monkeypatch.setattr(passes, "PASS_TOKENS", 16)
    monkeypatch.setattr(passes, "PASS_MASK", 200)
    found = report(batch=1, contexts=(30,), sight=Sight(window=8), stores=(("full", "plain"), ("ring", "plain")))
    assert found.failures == []
    full, ring = found.rows[1::2]
    assert full["sees"] == ring["sees"] == "window 8"
    # A later pass brings 200 / 38 = 5 tokens to a warm row: a window and four more.
    assert ring["cache_bytes"] == 2 * 2 * 2 * 8 * 4 * (8 + 5 - 1)
    assert full["cache_bytes"] == 2 * 2 * 2 * 8 * 4 * 38
    assert "sees window 8" in found.tables[0].title


@pytest.mark.parametrize("random_cache", [False, True])
def test_a_store_that_computes_something_else_fails_the_run(monkeypatch, random_cache):
    decode = ByEntry.decode
    monkeypatch.setattr(ByEntry, "decode", lambda *given: decode(*given).flip(-1))
    found = report(stores=(("full", "plain"), ("full", "int4")), batch=1, random_cache=random_cache)
    (failure,) = found.failures
    assert "eager, full int4) is off the float64 reference by" in failure
    assert [row["wrong"] for row in found.rows if row["phase"] == "decode"] == [False, True]
    assert "WRONG" in as_text(found.tables)
    assert "WRONG" not in as_text(report().tables).replace("WRONG: nor", "")


def test_what_goes_wrong_only_at_a_long_context_is_seen_too(monkeypatch):
    compute = BACKENDS["sdpa"][1]

    def forgetful(request: Request) -> Tensor:
        out = compute(request)
        return out.flip(1) if request.view.plan.limit > 40 and request.q.shape[2] == 1 else out

    monkeypatch.setitem(BACKENDS, "sdpa", (BACKENDS["sdpa"][0], forgetful))
    assert report(contexts=(20,)).failures == []
    (failure,) = report(contexts=(60,)).failures
    assert "context 60" in failure


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_of_a_step_is_what_ours_computes(variant, store):
    decoder = random_decoder(decoder_config(variant, GEOMETRY, Sight(window=8)), dtype="float32", device="cpu", seed=1)
    ids = torch.randint(GEOMETRY.vocab_size, (2, 20))
    ours = Ours(decoder, batch=2, capacity=24, store=store[0], codec=store[1], rewinds=4)
    with torch.inference_mode():
        ours.prefill(ids)
        given = ours.decode(ids[:, :1])
        ours.rewind(1)
        before = ours.reference(ids[:, :1])
        assert tiny.error(given.double(), before) < 1e-5
        # Nothing was appended.
        assert torch.equal(ours.decode(ids[:, :1]), given)


def test_a_pool_without_pages_cannot_be_shuffled(capsys):
    assert main(["throughput", *SIZES, "--shuffled"]) == 2
    assert "--shuffled is about pages, and --store is full" in capsys.readouterr().err


@pytest.mark.parametrize("codec", ["plain", "int8"])
def test_a_long_cache_may_be_filled_without_a_prompt(codec):
    stores = (("full", codec), ("paged:4", codec))
    found = report(variant="mla", contexts=(20, 40), stores=stores, random_cache=True)
    assert [row["phase"] for row in found.rows] == ["decode"] * 4
    assert "TTFT ms" not in [column.heading for column in found.tables[0].columns]
    assert [row["context"] for row in found.rows] == [20, 20, 40, 40]


def test_a_peer_needs_a_prompt():
    with pytest.raises(ValueError, match="--random-cache fills stores of ours"):
        report(against="transformers", random_cache=True)
