"""Parity holds for every variant of the registry, and sees a fault where there is one."""

import json
from dataclasses import replace

import pytest
import torch

from attn_variants import VARIANTS
from attn_variants.bench import case, parity
from attn_variants.bench.case import Sight, decoder_config, has_limits, random_decoder
from attn_variants.bench.cli import main
from attn_variants.bench.parity import parity_report
from attn_variants.bench.reference import absorbed_below, absorbing_layers, reference_logits
from attn_variants.cache.number_codes import Integers
from attn_variants.cache.pages import Pages
from attn_variants.cache.ring import Ring
from attn_variants.cache.store import Store
from attn_variants.cache.views import StoreView
from attn_variants.norm import RMSNorm
from tests import reference as textbook
from tests import tiny

CHECKS = {"uncached", "cached", "chunked", "ragged", "padded", "rewound", "forked", "reused", "negative-control"}
GEOMETRY = tiny.GEOMETRY
OPTIONAL = [variant for variant in VARIANTS if has_limits(variant)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cell_is_right_and_its_control_is_caught(variant, dtype):
    report = parity_report([variant], GEOMETRY, dtypes=[dtype])
    assert report.failures == []
    # Keys and values of two widths are nothing that `split` computes.
    assert {row["backend"] for row in report.rows} == {"reference", "blockwise", "sdpa", "split"} - (
        {"split"} if variant == "mla-expanded" else set()
    )
    for row in report.rows:
        assert row["ok"]
        assert 0 < row["passes_by_backend"] <= row["passes"]
        assert row["tolerance"] == {"float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}[dtype]
        assert 0 <= row["argmax_agreement"] <= 1
        caught = row["check"] == "negative-control"
        assert (row["error"] > row["tolerance"]) == caught


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_way_of_computing_is_asked(variant):
    report = parity_report([variant], GEOMETRY, dtypes=["float32"], backends=["reference"])
    checks = [row["check"] for row in report.rows if row["peer"] is None]
    assert set(checks) == CHECKS | ({"absorbed", "expanded"} if variant == "mla" else set())
    assert len(checks) == len(set(checks))


@pytest.mark.parametrize(
    ("variant", "classes"),
    [
        ("gqa", ["LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ("mqa", ["LlamaForCausalLM"]),
        ("mla", ["DeepseekV3ForCausalLM"]),
    ],
)
def test_transformers_classes_are_compared_on_the_same_weights(variant, classes):
    pytest.importorskip("transformers")
    # Llama wants a hidden size that its heads divide.
    report = parity_report([variant], replace(GEOMETRY, hidden_size=48), dtypes=["float32"], backends=["sdpa"])
    found = [row for row in report.rows if row["check"] == "transformers"]
    assert [row["peer"] for row in found] == classes
    assert all(row["ok"] for row in found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_equals_the_textbook_with_loops(variant):
    decoder = random_decoder(decoder_config(variant, GEOMETRY), dtype="float32", device="cpu", seed=3)
    ids = torch.randint(GEOMETRY.vocab_size, (1, 6))
    given = reference_logits(decoder, ids)
    wanted = textbook.decoder(variant, textbook.weights_of(decoder.double()), decoder.config, ids[0].tolist())
    assert given.dtype == torch.float64
    assert tiny.error(given[0], wanted) < 1e-6


SEEN = [Sight(window=3), Sight(window=2, sinks=2), Sight(chunk=3), Sight(chunk=2, sinks=1)]


@pytest.mark.parametrize("sight", SEEN, ids=str)
@pytest.mark.parametrize("variant", OPTIONAL)
def test_the_reference_equals_the_textbook_with_loops_where_tokens_pass_out_of_sight(variant, sight):
    decoder = random_decoder(decoder_config(variant, GEOMETRY, sight), dtype="float32", device="cpu", seed=3)
    ids = torch.randint(GEOMETRY.vocab_size, (1, 8))
    given = reference_logits(decoder, ids)
    wanted = textbook.decoder(variant, textbook.weights_of(decoder.double()), decoder.config, ids[0].tolist())
    assert tiny.error(given[0], wanted) < 1e-6


@pytest.mark.parametrize("option", [{"attention_sink": True}, {"attn_logit_softcapping": 0.7}], ids=str)
@pytest.mark.parametrize("variant", OPTIONAL)
def test_the_reference_knows_learned_sinks_and_caps(variant, option):
    plain = decoder_config(variant, GEOMETRY)
    decoder = random_decoder(
        replace(plain, attention=replace(plain.attention, **option)), dtype="float32", device="cpu", seed=3
    )
    ids = torch.randint(GEOMETRY.vocab_size, (1, 6))
    given = reference_logits(decoder, ids)
    wanted = textbook.decoder(variant, textbook.weights_of(decoder.double()), decoder.config, ids[0].tolist())
    assert tiny.error(given[0], wanted) < 1e-6


@pytest.mark.parametrize("codec", ["plain", "int8", "int4:4", "int4-kivi:5", "fp8"])
@pytest.mark.parametrize("store", ["full", "ring", "paged:1", "paged:16"])
@pytest.mark.parametrize("variant", ["mqa", "mla"])
def test_every_store_and_codec_is_right_and_its_control_is_caught(variant, store, codec):
    report = parity_report(
        [variant], GEOMETRY, dtypes=["float32"], stores=[store], codecs=[codec], backends=["blockwise"]
    )
    assert report.failures == []
    checks = {row["check"] for row in report.rows if row["peer"] is None}
    assert checks - {"absorbed", "expanded"} == CHECKS | ({"wrapped"} if store == "ring" else set()) | (
        {"page-boundary"} if store.startswith("paged") else set()
    )
    assert {row["sees"] for row in report.rows} == {"window 7" if store == "ring" else "all"}
    if codec == "plain":
        assert {row["tolerance"] for row in report.rows} == {1e-5}
        return
    found = max(row["error"] for row in report.rows if row["check"] in ("cached", "wrapped"))
    # As much as the step makes of it, or else nothing were held to anything; where tokens wait, most are exact here.
    times = {"fp8": 6, "int4-kivi:5": 100}.get(codec, 4)
    assert all(found < row["tolerance"] < times * found for row in report.rows)


@pytest.mark.parametrize("sight", SEEN, ids=str)
@pytest.mark.parametrize("store", ["full", "ring", "paged:4"])
def test_limits_that_are_asked_for_hold_on_every_store(store, sight):
    report = parity_report(["gqa"], GEOMETRY, dtypes=["float32"], stores=[store], codecs=["plain", "int8"], sight=sight)
    assert report.failures == []
    assert {row["sees"] for row in report.rows} == {str(sight)}
    assert not any(row["peer"] for row in report.rows)


def test_a_ring_that_is_too_small_fails(monkeypatch):
    size = Ring.size.fget
    monkeypatch.setattr(Ring, "size", property(lambda ring: size(ring) - 1))
    report = parity_report(["gqa"], GEOMETRY, dtypes=["float32"], stores=["ring"], backends=["sdpa"])
    assert "wrapped" in {row["check"] for row in report.rows if not row["ok"]}


def test_a_page_that_is_not_copied_for_its_second_holder_fails(monkeypatch):
    holders = Pages.holders
    monkeypatch.setattr(Pages, "holders", lambda pages, page: min(1, holders(pages, page)))
    report = parity_report(["gqa"], GEOMETRY, dtypes=["float32"], stores=["paged:16"], backends=["blockwise"])
    assert {row["check"] for row in report.rows if not row["ok"]} == {"forked"}


def test_a_codec_whose_step_is_larger_than_it_says_fails(monkeypatch):
    decode = Integers.decode
    monkeypatch.setattr(Integers, "decode", lambda *given: decode(*given) * 1.05)
    report = parity_report(["gqa"], GEOMETRY, dtypes=["float32"], codecs=["int8"], backends=["reference"])
    assert "cached" in {row["check"] for row in report.rows if not row["ok"]}


def test_codes_with_a_wrong_scale_fail(monkeypatch):
    factors = StoreView._factors

    def wrong(*given):
        codes, scales = factors(*given)
        return codes, tuple(scale * 1.05 for scale in scales)

    monkeypatch.setattr(StoreView, "_factors", wrong)
    report = parity_report(["gqa"], GEOMETRY, dtypes=["float32"], codecs=["int8"], backends=["blockwise"])
    assert "cached" in {row["check"] for row in report.rows if not row["ok"]}


@pytest.mark.parametrize("sight", [Sight(window=1), Sight(chunk=1)], ids=str)
def test_where_no_token_sees_another_there_is_no_control(sight):
    report = parity_report(["gqa"], GEOMETRY, dtypes=["float32"], backends=["sdpa"], sight=sight)
    assert report.failures == []
    assert {row["check"] for row in report.rows} == CHECKS - {"negative-control"}
    assert report.tables[0].rows[0]["control"] is None


def test_without_flags_some_pairs_of_other_stores_and_codecs_are_shown_too(capsys):
    small = ["--layers", "1", "--hidden-size", "32", "--vocab-size", "50", "--intermediate-size", "44"]
    asked = ["parity", "--variant", "mqa", "--dtype", "float32", "--format", "json", *small]
    for flags, pairs in [([], {("full", "plain"), *parity.ALSO}), (["--store", "full"], {("full", "plain")})]:
        assert main([*asked, *flags]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert {(row["store"], row["codec"]) for row in rows} == pairs


def test_limits_of_a_variant_without_them_are_refused_by_name(monkeypatch, capsys):
    monkeypatch.setattr(case, "has_limits", lambda variant: False)
    assert main(["parity", "--variant", "gqa", "--window", "4"]) == 2
    assert "gqa has no windows, chunks or sinks, and window 4 was asked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--window", "0"], "--window (0) must be at least 1"),
        (["--window", "4", "--chunk", "4"], "sliding_window (4) and attention_chunk_size (4) exclude each other"),
        (["--sinks", "-1"], "sink_tokens (-1) must be an integer of at least 0"),
    ],
)
def test_limits_that_mean_nothing_are_refused_in_a_line(flags, says, capsys):
    assert main(["parity", "--variant", "gqa", *flags]) == 2
    assert says in capsys.readouterr().err


def test_the_reference_leaves_the_decoder_as_it_was():
    decoder = random_decoder(decoder_config("mla", GEOMETRY), dtype="bfloat16", device="cpu", seed=0)
    reference_logits(decoder, torch.ones(1, 3, dtype=torch.int64))
    assert decoder.dtype == torch.bfloat16


def test_a_forced_path_lasts_as_long_as_it_is_asked_for():
    decoder = random_decoder(decoder_config("mla", GEOMETRY), dtype="float32", device="cpu", seed=0)
    own = [layer.absorbed_below for layer in absorbing_layers(decoder)]
    with absorbed_below(decoder, 0):
        assert [layer.absorbed_below for layer in absorbing_layers(decoder)] == [0, 0]
    assert [layer.absorbed_below for layer in absorbing_layers(decoder)] == own
    assert own == [None, None]


def test_a_store_that_loses_a_token_fails_every_check_that_reads_it(monkeypatch, capsys):
    write = Store._write

    def forgetful(store, plan, record, entries):
        write(store, plan, record, entries)
        next(iter(store.tensors.values()))[:, :, 4] = 0

    monkeypatch.setattr(Store, "_write", forgetful)
    report = parity_report(["gqa"], GEOMETRY, dtypes=["float32"], backends=["sdpa"])
    failed = {row["check"] for row in report.rows if not row["ok"]}
    assert failed == {"cached", "chunked", "ragged", "padded", "rewound", "forked", "reused"}
    assert all("gqa full plain sdpa float32" in failure for failure in report.failures)


def test_a_failed_check_makes_the_exit_code_1_and_is_named(monkeypatch, capsys):
    monkeypatch.setitem(parity.TOLERANCES, "float32", 1e-12)
    small = ["--layers", "1", "--hidden-size", "32", "--vocab-size", "50", "--intermediate-size", "44"]
    assert main(["parity", "--variant", "mqa", "--dtype", "fp32", "--backend", "sdpa", "--format", "json", *small]) == 1
    printed = capsys.readouterr()
    rows = json.loads(printed.out)["rows"]
    assert any(not row["ok"] for row in rows)
    assert "failed: mqa full plain sdpa float32 cached" in printed.err


def test_a_control_that_passes_is_a_failure(monkeypatch):
    monkeypatch.setitem(parity.TOLERANCES, "float32", 1e3)
    report = parity_report(["mqa"], GEOMETRY, dtypes=["float32"], backends=["sdpa"])
    assert [row["check"] for row in report.rows if not row["ok"]] == ["negative-control"]
    assert "unseen" in report.failures[0]


def test_nan_is_a_failure_that_json_can_hold(monkeypatch):
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: x * torch.nan)
    report = parity_report(["mqa"], GEOMETRY, dtypes=["float32"], backends=["sdpa"])
    assert all(row["error"] is None and not row["ok"] for row in report.rows if row["peer"] is None)
    json.dumps(report.rows, allow_nan=False)


def test_without_transformers_its_checks_are_skipped_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(parity, "transformers_installed", lambda: False)
    report = parity_report(["mqa", "gqa"], GEOMETRY, dtypes=["float32"], backends=["sdpa"])
    assert all(row["check"] != "transformers" for row in report.rows)
    told = [line for line in capsys.readouterr().err.splitlines() if "transformers" in line]
    assert len(told) == 1
    assert "attn-variants[hf]" in told[0]


@pytest.mark.cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cell_is_right_on_a_gpu(variant):
    report = parity_report([variant], GEOMETRY, dtypes=["float32", "float16", "bfloat16"], device="cuda")
    assert report.failures == []
    assert {row["device"] for row in report.rows} == {"cuda"}
