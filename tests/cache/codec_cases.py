"""What tests of codecs share: names of all kinds, records, and rows that are hard to code."""

import torch

from attn_variants import Entry, Record

NAMES = [
    "plain",
    "int8",
    "int8:4",
    "int8:asym",
    "int8:4:asym:rope",
    "int4",
    "int4:4",
    "int4:sym",
    "int4:4:sym:rope",
    "fp8",
    "fp8:rope",
    "fp8-mla",
]
K, V = Record.of(Entry("k", 2, 8)), Record.of(Entry("v", 2, 12))
KV = Record("kv", (Entry("latent", 1, 256), Entry("k_rope", 1, 64)))
GTA_KV = Record("kv", (Entry("tied", 2, 20),))
OWN = Record.of(Entry("index", 1, 5, dtype="uint8"))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def hard_rows(width, dtype, seed=0):
    """(n, width): normal, of all magnitudes, zero, constant, with one outlier, offset, and up to the dtype's ends."""
    generator, info = torch.Generator().manual_seed(seed), torch.finfo(dtype)

    def normal(n):
        return torch.randn(n, width, generator=generator, dtype=torch.float64)

    spread = 2.0 ** torch.linspace(-30, 30, 61, dtype=torch.float64)[:, None]
    rows = [torch.zeros(2, width, dtype=torch.float64), normal(32), normal(61) * spread]
    ends = (info.max, info.max * 0.99, info.smallest_normal, info.smallest_normal * info.eps)
    for value in (100.0, 0.1, -0.1, 6e4, 1e30, 1e-30, 3e-5, *ends, -info.max):
        outlier, both = normal(4), (torch.rand(8, width, generator=generator, dtype=torch.float64) * 2 - 1) * value
        outlier[:, 1] = value
        both[:4, 0], both[:4, 3] = value, -value
        rows += [torch.full((1, width), value, dtype=torch.float64), outlier, both, normal(4) * 0.01 + value]
    return torch.cat(rows).clamp(-info.max, info.max).to(dtype)
