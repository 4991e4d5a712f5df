"""Cache sizes: by formula from the declaration, and, when asked, as a store really allocates them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attn_variants.architectures import PRESETS
from attn_variants.architectures.strided import StridedSpec
from attn_variants.cache import cache_shapes, model_cache
from attn_variants.cache.explain import explained
from attn_variants.cache.policies import codec_of
from attn_variants.contract import CacheSpec, Entry
from attn_variants.dtypes import dtype_bytes

from .case import Subject
from .fitting import CONTEXTS, FITTING_COLUMNS, Question, fitting
from .real_error import ERROR_NOTE, real_errors, shown_errors
from .results import Report, Row
from .tables import Column, Table, exact, size

META_ABOVE = 1 << 30
"""A store of more bytes than this is made on the meta device: every shape and size is real, no memory is taken."""


COLUMNS = (
    Column("subject", "subject", right=False),
    Column("entries", "kept per token, each layer", lambda entries: described(entries), right=False),
    Column("bytes_fixed", "fixed", size),
    Column("bytes_per_token", "bytes/token", exact),
    Column("bytes_per_token_mean", "in the mean", lambda mean: f"{mean:,.10g}"),
    Column("bytes_ideal", "ideal", size),
    Column("bytes_formula", "reserved", size),
    Column("bytes_by_policy", "by policy", size),
    Column("bytes_over_ranks", "over ranks", size),
    Column("bytes_allocated", "allocated", size),
    Column("allocated_on", "on", right=False),
    Column("bytes_used", "used", size),
    Column("bytes_wasted", "waste", size),
    Column("codec_error", "error on SmolLM2", lambda found: shown_errors(found), right=False),
    Column("windowed_layers", "windowed layers"),
    Column("ratio_to_mha", "of MHA", "{:.2%}".format),
    Column("ratio_to_first", "of the first", "{:.2%}".format),
    Column("bytes_transformers", "transformers", size),
    Column("bytes_measured", "measured", size),
    Column("measured_on", "on", right=False),
    Column("weights", "weights/rank", size),
    Column("max_batch", "most sequences", lambda most: "any" if most == "any" else exact(most)),
    Column("max_context", "longest context", lambda most: "any" if most == "any" else exact(most)),
)
SHAPE_COLUMNS = (
    Column("subject", "subject", right=False),
    Column("name", "tensor", right=False),
    Column("shape", "shape", lambda shape: " x ".join(map(str, shape)), right=False),
    Column("dtype", "dtype", right=False),
    Column("bytes", "bytes", exact),
)
NOTE = (
    "bytes/token: what one more token of one sequence adds over all layers at this context, 0 where windows are full; "
    "ideal: what attention can ever read; reserved: what the store sets aside for batch x context, by formula. "
    "used: what attention can read of that; waste: slots out of sight, the end of a last page, a pool's page 0."
)


def memory_report(
    subjects: Iterable[Subject],
    question: Question,
    *,
    shapes: bool = False,
    explain: bool = False,
    compared: bool = False,
    measure: bool = False,
    device: str | None = None,
) -> Report:
    """One row per subject; `device` not None also makes the store there and reads its storages.

    compared: each subject's bytes are given over the first one's. measure: transformers' own model of each is run and
    its cache read off, which has to be what policy `transformers` says. Raises ValueError, naming the subject, for what
    the question's options refuse.
    """
    rows = []
    for subject in subjects:
        try:
            rows.append(_row(subject, question, shapes=shapes, explain=explain, measure=measure, device=device))
        except ValueError as error:
            raise ValueError(f"{subject.name}: {error}") from None
        if compared:
            rows[-1]["ratio_to_first"] = rows[-1]["bytes_by_policy"] / rows[0]["bytes_by_policy"]
    report = Report(rows, list(_tables(rows, question, shapes=shapes, explain=explain)))
    report.failures += [
        f"{row['subject']}: allocated {row['bytes_allocated']} bytes, the formula says {row['bytes_formula']}"
        for row in rows
        if row["bytes_allocated"] not in (None, row["bytes_formula"])
    ]
    report.failures += [
        f"{row['subject']}: transformers holds {row['bytes_measured']} bytes, "
        f"its policy says {row['bytes_transformers']}"
        for row in rows
        if measure and row["bytes_measured"] != row["bytes_transformers"]
    ]
    return report


MODEL_COLUMNS = (
    Column("model", "model", right=False),
    Column("model_type", "model_type", right=False),
    Column("layers", "layers"),
    Column("entries", "kept per token, each layer", lambda entries: described(entries), right=False),
    Column("bytes_fixed", "fixed", size),
    Column("bytes_per_token_mean", "bytes/token", lambda mean: f"{mean:,.10g}"),
    Column("bytes_ideal", "a sequence", size),
)


def models_report(context: int, kv_dtype: str) -> Report:
    """A row per bundled preset, with its source."""
    rows: list[Row] = []
    for name, preset in PRESETS.items():
        cache = model_cache(name)
        asked: dict[str, Any] = {"kv_dtype": kv_dtype}
        rows.append(
            {
                "model": name,
                "model_type": cache.architecture.model_type,
                "layers": len(cache.layers),
                "context": context,
                "kv_dtype": kv_dtype,
                "entries": _entries(cache.layers, kv_dtype),
                "bytes_fixed": cache.bytes_fixed(**asked),
                "bytes_per_token": cache.bytes_per_token(context=context, **asked),
                "bytes_per_token_mean": cache.bytes_per_token_mean(context=context, **asked),
                "bytes_ideal": cache.bytes(context=context, **asked),
                "source": preset.source,
            }
        )
    note = (
        "bytes/token: of one more token at this context, the mean where tokens are pooled. "
        "The source of each is in the other formats (--format json)."
    )
    return Report(rows, [Table(f"{len(rows)} presets, context {context:,}, {kv_dtype}", MODEL_COLUMNS, rows, note)])


def described(entries: list[Row]) -> str:
    """Entries in words, `k 8 x 128, v 8 x 128`; the layers are named where they differ."""
    counts = {entry["layers"] for entry in entries}
    return ", ".join(
        f"{entry['name']} {entry['heads']} x {entry['dim']}"
        + (f" per {entry['per']} tokens" if "per" in entry else "")
        + (f" ({entry['layers']} layers)" if len(counts) > 1 else "")
        for entry in entries
    )


def _row(
    subject: Subject, question: Question, *, shapes: bool, explain: bool, measure: bool, device: str | None
) -> Row:
    cache, sizes = subject.cache, {"batch": question.batch, "context": question.context}
    shared: dict[str, Any] = {"kv_dtype": question.kv_dtype, "codec": question.codec, **question.split}
    reserved, why = _reserved(subject, question)
    # A store is one of our own unless a policy is named.
    named = question.policy or ("allocated" if question.store is not None else None)
    whole = question.ranks == 1 and question.budget is None
    policy = named or ("allocated" if reserved is not None and whole else "ideal")
    # Growth is asked of what can ever be read, unless a policy is named.
    asked = shared | {"policy": named or "ideal"}
    if named is not None:
        asked["store"] = question.store
    row: Row = {
        "subject": subject.name,
        "variant": subject.variant,
        "layers": len(cache.layers),
        **sizes,
        "kv_dtype": question.kv_dtype,
        "store": question.store or {"allocated": "full", "transformers": "dynamic", "vllm": "held"}.get(policy),
        "codec": question.codec if reserved is None else _stored(subject, question)[1],
        "policy": policy,
        **question.split,
        "entries": _entries(cache.layers, question.kv_dtype),
        "windowed_layers": sum(1 for spec in cache.layers if spec.window or spec.chunk),
        "bytes_fixed": cache.bytes_fixed(**shared),
        "bytes_per_token": cache.bytes_per_token(context=question.context, **asked),
        "bytes_per_token_mean": cache.bytes_per_token_mean(context=question.context, **asked),
        "bytes_ideal": cache.bytes(**sizes, **shared),
        "bytes_formula": reserved,
        "bytes_by_policy": reserved if policy == "allocated" else cache.bytes(**sizes, **asked),
        "bytes_over_ranks": cache.bytes_over_ranks(**sizes, **asked) if question.ranks > 1 else None,
        "bytes_allocated": None,
        "allocated_on": None,
        "bytes_used": None,
        "bytes_wasted": None,
        "codec_error": None,
        "ratio_to_mha": None,
        "note": why,
    }
    if reserved is not None:
        row["bytes_used"], row["bytes_wasted"] = row["bytes_ideal"], reserved - row["bytes_ideal"]
        if row["codec"] != "plain":
            row["codec_error"] = real_errors(row["codec"])
    if subject.mha is not None and reserved is not None:
        plain: dict[str, Any] = {"kv_dtype": _stored(subject, question)[0], **question.split}
        row["ratio_to_mha"] = reserved / subject.mha.bytes(**sizes, **plain, policy="allocated")
    if measure:
        row |= _measured(subject, question)
    if question.budget is not None:
        row |= fitting(subject, question, asked, row.get("parameters"))
    if explain:
        priced = cache.pricing(**shared, policy=policy, store=question.store)
        row["explanation"] = explained(priced, **sizes)
    if shapes:
        row["tensors"] = _tensors(subject, question)
    if device is not None:
        if reserved is None:
            raise ValueError(f"--allocate: {why}")
        row["allocated_on"] = "meta" if reserved > META_ABOVE else device
        row["bytes_allocated"] = _allocated(subject, question, row["allocated_on"])
    return row


def _reserved(subject: Subject, question: Question) -> tuple[int | None, str | None]:
    """What our store reserves on a rank, or why no store of ours holds this yet."""
    store = question.store if question.policy in (None, "allocated") else None
    shared: dict[str, Any] = {"kv_dtype": question.kv_dtype, "codec": question.codec, **question.split}
    sizes = {"batch": question.batch, "context": question.context}
    try:
        return subject.cache.bytes(**sizes, **shared, policy="allocated", store=store), None
    except ValueError as error:
        if question.policy == "allocated" or store is not None or question.codec != "plain":
            raise
        # Splits that do not work out are refused by every policy; what no store holds can still be sized.
        subject.cache.pricing(**shared)
        return None, str(error)


def _stored(subject: Subject, question: Question) -> tuple[str, str]:
    """The dtype and the codec of our store."""
    form = subject.cache.form(question.kv_dtype, question.codec)
    return form.model, codec_of(form)


def _measured(subject: Subject, question: Question) -> Row:
    """What transformers' own model holds, and what its policy says of it."""
    if not subject.cache.config:
        raise ValueError("--measure runs published models; give --model")
    from .measured import measured_bytes

    dtype = subject.cache.dtype if question.kv_dtype == "auto" else question.kv_dtype
    sizes = {"batch": question.batch, "context": question.context}
    held = subject.cache.bytes(**sizes, kv_dtype=dtype, policy="transformers")
    found = measured_bytes(subject.cache.config, **sizes, dtype=dtype)
    return {
        "bytes_transformers": held,
        "bytes_measured": found.bytes,
        "measured_on": found.how,
        "parameters": found.parameters,
    }


def _entries(layers: Sequence[CacheSpec], kv_dtype: str) -> list[Row]:
    """What is kept per token, and how many layers keep it; what is pooled says of how many tokens, as `per`."""
    counts = Counter(
        (entry.name, entry.heads, entry.dim, entry.dtype or kv_dtype, per)
        for spec in layers
        if spec.shares is None
        for entry, per in _kept(spec)
    )
    return [
        {"name": name, "heads": heads, "dim": dim, "dtype": dtype, "layers": count} | ({"per": per} if per else {})
        for (name, heads, dim, dtype, per), count in counts.items()
    ]


def _kept(spec: CacheSpec) -> Iterator[tuple[Entry, int | None]]:
    yield from ((entry, None) for entry in spec.entries)
    if isinstance(spec, StridedSpec):
        yield from ((entry, spec.stride) for entry in spec.pooled)


def _tensors(subject: Subject, question: Question) -> list[Row]:
    dtype, codec = _stored(subject, question)
    shapes = cache_shapes(
        subject.cache.layers,
        batch=question.batch,
        capacity=question.context,
        store=question.store or "full",
        codec=codec,
        dtype=dtype,
    )
    return [
        {"name": name, "shape": list(shape), "dtype": dtype, "bytes": math.prod(shape) * dtype_bytes(dtype)}
        for name, (shape, dtype) in shapes.items()
    ]


def _allocated(subject: Subject, question: Question, device: str) -> int:
    from attn_variants.cache import KVCache

    if question.ranks > 1:
        raise ValueError("--allocate makes the store of one rank that holds all; leave out --tp, --pp, --dp and --cp")
    dtype, codec = _stored(subject, question)
    cache = KVCache(
        subject.cache.layers,
        batch=question.batch,
        capacity=question.context,
        dtype=dtype,
        device=device,
        store=question.store or "full",
        codec=codec,
    )
    return cache.nbytes


def _tables(rows: list[Row], question: Question, *, shapes: bool, explain: bool) -> Iterator[Table]:
    policies = ", ".join(dict.fromkeys(row["policy"] for row in rows))
    ways = [f"{name} {ranks}" for name, ranks in question.split.items() if ranks > 1]
    named = [f"{name} {value}" for name, value in (("store", question.store), ("codec", question.codec)) if value]
    where = ", ".join(
        [f"batch {question.batch}, context {question.context:,}, {question.kv_dtype}, policy {policies}"]
        + [text for text in named if text != "codec plain"]
        + ways
    )
    notes = list(dict.fromkeys(f"{row['subject']}: {row['note']}." for row in rows if row["note"]))
    if any(row["codec_error"] is not None for row in rows):
        notes.append(ERROR_NOTE)
    yield Table(f"KV cache: {where}", _shown(rows), rows, " ".join([NOTE, *notes]))
    if question.budget is not None:
        columns = (Column("subject", "subject", right=False), *(Column(str(c), f"at {c:,}") for c in CONTEXTS))
        lines = [{"subject": row["subject"]} | row["max_batch_by_context"] for row in rows]
        yield Table(f"Most sequences within {size(question.budget)} per rank, policy {policies}", columns, lines)
        sums = [{"subject": row["subject"], "line": line} for row in rows for line in row["fitting"]]
        yield Table("What fits, bytes of a rank", FITTING_COLUMNS, sums)
    if explain:
        for row in rows:
            lines = [{"line": line} for line in row["explanation"]]
            yield Table(f"{row['subject']}, policy {row['policy']}", (Column("line", "bytes", right=False),), lines)
    if shapes:
        tensors = [{"subject": row["subject"], **tensor} for row in rows for tensor in row["tensors"]]
        yield Table(f"Stored tensors: {where}", SHAPE_COLUMNS, tensors)


def _shown(rows: list[Row]) -> tuple[Column, ...]:
    """The columns that say something, as a count of 0 that fit does; a policy's and a mean only where they differ.

    Where nothing is wasted all is used; where something is, what is used is what attention can ever read.
    """
    wasted = any(row["bytes_wasted"] for row in rows)
    used = wasted and all(row["bytes_used"] == row["bytes_ideal"] for row in rows)
    hidden = {"bytes_ideal" if used else None if wasted else "bytes_used"}
    if all(row["bytes_per_token"] == row["bytes_per_token_mean"] for row in rows):
        hidden.add("bytes_per_token_mean")
    other = any(row["bytes_by_policy"] not in (row["bytes_ideal"], row["bytes_formula"]) for row in rows)
    return tuple(
        column
        for column in COLUMNS
        if (other or column.field != "bytes_by_policy")
        and column.field not in hidden
        and any(_says(row, column.field) for row in rows)
    )


def _says(row: Row, field: str) -> bool:
    return row.get(field) not in ((None,) if field in ("max_batch", "max_context") else (None, 0))
