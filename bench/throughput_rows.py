"""The rows of a throughput record: every sample, what follows from them, and what memory and arithmetic would allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_variants.decoder import Decoder
from attn_variants.linear import weights_by_columns

from .contest import TURN_STEPS, Case, Measured, Settings
from .contestants import Contestant, Ours
from .intervals import median_interval
from .limits import cache_bytes_read, operator_limit, step_operators, weight_bytes_read
from .measure import Timings, quantile
from .results import Row
from .room import Refused

FOR_P99 = 1000
"""Samples below which a 99th percentile is a guess."""

MEASURED = (
    *("tokens_per_s", "ms_p50", "ms_p50_interval", "ms_p95", "ms_p99", "samples", "turns", "cache_bytes"),
    *("cache_bytes_read", "weight_bytes", "weights_by_columns", "parameter_bytes", "read_bandwidth"),
    *("matmul_rate", "matmul_rates", "limit_ms", "fraction_of_limit", "step_flops", "operator_limit_ms"),
    *("fraction_of_operator_limit", "noise", "noise_samples", "noise_cache", "cpu_over_wall"),
    *("load_average", "unquiet", "reference_error", "reference_tolerance", "wrong", "largest_allocation"),
    *("over_full", "slower_settings_ms_p50"),
)
"""The fields of a row that are found out."""


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
            yield shared | _phase("prefill", best.prefill, [1] * len(best.prefill.wall), case.rows.tokens)
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
    sizes: dict[str, Any] = {"codec": contestant.codec, "steps": TURN_STEPS}
    read = weight_bytes_read(decoder, case.batch) + cache_bytes_read(decoder, case.rows, **sizes)
    limit = read / run.bandwidth * 1e3
    operators = step_operators(decoder, case.rows, **sizes)
    operators_limit = operator_limit(operators, run.bandwidth, max(run.rates.values())) * 1e3
    return {
        "limit_ms": limit,
        "fraction_of_limit": limit / step_ms,
        "step_flops": sum(operator.flops for operator in operators),
        "operator_limit_ms": operators_limit,
        "fraction_of_operator_limit": operators_limit / step_ms,
    }


def _shared_fields(case: Case, settings: Settings, decoder: Decoder, contestant: Contestant, run: Run) -> Row:
    """What both phases of every contestant have in common."""
    return blank_row(case, settings, contestant.store, contestant.codec) | {
        "cache_bytes_read": cache_bytes_read(decoder, case.rows, codec=contestant.codec, steps=TURN_STEPS),
        "weight_bytes": weight_bytes_read(decoder, case.batch),
        "parameter_bytes": sum(parameter.nbytes for parameter in decoder.parameters()),
        "read_bandwidth": run.bandwidth,
        "matmul_rate": max(run.rates.values()),
        "matmul_rates": run.rates,
        "load_average": list(run.load),
        "unquiet": run.unquiet,
    }


def unmeasured(case: Case, settings: Settings, refused: Refused) -> list[Row]:
    """A row for each store, and one for the peer, that there was no memory for; `error` says why."""
    rows = []
    for held, error in refused.items():
        who = {"peer": settings.against, "setting": ""} if held is None else {"peer": Ours.peer, "setting": "eager"}
        row = blank_row(case, settings, *(held or ("full", "plain")))
        rows.append(row | who | {"phase": "decode", "unquiet": False, "error": error})
    return rows


def blank_row(case: Case, settings: Settings, store: str, codec: str) -> Row:
    """Every field, in the order of the record; None where it has to be measured."""
    return {
        "subject": case.subject,
        "variant": case.variant,
        "peer": None,
        "setting": None,
        "store": store,
        "codec": codec,
        "sees": str(case.sight),
        "shuffled": settings.shuffled and store.startswith("paged"),
        "dtype": case.dtype,
        "device": settings.device,
        "threads": torch.get_num_threads(),
        "batch_spec": str(case.rows),
        "batch": case.batch,
        "budget": case.budget,
        "context": case.context,
        "phase": None,
        **dict.fromkeys(MEASURED),
        "error": None,
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
