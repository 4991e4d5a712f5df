"""Layers that share a block table: kinds apart, unequal pages made equal, large kinds split (v1/core/kv_cache_planning.py).

Every group draws its blocks from one pool, so a block costs the bytes of the largest group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .pages import Kind, Page, ceil_div

MUCH_LARGER = 1.5
"""From this ratio of the largest kind to the smallest on, the smallest is the size of a group."""


@dataclass(frozen=True)
class Group:
    """Layers of one kind that share a block table."""

    pages: tuple[Page, ...]

    @property
    def bytes(self) -> int:
        """Bytes that a block takes in all its layers."""
        return sum(page.bytes for page in self.pages)

    def planned(self, tokens: int, in_flight: int) -> int:
        """Blocks that admission reserves."""
        return max(page.planned(tokens, in_flight) for page in set(self.pages))

    def held(self, tokens: int) -> int:
        """Blocks that a request holds."""
        return self.pages[0].held(tokens)


def grouped(pages: Sequence[Page], *, packed: bool, disable_hybrid: bool) -> tuple[Group, ...]:
    """The groups of a model's layers (get_kv_cache_groups).

    packed: whether pages of different sizes lie side by side in a block, as kernels of pooled tokens read them.
    disable_hybrid: layers with windows or chunks get blocks for all tokens, as full ones do.
    """
    if disable_hybrid:
        pages = _promoted(pages)
    if _same(pages) or _alike(pages):
        return (Group(tuple(pages)),)
    if packed:
        return _packed(pages)
    largest = max(page.bytes for page in pages)
    return _split([page.with_page(largest) for page in pages])


def _same(pages: Sequence[Page]) -> bool:
    """Whether one page stands for all; full layers may differ in a window that is computed only."""
    return len({replace(page, span=None) if page.kind is Kind.FULL else page for page in pages}) == 1


def _alike(pages: Sequence[Page]) -> bool:
    """Whether all need the same number of blocks, whatever a block takes (UniformTypeKVCacheSpecs.is_uniform_type)."""
    first = pages[0]
    if first.kind is Kind.FULL:
        return all(page.kind is Kind.FULL and page.block == first.block for page in pages)
    return all((page.kind, page.block, page.span) == (first.kind, first.block, first.span) for page in pages)


def _promoted(pages: Sequence[Page]) -> Sequence[Page]:
    """Blocks for all tokens in every layer (unify_hybrid_kv_cache_specs); ValueError for what has no such form."""
    if _same(pages) or _alike(pages):
        return pages
    full = {page.block for page in pages if page.kind is Kind.FULL}
    local = (Kind.SLIDING, Kind.CHUNKED)
    if not full or not any(page.kind in local and not page.latent for page in pages):
        raise ValueError("disable_hybrid_kv_cache_manager (True) cannot give this model's layers one form: leave it out")
    block = full.pop() if len(full) == 1 else None
    promoted = [
        replace(page, kind=Kind.FULL, block=block or page.block) if page.kind in local else page for page in pages
    ]
    if not (_same(promoted) or _alike(promoted)):
        raise ValueError("disable_hybrid_kv_cache_manager (True) cannot give this model's layers one form: leave it out")
    return promoted


def _split(pages: Sequence[Page]) -> tuple[Group, ...]:
    """Groups of about equally many layers (_get_kv_cache_groups_uniform_page_size); pages are of one size."""
    counts = Counter(replace(page, span=None) if page.kind is Kind.FULL else page for page in pages)
    smallest, largest = min(counts.values()), max(counts.values())
    size = largest if largest < smallest * MUCH_LARGER else smallest
    groups = []
    for page, count in counts.items():
        number = ceil_div(count, size)
        groups += [Group((page,) * ceil_div(count - index, number)) for index in range(number)]
    return tuple(groups)


def _packed(pages: Sequence[Page]) -> tuple[Group, ...]:
    """Groups whose pages of several sizes lie side by side (_get_packed_kv_cache_groups).

    Kinds that repeat one pattern of pages are split into about as many repeats each; the others stay whole.
    """
    kinds: list[list[Page]] = []
    for page in pages:
        for kind in kinds:
            if _alike([kind[0], page]):
                kind.append(page)
                break
        else:
            kinds.append([page])
    repeats = [_repeats(kind) for kind in kinds]
    least = max((count for kind, count in zip(kinds, repeats, strict=True) if _mixed(kind) and count), default=0)
    assert least, "layers that pack side by side repeat a pattern of several pages"
    length = _least_padding([count for count in repeats if count], least)
    groups = []
    for kind, count in zip(kinds, repeats, strict=True):
        number = ceil_div(count, length) if count else 1
        by_size: dict[int, list[Page]] = {}
        for page in kind:
            by_size.setdefault(page.bytes, []).append(page)
        groups += [
            Group(tuple(page for members in by_size.values() for page in members[index::number]))
            for index in range(number)
        ]
    return tuple(groups)


def _mixed(kind: Sequence[Page]) -> bool:
    return len({page.bytes for page in kind}) > 1


def _repeats(kind: Sequence[Page]) -> int:
    """How often a kind repeats its pattern of one page of each size; 0 where the sizes are not equally frequent."""
    counts = set(Counter(page.bytes for page in kind).values())
    return counts.pop() if len(counts) == 1 else 0


def _least_padding(counts: Sequence[int], least: int) -> int:
    """The length of at least `least` to whose multiples the counts round up with the least padding; ties go up."""
    lengths = range(least, max(counts) + 1)
    return min(lengths, key=lambda length: (sum(-count % length for count in counts), -length))
