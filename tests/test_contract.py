"""Declarations: what adds up, what is refused, and how many tokens a layer can never do without."""

import pytest

from attn_variants import CacheSpec, Entry, Record, State

LATENT, K_ROPE = Entry("latent", 1, 20, sharded=False), Entry("k_rope", 1, 4, sharded=False)
KV = Record("kv", (LATENT, K_ROPE))


def test_an_entry_is_heads_times_dim_numbers():
    assert Entry("k", 2, 8).numel == 16


@pytest.mark.parametrize("field", ["heads", "dim"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8", None])
def test_an_entry_of_no_size_is_refused(field, value):
    sizes = {"heads": 2, "dim": 8} | {field: value}
    with pytest.raises(ValueError, match=rf"entry 'k': {field} \({value!r}\)"):
        Entry("k", **sizes)


def test_a_record_is_its_entries_side_by_side():
    assert (KV.heads, KV.width, KV.dtype, KV.sharded) == (1, 24, None, False)
    assert KV.columns("latent") == slice(0, 20)
    assert KV.columns("k_rope") == slice(20, 24)
    assert KV.columns("kv") == slice(0, 24)
    with pytest.raises(KeyError):
        KV.columns("v")


def test_a_record_of_one_entry_bears_its_name():
    record = Record.of(Entry("k", 2, 8, dtype="float32"))
    assert (record.name, record.heads, record.width, record.dtype, record.sharded) == ("k", 2, 8, "float32", True)
    assert record.columns("k") == slice(0, 8)


@pytest.mark.parametrize("odd", [Entry("b", 2, 4), Entry("b", 1, 4, dtype="int8"), Entry("b", 1, 4, sharded=False)])
def test_entries_that_differ_cannot_share_a_row(odd):
    with pytest.raises(ValueError, match="record 'ab': entries must agree on heads, dtype and shard"):
        Record("ab", (Entry("a", 1, 8), odd))


def test_an_empty_record_is_refused():
    with pytest.raises(ValueError, match="record 'kv' must hold at least one entry"):
        Record("kv", ())


def test_a_state_is_the_product_of_its_shape():
    assert State("s", (2, 3, 5)).numel == 30
    assert State("s", ()).numel == 1


def test_a_spec_finds_its_entries_and_adds_them_up():
    spec = CacheSpec(records=(KV, Record.of(Entry("v", 2, 12))))
    assert [entry.name for entry in spec.entries] == ["latent", "k_rope", "v"]
    assert spec.numel_per_token == 20 + 4 + 24
    assert spec.record_of("k_rope") is spec.record_of("kv") is KV
    with pytest.raises(KeyError, match="no entry or record 'q' in this layer's cache; it holds kv, v"):
        spec.record_of("q")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, r"window \(0\) must be"),
        ({"window": -4}, r"window \(-4\)"),
        ({"window": 2.5}, r"window \(2\.5\)"),
        ({"window": True}, r"window \(True\)"),
        ({"chunk": 0}, r"chunk \(0\) must be"),
        ({"sinks": -1}, r"sinks \(-1\) must"),
        ({"sinks": 1.5, "window": 4}, r"sinks \(1\.5\)"),
    ],
)
def test_limits_that_limit_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        CacheSpec(records=(KV,), **fields)


def test_names_within_a_layer_are_unique():
    with pytest.raises(ValueError, match=r"need names of their own, got \['k', 'k'\]"):
        CacheSpec(records=(Record.of(Entry("k", 1, 4)), Record.of(Entry("k", 2, 4))))
    with pytest.raises(ValueError, match="need names of their own"):
        CacheSpec(records=(KV, Record.of(Entry("latent", 1, 4))))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"window": 4}, [1, 2, 3, 4, 4, 4, 4, 4, 4]),
        ({"window": 4, "sinks": 2}, [1, 2, 3, 4, 5, 6, 6, 6, 6]),
        ({"chunk": 3}, [1, 2, 3, 3, 3, 3, 3, 3, 3]),
        ({"chunk": 3, "sinks": 1}, [1, 2, 3, 4, 4, 4, 4, 4, 4]),
        ({"window": 99}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_tokens_a_layer_cannot_do_without(fields, kept):
    spec = CacheSpec(records=(KV,), **fields)
    assert [spec.visible_tokens(context) for context in range(1, 10)] == kept
    assert spec.visible_tokens(0) == 0


def test_declarations_are_values():
    assert CacheSpec(records=(KV,)) == CacheSpec(records=(Record("kv", (LATENT, K_ROPE)),))
    assert len({CacheSpec(records=(KV,)), CacheSpec(records=(KV,)), CacheSpec(records=(KV,), window=4)}) == 2
    with pytest.raises(AttributeError):
        KV.name = "other"
