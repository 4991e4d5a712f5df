"""Parity holds for every variant of the registry, and sees a fault where there is one."""

import json
from dataclasses import replace

import pytest
import torch

from attn_variants import VARIANTS
from attn_variants.bench import parity
from attn_variants.bench.case import decoder_config, random_decoder
from attn_variants.bench.cli import main
from attn_variants.bench.parity import parity_report
from attn_variants.bench.reference import absorbed_below, absorbing_layers, reference_logits
from attn_variants.cache.store import Store
from attn_variants.norm import RMSNorm
from tests import reference as textbook
from tests import tiny

CHECKS = {"uncached", "cached", "chunked", "ragged", "padded", "rewound", "negative-control"}
GEOMETRY = tiny.GEOMETRY


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
    assert failed == {"cached", "chunked", "ragged", "padded", "rewound"}
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
