"""The caches of transformers 5.24, measured: every row of tests/data/transformers_cache_bytes.jsonl.gz to the byte."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_variants.architectures import Architecture, architecture
from attn_variants.architectures.strided import strided_entries

SIZES = {"bfloat16": 2, "float32": 4, "int64": 8}
DATA = Path(__file__).parents[1] / "data" / "transformers_cache_bytes.jsonl.gz"


def rows() -> Iterator[dict[str, Any]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


BY_TYPE: dict[str, list[dict[str, Any]]] = {}
for row in rows():
    BY_TYPE.setdefault(row["model_type"], []).append(row)


def held(found: Architecture, *, tokens: int, batch: int, dtype: str) -> int:
    """Bytes of transformers' dynamic cache: a sliding layer drops the token that the next one pushes out."""
    total = 0
    for spec in found.layers:
        limit = spec.window or spec.chunk
        kept = tokens if limit is None else min(tokens, limit - 1)
        total += sum(kept * entry.numel * SIZES[entry.dtype or dtype] for entry in spec.entries)
        total += sum(state.numel * SIZES[state.dtype or dtype] for state in spec.states)
        total += sum(
            count * entry.numel * SIZES[entry.dtype or dtype] for entry, count in strided_entries(spec, tokens)
        )
    return batch * total + found.bytes_once


@pytest.mark.parametrize("spelling", ["config", "sparse_config"])
@pytest.mark.parametrize("model_type", BY_TYPE)
def test_the_bytes_of_every_measured_cache(model_type: str, spelling: str) -> None:
    """`config` is what save_pretrained writes; `sparse_config` holds the fields that were set, as hub configs do."""
    for row in BY_TYPE[model_type]:
        found = architecture(row[spelling], held_by="transformers")
        for tokens, total in (
            (row["prompt_len"], row["total_bytes_prompt"]),
            (row["prompt_len"] + row["decode_steps"], row["total_bytes_end"]),
        ):
            assert held(found, tokens=tokens, batch=row["batch"], dtype=row["dtype"]) == total, row["variant"]
