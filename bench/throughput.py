"""How fast? Prefill and decode apart, at a context that is really cached, beside the rate at which memory is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from attn_variants.cache.accounting import used_bytes
from attn_variants.contract import LARGEST_SIZE
from attn_variants.decoder import Decoder
from attn_variants.linear import lay_out_weights, weights_by_columns
from attn_variants.names import unknown

from .case import SEES_ALL, decoder_config, random_decoder
from .contest import Case, Measured, Settings, contest, steps_of
from .contestants import TRANSFORMERS_CACHES, Contestant, Ours
from .measure import Timings, quantile, read_bandwidth
from .memory_left import out_of_memory
from .parity import TOLERANCES, sample_ids, tolerance_of
from .peers import transformers_twin
from .reference import reference_logits
from .results import Report, Row
from .room import fitting, weights_refused
from .sweep import Sweep, all_refused, unmeasured
from .sweep_file import SweepFile
from .tables import Column, Table, exact, figure, folded, size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEERS = ("transformers",)

SAME = ("subject", "variant", "sees", "dtype", "batch_spec", "batch", "context")
"""What two contestants agree on when they can be compared."""

HELD = ("store", "codec")

COLUMNS = (
    Column("subject", "subject", right=False),
    Column("variant", "variant", right=False),
    Column("sees", "sees", right=False),
    Column("dtype", "dtype", right=False),
    Column("batch_spec", "batch spec", right=False),
    Column("batch", "batch"),
    Column("context", "context", exact),
    Column("store", "store", right=False),
    Column("codec", "codec", right=False),
    Column("by", "by", right=False),
    Column("ttft", "TTFT ms", figure),
    Column("prompt_tokens_per_s", "prompt tok/s", figure),
    Column("ms_p50", "step ms", figure),
    Column("ms_p95", "p95", figure),
    Column("tokens_per_s", "tok/s", figure),
    Column("fraction_of_limit", "of limit", "{:.0%}".format),
    Column("ratio", "x peer", "{:.2f}".format),
    Column("over_full", "step / full's", "{:.2f}".format),
    Column("cache_bytes", "cache", size),
    Column("largest_allocation", "largest alloc.", size),
    Column("unquiet", "", lambda unquiet: "unquiet" if unquiet else "", right=False),
    Column("error", "out of memory", lambda error: error.removeprefix("out of memory: "), right=False),
)
NOTE = (
    "TTFT: the prompt and the choice of the first token. step: a token more for every sequence, the median. of limit: "
    "time to read the weights and the cache once, at the rate measured in this run, over a step's. largest alloc.: "
    "of one decode step. Our weights lie by rows or by columns, as measured faster. unquiet: the cores were not ours "
    "alone, so take no speed from this line."
)


def throughput_report(cases: Sequence[Case], settings: Settings, record: SweepFile | None = None) -> Report:
    """A prefill and a decode row per case and contestant; of a peer's settings the fastest is reported.

    Without a prompt (`random_cache`) a decode row alone; one with an `error` where memory does not hold a store.
    record: is given each case's rows when they are measured; cases that it holds are taken from there.

    `failures` names cases in which a peer computes other logits. Raises ValueError, before anything is measured, as
    `require_measurable` does.
    """
    require_measurable(cases, settings)
    sweep = Sweep(cases, settings, record)
    progress = sweep.progress
    if sweep.todo:
        progress.at("read bandwidth")
        sweep.begin(read_bandwidth(settings.device))
    for _, group in groupby(sweep.todo, key=lambda case: case.weights):
        members = list(group)
        config = decoder_config(members[0].variant, members[0].geometry, members[0].sight)
        if refusal := weights_refused(config, members[0].dtype, sweep.left()):
            for case in members:
                sweep.add(case, unmeasured(case, settings, all_refused(case, refusal, peer=bool(settings.against))))
            continue
        decoder = random_decoder(config, dtype=members[0].dtype, device=settings.device, seed=settings.seed)
        twins = {cache: transformers_twin(decoder) for cache in TRANSFORMERS_CACHES} if settings.against else {}
        lay_out_weights(decoder)
        for case in members:
            sweep.add(case, *_measured(case, settings, decoder, twins, sweep))
    progress.close()
    report = Report(sweep.in_order(), failures=sweep.failures())
    report.tables += _tables(report.rows)
    return report


def require_measurable(cases: Sequence[Case], settings: Settings) -> None:
    """Refuse dtypes and peers that are unknown, a peer that is not installed, and more tokens than are countable."""
    if settings.against is not None and settings.against not in PEERS:
        raise ValueError(unknown("peer", settings.against, PEERS))
    if settings.against is not None and settings.random_cache:
        raise ValueError("--random-cache fills stores of ours, and --against compares with another's; leave one out")
    for case in cases:
        if case.dtype not in TOLERANCES:
            raise ValueError(f"dtype {case.dtype!r} is not one that decoders run in here: {', '.join(TOLERANCES)}")
        if case.context + steps_of(settings) > LARGEST_SIZE:
            raise ValueError(
                f"context {case.context} and {steps_of(settings)} steps more are beyond the {LARGEST_SIZE} tokens that "
                "a row can have; lower one of them"
            )


def _measured(
    case: Case,
    settings: Settings,
    decoder: Decoder,
    twins: Mapping[str, PreTrainedModel],
    sweep: Sweep,
) -> tuple[list[Row], list[str]]:
    """The rows of what fits in memory and of what does not, and the checks that failed."""
    twins = {} if case.ragged else twins
    case, peer_fits, refused = fitting(case, settings, decoder.cache_specs, len(twins), sweep.left())
    twins = twins if peer_fits else {}
    if not case.stores and not twins:
        return unmeasured(case, settings, refused), []
    assert sweep.bandwidth is not None
    try:
        measured, unquiet = contest(case, settings, decoder, twins, sweep.progress)
        failures = list(_disagreements(case, settings, decoder, measured))
        rows = list(throughput_rows(case, settings, decoder, measured, sweep.bandwidth, unquiet))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        said = "out of memory: " + " ".join(str(error).split())
        refused |= all_refused(case, said, peer=bool(twins))
        rows, failures = [], []
    return rows + unmeasured(case, settings, refused), failures


def _disagreements(case: Case, settings: Settings, decoder: Decoder, measured: Sequence[Measured]) -> Iterator[str]:
    """Contestants whose logits after the prompt are not the first's; both may be off by their tolerance."""
    if len(measured) == 1 or settings.random_cache:
        return
    ids = sample_ids(decoder, settings.seed)
    truth = None
    if any(one.contestant.codec != "plain" for one in measured):
        truth = reference_logits(decoder, ids)

    def tolerance(one: Measured) -> float:
        if truth is None:
            return TOLERANCES[case.dtype]
        return tolerance_of(decoder, case.dtype, one.contestant.store, one.contestant.codec, ids, truth)

    first = measured[0].logits
    assert first is not None
    for other in measured[1:]:
        assert other.logits is not None
        error = float((other.logits.double() - first.double()).abs().max() / first.double().abs().max())
        if not error <= tolerance(measured[0]) + tolerance(other):
            by = other.contestant
            held = f"{by.store} {by.codec}"
            yield f"{case}: {by.peer} ({by.setting}, {held}) computes other logits, error {error:.1e}"


def throughput_rows(
    case: Case, settings: Settings, decoder: Decoder, measured: Sequence[Measured], bandwidth: float, unquiet: bool
) -> Iterator[Row]:
    """Two rows for each way of ours, and two for the fastest setting of each peer."""
    reported: dict[tuple[str, ...], list[Measured]] = {}
    for one in measured:
        contestant = one.contestant
        own = contestant.peer == Ours.peer
        setting = contestant.setting if own else ""
        reported.setdefault((contestant.peer, setting, contestant.store, contestant.codec), []).append(one)
    for group in reported.values():
        best = min(group, key=_step_ms)
        others = {one.contestant.setting: _step_ms(one) for one in group if one is not best}
        (full,) = reported.get((best.contestant.peer, best.contestant.setting, "full", "plain"), [None])[:1]
        shared = _shared_fields(case, settings, decoder, best.contestant, bandwidth, unquiet) | {
            "peer": best.contestant.peer,
            "setting": best.contestant.setting,
            "slower_settings_ms_p50": others,
            "cache_bytes": best.contestant.cache_bytes,
            "weights_by_columns": weights_by_columns(decoder) if best.contestant.peer == Ours.peer else None,
        }
        if best.prefill.wall:
            yield shared | _phase("prefill", best.prefill, case.rows.tokens)
        decode = _phase("decode", best.decode, case.batch)
        decode["largest_allocation"] = best.largest_allocation
        decode["over_full"] = None if full in (None, best) else _step_ms(best) / _step_ms(full)
        read = shared["weight_bytes"] + shared["cache_bytes_read"]
        decode["fraction_of_limit"] = read / bandwidth / (decode["ms_p50"] / 1e3)
        yield shared | decode


def _step_ms(one: Measured) -> float:
    return quantile(one.decode.milliseconds, 0.5)


def _shared_fields(
    case: Case, settings: Settings, decoder: Decoder, contestant: Contestant, bandwidth: float, unquiet: bool
) -> Row:
    """What both phases of every contestant have in common, in the order of the record."""
    return {
        "subject": case.subject,
        "variant": case.variant,
        "peer": None,
        "setting": None,
        "store": contestant.store,
        "codec": contestant.codec,
        "sees": str(case.sight),
        "shuffled": settings.shuffled and contestant.store.startswith("paged"),
        "dtype": case.dtype,
        "device": settings.device,
        "threads": torch.get_num_threads(),
        "batch_spec": str(case.rows),
        "batch": case.batch,
        "context": case.context,
        "phase": None,
        "tokens_per_s": None,
        "ms_p50": None,
        "ms_p95": None,
        "samples": None,
        "cache_bytes": None,
        "cache_bytes_read": sum(
            used_bytes(decoder.cache_specs, batch=count, context=tokens, codec=contestant.codec, dtype=case.dtype)
            for count, tokens in case.rows.runs
        ),
        "weight_bytes": weight_bytes_read(decoder, case.batch),
        "weights_by_columns": None,
        "parameter_bytes": sum(parameter.nbytes for parameter in decoder.parameters()),
        "read_bandwidth": bandwidth,
        "fraction_of_limit": None,
        "cpu_over_wall": None,
        "unquiet": unquiet,
        "largest_allocation": None,
        "over_full": None,
        "error": None,
    }


def _phase(phase: str, timings: Timings, tokens: int) -> Row:
    """One phase's figures; `tokens` is what each sample took in or gave out, over the whole batch."""
    median = quantile(timings.milliseconds, 0.5)
    return {
        "phase": phase,
        "tokens_per_s": tokens / (median / 1e3),
        "ms_p50": median,
        "ms_p95": quantile(timings.milliseconds, 0.95),
        "samples": timings.milliseconds,
        "cpu_over_wall": timings.cpu_over_wall,
    }


def weight_bytes_read(decoder: Decoder, batch: int) -> int:
    """Bytes of weights that a decode step reads: all but the embedding, of which it reads a row per sequence.

    A head tied to the embedding is read whole, and counted once.
    """
    embedding = decoder.model.embed_tokens.weight
    everything = sum(parameter.nbytes for parameter in decoder.parameters())
    if decoder.config.tie_word_embeddings:
        return everything
    return everything - embedding.nbytes + batch * embedding[0].nbytes


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One line per contestant, its prefill and its decode side by side; then tokens/s over the contexts."""
    lines = [
        _line(before if before["phase"] == "prefill" else {}, row, rows)
        for before, row in zip([{"phase": None}, *rows], rows, strict=False)
        if row["phase"] == "decode"
    ]
    where = f"{rows[0]['device']}, {rows[0]['threads']} threads"
    # A sweep that was interrupted measured the ceiling again.
    if rates := sorted({f"{row['read_bandwidth'] / 1e9:.1f}" for row in rows if row["read_bandwidth"]}, key=float):
        where += f", memory read at {' to '.join(dict.fromkeys([rates[0], rates[-1]]))} GB/s"
    columns = [column for column in COLUMNS if any(_said(column, line) for line in lines)]
    same = [column.field for column in columns if column.field in (*SAME, *HELD)]
    yield folded(f"Speed on {where}", columns, lines, NOTE, same=same)
    even = [line for line in lines if not line["error"] and not _is_ragged(line)]
    if len({line["context"] for line in even}) > 1:
        yield _over_contexts(even, [column for column in columns if column.field in same])


def _said(column: Column, line: Row) -> bool:
    """Whether a column tells something of this line."""
    if column.field == "batch_spec":
        return _is_ragged(line)
    return line.get(column.field) is not None and not (column.field == "sees" and line["sees"] == str(SEES_ALL))


def _is_ragged(row: Row) -> bool:
    return "+" in row["batch_spec"]


def _line(prefill: Row, decode: Row, rows: Sequence[Row]) -> Row:
    ours = decode["peer"] == Ours.peer
    rivals = [
        row["tokens_per_s"]
        for row in rows
        if row["phase"] == "decode"
        and row["peer"] != Ours.peer
        and row["tokens_per_s"]
        and all(row[name] == decode[name] for name in SAME)
    ]
    return decode | {
        "contestant": f"ours, {decode['setting']}" if ours else decode["peer"],
        "by": f"ours, {decode['setting']}" if ours else f"{decode['peer']}, {decode['setting']}",
        "ttft": prefill.get("ms_p50"),
        "prompt_tokens_per_s": prefill.get("tokens_per_s"),
        "ratio": decode["tokens_per_s"] / max(rivals) if rivals and ours and not decode["error"] else None,
    }


def _over_contexts(lines: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Decode tokens/s, a line per contestant and a column per context."""
    import pandas as pd

    shown = [column for column in columns if column.field not in ("context", "batch_spec")]
    shown.append(Column("contestant", "by", right=False))
    index = [column.field for column in shown]
    wide = pd.DataFrame(lines).pivot_table(index=index, columns="context", values="tokens_per_s", sort=False)
    shown += [Column(str(context), f"at {context:,}", figure) for context in sorted(wide.columns)]
    records = [
        {str(name): None if value != value else value for name, value in line.items()}
        for line in wide.reset_index().to_dict("records")
    ]
    return folded("Decode tokens/s", shown, records, "", same=index[:-1])
