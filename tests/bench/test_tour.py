"""The tour: one command shows sizes, parity and speed, in every format. Its parts are tested on their own."""

import json

import pytest

from attn_variants import VARIANTS
from attn_variants.bench import parity, throughput, tour
from attn_variants.bench.cli import main
from tests import tiny


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The same tour at tiny sizes."""
    monkeypatch.setattr(tour, "SMALL", tiny.GEOMETRY)
    monkeypatch.setattr(tour, "CONTEXTS", (4, 6))
    monkeypatch.setattr(tour, "PARITY_DTYPES", ("float32",))
    monkeypatch.setattr(throughput, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(throughput, "matmul_rates", lambda device, dtype: {dtype: 1e11})


def test_the_tour_is_four_sections_shown_and_recorded(capsys, tmp_path):
    outputs = [tmp_path / "tour.json", tmp_path / "tour.md"]
    assert main([word for path in outputs for word in ("--output", str(path))]) == 0
    printed = capsys.readouterr().out
    markdown = outputs[1].read_text()
    for title in ("KV cache", "Parity", "Speed", "Decode tokens/s"):
        assert title in printed
        assert title in markdown
    rows = json.loads(outputs[0].read_text())["rows"]
    names = ("variants", "models", "parity", "throughput")
    sections = {name: [row for row in rows if row["section"] == name] for name in names}
    assert sum(map(len, sections.values())) == len(rows)
    assert [row["variant"] for row in sections["variants"]] == list(VARIANTS)
    gqa = sections["variants"][list(VARIANTS).index("gqa")]
    assert gqa["bytes_formula"] == 32 * 2 * 8 * 128 * 2 * 8 * 8192
    assert len(sections["models"]) == 12
    assert all(row["ok"] for row in sections["parity"])
    assert {row["context"] for row in sections["throughput"]} == {4, 6}


def test_without_an_output_stdout_is_the_format_that_was_asked_for(capsys, monkeypatch):
    first = next(tour.sections("cpu", 0))
    monkeypatch.setattr(tour, "sections", lambda device, seed: iter([first]))
    assert main(["--format", "json"]) == 0
    assert [row["section"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["variants"] * len(VARIANTS)


def test_no_speed_is_shown_of_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(parity.TOLERANCES, "float32", 1e-12)
    assert main([]) == 1
    printed = capsys.readouterr()
    assert "Parity" in printed.out
    assert "Speed" not in printed.out
    assert "failed: " in printed.err


# Worked by hand from the published configs: layers, K, D and windows; bfloat16, 8 sequences of 8192 tokens.
IDEAL = {
    "llama-2-7b": 32 * 2 * 32 * 128 * 8192,
    "llama-3.1-405b": 126 * 2 * 8 * 128 * 8192,
    "falcon-7b": 32 * 2 * 1 * 64 * 8192,
    "mistral-7b-v0.1": 32 * 2 * 8 * 128 * 4096,
    "gemma-3-27b": 2 * 16 * 128 * (10 * 8192 + 52 * 1024),
    "gpt-oss-120b": 2 * 8 * 64 * (18 * 8192 + 18 * 128),
    "llama-4-scout": 48 * 2 * 8 * 128 * 8192,
    "deepseek-v2-lite": 27 * 576 * 8192,
    "deepseek-v3": 61 * 576 * 8192,
}


def test_published_models_are_right_windows_and_latents_included():
    sections = tour.sections("cpu", 0)
    next(sections)
    name, report = next(sections)
    assert name == "models"
    found = {row["subject"]: row["bytes_ideal"] for row in report.rows}
    assert {model: found[model] for model in IDEAL} == {model: 2 * 8 * numbers for model, numbers in IDEAL.items()}
