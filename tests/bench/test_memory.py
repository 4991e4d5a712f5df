"""Sizes, worked by hand: what a formula says, what a store reserves and what is allocated are the same bytes."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from attn_variants.bench import measured as measured_module
from attn_variants.bench import memory as module
from attn_variants.bench.cli import main

LLAMA_3_8B = ["--batch", "8", "--context", "8192", "--kv-dtype", "bfloat16"]


def rows(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> list[dict[str, Any]]:
    assert main(["memory", *arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_every_variant_at_llama_3_8bs_sizes(capsys):
    found = {row["variant"]: row for row in rows(capsys, LLAMA_3_8B)}
    per_token_and_layer = {
        "mha": 2 * 32 * 128,
        "gqa": 2 * 8 * 128,
        "mqa": 2 * 1 * 128,
        "mla": 512 + 64,
        "mla-expanded": 32 * (128 + 64 + 128),
    }
    assert found.keys() >= per_token_and_layer.keys()
    for variant, numbers in per_token_and_layer.items():
        row = found[variant]
        assert row["bytes_per_token"] == 32 * numbers * 2
        assert row["bytes_formula"] == row["bytes_ideal"] == 32 * numbers * 2 * 8 * 8192
        assert row["ratio_to_mha"] == numbers / (2 * 32 * 128)
    assert found["gqa"]["bytes_formula"] == 8_589_934_592
    assert found["mla"]["bytes_formula"] == 2_415_919_104


def test_a_row_has_the_fields_that_readers_rely_on(capsys):
    (row,) = rows(capsys, ["--variant", "mla", "--layers", "3", "--batch", "2", "--context", "5", "--kv-dtype", "fp32"])
    assert row["entries"] == [
        {"name": "latent", "heads": 1, "dim": 512, "dtype": "float32", "layers": 3},
        {"name": "k_rope", "heads": 1, "dim": 64, "dtype": "float32", "layers": 3},
    ]
    expected = {
        "subject": "mla",
        "variant": "mla",
        "layers": 3,
        "batch": 2,
        "context": 5,
        "kv_dtype": "float32",
        "store": "full",
        "codec": "plain",
        "policy": "allocated",
        "tp": 1,
        "bytes_per_token": 3 * 576 * 4,
        "bytes_ideal": 3 * 576 * 4 * 5 * 2,
        "bytes_formula": 3 * 576 * 4 * 5 * 2,
        "bytes_allocated": None,
        "allocated_on": None,
    }
    assert expected.items() <= row.items()


def test_head_dim_is_what_was_asked_for_not_hidden_size_over_heads(capsys):
    sizes = ["--hidden-size", "2560", "--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--layers", "36"]
    (row,) = rows(capsys, ["--variant", "gqa", *sizes])
    assert row["bytes_per_token"] == 147_456


def test_shapes_lists_each_stored_tensor_and_they_add_up(capsys):
    sizes = ["--layers", "2", "--batch", "3", "--context", "7", "--head-dim", "10", "--heads", "6", "--kv-heads", "2"]
    (row,) = rows(capsys, ["--variant", "gqa", "--shapes", *sizes])
    wanted = {"shape": [3, 2, 7, 10], "dtype": "bfloat16", "bytes": 3 * 2 * 7 * 10 * 2}
    assert row["tensors"] == [{"name": f"layers.{layer}.{name}"} | wanted for layer in range(2) for name in ("k", "v")]
    assert sum(tensor["bytes"] for tensor in row["tensors"]) == row["bytes_formula"]


def test_shapes_are_shown_in_a_table_of_their_own(capsys):
    assert main(["memory", "--variant", "mla", "--shapes", "--layers", "2", "--context", "9"]) == 0
    printed = capsys.readouterr().out
    assert "layers.1.kv" in printed
    assert "1 x 1 x 9 x 576" in printed


def test_a_window_bounds_what_is_read_but_not_what_a_full_store_reserves(capsys):
    # Mistral 7B v0.1: 32 layers, 8 KV heads of 128, a window of 4096 everywhere.
    (row,) = rows(capsys, ["--model", "mistral-7b-v0.1", "--context", "8192"])
    assert row["bytes_ideal"] == 32 * 2 * 8 * 128 * 2 * 4096
    assert row["bytes_formula"] == 32 * 2 * 8 * 128 * 2 * 8192
    assert row["bytes_per_token"] == 0
    assert row["windowed_layers"] == row["layers"] == 32


def test_models_are_sized_from_their_own_config(capsys, tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"num_hidden_layers": 3, "head_dim": 32, "intermediate_size": 96, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = rows(capsys, ["--model", str(tmp_path), "--model", "deepseek-v3", "--batch", "2", "--context", "10"])
    assert [row["subject"] for row in found] == [str(tmp_path), "deepseek-v3"]
    assert [row["bytes_per_token"] for row in found] == [3 * 2 * 2 * 32 * 2, 61 * 576 * 2]
    assert all(row["variant"] is None and row["ratio_to_mha"] is None for row in found)


def test_allocate_makes_the_store_and_finds_the_formulas_bytes(capsys):
    sizes = ["--layers", "2", "--batch", "2", "--context", "11", "--kv-dtype", "float16"]
    for row in rows(capsys, ["--allocate", "--device", "cpu", *sizes]):
        assert row["bytes_allocated"] == row["bytes_formula"]
        assert row["allocated_on"] == "cpu"


def test_above_one_gibibyte_the_store_is_made_on_the_meta_device_and_the_row_says_so(capsys):
    # One row per 1024 bytes: 2^20 tokens are exactly 1 GiB, and one more token is above it.
    sizes = ["--variant", "mqa", "--layers", "2", "--head-dim", "128", "--allocate", "--device", "cpu"]
    (row,) = rows(capsys, [*sizes, "--context", str(2**20 + 1)])
    assert row["allocated_on"] == "meta"
    assert row["bytes_allocated"] == row["bytes_formula"] == 2**30 + 1024


def test_a_store_that_differs_from_its_formula_fails_the_command(capsys, monkeypatch):
    monkeypatch.setattr(module, "_allocated", lambda layers, question, device: 2049)
    assert main(["memory", "--allocate", "--variant", "mqa", "--layers", "1", "--context", "4"]) == 1
    assert "failed: mqa: allocated 2049 bytes, the formula says 2048" in capsys.readouterr().err


def test_a_model_that_no_store_holds_is_sized_and_the_row_says_why_nothing_is_reserved(capsys):
    (row,) = rows(capsys, ["--model", "deepseek-v4-flash", "--context", "1000"])
    assert row["policy"] == "ideal"
    assert row["bytes_formula"] is None
    assert "layer 2 pools every 4 tokens into one, which no store holds" in row["note"]
    assert row["bytes_ideal"] == row["bytes_by_policy"]
    assert main(["memory", "--model", "deepseek-v4-flash", "--policy", "allocated"]) == 2
    assert "deepseek-v4-flash: layer 2 pools every 4 tokens" in capsys.readouterr().err


def test_states_are_reserved_beside_the_tokens(capsys):
    (row,) = rows(capsys, ["--model", "qwen3-next-80b-a3b", "--context", "1000"])
    assert row["policy"] == "allocated"
    assert row["bytes_formula"] == row["bytes_ideal"] == row["bytes_fixed"] + 1000 * row["bytes_per_token"]


def test_a_policy_answers_its_own_question(capsys):
    asked = ["--model", "mistral-7b-v0.1", "--context", "8192"]
    by_policy = {
        words: rows(capsys, [*asked, "--policy", *words.split()])[0]["bytes_by_policy"]
        for words in ("ideal", "allocated", "transformers", "transformers --store static")
    }
    token = 131_072
    assert by_policy == {
        "ideal": 4096 * token,
        "allocated": 8192 * token,
        "transformers": 4095 * token,
        "transformers --store static": 4096 * token,
    }


def test_ranks_and_formats(capsys):
    asked = ["--model", "llama-3.1-70b", "--context", "1000", "--kv-dtype", "fp8"]
    (one,), (rank,) = (rows(capsys, [*asked, "--tp", tp]) for tp in ("1", "16"))
    assert one["bytes_ideal"] == 80 * 2 * 8 * 128 * 1000
    assert rank["bytes_ideal"] == 80 * 2 * 1 * 128 * 1000
    assert (one["bytes_over_ranks"], rank["bytes_over_ranks"]) == (None, 2 * one["bytes_ideal"])


def test_a_budget_holds_what_fits_and_no_more(capsys):
    """Llama-3.1-8B: 131072 bytes a token."""
    asked = ["--model", "llama-3.1-8b", "--batch", "4", "--context", "1024", "--budget"]
    (row,) = rows(capsys, [*asked, "1GiB"])
    assert (row["budget"], row["max_batch"], row["max_context"]) == (2**30, 8, 2048)
    (row,) = rows(capsys, [*asked, "1GB"])
    assert (row["budget"], row["max_batch"], row["max_context"]) == (10**9, 7, 1907)
    (row,) = rows(capsys, [*asked, str(2**30 + 2**20), "--weights", "1MiB"])
    assert (row["weights"], row["max_batch"], row["max_batch_by_context"]["4096"]) == (2**20, 8, 2)


def test_counted_weights_say_what_they_are_made_of(capsys):
    asked = ["--model", "smollm2-135m", "--budget", "1GiB", "--weights", "auto", "--context", "1000"]
    (row,) = rows(capsys, asked)
    assert row["fitting"][0] == (
        "weights: 134,515,008 numbers x 2 B (bfloat16) = 269,030,016; of a quantised checkpoint give --weights BYTES"
    )


@pytest.mark.parametrize(
    ("words", "most", "sums"),
    [
        (
            "--budget 1GB --weights 2GB --tp 2 --pp 1 --context 1000",
            0,
            [
                "weights 2,000,000,000 / (tp 2 x pp 1) = 1,000,000,000 (953.7 MiB)",
                "left: budget 1,000,000,000 - weights 1,000,000,000 = 0 (0 B)",
                "does not fit: a sequence of 1,000 tokens 65,536,000 (62.5 MiB) is 62.5 MiB over what is left",
            ],
        ),
        (
            "--budget 1GiB --weights 2GiB --dp 2",
            0,
            [
                "weights 2,147,483,648 / (tp 1 x pp 1) = 2,147,483,648 (2 GiB); every rank of dp 2 holds that share",
                "left: budget 1,073,741,824 - weights 2,147,483,648 = -1,073,741,824 (-1 GiB)",
                "does not fit: the weights alone are 1 GiB over the budget",
            ],
        ),
        (
            "--budget 1GiB --context 1024 --dp 2",
            16,
            ["a sequence of 1,024 tokens 134,217,728 (128 MiB): 8 fit on each of 2 ranks of dp in 1,073,741,824"],
        ),
    ],
)
def test_a_no_shows_the_same_sum_as_a_yes(capsys, words, most, sums):
    (row,) = rows(capsys, ["--model", "llama-3.1-8b", *words.split()])
    assert (row["policy"], row["max_batch"], row["fitting"]) == ("ideal", most, sums)
    assert main(["memory", "--model", "llama-3.1-8b", *words.split()]) == 0
    shown = capsys.readouterr().out
    assert "most sequences" in shown
    assert sums[-1] in shown


def test_figures_of_a_row_answer_the_question_it_names(capsys):
    """Mistral-7B-v0.1 keeps a window of 4096; without a policy, what fits and what all ranks hold is the ideal."""
    (row,) = rows(capsys, ["--model", "mistral-7b-v0.1", "--tp", "2"])
    assert (row["policy"], row["bytes_over_ranks"]) == ("ideal", 2 * row["bytes_by_policy"])
    (row,) = rows(capsys, ["--model", "mistral-7b-v0.1", "--tp", "2", "--store", "full"])
    assert (row["policy"], row["bytes_over_ranks"]) == ("allocated", 2 * row["bytes_formula"])


def test_the_arithmetic_is_shown_on_request(capsys):
    (row,) = rows(capsys, ["--model", "deepseek-v3", "--context", "131072", "--explain"])
    assert row["explanation"][-1] == "1 sequence x 9,210,691,584 = 9,210,691,584 bytes (8.578 GiB)"
    assert main(["memory", "--model", "deepseek-v3", "--explain"]) == 0
    assert "61 x (latent 1 x 512 x 2 B x 8,192 tokens" in capsys.readouterr().out


def test_subjects_are_compared_with_the_first(capsys):
    assert main(["compare", "mha", "mla", "deepseek-v3", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert [row["subject"] for row in found] == ["mha", "mla", "deepseek-v3"]
    assert [row["ratio_to_first"] for row in found] == [1, 576 / 8192, 61 * 576 / (32 * 8192)]
    assert main(["compare", "mistral-7b-v0.1", "qwen3-next-80b-a3b", "--format", "json"]) == 0
    assert {row["policy"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"ideal"}


def test_every_preset_is_listed_with_its_source(capsys):
    assert main(["models", "--format", "json"]) == 0
    found = {row["model"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert len(found) >= 60
    assert found["llama-3.1-8b"]["bytes_per_token"] == 131_072
    assert all(row["source"] for row in found.values())


def test_transformers_own_model_is_run_and_has_to_hold_what_its_policy_says(capsys, monkeypatch):
    pytest.importorskip("transformers")
    asked = ["--model", "smollm2-135m", "--context", "20", "--measure"]
    (row,) = rows(capsys, asked)
    assert row["bytes_measured"] == row["bytes_transformers"] == 30 * 2 * 3 * 64 * 2 * 20
    assert (row["measured_on"], row["parameters"]) == ("meta", 134_515_008)
    found = measured_module.Measured(7, "meta", None)
    monkeypatch.setattr(measured_module, "measured_bytes", lambda *given, **more: found)
    assert main(["memory", *asked]) == 1
    assert "failed: smollm2-135m: transformers holds 7 bytes, its policy says 460800" in capsys.readouterr().err
    assert main(["memory", "--variant", "gqa", "--measure"]) == 2
    assert "--measure runs published models; give --model" in capsys.readouterr().err


def test_what_is_pooled_says_of_how_many_tokens(capsys):
    assert main(["memory", "--model", "deepseek-v4-flash"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "per 4 tokens" in shown
    assert "per 128 tokens" in shown
    (row,) = rows(capsys, ["--model", "deepseek-v4-flash"])
    assert {entry.get("per") for entry in row["entries"]} == {None, 4, 128}
