"""A cache in a file: what is saved goes on in any layout as the original does, and nothing else is loaded."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from attn_variants import CacheSpec, Decoder, DecoderConfig, Entry, Record, State
from attn_variants.cache import KVCache
from attn_variants.cache.quantize import CODECS, codec_named
from tests.tiny import LONG, SHORT, TOLERANCE, append, decoder, error, kv_cache, same, sharpen, snapshot, variants

STORES = ("full", "ring", "paged:4", "paged:7")
FOLLOWING = [[6, 1], [44, 9], [2, 2], [11, 30]]
stores = pytest.mark.parametrize("store", STORES)


class Windowed(Decoder):
    """A decoder whose layers see 5 tokens, and the first two."""

    @property
    def cache_specs(self):
        return tuple(replace(spec, window=5, sinks=2) for spec in super().cache_specs)


def windowed():
    model = Windowed(decoder("gqa").config)
    model.load_state_dict(decoder("gqa").state_dict())
    return model.double().eval()


def holds(codec, model):
    """Whether this codec stores what the model remembers."""
    try:
        for spec in model.cache_specs:
            for record in spec.records:
                codec_named(codec).parts(record, "float32")
    except ValueError:
        return False
    return True


def going_on(model, cache, rows=None):
    return [
        torch.cat(logits)
        for logits in zip(*(append(model, cache, [[a], [b]], rows) for a, b in FOLLOWING), strict=True)
    ]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@variants
def test_a_loaded_prompt_goes_on_as_the_original_does_in_every_layout(tmp_path, variant, dtype, codec):
    model = decoder(variant, dtype)
    if not holds(codec, model):
        pytest.skip(f"codec {codec} is for other records")
    for store in STORES:
        cache = kv_cache(model, store=store, codec=codec)
        append(model, cache, [LONG, SHORT])
        cache.save(tmp_path / store, model=model)
        wanted = going_on(model, cache)
        for other in STORES:
            loaded = kv_cache(model, batch=3, store=other, codec=codec)
            if loaded.together != cache.together:
                with pytest.raises(ValueError, match=f"was saved with {cache.together} tokens coded together"):
                    loaded.load(tmp_path / store, model=model, rows=[2, 0])
                continue
            loaded.load(tmp_path / store, model=model, rows=[2, 0])
            assert loaded.lengths.tolist() == [len(SHORT), 0, len(LONG)]
            for got, want in zip(going_on(model, loaded, rows=[2, 0]), wanted, strict=True):
                assert error(got, want) <= TOLERANCE[dtype]


@stores
def test_the_file_holds_the_tokens_in_the_order_of_positions_and_no_empty_slot(tmp_path, store):
    model = decoder("gqa")
    cache, plain = (kv_cache(model, batch=3, capacity=32, store=name) for name in (store, "full"))
    for made in (cache, plain):
        append(model, made, [SHORT, [1], LONG])
        made.free([1])
        append(model, made, [[3, 4], [5]], rows=[2, 0])
    cache.save(tmp_path / "saved", model=model)
    with safe_open(tmp_path / "saved", framework="pt") as file:
        assert json.loads(file.metadata()["cache"])["lengths"] == [8, 12]
        for at, (row, length) in enumerate([(0, 8), (2, 12)]):
            for name, tensor in plain.tensors.items():
                assert torch.equal(file.get_tensor(f"rows.{at}.{name}"), tensor[row, :, :length])


@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("length", [4, 7, 8, 14])
@stores
def test_a_window_is_saved_with_what_is_in_sight_and_goes_back_as_far_as_that(tmp_path, store, length, burst):
    model = windowed()
    ids = (LONG + SHORT)[:length]
    cache = kv_cache(model, batch=1, capacity=24, store=store, burst=burst)
    append(model, cache, [ids])
    cache.save(tmp_path / "saved", model=model)
    with safe_open(tmp_path / "saved", framework="pt") as file:
        kept = file.get_tensor("rows.0.layers.0.k").shape[1]
    assert kept <= 2 + 5 + burst - 1
    for other in STORES:
        loaded = kv_cache(model, batch=2, capacity=24, store=other, burst=burst)
        loaded.load(tmp_path / "saved", model=model, rows=[1])
        assert loaded.floor(1) == max(0 if length <= kept else length - burst, cache.floor(0))
        for back in range(length - loaded.floor(1) + 1):
            twin, rest = loaded.fork([1]), ids[: length - back]
            twin.rewind(back)
            whole = kv_cache(model, batch=1, capacity=24)
            if rest:
                append(model, whole, [rest])
            for token in (6, 44, 2):
                got, wanted = append(model, twin, [[token]])[0], append(model, whole, [[token]])[0]
                assert error(got, wanted) < 1e-6, (other, back)
        with pytest.raises(ValueError, match=f"row 1 holds {length} tokens"):
            loaded.rewind([0, length - loaded.floor(1) + 1])


@pytest.mark.parametrize("limits", [{"chunk": 5}, {"chunk": 4, "sinks": 1}, {"window": 3, "chunk": 6}], ids=str)
def test_a_chunk_is_saved_from_and_loaded_into_every_layout(tmp_path, limits):
    class Limited(Windowed):
        cache_specs = tuple(replace(spec, **limits) for spec in decoder("mla").cache_specs)

    model = Limited(decoder("mla").config).double().eval()
    sharpen(model)
    for length in (3, 9, 12):
        whole = kv_cache(model, batch=1, capacity=24)
        append(model, whole, [(LONG + SHORT)[:length]])
        wanted = torch.cat([append(model, whole, [[token]])[0] for token in LONG[:5]])
        for store in STORES:
            cache = kv_cache(model, batch=1, capacity=24, store=store)
            append(model, cache, [(LONG + SHORT)[:length]])
            cache.save(tmp_path / "saved", model=model)
            for other in STORES:
                loaded = kv_cache(model, batch=1, capacity=24, store=other)
                loaded.load(tmp_path / "saved", model=model)
                assert error(torch.cat([append(model, loaded, [[token]])[0] for token in LONG[:5]]), wanted) < 1e-6


class Summing(torch.nn.Module):
    """Remembers a state: the sum of its inputs."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))

    cache_specs = (CacheSpec(states=(State("s", (3,), "float64"),), records=(Record.of(Entry("k", 1, 4)),)),)

    def feed(self, cache, x):
        step = cache.step(*x.shape)
        cache.layers[0].append(step, k=x[:, None, :, None].expand(-1, 1, -1, 4).float())
        sums = cache.layers[0].states(step)["s"][:, None] + x.double().cumsum(1)[..., None]
        cache.layers[0].keep(step, s=sums[:, -cache.burst :])
        cache.advance(step)
        return sums[:, -1, 0].tolist()


@pytest.mark.parametrize("burst", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_states_are_saved_as_far_as_a_rewind_goes_back(tmp_path, burst, length):
    model = Summing()
    cache = KVCache(model.cache_specs, batch=1, capacity=9, dtype="float32", burst=burst)
    for at in range(length):
        model.feed(cache, torch.tensor([[10**at]]))
    cache.save(tmp_path / "saved", model=model)
    for other in (1, 2, 3, 5):
        loaded = KVCache(model.cache_specs, batch=2, capacity=9, dtype="float32", store="paged:2", burst=other)
        loaded.load(tmp_path / "saved", model=model, rows=[1])
        floor = loaded.floor(1)
        assert floor == max(0, length - min(burst, other) + 1)
        loaded.rewind([0, length - floor])
        assert model.feed(loaded, torch.tensor([[0], [5]]))[1] == 5 + sum(10**at for at in range(floor))


@pytest.fixture
def prompt(tmp_path):
    """A model, and a file of two rows that it filled."""
    model = decoder("gqa")
    cache = kv_cache(model)
    append(model, cache, [LONG, SHORT])
    cache.save(tmp_path / "saved", model=model)
    return model, tmp_path / "saved"


def refused(message, path, model, cache, rows=None):
    """A load that is refused leaves every number, every length and every page as it was."""
    before, free = snapshot(cache), [layout.pool.free for layout in cache._layouts.values() if layout.pooled]
    with pytest.raises(ValueError, match=message):
        cache.load(path, model=model, rows=rows)
    assert same(snapshot(cache), before)
    assert [layout.pool.free for layout in cache._layouts.values() if layout.pooled] == free


@stores
@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({"capacity": 9}, None, "rows of up to 10 tokens, beyond the cache's capacity of 9: make the KVCache with"),
        ({"batch": 1}, None, "saved holds 2 rows, for which 1 were given"),
        ({"batch": 3}, [1], "saved holds 2 rows, for which 1 were given: name as many with rows="),
        ({"batch": 3}, [1, 3], r"rows \[1, 3\] must be some of 0 to 2"),
        ({"batch": 3}, [1, 1], "must be distinct"),
        ({"dtype": "float32"}, None, "saved was saved in dtype float64, the cache is in float32: make it with dtype="),
    ],
)
def test_rows_that_do_not_take_what_was_saved_are_refused(prompt, store, options, rows, message):
    model, path = prompt
    refused(message, path, model, kv_cache(model, store=store, **options), rows)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "plain"])
def test_another_codec_is_refused(prompt, codec):
    model, path = prompt
    if not holds(codec, model):
        pytest.skip(f"codec {codec} is for other records")
    refused(f"saved in codec plain, the cache is in {codec}", path, model, kv_cache(model, codec=codec))


@stores
def test_a_row_that_holds_something_is_not_overwritten(prompt, store):
    model, path = prompt
    cache = kv_cache(model, batch=3, store=store)
    append(model, cache, [[1, 2, 3]], rows=[1])
    refused("row 1 holds 3 tokens already: name an empty one, or free it", path, model, cache)
    cache.load(path, model=model, rows=[2, 0])
    assert cache.lengths.tolist() == [7, 3, 10]


def test_a_pool_that_is_too_small_is_refused(prompt):
    model, path = prompt
    used = kv_cache(model, store="paged:4", pages=4)
    append(model, used, [[1, 2, 3], [4, 5, 6, 7, 8]])
    used.free()
    refused("pages", path, model, used)
    kv_cache(model, store="paged:4", pages=5).load(path, model=model)


def test_another_model_is_refused(prompt):
    model, path = prompt
    other = sharpen(Decoder(model.config).double(), seed=1)
    refused("another model: its weight model.layers.1.self_attn.v_proj.weight is not", path, other, kv_cache(model))
    rope = replace(model.config.attention.rope, rope_theta=5e5)
    config = replace(model.config, attention=replace(model.config.attention, rope=rope))
    turned = Decoder(config).double()
    turned.load_state_dict(model.state_dict())
    refused("another model: its config or cache specs", path, turned, kv_cache(model))
    deeper = decoder("gqa", layers=3)
    refused("another model: its config or cache specs", path, deeper, kv_cache(deeper))
    refused("not made from this model's cache_specs", path, decoder("mla"), kv_cache(model))
    latent = kv_cache(decoder("mla"))
    append(decoder("mla"), latent, [LONG, SHORT])
    with pytest.raises(ValueError, match="not made from this model's cache_specs"):
        latent.save(path, model=model)


def test_a_file_that_is_not_whole_is_refused(prompt, tmp_path):
    model, path = prompt
    whole = path.read_bytes()
    broken = tmp_path / "broken"
    for length in [0, 5, 8, 60, 300, *range(400, len(whole), 997), len(whole) - 1]:
        broken.write_bytes(whole[:length])
        refused("broken is (broken off|corrupted)", broken, model, kv_cache(model))
    broken.write_bytes(whole + b"\0")
    refused("broken is broken off, or no safetensors file", broken, model, kv_cache(model))


def test_a_file_with_a_changed_byte_is_refused(prompt, tmp_path):
    model, path = prompt
    whole = path.read_bytes()
    changed, cache = tmp_path / "changed", kv_cache(model)
    for at in [*range(0, 2000, 13), *range(2000, len(whole), 977), len(whole) - 1]:
        changed.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        if at % 7:
            with pytest.raises(ValueError, match="changed"):
                cache.load(changed, model=model)
            assert cache.lengths.tolist() == [0, 0]
        else:
            refused("changed", changed, model, cache)


def test_other_files_are_refused_by_name(prompt, tmp_path):
    model, _ = prompt
    cache = kv_cache(model)
    save_file({"k": torch.zeros(3)}, tmp_path / "weights")
    refused(
        "weights holds no saved cache: its safetensors metadata does not say 'attn-variants cache'",
        tmp_path / "weights",
        model,
        cache,
    )
    (tmp_path / "text").write_text("a text, and no tensors\n" * 99)
    refused("text is broken off, or no safetensors file", tmp_path / "text", model, cache)
    refused("missing is not there; give a file that save wrote", tmp_path / "missing", model, cache)
    refused("is a folder; give a file that save wrote", tmp_path, model, cache)


def test_what_cannot_be_saved_is_refused(tmp_path):
    model = decoder("gqa")
    cache = kv_cache(model)
    with pytest.raises(ValueError, match="no row of the cache holds anything to save"):
        cache.save(tmp_path / "saved", model=model)
    append(model, cache, [LONG], rows=[1])
    with pytest.raises(ValueError, match=r"rows \[0\] hold nothing to save"):
        cache.save(tmp_path / "saved", model=model, rows=[1, 0])
    for path in (tmp_path, tmp_path / "missing" / "saved"):
        with pytest.raises(ValueError, match="must name a file in a folder that is there"):
            cache.save(path, model=model)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_the_old_file(prompt, tmp_path, monkeypatch):
    model, path = prompt
    before = path.read_bytes()
    cache = kv_cache(model)
    append(model, cache, [SHORT, LONG])

    def interrupted(tensors, file, metadata):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("attn_variants.cache.saved.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.save(path, model=model)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_saved_file_is_as_readable_as_any_other(prompt, tmp_path):
    _, path = prompt
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_field_that_is_new_and_has_its_default_changes_no_file(prompt):
    from dataclasses import dataclass

    from attn_variants.cache.saved import _facts

    model, _ = prompt

    @dataclass(frozen=True)
    class GQAConfig(type(model.config.attention)):
        invented: int = 3

    config = model.config.attention
    newer = GQAConfig(**vars(config))
    assert _facts(newer) == _facts(config)
    assert _facts(replace(newer, invented=4)) != _facts(config)
    assert isinstance(model.config, DecoderConfig)
    assert os.fspath(prompt[1])
