"""What published models keep in strides: a declaration richer than the contract's, for accounting alone."""

from __future__ import annotations

from dataclasses import dataclass

from attn_variants.contract import CacheSpec, Entry


@dataclass(frozen=True)
class StridedSpec(CacheSpec):
    """A layer that pools every `stride` tokens into one entry, besides the records of its window (DeepSeek-V4).

    pooled:  kept per complete stride.
    pending: kept per token of the stride that is not complete yet.
    overlap: kept per token of the last complete stride, once there is one.
    """

    stride: int = 1
    pooled: tuple[Entry, ...] = ()
    pending: tuple[Entry, ...] = ()
    overlap: tuple[Entry, ...] = ()

    def visible_tokens(self, context: int) -> int:
        """Refused: entries in strides are no number of tokens; `kept_entries` counts them."""
        raise ValueError("a layer that pools its tokens in strides is counted by kept_entries, not by visible tokens")


def kept_entries(spec: CacheSpec, tokens: int) -> tuple[tuple[Entry, int], ...]:
    """All that a layer keeps of `tokens` tokens for the next one to read: entries, each with how often it is there."""
    visible = CacheSpec.visible_tokens(spec, tokens)
    return (*((entry, visible) for entry in spec.entries), *strided_entries(spec, tokens))


def strided_entries(spec: CacheSpec, tokens: int) -> tuple[tuple[Entry, int], ...]:
    """What a layer keeps of `tokens` tokens in strides: entries, each with how many times it is there."""
    if not isinstance(spec, StridedSpec):
        return ()
    complete, rest = divmod(tokens, spec.stride)
    counts = ((spec.pooled, complete), (spec.pending, rest), (spec.overlap, spec.stride if complete else 0))
    return tuple((entry, count) for entries, count in counts for entry in entries)
