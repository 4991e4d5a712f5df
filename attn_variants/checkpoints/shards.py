"""The safetensors files of a checkpoint: which they are, and that each is whole, before a tensor is read.

A safetensors file is 8 bytes (the header's length, little-endian), a JSON header that gives each tensor's dtype, shape
and extent, then the data; so header and file size together tell a broken-off download from a whole one. Imports no
torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folder import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor of a checkpoint lies, and what it is; `dtype` is the format's name, such as `BF16`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in a folder's safetensors files, by name.

    model.safetensors comes before the shards of model.safetensors.index.json, as in transformers, so an index that a
    single file has made stale is not opened. Pickle checkpoints are never opened.

    Raises ValueError, naming the file, when there is none, a shard is missing, broken off or corrupted, or the index
    and the shards disagree.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder; a checkpoint is a folder with config.json and "
            f"{SINGLE}, such as the one that `attn-bench fetch` prints"
        )
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} holds {pickles[0]}, a pickle, which can run code when it is read and was not opened; "
            f"convert it to {SINGLE} (save_pretrained of transformers writes one)"
        )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, once what its header promises and the file's size have been found equal.

    Raises ValueError with the expected and the found size.
    """
    found = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head.startswith(b"version "):
            raise ValueError(f"{path} is a Git LFS pointer ({found} bytes), not the weights; run `git lfs pull` there")
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} ({found} bytes) does not begin with a safetensors header; fetch it again")
        _require_size(path, 8 + length, found, whole=False)
        text = file.read(length)
    try:
        header = json.loads(text)
        tensors = {name: _stored(path, **entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has a corrupted header: {error}; fetch it again") from error
    _require_size(path, 8 + length + sum(tensor.nbytes for tensor in tensors.values()), found)
    return tensors


def _stored(path: Path, dtype: str, shape: list[int], data_offsets: tuple[int, int]) -> StoredTensor:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    begin, end = data_offsets
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise ValueError(f"a {dtype} tensor of shape {shape} takes {nbytes} bytes, not {end - begin}")
    return StoredTensor(path, dtype, tuple(shape), nbytes)


def _require_size(path: Path, expected: int, found: int, *, whole: bool = True) -> None:
    if found < expected:
        raise ValueError(f"{path} is broken off: expected {expected} bytes, found {found}; fetch it again")
    if whole and found > expected:
        raise ValueError(
            f"{path} is longer than its header says: expected {expected} bytes, found {found}; fetch it again"
        )


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of every shard that the index names, which must be where the index says."""
    path = folder / INDEX
    index = read_json(path)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{path} must hold `weight_map`, an object of tensor names and file names")
    names = sorted({str(name) for name in placed.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{path} names the shard {name!r}; a shard is a .safetensors file in the same folder")
    tensors: dict[str, StoredTensor] = {}
    missing = [name for name in names if not (folder / name).is_file()]
    for name in names:
        if name not in missing:
            tensors |= read_header(folder / name)
    if missing:
        held = sum(tensor.nbytes for tensor in tensors.values())
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}: expected {len(names)} shards{_promised(index)}, "
            f"found {len(names) - len(missing)} with {held} bytes; fetch it again"
        )
    for name, file in placed.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{path} places {name} in {file}, which does not hold it; fetch both again")
    return tensors


def _promised(index: dict[str, Any]) -> str:
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return f" with {size} bytes of tensors" if isinstance(size, int) else ""
