"""The codec's error on real keys and values: there where SmolLM2 was fetched, and elsewhere how to get it."""

import json

import pytest

from attn_variants.bench import real_error
from attn_variants.bench.cli import main
from attn_variants.checkpoints.fetch import model_folder


@pytest.fixture(autouse=True)
def forgotten():
    real_error.real_errors.cache_clear()
    yield
    real_error.real_errors.cache_clear()


def test_without_the_model_the_column_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ATTN_VARIANTS_CACHE", str(tmp_path))
    assert main(["memory", "--variant", "gqa", "--codec", "int8", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["codec_error"] == "attn-bench fetch smollm2-135m"
    assert real_error.shown_errors(row["codec_error"]) == "attn-bench fetch smollm2-135m"


def test_plain_numbers_have_no_error_to_show(capsys):
    assert main(["memory", "--variant", "gqa", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["codec_error"] is None


def test_errors_are_shown_in_percent():
    assert real_error.shown_errors({"k": 0.01137, "v": 0.0071}) == "k 1.14%, v 0.71%"
    assert real_error.shown_errors("none: codec fp8-mla is for a record of latent and k_rope") == "none"


@pytest.mark.download
def test_finer_groups_and_more_bits_err_less_on_real_keys_and_values():
    try:
        model_folder("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    found = {codec: real_error.real_errors(codec) for codec in ("plain", "int8:32", "int8", "fp8", "int4")}
    for name in ("k", "v"):
        errors = [found[codec][name] for codec in found]
        assert errors == sorted(errors)
        assert errors[0] == 0
        assert 0.004 < errors[2] < 0.02 < errors[4] < 0.2
    assert real_error.real_errors("fp8-mla").startswith("none: codec fp8-mla is for a record of latent and k_rope")
