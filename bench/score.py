"""`score`: a text's perplexity on every variant, store and codec, and so what a codec costs beside its bytes."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attn_variants.architectures import decoder_config
from attn_variants.cache import KVCache, cache_shapes
from attn_variants.cache.accounting import used_bytes
from attn_variants.checkpoints import load_tokenizer
from attn_variants.checkpoints.fetch import model_folder
from attn_variants.config import DecoderConfig, ExpandedMLAConfig, MLAConfig
from attn_variants.decoder import Decoder
from attn_variants.dtypes import canonical_dtype
from attn_variants.generation.scoring import mean_nll, score
from attn_variants.registry import variant_of

from .progress import Progress
from .results import Report, Row
from .tables import Column, exact, folded, size

BASELINE = ("full", "plain")

COLUMNS = (
    *(Column(name, name, right=False) for name in ("variant", "store", "codec", "dtype")),
    Column("tokens", "tokens", exact),
    Column("nll", "nll", "{:.5f}".format),
    Column("perplexity", "perplexity", "{:.4f}".format),
    Column("delta_nll", "against full, plain", "{:+.5f}".format),
    Column("cache_bytes", "cache", size),
    Column("bytes_per_token", "bytes/token", exact),
)
NOTE = (
    "nll: mean negative log-likelihood of the tokens after the first, in nats; perplexity: its exponential. The text "
    "goes through the cache {chunk} tokens at a time, the first by itself, so that all others read what the store and "
    "codec made of keys and values. against full, plain: nll less that row's, of the same variant and dtype. "
    "bytes/token: what one more token adds to what can be read, as the codec stores it."
)


def score_report(
    model: str,
    text: str,
    *,
    dtypes: Sequence[str | None] = (None,),
    stores: Sequence[str] = ("full",),
    codecs: Sequence[str] = ("plain",),
    max_tokens: int | None = None,
    chunk: int,
    device: str = "cpu",
) -> Report:
    """A row per variant, dtype, store and codec: what the model makes of the text's tokens after the first.

    The variant is the model's own; MLA is also scored with its expanded cache. full and plain are always among the
    pairs, for the others to be compared with. A dtype of None is the checkpoint's. chunk: tokens of a step behind the
    first. `failures` names what gave no number.
    Raises ValueError, before weights are read, for a text of fewer than two tokens and a store that cannot be made.
    """
    folder = model_folder(model)
    pairs = list(dict.fromkeys([BASELINE, *itertools.product(stores, codecs)]))
    configs = [decoder_config(folder), *_expanded(decoder_config(folder))]
    storable = [[pair for pair in pairs if _storable(config, pair, own=config is configs[0])] for config in configs]
    ids = load_tokenizer(folder).encode(text)[:max_tokens]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens for this model; a score needs at least 2")
    if len(ids) > (most := configs[0].max_position_embeddings):
        print(f"the text has {len(ids)} tokens and the model knows {most}: see --max-tokens", file=sys.stderr)
    rows: list[Row] = []
    progress = Progress("score", len(dtypes) * sum(map(len, storable)))
    for dtype in dtypes:
        decoder = Decoder.from_pretrained(folder, dtype=dtype, device=device).eval()
        for config, chosen in zip(configs, storable, strict=True):
            own = decoder if config is configs[0] else _twin(decoder, config)
            for row in _rows(own, ids, chosen, chunk, progress):
                rows.append({"model": str(model)} | row)
    progress.close()
    title = f"{Path(model).name} on {device}"
    table = folded(title, COLUMNS, rows, NOTE.format(chunk=chunk), same=("variant", "dtype"))
    return Report(rows, [table], [_failure(row) for row in rows if row["nll"] is None])


def _rows(
    decoder: Decoder, ids: Sequence[int], pairs: Sequence[tuple[str, str]], chunk: int, progress: Progress
) -> Iterator[Row]:
    variant = variant_of(decoder.config.attentions[0]).name
    dtype = canonical_dtype(decoder.dtype)
    fed = len(ids) - 1
    baseline = math.nan
    for store, codec in pairs:
        progress.at(f"{variant} {dtype} {store} {codec}")
        burst = min(chunk, fed)
        sizes: dict[str, Any] = {"batch": 1, "capacity": fed, "dtype": decoder.dtype, "device": decoder.device}
        cache = KVCache(decoder.cache_specs, **sizes, store=store, codec=codec, burst=burst)
        nll = mean_nll(_scores(decoder, ids, cache, chunk))
        baseline = nll if (store, codec) == BASELINE else baseline
        after, before = (
            used_bytes(decoder.cache_specs, batch=1, context=tokens, codec=codec, dtype=decoder.dtype)
            for tokens in (fed + 1, fed)
        )
        yield {
            "variant": variant,
            "store": store,
            "codec": codec,
            "dtype": dtype,
            "device": decoder.device.type,
            "chunk": chunk,
            "tokens": fed,
            "nll": _finite(nll),
            "perplexity": _finite(float(torch.tensor(nll).double().exp())),
            "delta_nll": _finite(nll - baseline),
            "cache_bytes": cache.nbytes,
            "bytes_per_token": after - before,
        }


def _scores(decoder: Decoder, ids: Sequence[int], cache: KVCache, chunk: int) -> torch.Tensor:
    """`score` in steps, the first token by itself: a step onto an empty cache reads its own tensors, uncoded."""
    first = score(decoder, [ids[:2]], cache=cache)
    return torch.cat([first, score(decoder, [ids[1:]], cache=cache, chunk=chunk)], dim=1) if len(ids) > 2 else first


def _expanded(config: DecoderConfig) -> list[DecoderConfig]:
    """MLA's decoder around the cache of expanded keys and values; of other variants there is none."""
    if any(type(attention) is not MLAConfig for attention in config.attentions):
        return []
    layers = tuple(ExpandedMLAConfig(**vars(attention)) for attention in config.attentions)
    return [replace(config, attention=layers if isinstance(config.attention, tuple) else layers[0])]


def _twin(decoder: Decoder, config: DecoderConfig) -> Decoder:
    """A decoder of another variant with the same weights, which memory holds once."""
    with torch.device("meta"):
        twin = Decoder(config)
    twin.load_state_dict(decoder.state_dict(), assign=True)
    return twin.eval()


def _storable(config: DecoderConfig, pair: tuple[str, str], *, own: bool) -> bool:
    """Whether a store holds this decoder's cache; where the model's own does not fit, refuse, else say so."""
    store, codec = pair
    try:
        cache_shapes(config.cache_specs, batch=1, capacity=1, store=store, codec=codec)
    except ValueError as error:
        if own:
            raise
        print(f"{variant_of(config.attentions[0]).name} goes without {store} {codec}: {error}", file=sys.stderr)
        return False
    return True


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _failure(row: Row) -> str:
    where = " ".join(row[name] for name in ("variant", "store", "codec", "dtype"))
    return f"{where}: the log-likelihood is no finite number; check the weights, or give --dtype float32"
