from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_variants import CacheSpec, Entry, Record
from attn_variants.cache import KVCache, assert_cache_shapes


@pytest.fixture(scope="module")
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("transformers")
    return example("transformers_generate_cache")


@pytest.fixture(scope="module")
def found(script: ModuleType) -> Any:
    return script.main()


def test_every_model_and_mode_gives_the_same_tokens(found: Any) -> None:
    assert len(found) == 15
    different = [case for case, result in found.items() if not torch.equal(*result["tokens"])]
    assert different == []


def test_bytes_are_those_of_a_dynamic_cache_and_of_the_declaration(found: Any) -> None:
    for (_, mode), result in found.items():
        memory = result["cache"].kv_cache
        assert_cache_shapes(memory, memory.specs)
        if mode != "prompt lookup":
            assert result["our_bytes"] == result["dynamic_bytes"]


# 3 layers x 4 bytes x 2 rows x 18 columns, times 2 x 2 x 8, 2 x 3 x 12, and 20 + 4 numbers.
@pytest.mark.parametrize(("model", "numbers"), [("llama", 32), ("qwen3", 72), ("deepseek-v3", 24)])
def test_bytes_by_hand(found: Any, model: str, numbers: int) -> None:
    assert found[model, "greedy"]["our_bytes"] == 3 * 4 * 2 * 18 * numbers


def test_a_conversation_goes_on_in_the_same_memory(script: ModuleType) -> None:
    model = script.tiny_models()["deepseek-v3"]
    cache = adapted(script, model, batch=1, capacity=30)
    first = model.generate(script.REPETITIVE, cache=cache, max_new_tokens=5)
    second = torch.cat([first, torch.tensor([[17, 3]])], dim=1)
    tokens = model.generate(second, cache=cache, max_new_tokens=5)
    assert torch.equal(tokens, model.generate(second, max_new_tokens=5))
    assert cache.kv_cache.lengths.tolist() == [10 + 5 + 2 + 5 - 1]


def test_rows_can_be_repeated_selected_and_emptied(script: ModuleType) -> None:
    model = script.tiny_models()["llama"]
    ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
    cache = adapted(script, model, batch=2, capacity=5)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([True, False, True, True]))
        next_ids = torch.tensor([[1], [2], [3]])
        logits = model(next_ids, cache=cache).logits
        alone = model(torch.cat([ids[[0, 1, 1]], next_ids], dim=1)).logits
    assert_close(logits, alone[:, -1:])
    cache.reset()
    assert cache.get_seq_length() == 0


def test_it_tells_transformers_its_size(script: ModuleType) -> None:
    cache = adapted(script, script.tiny_models()["llama"], batch=1, capacity=9)
    assert (cache.get_max_length(), cache.get_seq_length(), cache.get_mask_sizes(4, 0)) == (9, 0, (4, 0))
    assert cache.is_croppable
    assert cache.is_initialized
    assert not cache.is_compileable


def test_a_pass_beyond_the_capacity_is_refused_and_one_that_fits_exactly_is_not(script: ModuleType) -> None:
    model = script.tiny_models()["llama"]
    cache = adapted(script, model, batch=1, capacity=12)
    # The last token is never fed: 10 + 3 - 1 = 12.
    model.generate(script.REPETITIVE, cache=cache, max_new_tokens=3)
    with torch.no_grad(), pytest.raises(ValueError, match="beyond the cache's capacity of 12"):
        model(torch.tensor([[1]]), cache=cache)
    assert cache.get_seq_length() == 12


def test_beams_without_a_row_each_are_refused(script: ModuleType) -> None:
    model = script.tiny_models()["llama"]
    with pytest.raises(ValueError, match=r"keeps 3 sequences .* has 1 rows: make it with batch=3"):
        model.generate(script.REPETITIVE, cache=adapted(script, model, 1, 12), num_beams=3, max_new_tokens=2)


def test_memory_that_transformers_would_misread_is_refused(script: ModuleType) -> None:
    specs = script.cache_specs(script.tiny_models()["llama"].config)
    ragged = KVCache(specs, batch=2, capacity=4)
    ragged.advance(ragged.step(2, 3, counts=[3, 1]))
    for memory in (ragged, KVCache(specs, batch=2, capacity=4, static=True)):
        with pytest.raises(ValueError, match=r"static=False and rows of one length, got .*(static=True|\[3, 1\])"):
            script.TransformersKVCache(memory)


def test_a_model_of_fewer_layers_is_refused(script: ModuleType) -> None:
    model = script.tiny_models()["llama"]
    specs = [*script.cache_specs(model.config)] * 2
    cache = script.TransformersKVCache(KVCache(specs, batch=1, capacity=12))
    with pytest.raises(ValueError, match="did not reach layer 5"):
        model.generate(script.REPETITIVE, cache=cache, max_new_tokens=2)


def test_an_interrupted_pass_can_be_forgotten(script: ModuleType) -> None:
    model = script.tiny_models()["llama"]
    cache, ids = adapted(script, model, batch=1, capacity=12), script.REPETITIVE
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(ids, cache=cache)
    hook.remove()
    with pytest.raises(ValueError, match=r"crop\(0\)"):
        model(ids, cache=cache)
    cache.crop(0)
    with torch.no_grad():
        assert_close(model(ids, cache=cache).logits, model(ids).logits)


def test_what_it_cannot_do_is_refused(script: ModuleType) -> None:
    cache = adapted(script, script.tiny_models()["llama"], batch=1, capacity=9)
    for call in ("crop", "reset", "reorder_cache", "offload", "prefetch"):
        with pytest.raises(NotImplementedError, match="call the whole cache's method"):
            getattr(cache.layers[0], call)()
    with pytest.raises(AttributeError, match="keys"):
        _ = cache.layers[0].keys
    with pytest.raises(ValueError, match="minus the number of tokens"):
        cache.crop(3)
    three = CacheSpec(records=tuple(Record.of(Entry(name, 1, 4)) for name in "abc"))
    with pytest.raises(ValueError, match="two tensors per layer, the KVCache's layers hold a, b, c"):
        script.TransformersKVCache(KVCache([three], batch=1, capacity=2))


def adapted(script: ModuleType, model: Any, batch: int, capacity: int) -> Any:
    return script.TransformersKVCache(KVCache(script.cache_specs(model.config), batch=batch, capacity=capacity))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
