"""`generate --no-cache`: what each new token costs with the cache and without, as a table and as a drawing."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from .results import Row, write_whole
from .tables import Column, Table, exact, figure

PLACES = 8
COLUMNS = (
    Column("length", "tokens before it", exact),
    Column("cached_ms", "with cache, ms", figure),
    Column("uncached_ms", "without, ms", figure),
    Column("ratio", "times as long", figure),
)
NOTE = (
    "What one new token costs, the median of each stretch of the sequence. With the cache one token is fed; without it "
    "all tokens before it are too, every time."
)


def costs(prompt_tokens: int, cached_ms: Sequence[float], uncached_ms: Sequence[float]) -> list[Row]:
    """Up to 8 stretches of the sequence, each with its middle length and the median milliseconds of a token in it."""
    steps = list(zip(cached_ms, uncached_ms, strict=False))
    stretches = min(PLACES, len(steps))
    rows = []
    for place in range(stretches):
        start, stop = place * len(steps) // stretches, (place + 1) * len(steps) // stretches
        cached, uncached = (statistics.median(side) for side in zip(*steps[start:stop], strict=True))
        # The first step follows the prompt and the first new token.
        length = prompt_tokens + 1 + (start + stop - 1) // 2
        rows.append({"length": length, "cached_ms": cached, "uncached_ms": uncached, "ratio": uncached / cached})
    return rows


def cost_table(rows: Sequence[Row]) -> Table:
    """The stretches for a reader."""
    return Table("A token's cost with and without the cache", COLUMNS, rows, NOTE)


def draw(path: Path, title: str, prompt_tokens: int, cached_ms: Sequence[float], uncached_ms: Sequence[float]) -> None:
    """Both curves over the length of the sequence, in a PNG or SVG file."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(7, 4.5), layout="constrained")
    axes = canvas.subplots()
    for name, steps in (("without cache", uncached_ms), ("with cache", cached_ms)):
        axes.plot(range(prompt_tokens + 1, prompt_tokens + 1 + len(steps)), steps, label=name)
    axes.set(title=title, xlabel="tokens before the new one", ylabel="ms per new token")
    axes.set_ylim(bottom=0)
    axes.legend()
    drawn = io.BytesIO()
    canvas.savefig(drawn, format=path.suffix.lower().removeprefix("."), dpi=150)
    write_whole(path, drawn.getvalue())
