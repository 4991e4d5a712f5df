"""`generate`: a continuation as it comes, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from attn_variants.architectures import decoder_config
from attn_variants.cache import KVCache, cache_shapes
from attn_variants.checkpoints import load_tokenizer
from attn_variants.checkpoints.fetch import model_folder
from attn_variants.decoder import Decoder
from attn_variants.generation import Stopping, stream

from .results import Report, Row
from .tables import Column, Table, figure, size

COLUMNS = (
    Column("prompt_tokens", "prompt tokens"),
    Column("new_tokens", "new tokens"),
    Column("reason", "ended by", right=False),
    Column("ttft_ms", "TTFT ms", figure),
    Column("tokens_per_s", "tokens/s", figure),
    Column("cache_bytes", "cache", size),
)


def generate_report(
    model: str,
    prompt: str,
    *,
    max_new_tokens: int,
    dtype: str | None,
    device: str,
    say: Callable[[str], None],
    store: str = "full",
    codec: str = "plain",
) -> Report:
    """Greedy continuation of a prompt; `say` is given the text piece by piece, whole characters only.

    model: a Hugging Face folder, or the name of a model that was fetched. store, codec: of its cache. Raises ValueError
    for what cannot be loaded, a prompt without a token, and, before weights are read, a store that cannot be made.
    """
    folder = model_folder(model)
    cache_shapes(decoder_config(folder).cache_specs, batch=1, capacity=1, store=store, codec=codec)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("--prompt is empty; give some text to continue")
    decoder = Decoder.from_pretrained(folder, dtype=dtype, device=device).eval()
    row = _generated(decoder, ids, tokenizer.decode, max_new_tokens, say, store=store, codec=codec)
    return Report([{"model": str(model)} | row], [Table(f"{Path(model).name} on {device}", COLUMNS, [row])])


def _generated(
    decoder: Decoder,
    prompt: list[int],
    decode: Callable[[Sequence[int]], str],
    max_new_tokens: int,
    say: Callable[[str], None],
    *,
    store: str = "full",
    codec: str = "plain",
) -> Row:
    cache = KVCache(
        decoder.cache_specs,
        batch=1,
        capacity=len(prompt) + max_new_tokens - 1,
        dtype=decoder.dtype,
        device=decoder.device,
        store=store,
        codec=codec,
    )
    start = time.perf_counter()
    first = last = start
    result = None
    for token in stream(decoder, [prompt], stopping=Stopping(max_new_tokens), cache=cache, decode=decode):
        last = time.perf_counter()
        first = last if first == start else first
        say(token.text)
        result = token.result
    say("\n")
    assert result is not None
    return {
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": result.new_tokens,
        "text": result.text,
        "ids": list(result.ids),
        "reason": result.reason,
        "ttft_ms": (first - start) * 1e3,
        "tokens_per_s": (result.new_tokens - 1) / (last - first) if result.new_tokens > 1 else None,
        "store": store,
        "codec": codec,
        "cache_bytes": cache.nbytes,
    }
