"""The caches of transformers 5.24, measured: every row of tests/data/transformers_cache_bytes.jsonl.gz to the byte."""

import gzip
import json
from pathlib import Path

import pytest

from attn_variants.cache import model_cache

DATA = Path(__file__).parents[1] / "data" / "transformers_cache_bytes.jsonl.gz"
NOT_IN_ITS_STATIC_CACHE = {
    "recurrent_gemma": "keeps its states on its modules",
    "xlnet": "has no static cache",
}

BY_TYPE = {}
with gzip.open(DATA, "rt", encoding="utf-8") as lines:
    for row in map(json.loads, lines):
        BY_TYPE.setdefault(row["model_type"], []).append(row)


@pytest.mark.parametrize("spelling", ["config", "sparse_config"])
@pytest.mark.parametrize("model_type", BY_TYPE)
def test_the_bytes_of_every_measured_cache(model_type, spelling):
    """`config` is what save_pretrained writes; `sparse_config` holds the fields that were set, as hub configs do."""
    for row in BY_TYPE[model_type]:
        m, sizes = (
            model_cache(row[spelling]),
            {"batch": row["batch"], "kv_dtype": row["dtype"], "policy": "transformers"},
        )
        prompt, end = row["prompt_len"], row["prompt_len"] + row["decode_steps"]
        assert m.bytes(context=prompt, **sizes) == row["total_bytes_prompt"], row["variant"]
        assert m.bytes(context=end, **sizes) == row["total_bytes_end"], row["variant"]
        if row.get("total_bytes_static") is not None and model_type not in NOT_IN_ITS_STATIC_CACHE:
            assert m.bytes(context=end, store="static", **sizes) == row["total_bytes_static"], row["variant"]


def test_most_types_were_measured_with_a_static_cache_too():
    static = {name for name, rows in BY_TYPE.items() if any(row.get("total_bytes_static") for row in rows)}
    assert len(BY_TYPE) == 146
    assert len(static - NOT_IN_ITS_STATIC_CACHE.keys()) > 70
