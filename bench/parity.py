"""Is the output right? Every variant, store, backend and dtype, in several ways, against the float64 reference.

The figure is max |d| / max |reference| over all logits compared; the tolerance belongs to the dtype and the codec.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from attn_variants.attend import BACKENDS, backend, counted
from attn_variants.cache.layouts import layout_named
from attn_variants.cache.quantize import codec_named
from attn_variants.config import Geometry, GQAConfig
from attn_variants.decoder import Decoder
from attn_variants.names import unknown

from .case import Sight, decoder_config, has_limits, random_decoder
from .checks import BATCH, CONTROL, TOKENS, Cell, Peer, checks_of
from .peers import INSTALL, transformers_installed, transformers_twin
from .progress import Progress
from .reference import moved_logits, reference_logits
from .results import Report, Row
from .tables import Column, Table, folded

TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}
DRAWS = 4
"""How often keys and values are moved at random to learn what a codec may bring."""
RING = Sight(window=7)
"""What a ring is checked at where no limits are given: without any it is a full store."""
ALSO = (("ring", "plain"), ("paged:16", "plain"), ("paged:16", "int8"))
"""Pairs of store and codec that parity shows of itself, in the first dtype and by the backend that reads them all."""

CELL = ("variant", "store", "codec", "sees", "backend", "dtype")
COLUMNS = (
    *(Column(name, name, right=False) for name in CELL),
    Column("checks", "checks"),
    Column("by_it", "by it", "{:.0%}".format),
    Column("worst", "worst error"),
    Column("in", "in", right=False),
    Column("tolerance", "tolerance", "{:.1e}".format),
    Column("argmax_agreement", "argmax", "{:.1%}".format),
    Column("control", "control", lambda caught: "caught" if caught else "MISSED", right=False),
    Column("ok", "", lambda ok: "ok" if ok else "FAIL", right=False),
)
NOTE = (
    "by it: layers' passes that the backend computed; others took those it does not accept. "
    "Checks: uncached, cached token by token, chunked, ragged rows, padded rows, rewound, forked, past the end of a "
    "window's memory and of a page where there is one, absorbed and expanded where there are two ways, transformers' "
    "class with the same weights. tolerance: the dtype's, and the error of the reference where each key and value is "
    "off by all of the codec's bound, half a step, to a side drawn at random. sees: the tokens in sight. "
    "argmax: least agreement on the most likely token. "
    "control: a cache of other tokens, on purpose, which has to be noticed."
)


def parity_report(
    variants: Sequence[str],
    geometry: Geometry,
    *,
    dtypes: Sequence[str],
    stores: Sequence[str] = ("full",),
    codecs: Sequence[str] = ("plain",),
    also: Sequence[tuple[str, str]] = (),
    backends: Sequence[str] | None = None,
    sight: Sight | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Report:
    """Rows of every cell and check; `failures` names those that do not hold. `backends` None is all there are.

    also: more pairs of a store and a codec, in the first dtype and by one backend. sight None is all, but for rings
    `RING`. Raises ValueError for a dtype without a stated tolerance and for unknown names.
    """
    for dtype in dtypes:
        if dtype not in TOLERANCES:
            raise ValueError(f"dtype {dtype!r} has no stated tolerance; parity knows {', '.join(TOLERANCES)}")
    backends = list(BACKENDS) if backends is None else backends
    if unknown_backends := [name for name in backends if name not in BACKENDS]:
        raise ValueError(unknown("backend", unknown_backends[0], BACKENDS))
    every = [(store, codec, tuple(backends)) for store in stores for codec in codecs]
    few = [(store, codec, ("blockwise",)) for store, codec in also]
    rows: list[Row] = []
    cells = len(dtypes) * len(every) * len(backends) + len(few)
    progress = Progress("parity", len(variants) * cells)
    with torch.inference_mode(), _exact_products():
        for variant in variants:
            for dtype in dtypes:
                asked: dict[Sight, list[tuple[str, str, tuple[str, ...]]]] = {}
                for pair in every + (few if dtype == dtypes[0] else []):
                    asked.setdefault(sight_of(variant, pair[0], sight), []).append(pair)
                for seen, pairs in asked.items():
                    for cell in _cells(variant, geometry, seen, dtype, pairs, device, seed):
                        progress.at(f"{cell.variant} {cell.dtype} {cell.store} {cell.codec} {cell.backend}")
                        rows += _cell_rows(cell)
    progress.close()
    if not transformers_installed():
        print(f"transformers is not installed, its comparison is skipped: {INSTALL}", file=sys.stderr)
    return Report(rows, [_table(rows)], [_failure(row) for row in rows if not row["ok"]])


def sight_of(variant: str, store: str, sight: Sight | None) -> Sight:
    """What is seen in a cell: what was asked for, and else all, but for a ring, which has its meaning by a window."""
    if sight is not None:
        return sight
    return RING if store == "ring" and has_limits(variant) else Sight()


def _cells(
    variant: str,
    geometry: Geometry,
    sight: Sight,
    dtype: str,
    pairs: Sequence[tuple[str, str, tuple[str, ...]]],
    device: str,
    seed: int,
) -> Iterator[Cell]:
    decoder = random_decoder(decoder_config(variant, geometry, sight), dtype=dtype, device=device, seed=seed)
    ids = sample_ids(decoder, seed)
    truth = reference_logits(decoder, ids)
    tolerances = {(store, codec): tolerance_of(decoder, dtype, store, codec, ids, truth) for store, codec, _ in pairs}
    ids, truth = ids.to(device), truth.to(device)
    # A window is no option of most of transformers' classes.
    compared = transformers_installed() and not sight.limited
    peers = tuple(_peers(decoder, ids, dtype, device, seed)) if compared else ()
    for store, codec, backends in pairs:
        for name in backends:
            yield Cell(
                decoder, variant, store, codec, name, dtype, device, ids, truth, peers, sight, tolerances[store, codec]
            )


def _cell_rows(cell: Cell) -> list[Row]:
    """A row per check in which the cell's backend computed something; what it does not accept, others compute."""
    rows = []
    for check, compare in checks_of(cell).items():
        with backend(cell.backend), counted() as passes:
            got, wanted = compare(cell)
        rows.append(_row(cell, check, got, wanted, passes))
    for peer in cell.peers:
        with backend(cell.backend), counted() as passes:
            got = peer.decoder(cell.ids)
        rows.append(_row(cell, "transformers", got.flatten(0, 1), peer.truth.flatten(0, 1), passes, peer=peer.name))
    return [row for row in rows if row["passes_by_backend"]]


def _peers(decoder: Decoder, ids: Tensor, dtype: str, device: str, seed: int) -> Iterator[Peer]:
    """The same weights in transformers' class, in float32; GQA with normalised heads is Qwen3's.

    A variant for which transformers has no class goes without, and says so.
    """
    decoders = [decoder]
    config = decoder.config
    if type(config.attention) is GQAConfig:
        normed = replace(config, attention=replace(config.attention, qk_norm=True))
        decoders.append(random_decoder(normed, dtype=dtype, device=device, seed=seed))
    for ours in decoders:
        try:
            twin = transformers_twin(ours, dtype="float32")
        except ValueError as error:
            print(f"no comparison with transformers: {error}", file=sys.stderr)
            return
        yield Peer(type(twin).__name__, ours, twin(ids).logits)


def _row(cell: Cell, check: str, got: Tensor, wanted: Tensor, passes: Counter[str], peer: str | None = None) -> Row:
    got, wanted = got.double(), wanted.double()
    error, tolerance = relative(got, wanted), cell.tolerance
    # NaN compares false, so it can pass neither as right nor as a control that fails.
    holds = error > tolerance if check == CONTROL else error <= tolerance
    return {
        "variant": cell.variant,
        "store": cell.store,
        "codec": cell.codec,
        "sees": str(cell.sight),
        "backend": cell.backend,
        "dtype": cell.dtype,
        "device": cell.device,
        "check": check,
        "peer": peer,
        "passes": passes.total(),
        "passes_by_backend": passes[cell.backend],
        "error": error if math.isfinite(error) else None,
        "tolerance": tolerance,
        "argmax_agreement": float((got.argmax(-1) == wanted.argmax(-1)).double().mean()),
        "ok": holds,
    }


def tolerance_of(decoder: Decoder, dtype: str, store: str, codec: str, ids: Tensor, truth: Tensor) -> float:
    """The largest error of logits that a cache of this dtype and codec may bring to this decoder.

    The dtype's, and what the codec's step makes of the reference, `truth`, on these ids: the largest of a few errors of
    `moved_logits`. Rounding is evenly spread within the bound, so that its errors are about 0.6 of these.
    """
    if codec == "plain":
        return TOLERANCES[dtype]
    code = codec_named(codec)
    layout = layout_named(store, decoder.cache_specs[0], batch=1, capacity=ids.shape[1], together=code.together)
    code = code.over(layout.together)
    if ids.shape[1] < code.together:
        return TOLERANCES[dtype]
    moved = (relative(moved_logits(decoder, ids, code, seed=draw), truth) for draw in range(DRAWS))
    return TOLERANCES[dtype] + max(moved)


def sample_ids(decoder: Decoder, seed: int) -> Tensor:
    """The ids (B, T) of a parity check."""
    return torch.randint(decoder.config.vocab_size, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))


def relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest magnitude wanted."""
    return float((got - wanted).abs().max() / wanted.abs().max())


def _failure(row: Row) -> str:
    where = " ".join(row[name] for name in ("variant", "store", "codec", "backend", "dtype", "check"))
    if row["check"] == CONTROL:
        return f"{where}: a wrong key went unseen, error {row['error']} within {row['tolerance']}"
    return f"{where}: error {row['error']} beyond {row['tolerance']}"


def _table(rows: Sequence[Row]) -> Table:
    """One line per cell: its worst check, and whether the control was caught."""
    lines = []
    for key, group in groupby(rows, key=lambda row: tuple(row[name] for name in CELL)):
        members = list(group)
        checks = [row for row in members if row["check"] != CONTROL]
        worst = max(checks, key=lambda row: math.inf if row["error"] is None else row["error"])
        lines.append(
            dict(zip(CELL, key, strict=True))
            | {
                "checks": len(checks),
                "by_it": sum(row["passes_by_backend"] for row in checks) / sum(row["passes"] for row in checks),
                "worst": "NaN" if worst["error"] is None else f"{worst['error']:.1e}",
                "in": worst["check"],
                "tolerance": worst["tolerance"],
                "argmax_agreement": min(row["argmax_agreement"] for row in checks),
                "control": next((row["ok"] for row in members if row["check"] == CONTROL), None),
                "ok": all(row["ok"] for row in members),
            }
        )
    title = f"Parity on {rows[0]['device']}, worst max |d| / max |reference|"
    return folded(title, COLUMNS, lines, NOTE, same=("store", "codec", "sees"))


@contextmanager
def _exact_products() -> Iterator[None]:
    """float32 products in float32: no TF32 on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
