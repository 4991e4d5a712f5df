"""At how many query tokens do MLA's two orders take the same time? What `MultiHeadLatentAttention` chooses by.

    python -m attn_variants.bench.crossover [--output FILE.md]

One layer at DeepSeek-V3's sizes per head, absorbed and expanded in turns, over a filled cache and over a prompt alone.
"""

from __future__ import annotations

import math
import statistics
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from attn_variants.cache import KVCache
from attn_variants.config import MLAConfig
from attn_variants.mla import MultiHeadLatentAttention, crossover

from .measure import Timings, prepare
from .progress import Progress
from .results import Report, Row, deliver, environment, require_writable
from .tables import Column, Table, exact, figure

HEADS = (16, 32)
CACHED = (0, 512, 2048, 8192)
"""Tokens cached before; with 0 the query tokens are a prompt that is all there is."""

TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
TURNS = 5

COLUMNS = (
    Column("heads", "heads"),
    Column("cached", "cached", exact),
    *(Column(f"ratio_{tokens}", f"{tokens}", "{:.2f}".format) for tokens in TOKENS),
    Column("tokens", "equal at", figure),
    Column("share", "of the crossover", "{:.2f}".format),
)
NOTE = (
    "Absorbed over expanded time, by query tokens; where the two are equal, between neighbours in proportion; and that "
    "number over the one at which both take the same multiplications for as many keys."
)


def crossover_report(heads: Sequence[int] = HEADS, cached: Sequence[int] = CACHED) -> Report:
    """A row per number of heads and of cached tokens."""
    rows = []
    progress = Progress("crossover", len(heads) * len(cached))
    for count in heads:
        for before in cached:
            progress.at(f"{count} heads, {before} cached tokens")
            rows.append(_row(count, before))
    progress.close()
    return Report(rows, [Table("MLA: absorbed against expanded", COLUMNS, rows, NOTE)])


def _row(heads: int, cached: int) -> Row:
    config = MLAConfig(hidden_size=64 * heads, num_attention_heads=heads)
    module = MultiHeadLatentAttention(config).eval()
    cache = KVCache([config.cache_spec()], batch=1, capacity=cached + max(TOKENS))
    for tensor in cache.tensors.values():
        tensor.normal_()
    if cached:
        cache.advance(cache.step(1, cached))
    ratios = {tokens: _ratio(module, cache, tokens) for tokens in TOKENS}
    equal = equal_at(ratios)
    return {
        "heads": heads,
        "cached": cached,
        **{f"ratio_{tokens}": ratio for tokens, ratio in ratios.items()},
        "tokens": equal,
        "share": None if equal is None else equal / crossover(config, cached + round(equal)),
    }


def _ratio(module: MultiHeadLatentAttention, cache: KVCache, tokens: int) -> float:
    """Absorbed over expanded time of a pass, the median over turns; nothing is appended for good."""
    x = torch.randn(1, tokens, module.config.hidden_size)
    ratios = []
    with torch.inference_mode():
        for _ in range(TURNS + 1):
            seconds = []
            for below in (math.inf, 0):
                module.absorbed_below = below
                work = partial(module, x, cache.step(1, tokens), cache.layers[0])
                seconds.append(Timings().time("cpu", work))
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])


def equal_at(ratios: dict[int, float]) -> float | None:
    """The first number of tokens at which the ratio reaches one, between neighbours in proportion; None if it never."""
    last, below = 0, 0.0
    for tokens, ratio in ratios.items():
        if ratio >= 1:
            return last + (tokens - last) * (1 - below) / (ratio - below)
        last, below = tokens, ratio
    return None


def main() -> None:
    """The command."""
    parser = ArgumentParser(prog="python -m attn_variants.bench.crossover", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the table to this file")
    output: Path | None = parser.parse_args().output
    if output is not None:
        require_writable(output)
    prepare("cpu", seed=0, threads=None)
    report = crossover_report()
    facts = environment([], seed=0, device="cpu", threads=None) | {"command": parser.prog}
    deliver(report, None, [] if output is None else [output], facts)


if __name__ == "__main__":
    main()
