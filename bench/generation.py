"""What generation costs: the loop beside bare steps, speculation and lookup beside plain decoding, no cache at all.

    python -m attn_variants.bench.generation [--output FILE.md] [--output FILE.json]

Every ratio is of one run, its two sides in turns, and is the median over turns.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path

from attn_variants.config import Geometry

from .case import SMALL, preset_geometry
from .loop_cost import cost_rows, loop_rows
from .measure import prepare
from .progress import Progress
from .results import Report, Row, deliver, environment, require_writable
from .speculating import SMOLLM2, lookup_rows, speculation_rows
from .tables import Column, Table, exact, figure

PRESET = "llama-100m"
SEED = 0
CONTEXT = 512
LOOP_TURNS = 12
ACCEPTANCE = 0.8
DRAFTS = (2, 4, 6)
NEW, TURNS = 193, 2
LOOKUPS = (8,)
LOOKUP_DTYPES = ("float32", "bfloat16")
LENGTHS = (128, 256, 512, 1024, 2048)


def _median(samples: Sequence[float]) -> str:
    return figure(statistics.median(samples))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _times(value: float) -> str:
    return f"{value:.2f}"


UNQUIET = Column("unquiet", "cores shared", _yes, right=False)
LOOP = (
    Column("dtype", "dtype", right=False),
    Column("sampling", "sampling", right=False),
    Column("bare_ms", "bare ms", _median),
    Column("loop_ms", "loop ms", _median),
    Column("ratio", "loop over bare", "{:.3f}".format),
    UNQUIET,
)
SPEED = (
    Column("plain_ms", "plain ms/token", _median),
    Column("speculative_ms", "with it", _median),
    Column("speedup", "times as fast", _times),
    Column("acceptance", "acceptance", _times),
    Column("tokens_per_call", "tokens per call", _times),
)
SPECULATION = (
    Column("sampling", "sampling", right=False),
    Column("drafts", "drafts"),
    *SPEED,
    Column("cost", "draft step", "{:.3f}".format),
    Column("block", "block pass", _times),
    Column("expected", "expected", _times),
    Column("expected_block", "with that pass", _times),
    UNQUIET,
)
LOOKUP = (
    Column("dtype", "dtype", right=False),
    Column("text", "text", right=False),
    Column("drafts", "drafts"),
    *SPEED,
    Column("same", "same text", _yes, right=False),
    UNQUIET,
)
CACHE = (
    Column("length", "tokens before", exact),
    Column("cached_ms", "with the cache, ms", _median),
    Column("recomputed_ms", "without, ms", _median),
    Column("ratio", "without over with", _times),
    UNQUIET,
)

LOOP_NOTE = (
    "A token's time at batch 1 over a full store: `stream` against calls of the decoder alone over as many cached "
    "tokens, which choose nothing."
)
SPECULATION_NOTE = (
    "The draft has two layers and proposes from a mixture with the model's own distribution, set so that the "
    "acceptance asked for holds at each place; the mixture is made in a rehearsal that is not timed. Draft step and "
    "block pass: the draft's step, and the model's pass over a block, over the model's step. Expected: for the "
    "measured acceptance, if a block took as long as a step (arXiv 2211.17192, theorem 3.8); then with the pass as "
    "measured. The first token, which waits for the prompt, is not timed; the draft's own pass over the prompt is."
)
LOOKUP_NOTE = (
    "Greedy. Ordinary: questions in the chat template. Repeating: a passage that stands twice in the prompt and begins "
    "again. Same text: in lower precision a block may round otherwise than steps do, and an argmax may turn."
)
CACHE_NOTE = "A new token's time after a prompt of so many, in float32 with the small decoder."


def generation_report(
    variant: str,
    geometry: Geometry,
    small: Geometry = SMALL,
    *,
    context: int = CONTEXT,
    loop_turns: int = LOOP_TURNS,
    drafts: Sequence[int] = DRAFTS,
    new: int = NEW,
    turns: int = TURNS,
    lengths: tuple[int, ...] = LENGTHS,
    lookups: Sequence[int] = LOOKUPS,
) -> Report:
    """All four sections; the one of lookup says so where SmolLM2 is not here."""
    progress = Progress("generation", 4 + 2 * len(drafts) + 4 * len(lookups) + len(lengths))
    loop = _said(progress, loop_rows(variant, geometry, context=context, turns=loop_turns, seed=SEED))
    speculation = _said(
        progress,
        speculation_rows(variant, geometry, acceptance=ACCEPTANCE, drafts=drafts, new=new, turns=turns, seed=SEED),
    )
    lookup, lacking = [], ""
    try:
        lookup = _said(progress, lookup_rows(drafts=lookups, dtypes=LOOKUP_DTYPES, new=new, turns=turns))
    except ValueError as error:
        lacking = f"Not measured: {error}."
    cache = _said(progress, cost_rows(variant, small, lengths=lengths, turns=turns, seed=SEED))
    progress.close()
    model = f"{geometry.layers} layers of {geometry.hidden_size}"
    tables = [
        Table(f"The loop's own cost: {variant}, {model}, {context} cached tokens", LOOP, loop, LOOP_NOTE),
        Table(
            f"Speculation in bfloat16 at an acceptance of {ACCEPTANCE}: {variant}, {model}",
            SPECULATION,
            speculation,
            SPECULATION_NOTE,
        ),
        Table(f"Prompt lookup: {SMOLLM2}", LOOKUP, lookup, lacking or LOOKUP_NOTE),
        Table(f"Without a cache: {variant}, {small.layers} layers of {small.hidden_size}", CACHE, cache, CACHE_NOTE),
    ]
    return Report([*loop, *speculation, *lookup, *cache], tables)


def _said(progress: Progress, rows: Iterator[Row]) -> list[Row]:
    found = []
    for row in rows:
        found.append(row)
        progress.at(str(row["section"]))
    return found


def main() -> None:
    """The command."""
    parser = ArgumentParser(prog="python -m attn_variants.bench.generation", description=__doc__)
    parser.add_argument("--output", type=Path, action="append", default=[], help="write to this file; may be repeated")
    parser.add_argument("--threads", type=int, help="threads of torch; its own choice if left out")
    asked = parser.parse_args()
    for output in asked.output:
        require_writable(output)
    prepare("cpu", seed=SEED, threads=asked.threads)
    report = generation_report(*preset_geometry(PRESET))
    facts = environment([], seed=SEED, device="cpu", threads=asked.threads) | {"command": parser.prog}
    deliver(report, None, asked.output, facts)


if __name__ == "__main__":
    main()
