"""Layers that share a block table: kinds apart, unequal pages made equal, large kinds split.

Every group draws its blocks from one pool, so a block costs the bytes of the largest group. The rules are those of
vLLM's v1/core/kv_cache_planning.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from .pages import Kind, Page, ceil_div

MUCH_LARGER = 1.5
"""From this ratio of the largest kind to the smallest on, the smallest is the size of a group."""


Layers = Counter[Page]
"""Pages, and how many layers have each."""


@dataclass(frozen=True)
class Group:
    """Layers of one kind that share a block table: their pages, and how many layers have each."""

    pages: tuple[tuple[Page, int], ...]

    @classmethod
    def of(cls, layers: Layers) -> Group:
        """The group of all these layers."""
        return cls(tuple(layers.items()))

    @property
    def layers(self) -> int:
        """How many layers share the block table."""
        return sum(count for _, count in self.pages)

    @property
    def bytes(self) -> int:
        """Bytes that a block takes in all its layers."""
        return sum(page.bytes * count for page, count in self.pages)

    def planned(self, tokens: int, in_flight: int) -> int:
        """Blocks that admission reserves."""
        return max(page.planned(tokens, in_flight) for page, _ in self.pages)

    def held(self, tokens: int) -> int:
        """Blocks that a request holds."""
        return self.pages[0][0].held(tokens)


def grouped(layers: Layers, *, packed: bool, disable_hybrid: bool) -> tuple[Group, ...]:
    """The groups of a model's layers (get_kv_cache_groups).

    packed: whether pages of different sizes lie side by side in a block, as kernels of pooled tokens read them.
    disable_hybrid: layers with windows or chunks get blocks for all tokens, as full ones do.
    """
    if disable_hybrid:
        layers = _promoted(layers)
    if _uniform(layers):
        return (Group.of(layers),)
    if packed:
        return _packed(layers)
    largest = max(page.bytes for page in layers)
    return _split(_mapped(layers, lambda page: page.with_page(largest)))


def _mapped(layers: Layers, change: Callable[[Page], Page]) -> Layers:
    changed: Layers = Counter()
    for page, count in layers.items():
        changed[change(page)] += count
    return changed


def _uniform(pages: Collection[Page]) -> bool:
    """Whether all need the same number of blocks, whatever a block takes (UniformTypeKVCacheSpecs.is_uniform_type).

    One page for all layers is the case that is_kv_cache_spec_uniform finds first.
    """
    first = next(iter(pages))
    if first.kind is Kind.FULL:
        return all(page.kind is Kind.FULL and page.block == first.block for page in pages)
    return all((page.kind, page.block, page.span) == (first.kind, first.block, first.span) for page in pages)


def _promoted(layers: Layers) -> Layers:
    """Blocks for all tokens in every layer (unify_hybrid_kv_cache_specs); ValueError for what has no such form."""
    if _uniform(layers):
        return layers
    full = {page.block for page in layers if page.kind is Kind.FULL}
    local = (Kind.SLIDING, Kind.CHUNKED)
    # Full layers take one window at most (merge_window_sizes), and latents' have no field for it.
    spans = [{page.span for page in layers if page.kind is kind} for kind in local]
    one_window = all(len(found) <= 1 for found in spans)
    if full and one_window and not any(page.kind in local and page.latent for page in layers):
        block = full.pop() if len(full) == 1 else None
        promoted = _mapped(
            layers,
            lambda page: replace(page, kind=Kind.FULL, block=block or page.block) if page.kind in local else page,
        )
        if _uniform(promoted):
            return promoted
    raise ValueError("disable_hybrid_kv_cache_manager (True) cannot give this model's layers one form: leave it out")


def _split(layers: Layers) -> tuple[Group, ...]:
    """Groups of about equally many layers (_get_kv_cache_groups_uniform_page_size); pages are of one size.

    The i-th of n groups has the layers i, i + n, i + 2n and so on of its kind.
    """
    smallest, largest = min(layers.values()), max(layers.values())
    size = largest if largest < smallest * MUCH_LARGER else smallest
    numbers = {page: ceil_div(count, size) for page, count in layers.items()}
    return tuple(
        Group(((page, ceil_div(count - index, numbers[page])),))
        for page, count in layers.items()
        for index in range(numbers[page])
    )


def _packed(layers: Layers) -> tuple[Group, ...]:
    """Groups whose pages of several sizes lie side by side (_get_packed_kv_cache_groups).

    Kinds that repeat one pattern of pages are split into about as many repeats each; the others stay whole.
    """
    kinds: list[Layers] = []
    for page, count in layers.items():
        kind = next((kind for kind in kinds if _uniform([*kind, page])), None)
        if kind is None:
            kinds.append(Counter({page: count}))
        else:
            kind[page] += count
    least = max((_repeats(kind) for kind in kinds if len(_by_size(kind)) > 1), default=0)
    assert least, "layers that pack side by side repeat a pattern of several pages"
    length = _least_padding([count for kind in kinds if (count := _repeats(kind))], least)
    return tuple(group for kind in kinds for group in _cut(kind, length))


def _cut(kind: Layers, length: int) -> Iterator[Group]:
    """A kind in groups of at most `length` repeats of its pattern; whole where it has none."""
    number = ceil_div(_repeats(kind), length)
    if number <= 1:
        yield Group.of(kind)
        return
    for index in range(number):
        yield Group(tuple((page, ceil_div(count - index, number)) for page, count in kind.items()))


def _by_size(kind: Layers) -> Counter[int]:
    """How many pages there are of each size."""
    sizes: Counter[int] = Counter()
    for page, count in kind.items():
        sizes[page.bytes] += count
    return sizes


def _repeats(kind: Layers) -> int:
    """How often a kind repeats its pattern of one page of each size; 0 where the sizes are not equally frequent."""
    counts = set(_by_size(kind).values())
    return counts.pop() if len(counts) == 1 else 0


def _least_padding(counts: Sequence[int], least: int) -> int:
    """The length of at least `least` to whose multiples the counts round up with the least padding; ties go up."""
    lengths = range(least, max(counts) + 1)
    return min(lengths, key=lambda length: (sum(-count % length for count in counts), -length))
