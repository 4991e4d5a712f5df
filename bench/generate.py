"""`generate`: a continuation as it comes, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from attn_variants.architectures import decoder_config
from attn_variants.cache import KVCache, cache_shapes
from attn_variants.checkpoints import load_tokenizer
from attn_variants.checkpoints.fetch import model_folder
from attn_variants.decoder import Decoder
from attn_variants.generation import Stopping, stream

from .results import Report, Row
from .tables import Column, Table, figure, size

UNFINISHED = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to, until the rest of them has come."""

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
    decode: Callable[[list[int]], str],
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
    ids: list[int] = []
    text, said, reason = "", 0, "length"
    start = time.perf_counter()
    first = last = start
    for token in stream(decoder, [prompt], stopping=Stopping(max_new_tokens), cache=cache):
        last = time.perf_counter()
        first = first if ids else last
        ids.append(token.id)
        reason = token.reason or reason
        # An end token is no text.
        text = decode(ids[:-1] if reason == "eos" else ids)
        if not text.endswith(UNFINISHED):
            say(text[said:])
            said = len(text)
    say(text[said:] + "\n")
    return {
        "prompt_tokens": len(prompt),
        "new_tokens": len(ids),
        "text": text,
        "ids": ids,
        "reason": reason,
        "ttft_ms": (first - start) * 1e3,
        "tokens_per_s": (len(ids) - 1) / (last - first) if len(ids) > 1 else None,
        "store": store,
        "codec": codec,
        "cache_bytes": cache.nbytes,
    }
