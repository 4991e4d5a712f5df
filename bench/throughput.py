"""How fast? Prefill and decode apart, at a context that is really cached, beside the rate at which memory is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from attn_variants.decoder import Decoder
from attn_variants.linear import lay_out_weights, weights_by_columns
from attn_variants.names import unknown
from attn_variants.packed import pack_weights

from .agreement import Agreement
from .budget import equal_memory
from .case import SEES_ALL, decoder_config, random_decoder
from .ceilings import matmul_rates, read_bandwidth
from .contest import TURN_STEPS, Case, Measured, Settings, contest
from .contestants import TRANSFORMERS_CACHES, Contestant, Ours
from .intervals import median_interval
from .limits import cache_bytes_read, operator_limit, step_operators, weight_bytes_read
from .measure import Timings, load_average, quantile
from .parity import TOLERANCES
from .peers import transformers_twin
from .progress import Progress
from .results import Report, Row
from .tables import Column, Table, exact, figure, folded, size

PEERS = ("transformers",)

SAME = ("subject", "variant", "sees", "dtype", "batch", "context")
"""What two contestants agree on when they can be compared."""

HELD = ("store", "codec")

FOR_P99 = 1000
"""Samples below which a 99th percentile is a guess."""

COLUMNS = (
    Column("subject", "subject", right=False),
    Column("variant", "variant", right=False),
    Column("sees", "sees", right=False),
    Column("dtype", "dtype", right=False),
    Column("batch", "batch"),
    Column("context", "context", exact),
    Column("store", "store", right=False),
    Column("codec", "codec", right=False),
    Column("by", "by", right=False),
    Column("ttft", "TTFT ms", figure),
    Column("prompt_tokens_per_s", "prompt tok/s", figure),
    Column("ms_p50", "step ms", figure),
    Column("ms_p50_interval", "95 %", lambda interval: " to ".join(map(figure, interval))),
    Column("ms_p95", "p95", figure),
    Column("tokens_per_s", "tok/s", figure),
    Column("fraction_of_limit", "of limit", "{:.0%}".format),
    Column("fraction_of_operator_limit", "of operators'", "{:.0%}".format),
    Column("noise", "A/A", "{:.1%}".format),
    Column("ratio", "x peer", "{:.2f}".format),
    Column("over_full", "step / full's", "{:.2f}".format),
    Column("cache_bytes", "cache", size),
    Column("largest_allocation", "largest alloc.", size),
    Column("unquiet", "", lambda unquiet: "unquiet" if unquiet else "", right=False),
    Column("wrong", "", lambda wrong: "WRONG" if wrong else "", right=False),
)
NOTE = (
    "TTFT: the prompt and the choice of the first token. step: a token more for every sequence, the median, at the "
    "context and no more than a turn beyond it. 95 %: the median's interval, from the order of the turns' medians; "
    "there is none below six turns. of limit: time to read the weights and the cache once, at the rate measured in "
    "this run, over a step's; of operators': the same for the sum over the operators of reading or multiplying, "
    "whichever takes longer. What the cores' caches hold may be read faster. A/A: what our first line, measured "
    "twice, differed by; ratios closer to 1 are no difference. largest alloc.: of one decode step. Our weights lie by "
    "rows or by columns, or some rows meet a packed copy, as measured faster. unquiet: the cores were not ours alone, "
    "so take no speed from this line. "
    "WRONG: nor from this one, whose logits are not those of the reference."
)


def throughput_report(cases: Sequence[Case], settings: Settings) -> Report:
    """A prefill and a decode row per case and contestant; of a peer's settings the fastest is reported.

    Without a prompt (`random_cache`) a decode row alone.

    `failures` names contestants whose logits are not the float64 reference's, or, of peers, not ours. Raises
    ValueError, before anything is measured, for dtypes and peers that are unknown and for a peer that is not installed.
    """
    if settings.against is not None and settings.against not in PEERS:
        raise ValueError(unknown("peer", settings.against, PEERS))
    if settings.against is not None and settings.random_cache:
        raise ValueError("--random-cache fills stores of ours, and --against compares with another's; leave one out")
    for case in cases:
        if case.dtype not in TOLERANCES:
            raise ValueError(f"dtype {case.dtype!r} is not one that decoders run in here: {', '.join(TOLERANCES)}")
    report = Report()
    progress = Progress("throughput", len(cases) * (settings.repeats + 1) + 1)
    progress.at("read bandwidth")
    bandwidth = read_bandwidth(settings.device)
    rates = {dtype: matmul_rates(settings.device, dtype) for dtype in dict.fromkeys(case.dtype for case in cases)}
    for _, group in groupby(cases, key=lambda case: case.weights):
        members = list(group)
        config = decoder_config(members[0].variant, members[0].geometry, members[0].sight)
        decoder = random_decoder(config, dtype=members[0].dtype, device=settings.device, seed=settings.seed)
        twins = {cache: transformers_twin(decoder) for cache in TRANSFORMERS_CACHES} if settings.against else {}
        lay_out_weights(decoder)
        agreement = Agreement(decoder, members[0].dtype, settings.seed)
        for case in members:
            pack_weights(decoder, case.batch)
            before = load_average()
            measured, unquiet = contest(case, settings, decoder, twins, progress)
            assert case.budget is None or all(one.contestant.cache_bytes <= case.budget for one in measured)
            run = Run(bandwidth, rates[case.dtype], (before, load_average()), unquiet)
            report.failures += agreement.judge(case, measured)
            report.rows += throughput_rows(case, settings, decoder, measured, run)
    progress.close()
    report.tables += _tables(report.rows, bandwidth)
    return report


@dataclass(frozen=True)
class Run:
    """What was found of the machine: its ceilings, the load before and after a case, and whether others ran."""

    bandwidth: float
    rates: dict[str, float]
    load: tuple[float | None, float | None]
    unquiet: bool


def throughput_rows(
    case: Case, settings: Settings, decoder: Decoder, measured: Sequence[Measured], run: Run
) -> Iterator[Row]:
    """Two rows for each way of ours, and two for the fastest setting of each peer."""
    noise = _noise(measured[0])
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
        shared = _shared_fields(case, settings, decoder, best.contestant, run) | {
            "peer": best.contestant.peer,
            "setting": best.contestant.setting,
            "slower_settings_ms_p50": others,
            "cache_bytes": best.contestant.cache_bytes,
            "weights_by_columns": weights_by_columns(decoder) if best.contestant.peer == Ours.peer else None,
            "reference_error": best.error if math.isfinite(best.error) else None,
            "reference_tolerance": best.tolerance,
            "wrong": best.failure is not None,
        }
        if best.prefill.wall:
            yield shared | _phase("prefill", best.prefill, [1] * len(best.prefill.wall), case.batch * case.context)
        decode = _phase("decode", best.decode, best.turns, case.batch)
        decode["largest_allocation"] = best.largest_allocation
        decode["over_full"] = None if full in (None, best) else _step_ms(best) / _step_ms(full)
        decode["noise"] = noise
        if best.second is not None:
            decode["noise_samples"] = best.second.decode.milliseconds
            decode["noise_cache"] = "same" if best.second.contestant is best.contestant else "own"
        yield shared | decode | _limits(case, decoder, best.contestant, run, decode["ms_p50"])


def _noise(first: Measured) -> float | None:
    """What the medians of the first contestant's two seats differ by, as a fraction."""
    if first.second is None:
        return None
    medians = sorted((_step_ms(first), _step_ms(first.second)))
    return medians[1] / medians[0] - 1


def _step_ms(one: Measured) -> float:
    return quantile(one.decode.milliseconds, 0.5)


def _limits(case: Case, decoder: Decoder, contestant: Contestant, run: Run, step_ms: float) -> Row:
    """A step against what memory, and what memory and arithmetic, allow; a turn's steps against the least of them."""
    sizes: dict[str, Any] = {
        "batch": case.batch,
        "context": case.context,
        "codec": contestant.codec,
        "steps": TURN_STEPS,
    }
    limit = (weight_bytes_read(decoder, case.batch) + cache_bytes_read(decoder, **sizes)) / run.bandwidth * 1e3
    operators = step_operators(decoder, **sizes)
    operators_limit = operator_limit(operators, run.bandwidth, max(run.rates.values())) * 1e3
    return {
        "limit_ms": limit,
        "fraction_of_limit": limit / step_ms,
        "step_flops": sum(operator.flops for operator in operators),
        "operator_limit_ms": operators_limit,
        "fraction_of_operator_limit": operators_limit / step_ms,
    }


def _shared_fields(case: Case, settings: Settings, decoder: Decoder, contestant: Contestant, run: Run) -> Row:
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
        "batch": case.batch,
        "budget": case.budget,
        "context": case.context,
        "phase": None,
        "tokens_per_s": None,
        "ms_p50": None,
        "ms_p50_interval": None,
        "ms_p95": None,
        "ms_p99": None,
        "samples": None,
        "turns": None,
        "cache_bytes": None,
        "cache_bytes_read": cache_bytes_read(
            decoder, batch=case.batch, context=case.context, codec=contestant.codec, steps=TURN_STEPS
        ),
        "weight_bytes": weight_bytes_read(decoder, case.batch),
        "weights_by_columns": None,
        "parameter_bytes": sum(parameter.nbytes for parameter in decoder.parameters()),
        "read_bandwidth": run.bandwidth,
        "matmul_rate": max(run.rates.values()),
        "matmul_rates": run.rates,
        "limit_ms": None,
        "fraction_of_limit": None,
        "step_flops": None,
        "operator_limit_ms": None,
        "fraction_of_operator_limit": None,
        "noise": None,
        "noise_samples": None,
        "noise_cache": None,
        "cpu_over_wall": None,
        "load_average": list(run.load),
        "unquiet": run.unquiet,
        "reference_error": None,
        "reference_tolerance": None,
        "wrong": None,
        "largest_allocation": None,
        "over_full": None,
    }


def _phase(phase: str, timings: Timings, turns: Sequence[int], tokens: int) -> Row:
    """One phase's figures; `tokens` is what each sample took in or gave out, over the whole batch."""
    samples = timings.milliseconds
    median = quantile(samples, 0.5)
    return {
        "phase": phase,
        "tokens_per_s": tokens / (median / 1e3),
        "ms_p50": median,
        "ms_p50_interval": median_interval(samples, turns),
        "ms_p95": quantile(samples, 0.95),
        "ms_p99": quantile(samples, 0.99) if len(samples) >= FOR_P99 else None,
        "samples": samples,
        "turns": list(turns),
        "cpu_over_wall": timings.cpu_over_wall,
    }


def _tables(rows: Sequence[Row], bandwidth: float) -> Iterator[Table]:
    """One line per contestant, its prefill and its decode side by side; then tokens/s over the contexts."""
    lines = [
        _line(before if before["phase"] == "prefill" else {}, row, rows)
        for before, row in zip([{"phase": None}, *rows], rows, strict=False)
        if row["phase"] == "decode"
    ]
    where = f"{rows[0]['device']}, {rows[0]['threads']} threads, memory read at {bandwidth / 1e9:.1f} GB/s"
    columns = [column for column in COLUMNS if any(_said(column, line) for line in lines)]
    same = [column.field for column in columns if column.field in (*SAME, *HELD)]
    if rows[0]["budget"] is not None:
        where += f", each cache within {size(rows[0]['budget'])}"
    yield folded(f"Speed on {where}", columns, lines, NOTE, same=same)
    if rows[0]["budget"] is not None:
        yield equal_memory(lines)
    elif len({row["context"] for row in rows}) > 1:
        yield _over_contexts(lines, [column for column in columns if column.field in same])


def _said(column: Column, line: Row) -> bool:
    """Whether a column tells something of this line."""
    return line.get(column.field) is not None and not (column.field == "sees" and line["sees"] == str(SEES_ALL))


def _line(prefill: Row, decode: Row, rows: Sequence[Row]) -> Row:
    ours = decode["peer"] == Ours.peer
    rivals = [
        row["tokens_per_s"]
        for row in rows
        if row["phase"] == "decode" and row["peer"] != Ours.peer and all(row[name] == decode[name] for name in SAME)
    ]
    return decode | {
        "contestant": f"ours, {decode['setting']}" if ours else decode["peer"],
        "by": f"ours, {decode['setting']}" if ours else f"{decode['peer']}, {decode['setting']}",
        "ttft": prefill.get("ms_p50"),
        "prompt_tokens_per_s": prefill.get("tokens_per_s"),
        "ratio": decode["tokens_per_s"] / max(rivals) if rivals and ours else None,
        "wrong": decode["wrong"] or None,
    }


def _over_contexts(lines: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Decode tokens/s, a line per contestant and a column per context."""
    import pandas as pd

    shown = [column for column in columns if column.field != "context"]
    shown.append(Column("contestant", "by", right=False))
    index = [column.field for column in shown]
    wide = pd.DataFrame(lines).pivot_table(index=index, columns="context", values="tokens_per_s", sort=False)
    shown += [Column(str(context), f"at {context:,}", figure) for context in sorted(wide.columns)]
    records = [{str(name): value for name, value in line.items()} for line in wide.reset_index().to_dict("records")]
    return folded("Decode tokens/s", shown, records, "", same=index[:-1])
