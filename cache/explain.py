"""The arithmetic behind a size: every group of layers with its numbers substituted, down to the total."""

from __future__ import annotations

from collections.abc import Iterator

from attn_variants.contract import Entry, State
from attn_variants.dtypes import dtype_bytes

from .formats import Format
from .policies import Layers, Priced, Pricing, VllmPricing


def explained(priced: Priced, batch: int, context: int) -> list[str]:
    """Lines that add up to `priced.fullest(batch, context)`, the fullest pipeline stage being shown."""
    if isinstance(priced, VllmPricing):
        return _blocks(priced, batch, context)
    stage = max(priced.stages, key=lambda stage: sum(priced.sequence(layers, context) for layers in stage))
    lines = [_group(priced, layers, context) for layers in stage]
    one = sum(priced.sequence(layers, context) for layers in stage)
    sequences = priced.split.sequences(batch)
    total = priced.fullest(batch, context)
    lines.append(f"one sequence: {one:,} bytes")
    once = f" + {priced.once:,} kept once" if priced.once else ""
    count = f"{sequences:,} sequence{'s' if sequences != 1 else ''}"
    lines.append(f"{count} x {one:,}{once} = {total:,} bytes ({total / 2**30:,.3f} GiB)")
    return lines


def _blocks(priced: VllmPricing, batch: int, context: int) -> list[str]:
    """Every group's layers, tokens per block, and blocks of a request."""
    counts = priced.blocks(context)
    lines = []
    for group, count in zip(priced.cache.groups, counts, strict=True):
        pages = ", ".join(
            f"{layers} {page.kind.value} layers x {page.bytes:,} B per block of {page.block:,} tokens"
            for page, layers in group.pages
        )
        lines.append(f"{pages}: {count:,} blocks")
    size, total = priced.cache.bytes_per_block, priced.fullest(batch, context)
    lines.append(f"one request: {sum(counts):,} blocks x {size:,} bytes = {sum(counts) * size:,} bytes")
    return [*lines, f"{batch:,} x {sum(counts) * size:,} = {total:,} bytes ({total / 2**30:,.3f} GiB)"]


def _group(priced: Pricing, layers: Layers, context: int) -> str:
    name = f"{layers.count} x {layers.kind}"
    if layers.spec.shares is not None:
        return f"{name}: reads the cache of another layer = 0"
    terms = [*_entries(priced, layers, context), *(_state(priced, state) for state in layers.spec.states)]
    if not terms:
        return f"{name}: keeps nothing = 0"
    return f"{name}: {layers.count} x ({' + '.join(terms)}) = {priced.sequence(layers, context):,}"


def _entries(priced: Pricing, layers: Layers, context: int) -> Iterator[str]:
    limit = layers.spec.window or layers.spec.chunk
    for entry, count in priced.kept(layers.spec, context):
        heads, tokens = priced.split.entry_heads(entry), priced.split.tokens(count)
        # What is pooled in strides is no part of the window.
        bounded = limit is not None and count < context and entry in layers.spec.entries
        why = f" ({'window' if layers.spec.window else 'chunk'} {limit:,})" if bounded else ""
        plain = min(tokens, priced.form.residual) if entry.dtype is None else 0
        if tokens > plain:
            yield f"{entry.name} {heads} x {_row(priced.form, entry)} x {tokens - plain:,} tokens{why}"
        if plain:
            yield f"{entry.name} {heads} x {entry.dim} x {dtype_bytes(priced.form.model)} B x {plain:,} newest tokens"


def _row(form: Format, entry: Entry) -> str:
    """One head of one token: `128 x 2 B`, or the whole row's bytes where scales come with it."""
    if entry.dtype is not None:
        return f"{entry.dim} x {dtype_bytes(entry.dtype)} B"
    if form.plain or not form.overhead:
        return f"{entry.dim} x {form.token_bytes(entry) // entry.dim} B"
    return f"{form.token_bytes(entry)} B ({entry.dim} in {form.name})"


def _state(priced: Pricing, state: State) -> str:
    itemsize = dtype_bytes(state.dtype or priced.form.model)
    axes = " x ".join(map(str, state.shape))
    numbers = priced.split.state_numbers(state)
    share = "" if numbers == state.numel else f", {numbers:,} of its {state.numel:,} numbers on a rank,"
    return f"{state.name} state {axes}{share} x {itemsize} B"
