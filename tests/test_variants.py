"""Every variant in the registry, held to the reference in every way a cache can be used."""

import pytest
import torch

from attn_variants import VARIANTS, rope
from attn_variants.cache import assert_cache_shapes
from tests import reference
from tests.tiny import (
    GEOMETRY,
    LONG,
    SHORT,
    TOLERANCE,
    append,
    decoder,
    error,
    expected,
    kv_cache,
    same,
    sharpen,
    snapshot,
    static,
    variants,
)

FLOAT64 = TOLERANCE[torch.float64]


@variants
def test_a_variant_has_a_textbook(variant):
    assert variant in reference.VARIANTS, f"write the textbook of {variant} in tests/reference.py"


@variants
def test_a_module_alone_is_the_textbook(variant):
    config = VARIANTS[variant].config.from_geometry(GEOMETRY)
    module = sharpen(VARIANTS[variant].module(config).double())
    x = torch.randn(3, 9, GEOMETRY.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = module(x)
    for row in range(3):
        assert error(out[row], reference.VARIANTS[variant](reference.weights_of(module), config, x[row])) < FLOAT64


@variants
def test_a_decoder_is_the_textbook(variant):
    with torch.no_grad():
        logits = decoder(variant)(torch.tensor([LONG]))
    assert error(logits[0], expected(variant, LONG)) < FLOAT64


@variants
@static
def test_cached_is_uncached_token_by_token(variant, static):
    model = decoder(variant)
    store = kv_cache(model, static=static)
    other = LONG[::-1]
    for t in range(10):
        first, second = append(model, store, [LONG[t : t + 1], other[t : t + 1]])
        assert error(first[0], expected(variant, LONG)[t]) < FLOAT64
        assert error(second[0], expected(variant, other)[t]) < FLOAT64
    assert store.lengths.tolist() == [10, 10]
    assert_cache_shapes(store, model.cache_specs)


@variants
@static
@pytest.mark.parametrize("chunk", [1, 3, 4, 9, 10, 999])
def test_a_chunked_prompt_is_the_whole_prompt(variant, static, chunk):
    model = decoder(variant)
    store = kv_cache(model, batch=1, static=static)
    logits = torch.cat([append(model, store, [LONG[at : at + chunk]])[0] for at in range(0, 10, chunk)])
    assert error(logits, expected(variant, LONG)) < FLOAT64
    assert error(append(model, store, [[11]])[0], expected(variant, [*LONG, 11])[-1:]) < FLOAT64


@variants
@static
@pytest.mark.parametrize("chunk", [1, 3, 4, 9, 10, 999])
def test_a_left_padded_chunked_prompt_is_each_row_alone(variant, static, chunk):
    model = decoder(variant)
    store = kv_cache(model, static=static)
    ids = torch.tensor([[49, 49, 49, *SHORT], LONG])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10])
    with torch.no_grad():
        logits = torch.cat(
            [model(ids[:, at : at + chunk], store, mask=mask[:, at : at + chunk]) for at in range(0, 10, chunk)], 1
        )
    assert store.lengths.tolist() == [7, 10]
    assert error(logits[0, 3:], expected(variant, SHORT)) < FLOAT64
    assert error(logits[1], expected(variant, LONG)) < FLOAT64


MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "middle": [[1, 1, 0, 1, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "everywhere": [[0, 1, 1, 0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 1, 1, 0]],
    "whole row": [[1, 1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
}


@variants
@pytest.mark.parametrize("cached", ["no cache", "empty cache", "warm cache", "static cache"])
@pytest.mark.parametrize("where", MASKS)
def test_padding_anywhere_is_each_row_alone(variant, cached, where):
    model, mask = decoder(variant), torch.tensor(MASKS[where])
    store = None if cached == "no cache" else kv_cache(model, static=cached == "static cache")
    before = [[4, 30], [19, 6, 44]] if cached == "warm cache" else [[], []]
    if any(before):
        append(model, store, before)
    real = [LONG[: int(row.sum())] for row in mask]
    ids = torch.full((2, 10), 49)
    for row, sequence in enumerate(real):
        ids[row, mask[row] == 1] = torch.tensor(sequence, dtype=torch.long)
    with torch.no_grad():
        logits = model(ids, store, mask=mask)
    assert logits.isfinite().all()
    for row in range(2):
        if real[row]:
            alone = expected(variant, before[row] + real[row])[len(before[row]) :]
            assert error(logits[row, mask[row] == 1], alone) < FLOAT64
    if store is None:
        return
    for row, logits in enumerate(append(model, store, [[11], [22]])):
        assert error(logits, expected(variant, [*before[row], *real[row], [11, 22][row]])[-1:]) < FLOAT64


@variants
@static
def test_rows_of_different_length_are_each_row_alone(variant, static):
    model = decoder(variant)
    store = kv_cache(model, batch=3, static=static)
    said = [[], [], []]
    for step in (
        [LONG[:5], [], LONG[:2]],
        [[1], [2, 3, 4], []],
        [[5], [6], [7]],
        [[], SHORT[:2], []],
        [[8] * 3, [9], []],
    ):
        logits = append(model, store, step)
        for row, tokens in enumerate(step):
            said[row] = said[row] + tokens
            if tokens:
                assert error(logits[row], expected(variant, said[row])[-len(tokens) :]) < FLOAT64
        assert store.lengths.tolist() == [len(row) for row in said]


@variants
@static
def test_a_chunk_over_rows_with_no_some_and_much_context(variant, static):
    model = decoder(variant)
    store = kv_cache(model, batch=3, capacity=16, static=static)
    context = [[], LONG[:5], [*LONG, 20, 21]]
    append(model, store, context)
    for row, logits in enumerate(append(model, store, [LONG[:4], SHORT[:4], LONG[3:7]])):
        new = [LONG[:4], SHORT[:4], LONG[3:7]][row]
        assert error(logits, expected(variant, context[row] + new)[-4:]) < FLOAT64


@variants
@static
def test_some_rows_may_step_while_others_rest(variant, static):
    model = decoder(variant)
    store = kv_cache(model, batch=4, static=static)
    append(model, store, [LONG[:3], SHORT[:4]], rows=[3, 1])
    resting = snapshot(store)
    logits = append(model, store, [[11], [12, 13], [14]], rows=[1, 0, 3])
    assert error(logits[0], expected(variant, [*SHORT[:4], 11])[-1:]) < FLOAT64
    assert error(logits[1], expected(variant, [12, 13])) < FLOAT64
    assert error(logits[2], expected(variant, [*LONG[:3], 14])[-1:]) < FLOAT64
    assert store.lengths.tolist() == [2, 5, 0, 4]
    assert all(torch.equal(tensor[2], resting[name][2]) for name, tensor in store.tensors.items())


@variants
@static
def test_rewound_is_never_written(variant, static):
    model = decoder(variant)
    store = kv_cache(model, static=static)
    append(model, store, [LONG[:6], SHORT[:3]])
    store.rewind([4, 1])
    assert store.lengths.tolist() == [2, 2]
    for row, logits in enumerate(append(model, store, [[11, 12, 13]] * 2)):
        assert error(logits, expected(variant, [*(LONG, SHORT)[row][:2], 11, 12, 13])[2:]) < FLOAT64
    store.rewind(5)
    first, second = append(model, store, [LONG[:4], SHORT])
    assert error(first, expected(variant, LONG[:4])) < FLOAT64
    assert error(second, expected(variant, SHORT)) < FLOAT64


@variants
@static
def test_reordered_forked_and_freed_rows_are_sequences_of_their_own(variant, static):
    model = decoder(variant)
    store = kv_cache(model, batch=3, static=static)
    said = [LONG[:5], SHORT[:2], [40, 41, 42]]
    append(model, store, said)
    twin = store.fork([2, 0, 0, 1])
    store.reorder([1, 1, 0])
    store.free([2])
    for name, tensor in store.tensors.items():
        assert not tensor[2].any(), f"{name} of a freed row is not zero"
    for row, logits in enumerate(append(model, store, [[11], [22], [33]])):
        assert error(logits, expected(variant, [*(said[1], said[1], [])[row], [11, 22, 33][row]])[-1:]) < FLOAT64
    for row, logits in enumerate(append(model, twin, [[1], [2], [3], [4]])):
        assert error(logits, expected(variant, [*said[[2, 0, 0, 1][row]], row + 1])[-1:]) < FLOAT64
    assert store.lengths.tolist() == [3, 3, 1]
    assert twin.lengths.tolist() == [4, 6, 6, 3]


def poison(store, tokens):
    """1e4 in every slot that a mask must hide; NaN in the slots that a step of `tokens` does not reach."""
    lengths = store.lengths.tolist()
    for tensor in store.tensors.values():
        for row, length in enumerate(lengths):
            tensor[row, :, length:] = 1e4
        if not store.static:
            tensor[:, :, max(length + new for length, new in zip(lengths, tokens, strict=True)) :] = float("nan")


@variants
@static
def test_unused_memory_is_never_read(variant, static):
    model = decoder(variant)
    store, said = kv_cache(model, static=static), [[], []]
    for step in ([LONG[:3], SHORT[:5]], [[11], [12]], [[13, 14, 15], [16]], [[], [17, 18]], [[19], [20]]):
        poison(store, [len(tokens) for tokens in step])
        said = [row + tokens for row, tokens in zip(said, step, strict=True)]
        for row, logits in enumerate(append(model, store, step)):
            if step[row]:
                assert error(logits, expected(variant, said[row])[-len(step[row]) :]) < FLOAT64


@variants
def test_a_lone_row_touches_nothing_past_its_length(variant):
    model = decoder(variant)
    store, said = kv_cache(model, batch=1), []
    for step in (LONG[:3], [11], [12, 13], [14]):
        poison(store, [0])
        said = said + step
        assert error(append(model, store, [step])[0], expected(variant, said)[-len(step) :]) < FLOAT64


@variants
@static
def test_the_size_of_the_cache_changes_nothing(variant, static):
    model = decoder(variant)
    small, large = kv_cache(model, capacity=16, static=static), kv_cache(model, capacity=64, static=static)
    for step in ([LONG[:9]] * 2, [[11], [12]]):
        for a, b in zip(append(model, small, step), append(model, large, step), strict=True):
            assert error(a, b) < 1e-12


@variants
def test_what_is_cached_does_not_depend_on_what_comes_later(variant):
    model = decoder(variant)
    one, other = kv_cache(model, batch=1), kv_cache(model, batch=1)
    append(model, one, [LONG[:6]])
    append(model, other, [[*LONG[:5], 44]])
    for name, tensor in one.tensors.items():
        assert error(tensor[:, :, :5], other.tensors[name][:, :, :5]) < 1e-12
        assert not torch.equal(tensor[:, :, 5], other.tensors[name][:, :, 5])


@variants
def test_every_stored_tensor_is_read_by_its_own_row_alone(variant):
    """The negative control of all the above: a disturbed number changes the row that holds it and no other."""
    model = decoder(variant)
    store = kv_cache(model)
    append(model, store, [LONG[:5], SHORT[:5]])
    twin = store.fork([0, 1])
    fair = append(model, twin, [[11], [12]])
    for name in store.tensors:
        disturbed = store.fork([0, 1])
        disturbed.tensors[name][0, :, 2] += 0.5
        first, second = append(model, disturbed, [[11], [12]])
        assert error(first, fair[0]) > 1e-3, f"{name} is stored and not read"
        assert error(second, fair[1]) < 1e-12


@variants
@static
def test_tokens_beyond_the_capacity_are_refused_before_anything_changes(variant, static):
    model = decoder(variant)
    store = kv_cache(model, static=static)
    append(model, store, [LONG, SHORT])
    before = snapshot(store)
    message = r"row 0 holds 10 tokens and 7 more make 17, beyond the cache's capacity of 16"
    with pytest.raises(ValueError, match=message):
        append(model, store, [SHORT, SHORT])
    assert same(before, snapshot(store))
    append(model, store, [SHORT[:6], SHORT])
    assert store.lengths.tolist() == [16, 14]
    with pytest.raises(ValueError, match="17"):
        append(model, store, [[1], []])
    with pytest.raises(ValueError, match="17"):
        append(model, kv_cache(model), [LONG + SHORT, [1]])


@variants
def test_one_table_of_angles_turns_queries_and_keys_of_every_layer(variant, monkeypatch):
    asked, table = [], rope.rotary_table

    def recorded(config, dim, positions):
        asked.append(positions.tolist())
        return table(config, dim, positions)

    monkeypatch.setattr(rope, "rotary_table", recorded)
    model = decoder(variant, layers=3)
    store = kv_cache(model)
    append(model, store, [LONG[:4], SHORT[:2]])
    append(model, store, [[5], [6]])
    assert asked == [[[0, 1, 2, 3], [0, 1, -1, -1]], [[4], [2]]]


@variants
@pytest.mark.parametrize("inference", [torch.inference_mode, torch.no_grad])
def test_a_cache_made_outside_serves_inside_inference_mode(variant, inference):
    model = decoder(variant)
    store = kv_cache(model, batch=1)
    with inference():
        model(torch.tensor([LONG[:3]]), store)
        logits = model(torch.tensor([LONG[3:4]]), store)
    assert error(logits[0], expected(variant, LONG[:4])[3:]) < FLOAT64


@variants
def test_a_module_takes_a_store_of_its_own_declaration_only(variant):
    model = decoder(variant)
    others = [other for other in VARIANTS if decoder(other).cache_specs != model.cache_specs]
    assert others
    for other in others:
        store = kv_cache(decoder(other))
        before = snapshot(store)
        with pytest.raises(
            ValueError, match=r"the store holds .* the layer gives .*: make the KVCache from this decoder"
        ):
            append(model, store, [LONG, LONG])
        assert same(before, snapshot(store))
    narrow = kv_cache(model, dtype="bfloat16")
    before = snapshot(narrow)
    with pytest.raises(ValueError, match=r"in bfloat16, the layer gives float64: .*dtype=torch.float64"):
        append(model, narrow, [LONG, LONG])
    assert same(before, snapshot(narrow))


@variants
def test_unknown_arguments_are_refused(variant):
    module = decoder(variant).model.layers[0].self_attn
    with pytest.raises(TypeError, match="attention_mask"):
        module(torch.zeros(1, 2, GEOMETRY.hidden_size, dtype=torch.float64), attention_mask=None)
