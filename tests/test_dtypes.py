"""Names of dtypes and the bytes of one number."""

import pytest
import torch

from attn_variants.dtypes import DTYPE_BYTES, canonical_dtype, dtype_bytes, torch_dtype


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_a_name_is_torchs_and_its_bytes_are_torchs(name):
    dtype = torch_dtype(name)
    assert str(dtype) == f"torch.{name}"
    assert canonical_dtype(dtype) == canonical_dtype(str(dtype)) == name
    assert dtype_bytes(name) == dtype_bytes(dtype) == torch.empty((), dtype=dtype).element_size()


@pytest.mark.parametrize(
    ("short", "name"),
    [("bf16", "bfloat16"), ("BF16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"),
     ("float", "float32"), ("fp64", "float64"), ("double", "float64"), ("f16", "float16"), ("f32", "float32")],
)  # fmt: skip
def test_short_names_are_understood(short, name):
    assert canonical_dtype(short) == name


@pytest.mark.parametrize("name", ["bfloat61", "", "complex64", "torch", "8"])
def test_an_unknown_name_is_refused_with_what_there_is(name):
    with pytest.raises(ValueError, match=rf"unknown dtype '{name}'.*\(known: float64, float32, bfloat16"):
        canonical_dtype(name)


def test_the_nearest_name_is_offered():
    with pytest.raises(ValueError, match="did you mean bfloat16"):
        torch_dtype("bfloat61")
