"""Codecs: what is stored, by hand and to the byte, what comes back, and which names and records are refused."""

from dataclasses import replace

import pytest
import torch

from attn_variants import Entry, Record
from attn_variants.cache.formats import format_named
from attn_variants.cache.quantize import CODECS, codec_named, format_of
from attn_variants.dtypes import dtype_bytes, torch_dtype
from tests.cache.codec_cases import GTA_KV, KV, NAMES, OWN, K, V

ODD, ROPE = Record.of(Entry("k", 3, 7)), Record.of(Entry("k_rope", 1, 8))
HELD = [
    (name, record)
    for name in NAMES
    for record in (K, V, KV, GTA_KV, ODD, ROPE)
    if (record is KV if name == "fp8-mla" else ":4" not in name or record is not ODD)
]


def stored(name, row, record=None):
    """Every part as nested lists."""
    record = record or Record.of(Entry("k", 1, len(row)))
    made = codec_named(name).encode(record, torch.tensor(row, dtype=torch.float32))
    return {suffix: part.tolist() for suffix, part in made.items()}


def back(name, row, dtype=torch.float32):
    record, given = Record.of(Entry("k", 1, len(row))), torch.tensor(row, dtype=dtype)
    codec = codec_named(name)
    return codec.decode(record, codec.encode(record, given), dtype).tolist()


def test_int8_by_hand():
    assert stored("int8", [127.0, -63.5, 1.0, 0.49]) == {"": [127, -64, 1, 0], ".scale": [1.0]}
    assert back("int8", [127.0, -63.5, 1.0, 0.49]) == [127.0, -64.0, 1.0, 0.0]


def test_int8_in_groups_by_hand():
    row = [127.0, -1.0, 2.54, 254.0, 0.0, -2.0]
    assert stored("int8:3", row) == {"": [127, -1, 3, 127, 0, -1], ".scale": [1.0, 2.0]}
    assert back("int8:3", row) == [127.0, -1.0, 3.0, 254.0, 0.0, -2.0]


def test_int8_asymmetric_by_hand():
    # 127 * 10 / 255 + 128 * 265 / 255 = 138 stands for code 0; the 255 steps from 10 to 265 are 1 each.
    assert stored("int8:asym", [10.0, 265.0, 138.0, 137.4]) == {
        "": [-128, 127, 0, -1],
        ".scale": [1.0],
        ".middle": [138.0],
    }
    assert back("int8:asym", [10.0, 265.0, 138.0, 137.4]) == [10.0, 265.0, 138.0, 137.0]


def test_int4_by_hand():
    # 7 * -1 / 15 + 8 * 14 / 15 = 7 stands for code 0; the 15 steps from -1 to 14 are 1 each. Low halves first:
    # -8 is 8 and 7 is 7, -7 is 9 and -1 is 15 in two's complement.
    row = [-1.0, 0.4, 14.0, 5.6]
    assert stored("int4", row) == {"": [0x78, 0xF9], ".scale": [1.0], ".middle": [7.0]}
    assert back("int4", row) == [-1.0, 0.0, 14.0, 6.0]


def test_int4_symmetric_in_groups_of_an_odd_row_by_hand():
    # Codes 7, -2, 0 | -7, 1, 3 | 0, 0, 0: nine numbers, five bytes, numbers i and i + 5 in byte i, the last half empty.
    row = [7.0, -2.0, 0.4, -3.5, 0.5, 1.6, 0.0, 0.0, 0.0]
    made = stored("int4:3:sym", row)
    assert made[""] == [0x37, 0x0E, 0x00, 0x09, 0x01]
    assert made[".scale"][:2] == [1.0, 0.5]
    assert back("int4:3:sym", row) == [7.0, -2.0, 0.0, -3.5, 0.5, 1.5, 0.0, 0.0, 0.0]


def test_fp8_by_hand():
    # e4m3 keeps three bits behind the first: above 16 it has 18 and 20, of which 19 takes the even one.
    assert stored("fp8", [448.0, -19.0, 2.0**-9, 2.0**-11]) == {"": [448.0, -20.0, 2.0**-9, 0.0], ".scale": [1.0]}
    assert back("fp8", [896.0, -38.0, 0.0, 2.0]) == [896.0, -40.0, 0.0, 2.0]


def test_the_fp8_record_is_656_bytes():
    record = Record("kv", (Entry("latent", 1, 512), Entry("k_rope", 1, 64)))
    parts = codec_named("fp8-mla").parts(record, "float32")
    assert [(part.suffix, part.width, part.dtype) for part in parts] == [
        (".latent", 512, "float8_e4m3fn"),
        (".latent.scale", 4, "float32"),
        (".k_rope", 64, "bfloat16"),
    ]
    assert sum(part.width * dtype_bytes(part.dtype) for part in parts) == 512 + 16 + 128 == 656


def test_the_fp8_record_by_hand():
    row = torch.zeros(1, 320)
    row[0, 0], row[0, 128], row[0, 256] = 448.0, -2 * 448.0, 1 + 2.0**-7
    made = codec_named("fp8-mla").encode(KV, row)
    assert made[".latent.scale"][0].tolist() == [1.0, 2.0]
    assert made[".latent"][0, [0, 128]].tolist() == [448.0, -448.0]
    assert made[".k_rope"][0, 0] == 1 + 2.0**-7
    assert torch.equal(codec_named("fp8-mla").decode(KV, made, torch.float32), row)


@pytest.mark.parametrize("name", ["int8", "int8:asym", "int4", "int4:sym", "fp8"])
def test_a_rope_key_stays_as_it_is_unless_asked(name):
    row = torch.randn(3, 320, generator=torch.Generator().manual_seed(0))
    for codec, kept in ((codec_named(name), True), (codec_named(f"{name}:rope"), False)):
        made = codec.encode(KV, row)
        assert torch.equal(codec.decode(KV, made, torch.float32)[:, 256:], row[:, 256:]) is kept
        assert (".k_rope.scale" in made) is not kept


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_with_a_dtype_of_its_own_keeps_it(name):
    row = torch.arange(5, dtype=torch.uint8)
    codec = codec_named(name)
    assert [(part.suffix, part.width, part.dtype) for part in codec.parts(OWN, "float32")] == [("", 5, "uint8")]
    assert codec.decode(OWN, codec.encode(OWN, row), torch.uint8) is row


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("name", "record"), HELD, ids=lambda value: str(getattr(value, "entries", value)))
def test_parts_are_what_is_stored_and_cost_what_accounting_says(name, record, dtype):
    codec = codec_named(name)
    made = codec.encode(record, torch.randn(2, record.heads, 3, record.width, dtype=torch_dtype(dtype)))
    assert [(part.suffix, part.width, part.dtype) for part in codec.parts(record, dtype)] == [
        (suffix, part.shape[-1], str(part.dtype).removeprefix("torch.")) for suffix, part in made.items()
    ]
    assert all(part.shape[:-1] == (2, record.heads, 3) for part in made.values())
    form = replace(format_named(format_of(name, dtype)), model=dtype)
    assert sum(part.shape[-1] * part.element_size() for part in made.values()) == sum(
        form.token_bytes(entry) for entry in record.entries
    )


def test_int8_and_int4_bytes_by_hand():
    """of DeepSeek's record: 512 + 64 numbers, the rope key in bfloat16 unless asked."""
    record = Record("kv", (Entry("latent", 1, 512), Entry("k_rope", 1, 64)))
    for name, wanted in {
        "int8": 512 + 2 + 128,
        "int8:rope": 512 + 2 + 64 + 2,
        "int8:64:asym": 512 + 8 * 4 + 128,
        "int4": 256 + 4 + 128,
        "int4:32:sym:rope": 256 + 16 * 2 + 32 + 2 * 2,
        "fp8": 512 + 4 + 128,
        "fp8:rope": 512 + 4 + 64 + 4,
        "plain": 1152,
    }.items():
        parts = codec_named(name).parts(record, "bfloat16")
        assert sum(part.width * dtype_bytes(part.dtype) for part in parts) == wanted, name


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("int8:sym", "int8"),
        ("fp8-token-head:rope", "fp8:rope"),
        ("int4:asym:64", "int4:64"),
        ("int8:rope:asym:32", "int8:32:asym:rope"),
        ("int4:sym", "int4:sym"),
        ("fp8:rope", "fp8:rope"),
    ],
)
def test_a_codec_s_name_is_what_was_said_in_one_order(said, name):
    assert codec_named(said).name == name
    assert codec_named(said) == codec_named(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "int9",
            r"unknown codec 'int9'; did you mean .*int8.*\(known: plain, int8, int4, int8-kivi, int4-kivi, fp8, fp8-mla\)",
        ),
        ("", r"unknown codec '' \(known"),
        ("int8:sym:asym", r"'int8:sym:asym': say each word once, and sym or asym"),
        ("int8:rope:rope", r"say each word once"),
        ("int8:0", r"'int8:0': give the size of a group, sym, asym, rope or nothing, as in int8:64:rope"),
        ("int8:64:32", r"'int8:64:32': give the size of a group"),
        ("int8:-4", r"'int8:-4': give the size of a group"),
        ("int8:", r"'int8:': give the size of a group"),
        ("int4:symmetric", r"'int4:symmetric': give the size of a group, sym, asym, rope"),
        ("fp8:64", r"'fp8:64': only int8, int4, int8-kivi, int4-kivi take a group; give fp8"),
        ("fp8:asym", r"'fp8:asym': give rope or nothing, as in fp8:rope"),
        ("plain:rope", r"'plain:rope': nothing follows plain"),
        ("fp8-mla:rope", r"'fp8-mla:rope': nothing follows fp8-mla"),
    ],
)
def test_unknown_and_contradictory_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        codec_named(name)


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("int8:5", K, "codec int8:5 takes groups of 5, which do not divide the 8 numbers of k; give a group that div"),
        ("int4:3:rope", KV, "groups of 3, which do not divide the 256 numbers of latent"),
        ("int8:128:rope", KV, "groups of 128, which do not divide the 64 numbers of k_rope"),
        ("fp8-mla", K, "codec fp8-mla is for a record of latent and k_rope, and record k holds k; give fp8 or int8"),
        ("fp8-mla", Record("kv", (Entry("latent", 1, 20), Entry("k_rope", 1, 4))), "groups of 128, .* the 20 numbers"),
    ],
)
def test_records_that_a_codec_cannot_hold_are_refused(name, record, message):
    with pytest.raises(ValueError, match=message):
        codec_named(name).parts(record, "float32")


def test_a_cache_of_no_float_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype int8 holds no keys and values"):
        codec_named("int4").parts(KV, "int8")


def test_every_codec_has_a_format_of_its_bytes():
    assert {name: format_of(name, "bfloat16") for name in CODECS} == {
        "plain": "bfloat16",
        "int8": "int8",
        "int4": "int4",
        "fp8": "fp8-token-head",
        "fp8-mla": "fp8-mla",
        "int8-kivi": "int8-kivi",
        "int4-kivi": "int4-kivi",
    }
    assert format_of("int4:64:asym:rope", "float16") == "int4:64:rope"
