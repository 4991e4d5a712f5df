"""Caches of transformers' own models, run and read off, against the formulas."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from attn_variants.architectures import parameters
from attn_variants.bench import measured
from attn_variants.bench.measured import measured_bytes
from attn_variants.cache import model_cache

DATA = Path(__file__).parents[1] / "data" / "transformers_cache_bytes.jsonl.gz"
SOME = [
    *("cohere2", "cpmant", "deepseek_v3", "deepseek_v32", "deepseek_v4", "falcon", "falcon_mamba", "gemma3n_text"),
    *("gemma4_text", "gpt2", "gpt_oss", "inkling_text", "kimi_k25", "lfm2_moe", "llama", "llama4_text"),
    *("longcat_flash", "mamba2", "mistral", "mixtral", "qwen2", "qwen3_next", "recurrent_gemma", "step3p7"),
    *("xlm", "xlstm", "zamba2", "zaya"),
]
"""Full, sliding, chunked and compressed layers, latents, indexers, states, shared caches, loops; on meta and CPU."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()


def last_rows() -> dict[str, dict[str, Any]]:
    """The last measured row of each type, with the configs that save_pretrained writes."""
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        found = {row["model_type"]: row for row in map(json.loads, lines)}
    return {name: {**row, "config": {**row["config"], "model_type": name}} for name, row in found.items()}


ROWS = last_rows()


def ours(row: dict[str, Any], context: int, dtype: str) -> int:
    return model_cache(row["config"]).bytes(context=context, batch=row["batch"], kv_dtype=dtype, policy="transformers")


@pytest.mark.parametrize("model_type", SOME)
def test_a_measured_cache_has_the_bytes_of_the_formula(model_type: str) -> None:
    row = ROWS[model_type]
    context = row["prompt_len"] + row["decode_steps"]
    found = measured_bytes(row["config"], batch=row["batch"], context=context, dtype=row["dtype"])
    assert found.bytes == ours(row, context, row["dtype"]) == row["total_bytes_end"]


@pytest.mark.slow
def test_every_type_in_the_data_but_two_runs_and_has_the_bytes_of_the_formula() -> None:
    refused, where = [], []
    for name, row in ROWS.items():
        context = row["prompt_len"] + row["decode_steps"]
        try:
            found = measured_bytes(row["config"], batch=row["batch"], context=context)
        except ValueError as error:
            refused.append(str(error).partition(" (")[0])
        else:
            where.append(found.how)
            assert found.bytes == ours(row, context, "bfloat16"), name
    assert refused == [
        "transformers has no decoder of model_type 'musicgen_decoder', so there is nothing to measure",
        # Its positions stay in float32, which do not mix with bfloat16.
        "transformers runs xlnet neither on the meta device",
    ]
    assert (where.count("meta"), where.count("cpu")) == (132, 12)


@pytest.mark.parametrize("context", [1, 2, 9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_that_follow_the_model_are_taken_in_the_dtype_asked_for(dtype: str, context: int) -> None:
    """A hybrid: its convolutions and keys are in the model's dtype, its states stay in float32; a window of 8 fills."""
    for name in ("qwen3_next", "mistral"):
        row = ROWS[name]
        found = measured_bytes(row["config"], batch=3, context=context, dtype=dtype)
        assert found.bytes == ours({**row, "batch": 3}, context, dtype), name
        assert found.how == "meta"


def test_a_preset_is_measured_at_its_full_size_on_the_meta_device() -> None:
    found = measured_bytes("llama-3.1-8b", batch=2, context=4096)
    assert found.how == "meta"
    assert found.bytes == 2 * 4096 * 131_072
    assert found.parameters == parameters("llama-3.1-8b") == 8_030_261_248


def test_what_runs_on_the_cpu_is_shrunk_but_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whole it would take 64 MB.
    monkeypatch.setattr(measured, "LARGEST_ON_CPU", 1_000_000)
    small = ROWS["dbrx"]
    ffn = {**small["config"]["ffn_config"], "ffn_hidden_size": 4096}
    config = {**small["config"], "vocab_size": 50_000, "ffn_config": ffn}
    found = measured_bytes(config, batch=1, context=10)
    assert found.how == "cpu"
    assert found.bytes == ours({"config": config, "batch": 1}, 10, "bfloat16")
    assert found.parameters is not None
    # In 8 layers 3 matrices of each of 4 experts, and embedding and head.
    assert found.parameters - 310_336 == 8 * 3 * 4 * 64 * (4096 - 32) + 2 * 64 * (50_000 - 96)


def test_what_would_not_fit_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "LARGEST_ON_CPU", 1000)
    with pytest.raises(ValueError, match=r"^dbrx does not run on the meta device \(.*\), and on the CPU it would take"):
        measured_bytes(ROWS["dbrx"]["config"], batch=1, context=10)


def test_a_model_that_transformers_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^transformers has no decoder of model_type 'kimi_k2', so there is nothing"):
        measured_bytes("kimi-k2", batch=1, context=10)


def test_without_transformers_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "transformers_installed", lambda: False)
    with pytest.raises(ValueError, match=r"^measuring needs transformers: pip install 'attn-variants\[hf\]'") as caught:
        measured_bytes("llama-3.1-8b", batch=1, context=10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("batch", "context"), [(0, 10), (1, 0)])
def test_sizes_below_one_are_refused(batch: int, context: int) -> None:
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        measured_bytes("llama-3.1-8b", batch=batch, context=context)
