"""The page: what one layer keeps in one block, how many pages a request is planned, and how many it holds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    """How long a layer keeps a token; a state has no tokens."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"


UNSIZED = 0
"""The tokens per block of a page whose block size is still to be chosen."""


@dataclass(frozen=True)
class Page:
    """One layer's cache in one block of `block` tokens (vLLM's KVCacheSpec, v1/kv_cache_interface.py).

    what:    what an entry is, beyond its bytes; layers that differ in it share no group unless all are full.
    entry:   bytes of one entry, for all heads of a rank; of a state, the whole of it.
    block:   tokens per block.
    every:   tokens that one entry covers.
    span:    window of a sliding layer, chunk of a chunked one; of a full layer, a window that is computed only.
    padded:  bytes the page takes where it is made larger than its entries.
    latent:  whether it is read as rows of latents, whose pages can be padded to whole rows only.
    align:   bytes that a page is rounded up to a multiple of.
    states:  blocks that a request is planned for a state.
    """

    kind: Kind
    what: Hashable
    entry: int
    block: int
    every: int = 1
    span: int | None = None
    padded: int | None = None
    latent: bool = False
    align: int = 1
    states: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of the page."""
        if self.padded is not None:
            return self.padded
        entries = 1 if self.kind is Kind.STATE else self.block // self.every
        return ceil_div(entries * self.entry, self.align) * self.align

    def planned(self, tokens: int, in_flight: int) -> int:
        """Blocks that admission reserves for a request of `tokens` tokens.

        A window that may begin inside a block takes one more; tokens of steps that are not settled yet keep theirs
        (max_admission_blocks_per_request and max_memory_usage_bytes of each spec, v1/kv_cache_interface.py).
        """
        if self.kind is Kind.STATE:
            return self.states
        if self.kind is Kind.SLIDING:
            return ceil_div(min(self._span() - 1 + in_flight, tokens), self.block) + 1
        if self.kind is Kind.CHUNKED:
            return ceil_div(min(self._span() + in_flight, tokens), self.block)
        return ceil_div(tokens, self.block)

    def held(self, tokens: int) -> int:
        """Blocks that a request holds once the step of its last token is scheduled and all earlier ones are settled.

        Blocks of skipped tokens only are freed (get_num_skipped_tokens, v1/core/single_type_kv_cache_manager.py).
        """
        return ceil_div(tokens, self.block) - self._skipped(tokens - 1) // self.block

    def _skipped(self, computed: int) -> int:
        """Tokens that the next one, after `computed`, does not read."""
        if self.kind is Kind.STATE:
            return max(computed - 1, 0)
        if self.kind is Kind.SLIDING:
            return max(computed - self._span() + 1, 0)
        if self.kind is Kind.CHUNKED:
            return computed // self._span() * self._span()
        return 0

    @property
    def falls(self) -> tuple[tuple[int, int], ...]:
        """(tokens, every): fewer blocks are held after the token that follows so many, and then every so many."""
        if self.kind is Kind.STATE:
            return ((1, self.block),)
        if self.kind is Kind.SLIDING:
            return ((self._span() - 1, self.block),)
        if self.kind is Kind.CHUNKED:
            return ((0, self._span()), (0, self.block))
        return ()

    def with_page(self, size: int) -> Page:
        """The same layer with a page of `size` bytes: more tokens if they fill it, else padded.

        Raises ValueError for a latent page that `size` is no multiple of.
        """
        if self.bytes == size:
            return self
        if self.kind is not Kind.STATE and size % self.bytes == 0:
            return replace(self, block=self.block * (size // self.bytes))
        if self.latent:
            raise ValueError(
                f"a page of {self.bytes} bytes of latents neither divides the largest page of {size} bytes nor can be "
                "padded to it; vLLM serves no such mixture"
            )
        return replace(self, padded=size)

    def _span(self) -> int:
        assert self.span is not None
        return self.span


def ceil_div(value: int, by: int) -> int:
    """How many times `by` it takes to cover `value`."""
    return -(-value // by)
