"""What a codec does to real keys and values: SmolLM2's on a paragraph, where it was fetched."""

from __future__ import annotations

from functools import cache

from attn_variants.cache.quantize import codec_named

MODEL = "smollm2-135m"
FETCH = f"attn-bench fetch {MODEL}"
ERROR_NOTE = (
    "error on SmolLM2: ||decoded - given|| / ||given|| of that model's keys and values on a paragraph, all layers."
)
TEXT = (
    "The lighthouse keeper wrote the weather into a book every evening: wind from the north-west, 14 knots, rain since "
    "noon, two ships seen. In 1893 a storm broke the lamp, and for three nights he rang the bell by hand. Nobody had "
    "asked him to; the harbour was empty. When the inspector came in spring, he counted the entries, found none "
    "missing, and said only that the ink was poor."
)


@cache
def real_errors(codec: str) -> dict[str, float] | str:
    """||decoded - given|| / ||given|| of keys and of values, over all layers, heads and tokens; or why there is none.

    The numbers are those of a bfloat16 cache of SmolLM2-135M-Instruct after reading `TEXT`.
    """
    from attn_variants.checkpoints.fetch import model_folder

    try:
        folder = model_folder(MODEL)
    except ValueError:
        return FETCH
    import torch

    from attn_variants.cache import KVCache
    from attn_variants.cache.codec_error import relative_errors
    from attn_variants.checkpoints import load_tokenizer
    from attn_variants.decoder import Decoder

    decoder = Decoder.from_pretrained(folder, dtype="bfloat16", device="cpu").eval()
    spec, chosen = decoder.cache_specs[0], codec_named(codec)
    try:
        for record in spec.records:
            chosen.parts(record, "bfloat16")
    except ValueError as error:
        return f"none: {error}"
    ids = torch.tensor([load_tokenizer(folder).encode(TEXT)])
    read = KVCache(decoder.cache_specs, batch=1, capacity=ids.shape[1], dtype="bfloat16", device="cpu")
    with torch.inference_mode():
        decoder(ids, read, last=True)
    layers = range(len(decoder.cache_specs))
    entries = {
        entry.name: torch.cat([read.tensors[f"layers.{layer}.{entry.name}"] for layer in layers])
        for entry in spec.entries
    }
    return relative_errors(chosen, spec.records, entries)


def shown_errors(found: dict[str, float] | str) -> str:
    """`k 1.14%, v 0.71%`, or how to get them."""
    if isinstance(found, str):
        return found.partition(":")[0]
    return ", ".join(f"{name} {error:.2%}" for name, error in found.items())
