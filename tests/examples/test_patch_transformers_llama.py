from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_variants.cache import KVCache


@pytest.fixture(scope="module")
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("transformers")
    return example("patch_transformers_llama")


def test_logits_and_generated_tokens_stay_the_same(script: ModuleType) -> None:
    found = script.main()
    assert max(found[padding] for padding in ("unpadded", "left-padded", "right-padded")) < 1e-5
    assert found["greedy"]
    assert found["beam search"]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1, "head_dim": 8},
        {"num_key_value_heads": 6, "attention_bias": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ],
    ids=["one kv head", "biases", "linear", "llama3", "yarn"],
)
def test_logits_and_gradients_of_other_llamas(script: ModuleType, changes: dict[str, Any]) -> None:
    ids = torch.randint(1, 97, (2, 40))
    theirs, ours = script.tiny_llama(**changes), script.patch(script.tiny_llama(**changes))
    for model in (theirs, ours):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.copy_(torch.linspace(-1, 1, len(parameter)))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():
        assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, expected[name].grad)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_computes_what_it_computes_alone(script: ModuleType, side: str) -> None:
    model = script.patch(script.tiny_llama())
    short, long = torch.tensor([[8, 3]]), torch.tensor([[5, 6, 7, 9, 2]])
    padding = (3, 0) if side == "left" else (0, 3)
    ids = torch.cat([torch.nn.functional.pad(short, padding), long])
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=(ids != 0).long()).logits
        assert_close(together[0][ids[0] != 0], model(input_ids=short).logits[0])
        assert_close(together[1], model(input_ids=long).logits[0])


def test_keeps_the_checkpoints_parameter_names(script: ModuleType) -> None:
    assert script.patch(script.tiny_llama()).state_dict().keys() == script.tiny_llama().state_dict().keys()


@pytest.mark.parametrize("prompts", ["UNPADDED", "LEFT"])
def test_continues_from_a_cache(script: ModuleType, prompts: str) -> None:
    model, ids = script.patch(script.tiny_llama()), getattr(script, prompts)
    mask = (ids != 0).long()
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask).logits
        first = model(input_ids=ids[:, :5], attention_mask=mask[:, :5])
        rest = model(input_ids=ids[:, 5:], attention_mask=mask, cache=first.cache)
    assert_close(rest.logits, whole[:, 5:])


def test_padding_between_a_prompt_and_its_continuation_stays_hidden(script: ModuleType) -> None:
    model, ids = script.patch(script.tiny_llama()), script.RIGHT
    newest = torch.tensor([[17], [3]])
    mask = torch.cat([ids != 0, newest != 0], dim=1).long()
    with torch.no_grad():
        cache = model(input_ids=ids, attention_mask=mask[:, :7]).cache
        padded = model(input_ids=newest, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, cache=cache)
        alone = model(input_ids=torch.cat([ids[:1, :4], newest[:1]], dim=1))
    assert_close(padded.logits[0], alone.logits[0, -1:])


def test_runs_over_our_memory_too(script: ModuleType, example: Callable[[str], ModuleType]) -> None:
    adapter = example("transformers_generate_cache")
    theirs, ours = script.tiny_llama(), script.patch(script.tiny_llama())
    inputs = {"attention_mask": (script.LEFT != 0).long(), "max_new_tokens": 12}
    memory = KVCache(adapter.cache_specs(ours.config), batch=2, capacity=7 + 12 - 1)
    tokens = ours.generate(script.LEFT, **inputs, cache=adapter.TransformersKVCache(memory))
    assert torch.equal(tokens, theirs.generate(script.LEFT, **inputs))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"output_attentions": True}, "would ignore output_attentions"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 7])}, "would ignore cu_seq_lens_q"),
        ({"sliding_window": 4}, "would ignore sliding_window"),
    ],
)
def test_an_argument_it_would_ignore_is_refused(script: ModuleType, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script.patch(script.tiny_llama())(input_ids=script.UNPADDED, **inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 7, 7)}, r"shape \(1, 1, 7, 7\), this attention takes \(1, 7\)"),
        ({"attention_mask": torch.ones(1, 1)}, r"shape \(1, 1\), this attention takes \(1, 7\)"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])}, "count neither columns nor real tokens"),
    ],
)
def test_another_pattern_or_other_positions_are_refused(
    script: ModuleType, inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        script.patch(script.tiny_llama())(input_ids=script.UNPADDED, **inputs)


def test_inputs_without_a_name_are_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="by name"):
        script.patch(script.tiny_llama()).model(script.UNPADDED)


def test_a_static_cache_is_refused(script: ModuleType) -> None:
    model = script.patch(script.tiny_llama())
    with pytest.raises(ValueError, match="use a DynamicCache"):
        model.generate(script.UNPADDED, max_new_tokens=2, cache_implementation="static")


def test_dropout_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"attention_dropout \(0.1\)"):
        script.patch(script.tiny_llama(attention_dropout=0.1))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
