"""The questions that a cache size can answer, and how each prices a layer. Imports no torch.

Honest tools differ by a factor of two because they answer different questions:

    ideal         what attention can ever read: min(T, W) tokens in a layer with a window of W
    allocated     what our own store reserves, to the byte
    transformers  what the cache of transformers 5.24 holds: its `dynamic` one, or its `static` one
    vllm          what a request takes of vLLM 0.33's pool, in whole blocks: `held` after a decode step, or `planned`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attn_variants.architectures import Architecture
from attn_variants.architectures.strided import StridedSpec, kept_entries, strided_entries
from attn_variants.contract import CacheSpec
from attn_variants.names import unknown

from .accounting import Kept, layer_bytes, require_storable, residual_slots
from .budgets import Fall
from .formats import Format, PerChannelFormat
from .layouts import layout_named
from .parallel import Split
from .quantize import CODECS, codec_named, format_of
from .vllm import VllmCache

VLLM_COUNTS = ("held", "planned")

Count = Callable[[CacheSpec, int], Kept]
"""Which entries a layer keeps of so many tokens, each with how often."""


@dataclass(frozen=True)
class Layers:
    """Layers that remember the same."""

    spec: CacheSpec
    kind: str
    count: int


@dataclass(frozen=True)
class Pricing:
    """A model's layers under one policy, format and split.

    stages: the layers of each pipeline stage.     once: bytes that a cache keeps besides, whatever the batch.
    pooled: what a layer keeps besides, whatever the batch: the page of a pool that is nobody's.
    """

    stages: tuple[tuple[Layers, ...], ...]
    kept: Count
    form: Format
    split: Split
    once: int = 0
    pooled: Count | None = None

    def sequence(self, layers: Layers, context: int, rank: int = 0) -> int:
        """Bytes of one sequence in these layers on one context-parallel rank."""
        return layers.count * layer_bytes(layers.spec, self.kept(layers.spec, context), self.form, self.split, rank)

    def common(self, layers: Layers, context: int) -> int:
        """Bytes that these layers keep on every rank besides those of sequences."""
        if self.pooled is None or layers.spec.shares is not None:
            return 0
        kept = self.pooled(layers.spec, context)
        return layers.count * sum(self.split.entry_heads(entry) * self.form.tokens_bytes(entry, n) for entry, n in kept)

    def fullest(self, batch: int, context: int) -> int:
        """Bytes on the fullest rank."""
        sequences = self.split.sequences(batch)
        stages = (
            sum(sequences * self.sequence(layers, context) + self.common(layers, context) for layers in stage)
            for stage in self.stages
        )
        return max(stages) + self.once

    def over_ranks(self, batch: int, context: int) -> int:
        """Bytes on all ranks together."""
        every = [layers for stage in self.stages for layers in stage]
        one = sum(self.sequence(layers, context, rank) for layers in every for rank in range(self.split.cp))
        common = sum(self.common(layers, context) for layers in every)
        split = self.split
        return split.tp * batch * one + split.tp * split.dp * split.cp * common + split.ranks * self.once

    @property
    def period(self) -> int:
        """Tokens after which growth repeats."""
        return math.lcm(*(every for _, every in self.falls))

    @property
    def falls(self) -> Iterator[Fall]:
        """Layers that pool their tokens in strides give up a stride's when it is complete."""
        for layers in itertools.chain.from_iterable(self.stages):
            if isinstance(layers.spec, StridedSpec):
                yield layers.spec.stride - 1, layers.spec.stride


@dataclass(frozen=True)
class VllmPricing:
    """Whole blocks of vLLM's pool, on one rank."""

    cache: VllmCache
    planned: bool
    split: Split

    def blocks(self, context: int) -> tuple[int, ...]:
        """Blocks of each group that a request takes; none before its first token."""
        if not context:
            return (0,) * len(self.cache.groups)
        return self.cache.planned_blocks(context) if self.planned else self.cache.held_blocks(context)

    def fullest(self, batch: int, context: int) -> int:
        """Bytes on a rank; all are alike."""
        return batch * sum(self.blocks(context)) * self.cache.bytes_per_block

    def over_ranks(self, batch: int, context: int) -> int:
        """Bytes on all ranks together."""
        return self.split.ranks * self.fullest(batch, context)

    @property
    def period(self) -> int:
        """Tokens after which growth repeats: whole blocks of every group, and whole chunks."""
        blocks = (page.block for group in self.cache.groups for page, _ in group.pages)
        return math.lcm(*blocks, *(every for _, every in self.falls))

    @property
    def falls(self) -> Iterator[Fall]:
        """Blocks that windows, chunks and states leave behind are freed; a plan counts no such thing."""
        for group in () if self.planned else self.cache.groups:
            for page, _ in group.pages:
                yield from page.falls


Priced = Pricing | VllmPricing


def vllm_pricing(cache: VllmCache, store: str | None, split: Split) -> VllmPricing:
    """How vLLM counts; what it does not split by is refused."""
    if store not in (None, *VLLM_COUNTS):
        raise ValueError(unknown("count of vLLM", str(store), VLLM_COUNTS))
    if split.pp > 1 or split.dp > 1 or split.cp > 1:
        raise ValueError("policy 'vllm' is sized for ranks of tp alone; leave out pp, dp and cp")
    return VllmPricing(cache, store == "planned", split)


def pricing(found: Architecture, policy: str, store: str | None, form: Format, split: Split) -> Pricing:
    """How a policy prices an architecture; names and splits that do not work out are refused."""
    if policy not in POLICIES:
        raise ValueError(unknown("policy", policy, [*POLICIES, "vllm"]))
    if policy == "allocated" and isinstance(form, PerChannelFormat):
        form = replace(form, together=_together(store, form.together))
    pooled = _pooled(store, _tokens(form)) if policy == "allocated" else None
    return Pricing(_stages(found, split), POLICIES[policy](found, store, form), form, split, found.bytes_once, pooled)


def _ideal(found: Architecture, store: str | None, form: Format) -> Count:
    if store is not None:
        raise ValueError(f"store ({store!r}): policy 'ideal' asks what attention reads in any store; leave it out")
    return kept_entries


def _allocated(found: Architecture, store: str | None, form: Format) -> Count:
    require_storable(found.layers)
    codec = codec_named(codec_of(form))
    for record in dict.fromkeys(record for spec in found.layers if spec.shares is None for record in spec.records):
        # A format may price what the codec of that name refuses to store.
        codec.parts(record, form.model)
    together = _tokens(form)
    waiting = residual_slots(together, burst=1)
    _slots(store, CacheSpec(), 1, together)

    def kept(spec: CacheSpec, context: int) -> Kept:
        slots = _slots(store, spec, context, together)[0]
        coded = tuple((entry, slots) for entry in spec.entries)
        if not waiting or not context:
            return coded
        return (*coded, *((replace(entry, dtype=entry.dtype or form.model), waiting) for entry in spec.entries))

    return kept


def _pooled(store: str | None, together: int) -> Count:
    def kept(spec: CacheSpec, context: int) -> Kept:
        return tuple((entry, _slots(store, spec, context, together)[1]) for entry in spec.entries)

    return kept


def _tokens(form: Format) -> int:
    """Tokens that are coded together."""
    return form.together if isinstance(form, PerChannelFormat) else 1


def _together(store: str | None, tokens: int) -> int:
    """As many of them as a store has side by side."""
    return layout_named(store or "full", CacheSpec(), batch=1, capacity=1, together=tokens).together


def _slots(store: str | None, spec: CacheSpec, context: int, together: int) -> tuple[int, int]:
    """Slots that a sequence adds to our store, and slots that it has in any case."""
    if not context:
        return 0, 0
    one, two = (
        math.prod(layout_named(store or "full", spec, batch=batch, capacity=context, together=together).shape(1, 1))
        for batch in (1, 2)
    )
    return two - one, 2 * one - two


def _transformers(found: Architecture, store: str | None, form: Format) -> Count:
    caches = {"dynamic": 1, "static": 0}
    if store is not None and store not in caches:
        raise ValueError(unknown("cache of transformers", store, caches))
    _require_plain("transformers", form)
    # A dynamic cache drops the token that the next one pushes out of the window; a static one has room for both.
    dropped = caches[store or "dynamic"]

    def kept(spec: CacheSpec, context: int) -> Kept:
        # One that is to keep none keeps all, since its slice `[-0:]` is the whole.
        limit = (spec.window or spec.chunk or 0) - dropped
        tokens = min(context, limit) if limit > 0 else context
        return (*((entry, tokens) for entry in spec.entries), *strided_entries(spec, context))

    return kept


def codec_of(form: Format) -> str:
    """The codec of our stores that costs what this format does. Raises ValueError, naming those there are."""
    if form.plain:
        return "plain"
    known = {format_of(name, form.model): name for name in CODECS if name != "plain"}
    if form.residual or form.name.partition(":")[0] not in known:
        raise ValueError(
            f"kv_dtype {form.name!r}: policy 'allocated' holds plain dtypes and what our codecs store, "
            f"{', '.join(known)}; give one of these, or policy 'ideal'"
        )
    return codec_named(form.name).name


def _require_plain(policy: str, form: Format) -> None:
    if not form.plain:
        raise ValueError(
            f"kv_dtype {form.name!r}: policy {policy!r} holds plain dtypes only; give one, or policy 'ideal'"
        )


POLICIES: dict[str, Callable[[Architecture, str | None, Format], Count]] = {
    "ideal": _ideal,
    "allocated": _allocated,
    "transformers": _transformers,
}


def _stages(found: Architecture, split: Split) -> tuple[tuple[Layers, ...], ...]:
    for heads, spec in zip(found.query_heads, found.layers, strict=True):
        if heads and spec.shares is None:
            split.require_query_heads(heads)
    return tuple(_grouped(found, stage, split) for stage in split.stages(found.num_hidden_layers))


def _grouped(found: Architecture, stage: range, split: Split) -> tuple[Layers, ...]:
    """The stage's layers, a layer that runs several times per token with all its slots."""
    counts: dict[tuple[CacheSpec, str], list[CacheSpec]] = {}
    for slot, spec, kind in zip(found.slots, found.layers, found.kinds, strict=True):
        if slot not in stage:
            continue
        if spec.shares is not None and spec.shares not in stage:
            raise ValueError(
                f"pp ({split.pp}) puts layer {slot} on another stage than layer {spec.shares}, whose cache it reads"
            )
        counts.setdefault((spec, kind), []).append(spec)
    return tuple(Layers(specs[0], kind, len(specs)) for (_, kind), specs in counts.items())
