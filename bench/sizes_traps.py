"""Ways in which calculators get a cache wrong, each with the size it gives and the right one. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from attn_variants.architectures import preset
from attn_variants.cache import bytes_per_token, ideal_bytes, model_cache
from attn_variants.cache.formats import format_named
from attn_variants.config import ExpandedMLAConfig

from .tables import Column, Table, exact, size

LONG = 131072
CARD = 80
"""Of memory that is said to hold so many GB."""


@dataclass(frozen=True)
class Trap:
    """A mistake, what it was asked about, and both answers; `show` words them."""

    mistake: str
    asked: str
    wrong: float
    right: float
    show: Callable[[int], str] = size


def traps_table() -> Table:
    """A row per trap."""
    columns = (
        Column("mistake", "mistake", right=False),
        Column("asked", "asked of", right=False),
        Column("wrong", "wrong"),
        Column("right", "right"),
        Column("ratio", "wrong / right", "{:.3g}".format),
    )
    rows = [
        {
            "mistake": trap.mistake,
            "asked": trap.asked,
            "wrong": trap.show(round(trap.wrong)),
            "right": trap.show(round(trap.right)),
            "ratio": trap.wrong / trap.right,
        }
        for trap in traps()
    ]
    return Table("Wrong and right", columns, rows)


def traps() -> Iterator[Trap]:
    """All of them, with the sizes of published models; bfloat16 and one sequence where nothing is said."""
    yield from _heads_and_latents()
    yield from _kinds_of_layers()
    yield from _ranks()
    yield from _numbers()
    yield from _growth()


def _per_token(config: Any) -> int:
    return model_cache(config).bytes_per_token(context=LONG)


def _changed(name: str, **fields: Any) -> dict[str, Any]:
    """A preset's config with other fields."""
    return preset(name) | fields


def _heads_and_latents() -> Iterator[Trap]:
    llama, qwen, deepseek = preset("llama-3.1-70b"), preset("qwen3-4b"), preset("deepseek-v3")
    right = _per_token("deepseek-v3")
    yield Trap(
        "query heads counted, not key/value heads",
        "llama-3.1-70b, per token",
        _per_token(_changed("llama-3.1-70b", num_key_value_heads=llama["num_attention_heads"])),
        _per_token(llama),
        exact,
    )
    guessed = qwen["hidden_size"] // qwen["num_attention_heads"]
    yield Trap(
        "head_dim guessed as hidden_size / heads",
        "qwen3-4b, per token",
        _per_token(_changed("qwen3-4b", head_dim=guessed)),
        _per_token(qwen),
        exact,
    )
    named = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    as_llama = {"model_type": "llama"} | {name: deepseek[name] for name in named}
    yield Trap("MLA priced as multi-head attention", "deepseek-v3, per token", _per_token(as_llama), right, exact)
    sizes = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    expanded = ExpandedMLAConfig(**{name: deepseek[name] for name in sizes}).cache_spec()
    yield Trap(
        "MLA priced as the keys and values it expands to",
        "deepseek-v3, per token",
        bytes_per_token([expanded] * deepseek["num_hidden_layers"], context=LONG),
        right,
        exact,
    )
    specs = [
        replace(spec, records=tuple(record for record in spec.records if record.name != "index_k"))
        for spec in model_cache("deepseek-v3.2").layers
    ]
    without = bytes_per_token(specs, context=LONG)
    yield Trap("the indexer's keys forgotten", "deepseek-v3.2, per token", without, _per_token("deepseek-v3.2"), exact)


def _kinds_of_layers() -> Iterator[Trap]:
    gemma, qwen, kimi = (model_cache(name) for name in ("gemma-3-27b", "qwen3-next-80b-a3b", "kimi-k3"))
    whole = [replace(spec, window=None) for spec in gemma.layers]
    yield Trap(
        "windows ignored",
        f"gemma-3-27b, {LONG:,} tokens",
        ideal_bytes(whole, batch=1, context=LONG),
        gemma.bytes(context=LONG),
    )
    full = [spec for spec in gemma.layers if spec.window is None]
    yield Trap(
        "layers with a window left out altogether",
        "gemma-3-27b, 1,024 tokens",
        ideal_bytes(full, batch=1, context=1024),
        gemma.bytes(context=1024),
    )
    attention = next(spec for spec in qwen.layers if spec.records)
    yield Trap(
        "linear layers counted as attention",
        f"qwen3-next-80b-a3b, {LONG:,} tokens",
        ideal_bytes([attention] * len(qwen.layers), batch=1, context=LONG),
        qwen.bytes(context=LONG),
    )
    yield Trap(
        "states forgotten",
        "kimi-k3, 8,192 tokens",
        kimi.bytes(context=8192) - kimi.bytes_fixed(),
        kimi.bytes(context=8192),
    )
    yield Trap(
        "layers that read another layer's cache counted",
        "gemma-3n-e4b, per token",
        _per_token(_changed("gemma-3n-e4b", num_kv_shared_layers=0)),
        _per_token("gemma-3n-e4b"),
        exact,
    )


def _ranks() -> Iterator[Trap]:
    deepseek, llama = model_cache("deepseek-v3"), model_cache("llama-3.1-70b")
    yield Trap(
        "latents divided by tp",
        f"deepseek-v3, {LONG:,} tokens, a rank of tp 8",
        deepseek.bytes(context=LONG) / 8,
        deepseek.bytes(context=LONG, tp=8),
    )
    heads = preset("llama-3.1-70b")["num_key_value_heads"]
    one_head = llama.bytes(context=LONG) // heads
    yield Trap(
        "K // tp heads a rank, with tp above K",
        f"llama-3.1-70b, {LONG:,} tokens, a rank of tp 16",
        heads // 16 * one_head,
        llama.bytes(context=LONG, tp=16),
    )
    yield Trap(
        "heads divided where they are replicated",
        f"llama-3.1-70b, {LONG:,} tokens, a rank of tp 16",
        llama.bytes(context=LONG) / 16,
        llama.bytes(context=LONG, tp=16),
    )


def _numbers() -> Iterator[Trap]:
    llama = model_cache("llama-3.1-8b")
    plain = llama.bytes(context=4096)
    yield Trap(
        "scales, zero points and the plain residual forgotten",
        "llama-3.1-8b, 4,096 tokens, int4:64:128",
        plain / 4,
        llama.bytes(context=4096, kv_dtype="int4:64:128"),
    )
    block = replace(llama.layers[0].entries[0], heads=1, dim=32)
    yield Trap(
        "the bytes of a block taken for those of a number",
        "llama-3.1-8b, 4,096 tokens, q8_0",
        plain / 2 * format_named("q8_0").token_bytes(block),
        llama.bytes(context=4096, kv_dtype="q8_0"),
    )
    yield Trap(
        f"{CARD} GB of memory taken for {CARD} GiB",
        "llama-3.1-8b, most tokens",
        llama.max_context(budget=CARD * 2**30) or 0,
        llama.max_context(budget=CARD * 10**9) or 0,
        exact,
    )


def _growth() -> Iterator[Trap]:
    gemma, kimi = model_cache("gemma-3-27b"), model_cache("kimi-k3")
    yield Trap(
        "eight times the tokens taken for eight times the bytes",
        "gemma-3-27b, 32,768 tokens from 4,096",
        8 * gemma.bytes(context=4096),
        gemma.bytes(context=32768),
    )
    yield Trap(
        "the same, with states",
        "kimi-k3, 32,768 tokens from 4,096",
        8 * kimi.bytes(context=4096),
        kimi.bytes(context=32768),
    )
    budget = 16 * 2**30
    yield Trap(
        "a budget divided by the average bytes per token",
        "gemma-3-27b, most tokens in 16 GiB, from 4,096",
        budget * 4096 // gemma.bytes(context=4096),
        gemma.max_context(budget=budget) or 0,
        exact,
    )
