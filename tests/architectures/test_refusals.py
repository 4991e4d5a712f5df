"""What a config.json may not say, each refused in one line that names the field."""

from typing import Any

import pytest

from attn_variants.architectures import architecture
from attn_variants.architectures.families import FAMILIES, UNNAMED
from attn_variants.architectures.family import COMMON, Family

TINY: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize("model_type", ["lama", "t5", 7, ["llama"]])
def test_an_unknown_model_type_is_refused_and_never_priced(model_type: Any) -> None:
    with pytest.raises(ValueError, match=r"^config: model_type"):
        architecture({**TINY, "model_type": model_type})


def test_an_unknown_model_type_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"model_type 'qwen3mo' is not known; did you mean .*qwen3_moe"):
        architecture({**TINY, "model_type": "qwen3mo"})


def test_an_unknown_kind_of_layer_is_refused() -> None:
    kinds = ["full_attention", "sliding_atention", "full_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"layer_types\[1\] is 'sliding_atention'.*did you mean sliding_attention"):
        architecture({**TINY, "model_type": "llama", "layer_types": kinds})


@pytest.mark.parametrize("kinds", ["full_attention", [1, 2, 3, 4], {"0": "full_attention"}])
def test_layer_types_are_a_list_of_names(kinds: Any) -> None:
    with pytest.raises(ValueError, match=r"layer_types .* must be a list"):
        architecture({**TINY, "model_type": "llama", "layer_types": kinds})


def test_layer_types_and_the_number_of_layers_must_agree() -> None:
    with pytest.raises(ValueError, match="layer_types names 3 layers, but num_hidden_layers is 4"):
        architecture({**TINY, "model_type": "llama", "layer_types": ["full_attention"] * 3})


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 2**40, "4", True, [4], float("nan")])
def test_a_size_is_a_positive_integer_of_sane_size(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} \\(.*\\) must be a positive integer"):
        architecture({**TINY, "model_type": "llama", field: value})


def test_ten_thousand_layers_are_too_many() -> None:
    with pytest.raises(ValueError, match=r"num_hidden_layers \(10001\) must be at most 10000"):
        architecture({**TINY, "num_hidden_layers": 10_001})


@pytest.mark.parametrize("model_type", [{}, {"model_type": "llama"}, {"model_type": "qwen2"}, {"model_type": "gpt2"}])
def test_a_hidden_size_that_heads_do_not_divide_needs_a_head_dim(model_type: dict[str, str]) -> None:
    config = {**TINY, "hidden_size": 100, "num_attention_heads": 6, "num_key_value_heads": 6, **model_type}
    with pytest.raises(ValueError, match=r"hidden_size \(100\) must be a multiple of num_attention_heads \(6\)"):
        architecture(config)


def test_query_heads_come_in_whole_groups() -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"):
        architecture({**TINY, "model_type": "llama", "num_key_value_heads": 3})


@pytest.mark.parametrize("field", list(TINY))
def test_without_a_model_type_sizes_have_no_defaults(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is missing"):
        architecture({name: value for name, value in TINY.items() if name != field})


@pytest.mark.parametrize("given", [{"9": {}}, {"x": {}}, {"1": 3}, [1]])
def test_sizes_of_a_layer_that_is_not_there_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"per_layer_config .*must be an object"):
        architecture({**TINY, "model_type": "llama", "per_layer_config": given})


def test_an_encoder_with_its_decoder_is_refused_and_the_decoder_alone_is_read() -> None:
    bart = {"model_type": "bart", "is_encoder_decoder": True, "decoder_layers": 3, "encoder_layers": 5}
    assert architecture(bart).num_hidden_layers == 3
    assert architecture({**bart, "architectures": ["BartForCausalLM"]}).num_hidden_layers == 3
    with pytest.raises(ValueError, match=r"architectures \['BartForConditionalGeneration'\] .* encoder and a decoder"):
        architecture({**bart, "architectures": ["BartForConditionalGeneration"]})


GARBAGE = [None, [], {}, "x", -1, 1.5, True, [None]]


def refusal(config: dict[str, Any]) -> str:
    """What is said against a config, or nothing; any other error is a fault."""
    try:
        architecture(config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model_type", [*FAMILIES, None])
def test_whatever_a_field_holds_the_answer_is_an_architecture_or_one_line(model_type: str | None) -> None:
    found = FAMILIES[model_type] if model_type else UNNAMED
    fields = [*found.fields, *COMMON, *found.aliases] if isinstance(found, Family) else [found.key]
    for field in [*fields, "model_type", "is_encoder_decoder"]:
        for value in GARBAGE:
            config: dict[str, Any] = {**TINY, "model_type": model_type} if model_type else dict(TINY)
            place, _, last = field.rpartition(".")
            config[place or field] = {last: value} if place else value
            assert "\n" not in refusal(config), (field, value)


@pytest.mark.parametrize("field", ["sliding_window", "head_dim", "num_key_value_heads", "attention_chunk_size"])
def test_text_in_a_config_is_never_taken_for_a_formula(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} \('2 \* hidden_size'\) must be a positive integer"):
        architecture({**TINY, "model_type": "llama", field: "2 * hidden_size"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gemma3n_text", "num_kv_shared_layers": 35},
            r"no layer before layer 0 is 'sliding_attention', .* num_kv_shared_layers = 35\)",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32, "sliding_window": None},
            r"its window is null: give one \(use_sliding_window = False, sliding_window = None\)",
        ),
        ({"model_type": "dbrx", "attn_config": [1]}, r"attn_config \(\[1\]\) must be an object"),
        (
            {"model_type": "gemma3", "hidden_size": 5, "text_config": {"hidden_size": 1024}},
            r"hidden_size \(5\) and text_config\.hidden_size \(1024\) contradict each other",
        ),
        (
            {"model_type": "gemma3", "sliding_window": 5, "text_config": {"sliding_window": 1024}},
            r"sliding_window \(5\) and text_config\.sliding_window \(1024\) contradict each other",
        ),
    ],
)
def test_the_field_at_fault_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        architecture(config)


@pytest.mark.parametrize("source", [{"model_type": "x" * 100_000}, "x" * 5_000])
def test_a_message_stays_short_however_long_the_name(source):
    with pytest.raises(ValueError, match="x" * 50) as refused:
        architecture(source)
    assert len(str(refused.value)) < 400
