"""--store and --codec: one meaning in every command, and what cannot be is refused before any work."""

import json
import math

import pytest

from attn_variants.bench.cli import main

TINY = ["--layers", "1", "--hidden-size", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"]
SMALL = [*TINY, "--vocab-size", "50", "--intermediate-size", "44"]


@pytest.fixture(autouse=True)
def nothing_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_VARIANTS_CACHE", str(tmp_path / "cache"))


def rows(capsys, *arguments):
    assert main([*arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_pages_waste_the_end_of_the_last_one_and_the_one_that_is_nobody_s(capsys):
    asked = ["memory", "--variant", "gqa", *TINY, "--batch", "3", "--context", "21", "--allocate", "--shapes"]
    (row,) = rows(capsys, *asked, "--store", "paged:8", "--codec", "int8")
    token = 2 * 2 * (8 + 2)
    assert (row["store"], row["codec"], row["policy"]) == ("paged:8", "int8", "allocated")
    assert row["bytes_used"] == row["bytes_ideal"] == 3 * 21 * token
    assert row["bytes_formula"] == row["bytes_allocated"] == (3 * 3 + 1) * 8 * token
    assert row["bytes_wasted"] == row["bytes_formula"] - row["bytes_used"]
    shapes = {tensor["name"]: (tensor["shape"], tensor["dtype"]) for tensor in row["tensors"]}
    assert shapes["layers.0.k"] == ([2, 80, 8], "int8")
    assert shapes["layers.0.k.scale"] == ([2, 80, 1], "bfloat16")
    assert sum(tensor["bytes"] for tensor in row["tensors"]) == row["bytes_formula"]


def test_a_full_store_of_a_windowed_model_wastes_what_is_out_of_sight_and_a_ring_nothing(capsys):
    wasted = {
        store: rows(capsys, "memory", "--model", "gemma-3-27b", "--context", "4096", "--store", store)[0][
            "bytes_wasted"
        ]
        for store in ("full", "ring", "paged:16")
    }
    assert wasted["full"] == 52 * 2 * 16 * 128 * (4096 - 1024) * 2
    assert wasted["ring"] == 0
    # 52 windows of 1024 begin anywhere in a page of 16, and 62 pools have a page that is nobody's.
    assert wasted["paged:16"] == (52 * 16 + 62 * 16) * 2 * 16 * 128 * 2


def test_a_codec_is_over_the_dtype_of_the_cache_and_a_format_over_the_model_s(capsys):
    for asked in (["--codec", "int8"], ["--kv-dtype", "int8"]):
        (row,) = rows(capsys, "memory", "--variant", "mla", "--context", "100", "--allocate", *asked)
        assert row["codec"] == "int8"
        assert row["bytes_formula"] == row["bytes_allocated"] == 32 * 100 * (512 + 2 + 64 * 2)
    (row,) = rows(capsys, "memory", "--variant", "mla", "--context", "100", "--codec", "int8", "--kv-dtype", "float32")
    assert row["bytes_formula"] == 32 * 100 * (512 + 2 + 64 * 4)


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("memory", ["--codec", "int5"], "unknown codec 'int5'; did you mean int8 or int4?"),
        (
            "memory",
            ["--codec", "int8:24"],
            "codec int8:24 takes groups of 24, which do not divide the 128 numbers of k",
        ),
        ("memory", ["--codec", "int8", "--kv-dtype", "int4"], "kv_dtype 'int4' is coded already"),
        ("memory", ["--codec", "fp8-mla", "--variant", "gqa"], "codec fp8-mla is for a record of latent and k_rope"),
        ("memory", ["--store", "paged:0"], "store 'paged:0': give pages of 1 to 256 tokens"),
        ("parity", ["--store", "rng"], "unknown store 'rng'; did you mean ring?"),
        ("parity", ["--store", "paged:300"], "give pages of 1 to 256 tokens"),
        ("parity", ["--codec", "plain,int8:24"], "do not divide the 32 numbers of k"),
        ("parity", ["--codec", "fp8-mla"], "mha: codec fp8-mla is for a record of latent and k_rope"),
        ("throughput", ["--store", "full,ringg"], "unknown store 'ringg'"),
        ("throughput", ["--store", "paged:16", "--compile"], "has no fixed shapes"),
        ("throughput", ["--codec", ","], "--codec ',' names nothing"),
        ("generate", ["--model", "smollm2-135m", "--prompt", "x", "--codec", "int9"], "unknown codec 'int9'"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(capsys, command, flags, message):
    assert main([command, *flags]) == 2
    assert message in capsys.readouterr().err


def test_parity_holds_on_every_store_and_codec_asked_for(capsys):
    asked = ["parity", "--variant", "gqa", "--dtype", "float32", "--backend", "reference", *SMALL]
    found = rows(capsys, *asked, "--store", "full,ring,paged:5", "--codec", "plain,int8,int4,fp8")
    assert {(row["store"], row["codec"]) for row in found} == {
        (store, codec) for store in ("full", "ring", "paged:5") for codec in ("plain", "int8", "int4", "fp8")
    }
    for row in found:
        assert row["ok"], row
        # A step of 1 / 127, of 1 / 15 and of 2 ** -4 of a number, which attention averages.
        most = {"plain": 1e-5, "int8": 0.04, "int4": 0.35, "fp8": 0.12}[row["codec"]]
        assert row["tolerance"] == most if row["codec"] == "plain" else most / 10 < row["tolerance"] < most


def test_throughput_measures_each_pair_and_says_which(capsys):
    asked = ["throughput", "--variant", "gqa", "--context", "24", "--repeats", "1", "--warmup", "1", *SMALL]
    found = rows(capsys, *asked, "--store", "full,paged:16", "--codec", "plain,int8")
    held = {(row["store"], row["codec"]): row for row in found if row["phase"] == "decode"}
    assert len(held) == 4
    slots = 24 + 8
    assert held["full", "plain"]["cache_bytes"] == slots * 2 * 2 * 8 * 4
    assert held["full", "int8"]["cache_bytes"] == slots * 2 * 2 * (8 + 2)
    assert held["paged:16", "int8"]["cache_bytes"] == (math.ceil(slots / 16) + 1) * 16 * 2 * 2 * (8 + 2)
    assert held["paged:16", "int8"]["cache_bytes_read"] == 24 * 2 * 2 * (8 + 2)
