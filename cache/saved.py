"""A cache in a file: what its rows hold, in the order of positions and whatever the layout, as safetensors.

    rows.0.layers.0.k    (heads, tokens, width)    a record's part as its codec stores it, position 0 first
    rows.0.layers.0.s    (lengths, *shape)         a state after each of the last lengths that a rewind goes back to

Beside them, in the metadata, stand the version, the model (a digest of its config and specs, and one of one named
weight), dtype and codec, and per row its length and which positions are there. A digest over all of it tells a file
that was changed from a whole one.

Where tokens pass out of sight (window, chunk), only those are saved that a next token, or one after a rewind by
`burst`, can see. After loading no row goes back further than that: `KVCache.floor` says how far.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parsed
from safetensors.torch import save_file
from torch import Tensor, nn

from .layouts import held_positions, limited, span
from .rows import Row, coded, reached, read_row, require_empty, write_rows
from .store import once

if TYPE_CHECKING:
    from .kv_cache import KVCache

FORMAT, VERSION = "attn-variants cache", 1


@dataclass(frozen=True)
class Saved:
    """All that the metadata says of a file but its digest."""

    version: int
    model: str
    weight: str
    weight_digest: str
    dtype: str
    codec: str
    together: int
    lengths: list[int]
    first: list[dict[str, int]]
    snapshots: list[int]


def save(cache: KVCache, path: Path, model: nn.Module, rows: Sequence[int]) -> None:
    """Write what these rows hold to `path`, whole or not at all: a file that is there stays until the new one is.

    model: whose tokens they are, a `Decoder` or any module; its `config`, if it has one, and one of its weights are
    what `load` knows it by. Raises ValueError for rows that hold nothing, for a model of other specs and for a path
    that names no file in a folder.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{path} must name a file in a folder that is there")
    if empty := [row for row in rows if not cache._lengths[row]]:
        raise ValueError(f"rows {empty} hold nothing to save")
    if not rows:
        raise ValueError("no row of the cache holds anything to save")
    held = [read_row(cache, row, cache._lengths[row], _in_reach(cache, row)) for row in rows]
    weight = _weight(model)
    about = Saved(
        version=VERSION,
        model=_model_digest(cache, model),
        weight=weight,
        weight_digest=_tensor_digest(model.get_parameter(weight)),
        dtype=cache.dtype,
        codec=cache.codec,
        together=cache.together,
        lengths=[row.length for row in held],
        first=[dict(row.first) for row in held],
        snapshots=[row.snapshots for row in held],
    )
    tensors = {
        f"rows.{at}.{name}": tensor.detach().cpu().contiguous()
        for at, row in enumerate(held)
        for name, tensor in {**row.tokens, **row.states, **row.residual}.items()
    }
    text = json.dumps(vars(about))
    metadata = {"format": FORMAT, "cache": text, "digest": _file_digest(text, tensors)}
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.absolute().parent) as scratch:
        building = Path(scratch) / path.name
        building.touch()
        mode = building.stat().st_mode
        try:
            save_file(tensors, building, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        # safetensors writes for the owner alone; this is a file like any other.
        building.chmod(mode)
        building.replace(path)


def load(cache: KVCache, path: Path, model: nn.Module, rows: Sequence[int] | None) -> None:
    """Fill empty rows, the first ones if None, with what `save` wrote; the cache may have another layout.

    Raises ValueError, with the cache as it was, for what is no saved cache or is not whole, for a cache of another
    model, dtype or codec, and for rows that are too few, too short or not empty, or a pool too small.
    """
    about, tensors = _opened(path)
    _require_same(cache, path, about, model)
    count = len(about.lengths)
    rows = list(range(count)) if rows is None else rows
    if len(rows) != count or count > cache.batch:
        raise ValueError(
            f"{path} holds {count} rows, for which {min(len(rows), cache.batch)} were given: name as many with rows=, "
            "or make the KVCache with a larger batch"
        )
    if max(about.lengths) > cache.capacity:
        raise ValueError(
            f"{path} holds rows of up to {max(about.lengths)} tokens, beyond the cache's capacity of {cache.capacity}: "
            "make the KVCache with a larger capacity"
        )
    require_empty(cache, rows)
    contents = {row: _row(cache, path, about, at, tensors) for at, row in enumerate(rows)}
    cache._drop_pending()
    write_rows(cache, contents)


def _in_reach(cache: KVCache, row: int) -> dict[str, int]:
    """Per kind of layer, the oldest position that a next token, or one after a rewind by `burst`, can see."""
    found = {}
    for kind, layout in cache._layouts.items():
        spec, found[kind] = layout.spec, layout.first(row)
        if limited(spec):
            found[kind] = max(found[kind], cache._lengths[row] - (span(spec) + cache.burst - 1))
        if found[kind] <= spec.sinks:
            found[kind] = 0
    return found


def _opened(path: Path) -> tuple[Saved, dict[str, Tensor]]:
    """What a file says and holds, once it has been found whole."""
    if not path.is_file():
        raise ValueError(f"{path} {'is a folder' if path.is_dir() else 'is not there'}; give a file that save wrote")
    try:
        # Read and not mapped: a file that is cut short meanwhile would end the process.
        data = path.read_bytes()
        tensors = parsed(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header.get("__metadata__") or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is broken off, or no safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} holds no saved cache: its safetensors metadata does not say {FORMAT!r}")
    text = metadata.get("cache", "")
    if metadata.get("digest") != _file_digest(text, tensors):
        raise ValueError(f"{path} is corrupted: what it holds is not what was saved; save it again")
    said = json.loads(text)
    if said.get("version") != VERSION:
        raise ValueError(f"{path} has version {said.get('version')} of the format, and this is read here: {VERSION}")
    if said.keys() != {field.name for field in fields(Saved)}:
        raise ValueError(f"{path} is corrupted: its metadata says {', '.join(said)}")
    return Saved(**said), tensors


def _require_same(cache: KVCache, path: Path, about: Saved, model: nn.Module) -> None:
    """Refuse a file of another model, or of numbers that are stored otherwise."""
    if about.model != _model_digest(cache, model):
        raise ValueError(f"{path} was saved from another model: its config or cache specs are not this one's")
    for name, given, wanted in (("dtype", about.dtype, cache.dtype), ("codec", about.codec, cache.codec)):
        if given != wanted:
            raise ValueError(
                f"{path} was saved in {name} {given}, the cache is in {wanted}: make it with {name}={given}"
            )
    if about.together != cache.together:
        raise ValueError(
            f"{path} was saved with {about.together} tokens coded together, the cache codes {cache.together}: give it "
            "pages of a multiple of the codec's, or the store that it was saved from"
        )
    parameters = dict(model.named_parameters())
    if about.weight not in parameters or about.weight_digest != _tensor_digest(parameters[about.weight]):
        raise ValueError(f"{path} was saved from another model: its weight {about.weight} is not this one's")


def _row(cache: KVCache, path: Path, about: Saved, at: int, tensors: Mapping[str, Tensor]) -> Row:
    """One row of the file, once it has been found to be what the cache's layers take."""
    length, first, snapshots = about.lengths[at], about.first[at], about.snapshots[at]
    tokens: dict[str, tuple[int, ...]] = {}
    states: dict[str, tuple[int, ...]] = {}
    residual: dict[str, tuple[int, ...]] = {}
    for layer, store in cache._stores.items():
        held_there = held_positions(store.spec, length, first[store.kind])
        positions = coded(cache, held_there, reached(cache, length, snapshots))
        tokens |= {
            f"layers.{layer}.{name}": (heads, len(once(positions, store.per[name])), width)
            for name, (heads, width) in store.parts.items()
        }
        residual |= {f"layers.{layer}.{name}": tuple(row.shape) for name, row in store.read_residual(0, 0).items()}
        states |= {f"layers.{layer}.{state.name}": (snapshots, *state.shape) for state in store.spec.states}
    wanted = tokens | states | residual
    found = {name: tensors.get(f"rows.{at}.{name}") for name in wanted}
    held = cache.tensors
    for name, tensor in found.items():
        if tensor is None or tuple(tensor.shape) != wanted[name] or tensor.dtype != held[name].dtype:
            raise ValueError(f"{path} does not hold {name} of row {at} as {wanted[name]} in {held[name].dtype}")
    given = {name: tensor for name, tensor in found.items() if tensor is not None}
    of = [{name: given[name] for name in names} for names in (tokens, states, residual)]
    return Row(length, first, of[0], of[1], snapshots, of[2])


def _model_digest(cache: KVCache, model: nn.Module) -> str:
    """Of the config and the cache's specs. Raises ValueError where the model's own specs are others."""
    if tuple(getattr(model, "cache_specs", cache.specs)) != cache.specs:
        raise ValueError("the cache was not made from this model's cache_specs: give the model that fills it")
    facts = [_facts(getattr(model, "config", None)), _facts(cache.specs)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _facts(value: Any) -> Any:
    """A config as JSON, without fields that have their defaults: one that is new some day changes no old digest."""
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        given = {field.name: named[field.name] for field in fields(value) if named[field.name] != field.default}
        return {type(value).__name__: {name: _facts(item) for name, item in given.items()}}
    if isinstance(value, list | tuple):
        return [_facts(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _facts(item) for name, item in value.items()}
    if hasattr(value, "__dict__"):
        return {type(value).__name__: _facts(vars(value))}
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _weight(model: nn.Module) -> str:
    """The weight that a model is known by: the last that makes keys and values, by the names of published models."""
    matrices = [name for name, weight in model.named_parameters() if weight.ndim > 1]
    if not matrices:
        raise ValueError("a saved cache knows its model by a weight, and this module has none")
    making = [name for name in matrices if "attn" in name and not name.endswith("o_proj.weight")]
    return (making or matrices)[-1]


def _file_digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        found.update(f"{name} {_tensor_digest(tensors[name])}".encode())
    return found.hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
