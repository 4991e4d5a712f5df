"""Safetensors files are found to be whole before a tensor is read; anything else is one error that names the file."""

import json
import os
import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

from attn_variants.checkpoints.shards import INDEX, SINGLE, read_header, stored_tensors

A, B, C = np.zeros((3, 5), np.float32), np.ones((4,), np.float16), np.ones((2, 2), np.int64)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def single(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / SINGLE, metadata={"format": "pt"})
    return tmp_path / SINGLE


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": A}, tmp_path / FIRST)
    save_file({"b": B, "c": C}, tmp_path / SECOND)
    index = {"metadata": {"total_size": 100}, "weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_a_single_file_says_what_it_holds(single):
    tensors = stored_tensors(single.parent)
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in tensors.items()} == {
        "a": ("F32", (3, 5), 60),
        "b": ("F16", (4,), 8),
    }


def test_shards_say_what_they_hold_together(sharded):
    tensors = stored_tensors(sharded)
    assert {name: tensor.file.name for name, tensor in tensors.items()} == {"a": FIRST, "b": SECOND, "c": SECOND}


def test_a_single_file_goes_before_a_stale_index(sharded):
    save_file({"z": B}, sharded / SINGLE)
    (sharded / SECOND).unlink()
    assert list(stored_tensors(sharded)) == ["z"]


def test_a_missing_shard_is_named_with_the_sizes(sharded):
    (sharded / SECOND).unlink()
    with pytest.raises(
        ValueError, match=f"lacks {SECOND}: expected 2 shards with 100 bytes of tensors, found 1 with 60"
    ):
        stored_tensors(sharded)


def test_a_shard_that_broke_off_is_named_with_the_sizes(sharded):
    path = sharded / SECOND
    size = path.stat().st_size
    os.truncate(path, size - 30)
    with pytest.raises(ValueError, match=f"{SECOND} is broken off: expected {size} bytes, found {size - 30}"):
        stored_tensors(sharded)


@pytest.mark.parametrize("length", range(0, 200, 7))
def test_a_file_that_broke_off_anywhere_is_refused(single, length):
    assert single.stat().st_size > 200
    os.truncate(single, length)
    with pytest.raises(ValueError, match=r"model\.safetensors .*fetch it again"):
        read_header(single)


def test_a_file_that_is_too_long_is_refused(single):
    size = single.stat().st_size
    with single.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=f"longer than its header says: expected {size} bytes, found {size + 4}"):
        read_header(single)


def test_no_single_wrong_byte_in_the_header_ends_otherwise_than_in_a_clear_error(single):
    """Some leave a header that is still right (a letter of a name); none may raise anything but ValueError."""
    whole = single.read_bytes()
    refused = 0
    for at in range(8 + int.from_bytes(whole[:8], "little")):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            broken = bytearray(whole)
            broken[at] ^= flip
            single.write_bytes(bytes(broken))
            try:
                read_header(single)
            except ValueError as error:
                assert str(single) in str(error)  # noqa: PT017
                refused += 1
    assert refused > 400


HEADERS = {
    "a list": [],
    "a number": {"a": 7},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 4]}},
    "an unknown dtype": {"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}},
    "a dtype that is no name": {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
    "an extent that is not the shape's": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    "an extent of one number": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
    "an extent of texts": {"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_makes_no_sense_is_refused(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(ValueError, match=r"model\.safetensors has a corrupted header"):
        stored_tensors(tmp_path)


def test_a_git_lfs_pointer_is_called_one(tmp_path):
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(ValueError, match=r"is a Git LFS pointer .*git lfs pull"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "must hold `weight_map`"),
        ('{"weight_map": []}', "must hold `weight_map`"),
        ('{"weight_map": {}}', "must hold `weight_map`"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "names the shard '../elsewhere.safetensors'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "names the shard '/etc/passwd'"),
        ('{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}', "names the shard"),
        ('{"weight_map": {"a": 5}}', "names the shard '5'"),
        (f'{{"weight_map": {{"a": "{SECOND}"}}}}', f"places a in {SECOND}, which does not hold it"),
        (f'{{"weight_map": {{"x": "{FIRST}"}}}}', f"places x in {FIRST}, which does not hold it"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(sharded, index, message):
    (sharded / INDEX).write_text(index)
    with pytest.raises(ValueError, match=message):
        stored_tensors(sharded)


class Payload:
    """Runs when it is unpickled: it makes a folder."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_a_pickle_is_refused_by_name_and_not_run(tmp_path, name):
    trap = tmp_path / "trap"
    (tmp_path / name).write_bytes(pickle.dumps(Payload(trap)))
    with pytest.raises(ValueError, match=rf"holds {name}, a pickle.*was not opened; convert it to model\.safetensors"):
        stored_tensors(tmp_path)
    assert not trap.exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert trap.exists(), "the trap must work, or the test proves nothing"


def test_safetensors_go_before_a_pickle(single):
    (single.parent / "pytorch_model.bin").write_bytes(b"junk")
    assert list(stored_tensors(single.parent)) == ["a", "b"]


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        stored_tensors(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        stored_tensors(tmp_path / "nowhere")
