"""What a codec does to given keys and values: the error beside the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attn_variants.contract import Record

from .quantize import Codec


def relative_errors(codec: Codec, records: Sequence[Record], entries: Mapping[str, Tensor]) -> dict[str, float]:
    """||decoded - given|| / ||given|| of each entry, over all its heads and tokens; 0 where all that was given is 0.

    entries: (..., heads, T, dim) each, in the cache's dtype, as a layer appends them. Tokens that would wait for others to
    be coded with are left out: they are exact until then.
    """
    found = {}
    for record in records:
        row = torch.cat([entries[entry.name] for entry in record.entries], dim=-1)
        row = row[..., : row.shape[-2] // codec.together * codec.together, :]
        decoded = codec.decode(record, codec.encode(record, row), row.dtype)
        for entry in record.entries:
            columns = record.columns(entry.name)
            given, back = row[..., columns].double(), decoded[..., columns].double()
            found[entry.name] = float((back - given).norm() / given.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return found
