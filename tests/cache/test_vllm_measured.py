"""What vLLM 0.33.0 reserved, measured: every row of tests/data/vllm_reserved_bytes.json.gz to the byte."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from attn_variants.architectures import PRESETS
from attn_variants.cache import ModelCache, model_cache

DATA = json.loads(gzip.decompress((Path(__file__).parents[1] / "data" / "vllm_reserved_bytes.json.gz").read_bytes()))
POOL = 40 * 2**30
TOKENS = (1, 1000, 8192, 131072)


@functools.cache
def model(name: str) -> ModelCache:
    return model_cache(DATA["configs"][name])


def of_model(kind: str, name: str) -> list[dict[str, Any]]:
    return [row for row in DATA[kind] if row["model"] == name]


@pytest.mark.parametrize("name", DATA["configs"])
def test_every_measured_figure(name: str) -> None:
    assert of_model("rows", name)
    for row in of_model("rows", name):
        found = model(name).vllm(**row["args"])
        assert found.bytes_per_block == row["bytes_per_block"], row["args"]
        assert [found.planned_bytes(tokens) for tokens in TOKENS] == row["planned"], row["args"]
        assert [found.held_bytes(tokens) for tokens in TOKENS] == row["held"], row["args"]
        assert found.num_blocks(POOL) == row["num_blocks"], row["args"]
        assert found.cache_tokens(POOL) == row["cache_tokens"], row["args"]
        assert found.max_concurrency(POOL) == row["max_concurrency"], row["args"]


def published(preset: str) -> str | None:
    """The measured config.json of a preset, under the name its owner gives it."""
    suffixes = ("", "-instruct", "-thinking", "-base", "-base-8k", "-bf16", "-v0.1", "-17b-16e-instruct")
    names = [owner + preset + suffix for owner in ("", "nvidia-", "meta-") for suffix in suffixes]
    return next((name for name in DATA["configs"] if name.partition("--")[2].lower() in names), None)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if published(preset)])
def test_a_preset_leaves_nothing_out_that_vllm_goes_by(preset: str) -> None:
    name = published(preset)
    assert name is not None
    for row in of_model("rows", name):
        found = model_cache(preset).vllm(**row["args"])
        assert [found.planned_bytes(tokens) for tokens in TOKENS] == row["planned"], row["args"]
        assert [found.held_bytes(tokens) for tokens in TOKENS] == row["held"], row["args"]


def test_most_measured_models_are_presets() -> None:
    assert sum(published(preset) is not None for preset in PRESETS) >= len(DATA["configs"]) - 1


@pytest.mark.parametrize("name", dict.fromkeys(row["model"] for row in DATA["refusals"]))
def test_what_vllm_refused_is_refused_in_one_line(name: str) -> None:
    for row in of_model("refusals", name):
        with pytest.raises(ValueError, match=r"give|leave it out") as caught:
            model(name).vllm(**row["args"])
        assert "\n" not in str(caught.value)


def test_the_rows_are_all_there() -> None:
    assert (len(DATA["configs"]), len(DATA["rows"]), len(DATA["refusals"])) == (29, 1832, 135)
