"""The same caches under every policy: the table of published models, and where the answers part. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attn_variants.architectures import PRESETS
from attn_variants.cache import model_cache

from .results import Row
from .tables import Column, Table, as_markdown, exact, size

CONTEXT = 32768
"""Tokens of the one sequence that the table and the formulas are about."""

FIRST_TOKENS = 4096
"""Where growth is compared from."""


@dataclass(frozen=True)
class Question:
    """A column of the table: a policy, its store, and what is asked."""

    heading: str
    policy: str
    store: str | None
    asks: str

    @property
    def field(self) -> str:
        """Its name in a row."""
        return self.policy if self.store is None else f"{self.policy}_{self.store}"


QUESTIONS = (
    Question("ideal", "ideal", None, "What can attention ever read? min(T, W) tokens in a layer with a window of W."),
    Question("allocated", "allocated", None, "What does our own store reserve? Every token, also behind a window."),
    Question(
        "transformers, dynamic",
        "transformers",
        "dynamic",
        "What does transformers' default cache hold? Not the token that the next one pushes out of a window.",
    ),
    Question(
        "transformers, static",
        "transformers",
        "static",
        "What does its preallocated cache hold, made for just this many tokens?",
    ),
    Question(
        "vLLM, held", "vllm", "held", "What of vLLM's pool does a request hold after a decode step? Whole blocks."
    ),
    Question(
        "vLLM, planned",
        "vllm",
        "planned",
        "What does its admission set aside? Blocks too, with room for tokens in flight and copies of states.",
    ),
)

SHOWN = ("llama-3.1-8b", "gemma-3-27b", "mimo-v2-flash", "kimi-k3", "falcon-40b", "minicpm3-4b")
"""Models in which the answers to the questions differ, after one in which they do not."""


def questions() -> Iterator[str]:
    """The section on policies."""
    yield "## Which question?"
    yield ""
    yield (
        "Honest tools differ by a factor of two and more because they answer different questions. No size here comes "
        "without its policy; transformers is 5.24, vLLM 0.33 on one H100 per rank."
    )
    yield ""
    found = {name: answers(name) for name in SHOWN}
    columns = (
        Column("heading", "policy", right=False),
        Column("asks", "question", right=False),
        *(Column(name, name) for name in SHOWN),
    )
    rows = [
        {"heading": question.heading, "asks": question.asks}
        | {name: _against(found[name][question.field], found[name]["ideal"]) for name in SHOWN}
        for question in QUESTIONS
    ]
    yield from drawn(Table(f"One sequence of {CONTEXT:,} tokens, and over the ideal", columns, rows))
    yield "Where they part:"
    yield ""
    yield from _differences()
    yield ""


def _differences() -> Iterator[str]:
    yield f"- A full store keeps what a window has passed: {_over('gemma-3-27b', 'allocated')} in gemma-3-27b."
    yield (
        "- vLLM's admission counts, for every window, tokens that may be in flight, and for states several of its "
        f"blocks, which are large in models with states: {_over('gemma-3-27b', 'vllm_planned')} in gemma-3-27b, "
        f"{_over('kimi-k3', 'vllm_planned')} in kimi-k3, which holds {_over('kimi-k3', 'vllm_held')}."
    )
    yield (
        "- A program may cache more than the architecture needs. transformers repeats falcon-40b's key/value heads for "
        f"every query head before it caches them ({_over('falcon-40b', 'transformers_dynamic')}); vLLM stores "
        f"minicpm3-4b's latents expanded, head by head ({_over('minicpm3-4b', 'vllm_held')})."
    )
    yield (
        "- Or less. vLLM keeps deepseek-v3.2's indexer keys in 8 bits with a scale even where the cache is bfloat16 "
        f"({_over('deepseek-v3.2', 'vllm_held')}), and qwen3-next-80b-a3b's delta states in the model's dtype where "
        f"transformers has float32 ({_over('qwen3-next-80b-a3b', 'vllm_held')})."
    )
    yield (
        "- transformers keeps one input more of each convolution than the next step reads, so models with states "
        "come out a little above the ideal. Its dynamic cache keeps one token less of each window, so models with "
        "windows come out a little below."
    )
    cache = model_cache("kimi-k3")
    growth = cache.bytes(context=CONTEXT) / cache.bytes(context=FIRST_TOKENS)
    yield (
        "- Bytes before the first token and bytes per token are figures of their own: kimi-k3 takes "
        f"{size(cache.bytes_fixed())} and then {exact(growth_at('kimi-k3', CONTEXT))} bytes per token, so "
        f"{CONTEXT // FIRST_TOKENS} times {FIRST_TOKENS:,} tokens take {growth:.3g} times the bytes."
    )


def models_table() -> Iterator[str]:
    """The section with every preset."""
    rows = model_rows()
    reasons: dict[str, int] = {}
    for row in rows:
        for question in QUESTIONS:
            if isinstance(row[question.field], str):
                reasons.setdefault(row[question.field], len(reasons) + 1)
    columns = (
        Column("model", "model", right=False),
        Column("layers", "layers"),
        Column("bytes_per_token", "bytes/token", exact),
        Column("bytes_fixed", "fixed", lambda fixed: size(fixed) if fixed else "0"),
        *(Column(question.field, question.heading, lambda value: _cell(value, reasons)) for question in QUESTIONS),
    )
    yield f"## {len(rows)} models"
    yield ""
    yield (
        "bytes/token: what one more token adds at this context, 0 where every layer has a window, the mean of a "
        "stride where tokens are pooled. fixed: what a sequence takes before its first token. layers: those that the "
        "cache knows, in some models more than config.json counts. These are the bundled presets; `attn-bench models "
        "--format json` gives the source of each."
    )
    yield ""
    yield from drawn(Table(f"One sequence of {CONTEXT:,} tokens, bfloat16, one rank", columns, rows))
    yield "A dash is a question without an answer, because:"
    yield ""
    yield from (f"{number}. {reason}." for reason, number in reasons.items())
    yield ""
    flash = model_cache("deepseek-v4-flash")
    held, planned = (
        size(flash.bytes(context=CONTEXT, kv_dtype="fp8", policy="vllm", store=store)) for store in ("held", "planned")
    )
    yield f"In fp8, which vLLM takes, deepseek-v4-flash holds {held} there, and admission plans {planned}."
    yield ""


def model_rows(context: int = CONTEXT) -> list[Row]:
    """A row per preset, a field per question; a question that is refused is answered by the reason, a string."""
    return [
        {
            "model": name,
            "layers": len(model_cache(name).layers),
            "bytes_per_token": growth_at(name, context),
            "bytes_fixed": model_cache(name).bytes_fixed(),
            **answers(name, context),
        }
        for name in PRESETS
    ]


def growth_at(name: str, context: int) -> int:
    """Bytes that one more token adds, in the mean where a model pools its tokens."""
    return int(model_cache(name).bytes_per_token_mean(context=context))


def answers(name: str, context: int = CONTEXT) -> dict[str, int | str]:
    """The bytes that each question comes to, or why it is refused."""
    cache = model_cache(name)
    found: dict[str, int | str] = {}
    for question in QUESTIONS:
        try:
            found[question.field] = cache.bytes(context=context, policy=question.policy, store=question.store)
        except ValueError as error:
            found[question.field] = str(error)
    return found


def drawn(table: Table) -> list[str]:
    """A table's lines, and an empty one."""
    return [*as_markdown(table).rstrip("\n").splitlines(), ""]


def _cell(value: int | str, reasons: dict[str, int]) -> str:
    return f"- ({reasons[value]})" if isinstance(value, str) else size(value)


def _over(name: str, field: str) -> str:
    found = answers(name)
    return _times(found[field], found["ideal"])


def _against(value: int | str, ideal: int | str) -> str:
    return "-" if isinstance(value, str) else f"{size(value)} ({_times(value, ideal)})"


def _times(value: Any, other: Any) -> str:
    return f"{value / other:.3g}x"
