"""A decoder's weights from and to a Hugging Face folder: every tensor is used or named, and memory holds them once."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from attn_variants.architectures import decoder_config, hf_config
from attn_variants.dtypes import canonical_dtype, torch_dtype

from .folder import read_json, whole_folder, write_json
from .shards import INDEX, PICKLE_PATTERNS, SINGLE, StoredTensor, stored_tensors
from .tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from attn_variants.decoder import Decoder

    DecoderT = TypeVar("DecoderT", bound=Decoder)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and config.json determines; nothing else may go unused."""


def load_decoder(
    folder: str | Path,
    *,
    kind: type[DecoderT],
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> DecoderT:
    """The decoder, of class `kind`, of a Hugging Face folder: config.json and safetensors files, single or sharded.

    dtype:  None is the checkpoint's own: `dtype` or `torch_dtype` of config.json, else that of its tensors.
    device: None is torch's default.

    A head that differs from the embedding is used although config.json says they are tied, with a warning. End tokens
    are those of config.json and generation_config.json together. Raises ValueError when a file is missing, broken or a
    pickle, and when its tensors are not exactly the decoder's.
    """
    folder = Path(folder)
    stored = stored_tensors(folder)
    config = decoder_config(folder)
    if config.tie_word_embeddings and HEAD in stored and EMBEDDING in stored:
        if _equal(stored, EMBEDDING, HEAD):
            del stored[HEAD]
        else:
            warnings.warn(
                f"{folder}: config.json ties the head to the embedding, but {HEAD} differs from it and is used",
                stacklevel=3,
            )
            config = replace(config, tie_word_embeddings=False)
    chosen = _checkpoint_dtype(folder, stored) if dtype is None else _float_dtype(dtype)
    config = replace(config, eos_token_ids=_eos_token_ids(folder, config.eos_token_ids))
    with torch.device("meta"):
        decoder = kind(config)
    load_weights(decoder, stored, dtype=chosen, device=device)
    return decoder


def load_weights(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype,
    device: str | torch.device | None = None,
) -> None:
    """Put stored tensors in the place of a module's parameters, which may be on the meta device.

    Parameters that the module shares stay shared. Each tensor is copied out of its file by itself, so memory holds the
    weights once. Raises ValueError, before anything is read, listing the tensors that are missing, unexpected, of
    another shape, or of a dtype that is no plain float.
    """
    parameters = dict(module.named_parameters())
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(IGNORED_SUFFIXES)}
    _require_same(parameters, stored)
    for name, tensor in _read(stored):
        loaded = torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
        # Swapping keeps the parameter's identity, and so whatever shares it.
        torch.utils.swap_tensors(parameters[name], nn.Parameter(loaded))


def save_decoder(
    decoder: Decoder,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json and safetensors files that transformers reads back; the folder is complete or untouched.

    tokenizer: a folder whose tokenizer files go along.
    max_shard_bytes: above this the weights are split into shards with an index; a tensor is never split.
    Shared weights are written once. Raises ValueError when the folder holds a checkpoint already.
    """
    folder = Path(folder)
    _refuse_checkpoint(folder)
    # named_parameters() gives a shared parameter once, under its first name: the embedding's.
    weights = {name: parameter.detach().contiguous() for name, parameter in decoder.named_parameters()}
    shards = _shards(weights, max_shard_bytes)
    config = {**hf_config(decoder.config), "dtype": canonical_dtype(decoder.dtype)}
    tokenizer_files = [] if tokenizer is None else [Path(tokenizer) / name for name in TOKENIZER_FILES]
    with whole_folder(folder) as building:
        for name, shard in shards.items():
            save_file(shard, building / name, metadata={"format": "pt"})
        if len(shards) > 1:
            total = sum(weight.nbytes for weight in weights.values())
            placed = {name: file for file, shard in shards.items() for name in shard}
            write_json(building / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})
        write_json(building / "config.json", config)
        for path in tokenizer_files:
            if path.is_file():
                shutil.copyfile(path, building / path.name)


def _read(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, a file at a time; a tensor is a window onto the mapped file."""
    for file in sorted({tensor.file for tensor in stored.values()}):
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file} has a corrupted header: {error}; fetch it again") from error
        with opened:
            for name in (name for name, tensor in stored.items() if tensor.file == file):
                yield name, opened.get_tensor(name)  # type: ignore[no-untyped-call]


def _equal(stored: Mapping[str, StoredTensor], first: str, second: str) -> bool:
    """Whether two stored tensors hold the same numbers; of another dtype or shape they do not."""
    if (stored[first].dtype, stored[first].shape) != (stored[second].dtype, stored[second].shape):
        return False
    tensors = dict(_read({name: stored[name] for name in (first, second)}))
    return torch.equal(tensors[first], tensors[second])


def _require_same(parameters: Mapping[str, nn.Parameter], stored: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that are not exactly the parameters, naming them."""
    missing = [name for name in parameters if name not in stored]
    unexpected = [name for name in stored if name not in parameters]
    misshapen = [
        f"{name} ({tuple(parameters[name].shape)} by config.json, {tensor.shape} in the file)"
        for name, tensor in stored.items()
        if name in parameters and tuple(parameters[name].shape) != tensor.shape
    ]
    other = [f"{name} ({tensor.dtype})" for name, tensor in stored.items() if tensor.dtype not in FLOATS]
    faults = [
        f"{label}: {_listed(names)}"
        for label, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("tensors of another shape", misshapen),
            ("tensors that are no plain floats", other),
        )
        if names
    ]
    if faults:
        hint = "; change config.json to what the files hold, or fetch the checkpoint again"
        if missing == [HEAD]:
            hint = "; a head shared with the embedding needs tie_word_embeddings true"
        raise ValueError(f"the checkpoint does not fit its config.json: {'; '.join(faults)}{hint}")


def _listed(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _checkpoint_dtype(folder: Path, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """What config.json names, else the widest dtype of the tensors."""
    config = read_json(folder / "config.json")
    named = config.get("dtype") or config.get("torch_dtype")
    if isinstance(named, str) and named != "auto":
        return _float_dtype(named)
    found = {FLOATS[tensor.dtype] for tensor in stored.values() if tensor.dtype in FLOATS}
    return reduce(torch.promote_types, found) if found else torch.float32


def _float_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = torch_dtype(dtype)
    if found not in FLOATS.values():
        known = ", ".join(map(canonical_dtype, FLOATS.values()))
        raise ValueError(f"dtype {str(dtype)!r} cannot hold a decoder's weights; those that can are {known}")
    return found


def _eos_token_ids(folder: Path, known: tuple[int, ...]) -> tuple[int, ...]:
    """Those of config.json, then those that generation_config.json adds: an integer, a list, null, or no field."""
    path = folder / "generation_config.json"
    added = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = added if isinstance(added, list) else [] if added is None else [added]
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{path}: eos_token_id ({added!r:.40}) must be a token id, a list of them, or null")
    return tuple(dict.fromkeys((*known, *ids)))


def _refuse_checkpoint(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; a checkpoint is written into a folder")
    for pattern in ("config.json", "model*.safetensors", INDEX, *PICKLE_PATTERNS):
        for path in folder.glob(pattern):
            raise ValueError(f"{folder} holds a checkpoint already ({path.name}); choose another folder or remove it")


def _shards(weights: Mapping[str, Tensor], max_shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """File names and the tensors of each, in order; a file ends before it would exceed the limit."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes ({max_shard_bytes}) must be positive")
    groups: list[dict[str, Tensor]] = []
    size = max_shard_bytes
    for name, weight in weights.items():
        if size + weight.nbytes > max_shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = weight
        size += weight.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, start=1)}
