"""Codecs: every finite row stays finite and within the bound, NaN keeps to its group, and stores keep to it all."""

import pytest
import torch

from attn_variants import CacheSpec, Entry, Record
from attn_variants.cache import KVCache
from attn_variants.cache.codec_error import relative_errors
from attn_variants.cache.quantize import codec_named
from attn_variants.cache.rounding import pack, unpack
from tests.cache.codec_cases import DTYPES, KV, NAMES, K, hard_rows

CODED = [name for name in NAMES if name not in ("plain", "fp8-mla")]
PAIRS = [(name, record) for name in CODED for record in (K, KV)] + [("fp8-mla", KV)]
GROUP = Record.of(Entry("k", 1, 8))


def decoded(codec, record, row, dtype=None):
    return codec.decode(record, codec.encode(record, row), dtype or row.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "record"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_what_comes_back_is_within_the_bound(name, record, dtype):
    row, codec = hard_rows(record.width, dtype), codec_named(name)
    back = decoded(codec, record, row)
    assert back.dtype == dtype
    assert back.isfinite().all()
    missed, bound = (back.double() - row.double()).abs(), codec.bound(record, row)
    assert bound.shape == row.shape
    assert (missed <= bound).all(), (missed / bound).nan_to_num().max()
    # A bound that nothing comes near to would bound nothing.
    assert (missed > 0.85 * bound)[2:34].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 6e4, 1e30])
@pytest.mark.parametrize(
    ("name", "steps"), [("int8", 127), ("int8:asym", 127.5), ("int4", 7.5), ("int4:sym", 7)], ids=str
)
def test_the_bound_is_half_a_step_of_the_largest_number(name, steps, magnitude, dtype):
    """to 2 percent, which is the scale's rounding up, and the dtype's own rounding."""
    magnitude = min(magnitude, float(torch.finfo(dtype).max) * 0.9)
    row = (torch.tensor([[-1.0, 0.0, 0.3, 1.0, 0.0, 0.0, 0.0, 0.7]]).double() * magnitude).to(dtype)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    largest = float(row.abs().max())
    assert (codec_named(name).bound(GROUP, row) <= (0.51 / steps + torch.finfo(dtype).eps * 2) * largest + least).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODED)
def test_zeros_come_back_as_zeros(name, dtype):
    assert not decoded(codec_named(name), K, torch.zeros(3, 8, dtype=dtype)).any()


@pytest.mark.parametrize("name", ["int8:asym", "int8:4:asym:rope", "int4", "int4:4"])
@pytest.mark.parametrize("value", [100.0, -0.125, 1e-30, 1e30])
def test_a_constant_comes_back_as_it_was_from_a_middle(name, value):
    row = torch.full((1, 8), value, dtype=torch.bfloat16)
    assert torch.equal(decoded(codec_named(name), K, row), row)


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_zeros_is_read_as_zeros(name):
    record = KV if name == "fp8-mla" else K
    codec = codec_named(name)
    memory = {
        part.suffix: torch.zeros(2, 3, part.width, dtype=getattr(torch, part.dtype))
        for part in codec.parts(record, "float32")
    }
    assert torch.equal(codec.decode(record, memory, torch.float32), torch.zeros(2, 3, record.width))


@pytest.mark.parametrize("name", ["int8:4", "int8:4:asym:rope", "int4:4", "int4:4:sym:rope"])
def test_nan_keeps_to_its_group(name):
    row = torch.arange(8.0).repeat(2, 1)
    row[0, 5] = torch.nan
    back = decoded(codec_named(name), GROUP, row)
    assert back[0, 4:].isnan().all()
    assert back[0, :4].isfinite().all()
    assert back[1].isfinite().all()


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinity_becomes_a_large_number(name, dtype):
    row = torch.ones(1, 8, dtype=dtype)
    row[0, 2], row[0, 7] = torch.inf, -torch.inf
    back = decoded(codec_named(name), K, row)
    most = min(torch.finfo(dtype).max, torch.finfo(torch.bfloat16).max)
    assert back.isfinite().all()
    assert back[0, 2] > 0.9 * most
    assert back[0, 7] < -0.9 * most


@pytest.mark.parametrize("odd", [1, 2, 7, 8])
def test_every_pair_of_int4_codes_is_packed_and_unpacked(odd):
    codes = torch.randint(-8, 8, (500, odd), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack(pack(codes), odd), codes)
    assert pack(codes).shape == (500, (odd + 1) // 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_coded_alike_wherever_it_lies_in_memory(name, dtype):
    """as heads split off a product, transposed, and read from a longer memory."""
    record = KV if name == "fp8-mla" else K
    codec = codec_named(name)
    row = torch.randn(2, 3, record.heads, record.width, dtype=dtype).transpose(1, 2)
    made = codec.encode(record, row)
    whole = codec.decode(record, made, dtype)
    assert torch.equal(decoded(codec, record, row.contiguous()), whole)
    longer = {suffix: torch.cat([part, part], 2)[:, :, :3] for suffix, part in made.items()}
    assert torch.equal(codec.decode(record, longer, dtype), whole)


def test_fp8_bits_are_read_as_torch_reads_them():
    """by the path of a CPU: all 256 codes but the two of NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    numbers = codes.float()
    real = ~numbers.isnan()[:, 0]
    stored = {"": codes[real], ".scale": torch.full((254, 1), 0.5)}
    read = codec_named("fp8").decode(Record.of(Entry("k", 1, 1)), stored, torch.float32)
    assert torch.equal(read, numbers[real] / 2)


def test_the_rope_key_of_the_fp8_record_is_bfloat16_in_any_cache():
    row = torch.randn(5, 320, generator=torch.Generator().manual_seed(0))
    codec = codec_named("fp8-mla")
    assert torch.equal(decoded(codec, KV, row)[:, 256:], row[:, 256:].bfloat16().float())
    assert not codec.bound(KV, row.bfloat16())[:, 256:].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_store_reads_what_the_codec_made(name):
    """rows of different lengths, which are written through an index, and one row read alone."""
    record = KV if name == "fp8-mla" else K
    codec, spec = codec_named(name), CacheSpec(records=(record,))
    cache = KVCache([spec], batch=2, capacity=6, dtype="float32", codec=name)
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(2, record.heads, 4, record.width, generator=generator)

    def append(columns, **options):
        part = given[options.get("rows", [0, 1]), :, columns]
        entries = {entry.name: part[..., record.columns(entry.name)] for entry in record.entries}
        step = cache.step(part.shape[0], part.shape[2], **options)
        view = cache.layers[0].append(step, **entries)
        cache.advance(step)
        return view

    append(slice(0, 2), counts=[2, 1])
    append(slice(2, 3))
    (read,) = append(slice(3, 4), rows=[0]).dense(record.name)
    assert torch.equal(read, decoded(codec, record, given)[:1])


def test_the_error_on_given_keys_and_values():
    entries = {"latent": torch.randn(2, 1, 50, 256), "k_rope": torch.randn(2, 1, 50, 64), "k": torch.zeros(1, 2, 3, 8)}
    errors = {name: relative_errors(codec_named(name), [KV, K], entries) for name in ("plain", "int8", "fp8", "int4")}
    assert errors["plain"] == {"latent": 0.0, "k_rope": 0.0, "k": 0.0}
    assert errors["int8"]["k"] == errors["int8"]["k_rope"] == 0
    assert 0.003 < errors["int8"]["latent"] < 0.01 < errors["fp8"]["latent"] < 0.04 < errors["int4"]["latent"] < 0.2


def test_the_error_by_hand():
    # 63.5 is half a step from 64, and the norm of 127 and 63.5 is 127 times the root of 1.25.
    error = relative_errors(codec_named("int8"), [GROUP], {"k": torch.tensor([[127.0, 63.5, 0, 0, 0, 0, 0, 0]])})
    assert error["k"] == pytest.approx(0.5 / (127 * 1.25**0.5))
