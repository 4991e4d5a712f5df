"""The tour: sizes, parity and speed of every variant, in about a minute, with nothing to download."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attn_variants.registry import VARIANTS

from .case import LLAMA_3_8B, SMALL, model_subject, variant_subject
from .contest import Case, Settings
from .fitting import Question
from .memory import memory_report
from .parity import parity_report
from .results import Report
from .throughput import throughput_report

BATCH, CONTEXT, KV_DTYPE = 8, 8192, "bfloat16"

MODELS = (
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-3.1-405b",
    "falcon-7b",
    "mixtral-8x7b",
    "mistral-7b-v0.1",
    "gemma-3-27b",
    "gpt-oss-120b",
    "llama-4-scout",
    "qwen3-235b-a22b",
    "deepseek-v2-lite",
    "deepseek-v3",
)
"""Published models of every kind: many heads, groups, one head, windows, chunks, latents."""

PARITY_DTYPES = ("float32", "bfloat16")
CONTEXTS = (512, 2048)


def sections(device: str, seed: int) -> Iterator[tuple[str, Report]]:
    """The tour's parts by name, each when it is done."""
    sized = partial(memory_report, question=Question(BATCH, CONTEXT, KV_DTYPE))
    yield "variants", sized([variant_subject(name, LLAMA_3_8B) for name in VARIANTS])
    yield "models", sized([model_subject(name) for name in MODELS])
    parity = parity_report(list(VARIANTS), SMALL, dtypes=PARITY_DTYPES, device=device, seed=seed)
    yield "parity", parity
    if parity.failures:
        # How fast a wrong output comes is of no interest.
        return
    cases = [Case("small", name, SMALL, "float32", 1, context) for name in VARIANTS for context in CONTEXTS]
    yield "throughput", throughput_report(cases, Settings(device, seed, repeats=3))
