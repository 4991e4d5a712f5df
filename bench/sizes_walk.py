"""From the question "will Kimi-K2 fit on 8 GPUs at 128k?" to its answer, by the command's own output."""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from attn_variants.cache import model_cache

from .cli import main as command
from .sizes_policies import drawn
from .tables import Column, Table, exact, size

MODEL = "kimi-k2"
CONTEXT = 131072
RANKS = 8
SMALL, LARGE = 80 * 2**30, 141 * 10**9
"""Memory of a GPU: 80 GiB, as a budget is often given, and the 141 GB of a larger one."""


@dataclass(frozen=True)
class Plan:
    """A way to make it fit: GPUs and their memory, bits per weight, format and split of the cache."""

    says: str
    gpus: int
    memory: int
    bits: int
    kv_dtype: str = "bfloat16"
    split: str = "tp"


PLANS = (
    Plan("weights in bfloat16", RANKS, SMALL, 16),
    Plan("weights in 8 bits", RANKS, SMALL, 8),
    Plan("weights in 8 bits, GPUs of 141 GB", RANKS, LARGE, 8),
    Plan("weights in 8 bits, GPUs of 141 GB, cache in fp8", RANKS, LARGE, 8, "fp8"),
    Plan("weights in 4 bits", RANKS, SMALL, 4),
    Plan("weights in 4 bits, cache in fp8", RANKS, SMALL, 4, "fp8"),
    Plan("weights in 4 bits, tokens over ranks (cp)", RANKS, SMALL, 4, split="cp"),
    Plan("weights in 4 bits, sequences over ranks (dp)", RANKS, SMALL, 4, split="dp"),
    Plan("weights in 8 bits, 16 GPUs", 2 * RANKS, SMALL, 8),
)


def walk() -> Iterator[str]:
    """The section's lines."""
    cache = model_cache(MODEL)
    numbers = cache.weights("bfloat16") // 2
    sizes = f"--model {MODEL} --context {CONTEXT} --tp {RANKS}"
    sequence = cache.bytes(context=CONTEXT, tp=RANKS)
    one_rank = cache.bytes(context=CONTEXT)
    yield f"## Will Kimi-K2 fit on {RANKS} GPUs at 128k?"
    yield ""
    yield f"**The cache.** {CONTEXT:,} tokens on each of {RANKS} ranks of tensor parallelism:"
    yield ""
    yield from transcript(f"memory {sizes} --explain")
    same = "the same as without tensor parallelism" if sequence == one_rank else f"against {size(one_rank)} on one rank"
    yield (
        f"{size(sequence)} on every rank, {same}: a latent has no heads to split, so all {RANKS} ranks hold "
        f"{size(cache.bytes_over_ranks(context=CONTEXT, tp=RANKS))} between them."
    )
    yield ""
    yield "**The weights.** `--weights auto` counts the model's numbers and prices them in its dtype:"
    yield ""
    yield from transcript(f"memory {sizes} --budget 80GiB --weights auto --explain")
    yield (
        f"In bfloat16 the answer is no. There are {numbers:,} numbers; at one byte each, as in an fp8 checkpoint "
        f"(scales not counted), a rank holds {size(-(-numbers // RANKS))}. Give those bytes, and the memory you have:"
    )
    yield ""
    yield from transcript(f"memory {sizes} --budget 141GB --weights {numbers} --explain")
    yield "**Ways to make it fit**, by the same figures; weights without scales, and nothing set aside for activations:"
    yield ""
    yield from _plans(numbers)
    yield from _answer(numbers)


def transcript(words: str) -> Iterator[str]:
    """A call of the command and all it prints, as a block."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        command(shlex.split(words))
    printed = [line.rstrip() for line in (out.getvalue() + err.getvalue()).rstrip().splitlines()]
    yield "```text"
    yield f"$ attn-bench {words}"
    yield from (line for line, before in zip(printed, ["-", *printed], strict=False) if line or before)
    yield "```"
    yield ""


def fitting(plan: Plan, numbers: int) -> dict[str, Any]:
    """What a plan leaves on a rank beside its share of the weights, and what fits there."""
    cache = model_cache(MODEL)
    weights = -(-numbers * plan.bits // (8 * plan.gpus))
    left = plan.memory - weights
    options: dict[str, Any] = {"kv_dtype": plan.kv_dtype, plan.split: plan.gpus}
    row: dict[str, Any] = {"plan": plan.says, "weights": weights, "left": max(left, 0), "sequences": 0, "longest": 0}
    if left > 0:
        row["sequences"] = cache.max_batch(budget=left, context=CONTEXT, **options)
        row["longest"] = cache.max_context(budget=left, **options)
    return row


def _plans(numbers: int) -> list[str]:
    columns = (
        Column("plan", "plan", right=False),
        Column("weights", "weights, a rank", size),
        Column("left", "left for cache, a rank", lambda left: size(left) if left else "nothing"),
        Column("sequences", f"sequences of {CONTEXT:,} in all", exact),
        Column("longest", "longest single sequence", exact),
    )
    rows = [fitting(plan, numbers) for plan in PLANS]
    title = f"{RANKS} GPUs of {size(SMALL)} with tensor parallelism, unless said otherwise"
    return drawn(Table(title, columns, rows))


def _answer(numbers: int) -> Iterator[str]:
    found = {plan.says: fitting(plan, numbers)["sequences"] for plan in PLANS}
    yield f"**The answer**, on {RANKS} GPUs of {size(SMALL)} unless said otherwise:"
    yield ""
    yield f"- No: {'; '.join(says for says, count in found.items() if not count)}."
    yield f"- Yes: {'; '.join(f'{says} ({exact(count)} at once)' for says, count in found.items() if count)}."
    yield ""
    yield (
        "Splitting heads does nothing for latents; splitting tokens (`--cp`) or sequences (`--dp`) does. A rank's "
        "share of the weights then depends on where the experts are: this table shares them out evenly, the command "
        "counts all of them on each rank of `--cp` and `--dp`, so give it `--weights` of a rank. Take what "
        "activations and the runtime need off `--budget`."
    )
    yield ""
