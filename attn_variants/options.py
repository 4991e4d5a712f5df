"""What published models combine an attention variant with: what is seen, how scores are made, whose cache is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_variants.contract import LARGEST_SIZE, CacheSpec, Record, require_size


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options that every variant's config has; at their defaults attention is full, causal and plain.

    sliding_window: newest tokens that a query sees, its own included (Mistral, Gemma 2, gpt-oss).
    attention_chunk_size: a query sees its own chunk of so many tokens and no other (Llama 4).
    sink_tokens: first tokens that stay visible in spite of a window or chunk (StreamingLLM, arXiv 2309.17453).
    attention_sink: a learned logit per query head, the parameter `sinks`, joins every softmax and carries no value
        (gpt-oss).
    attn_logit_softcapping: scores become cap * tanh(score / cap) before the mask (Gemma 2, arXiv 2408.00118).
    softmax_scale: what query-key products are multiplied by; None is the variant's own. Gemma's
        `query_pre_attn_scalar` n is n ** -0.5.
    attn_scale, floor_scale: queries at position p grow by 1 + attn_scale * ln(1 + floor((p + 1) / floor_scale)), for
        layers without positions at long contexts (Llama 4; arXiv 2501.19399); None grows nothing.
    kv_shared_layer: index of the earlier layer whose cache this one reads, without projections to keys and values of
        its own (CLA, arXiv 2405.12981; Gemma 3n).
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    sink_tokens: int = 0
    attention_sink: bool = False
    attn_logit_softcapping: float | None = None
    softmax_scale: float | None = None
    attn_scale: float = 0.1
    floor_scale: int | None = None
    kv_shared_layer: int | None = None

    def _require_options(self) -> None:
        """Raise ValueError, in one line that names the field, for what cannot be meant."""
        for name in ("sliding_window", "attention_chunk_size", "floor_scale"):
            if getattr(self, name) is not None:
                require_size(name, getattr(self, name), most=LARGEST_SIZE)
        for name in ("attn_logit_softcapping", "softmax_scale"):
            _require_positive_number(name, getattr(self, name))
        if not isinstance(self.attention_sink, bool):
            raise ValueError(f"attention_sink ({self.attention_sink!r}) must be True or False")
        require_size("sink_tokens", self.sink_tokens, least=0, most=LARGEST_SIZE)
        if self.kv_shared_layer is not None:
            require_size("kv_shared_layer", self.kv_shared_layer, least=0)
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ValueError(
                f"sliding_window ({self.sliding_window}) and attention_chunk_size ({self.attention_chunk_size}) "
                "exclude each other: a layer has one of them"
            )

    def _spec(self, *records: Record) -> CacheSpec:
        """These records under the limits of the options; a layer that shares keeps none."""
        return CacheSpec(
            records=records if self.kv_shared_layer is None else (),
            window=self.sliding_window,
            chunk=self.attention_chunk_size,
            sinks=self.sink_tokens,
            shares=self.kv_shared_layer,
        )


def _require_positive_number(name: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} ({value!r}) must be a positive number")
