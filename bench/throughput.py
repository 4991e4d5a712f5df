"""How fast? Prefill and decode apart, at a context that is really cached, beside the rate at which memory is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from attn_variants.contract import LARGEST_SIZE
from attn_variants.decoder import Decoder
from attn_variants.linear import lay_out_weights
from attn_variants.names import unknown
from attn_variants.packed import pack_weights

from .agreement import Agreement
from .case import decoder_config, random_decoder
from .ceilings import matmul_rates, read_bandwidth
from .contest import TURN_STEPS, Case, Settings, capacity_for, contest
from .measure import load_average
from .memory_left import out_of_memory
from .parity import TOLERANCES
from .peers import TRANSFORMERS_CACHES, transformers_twin
from .results import Report, Row
from .room import Refused, all_refused, fitting, weights_refused
from .sweep import Sweep
from .sweep_file import SweepFile
from .throughput_rows import Run, throughput_rows, unmeasured
from .throughput_tables import throughput_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEERS = ("transformers",)


def throughput_report(cases: Sequence[Case], settings: Settings, record: SweepFile | None = None) -> Report:
    """A prefill and a decode row per case and contestant; of a peer's settings the fastest is reported.

    Without a prompt (`random_cache`) a decode row alone; one with an `error` where memory does not hold a store.
    record: is given each case's rows when they are measured; cases that it holds are taken from there.

    `failures` names contestants whose logits are not the float64 reference's, or, of peers, not ours. Raises
    ValueError, before anything is measured, as `require_measurable` does.
    """
    require_measurable(cases, settings)
    sweep = Sweep(cases, settings, record)
    if sweep.todo:
        sweep.progress.at("read bandwidth")
        dtypes = dict.fromkeys(case.dtype for case in sweep.todo)
        sweep.begin(read_bandwidth(settings.device), {dtype: matmul_rates(settings.device, dtype) for dtype in dtypes})
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
        agreement = Agreement(decoder, members[0].dtype, settings.seed)
        for case in members:
            sweep.add(case, *_measured(case, settings, decoder, twins, agreement, sweep))
    sweep.progress.close()
    report = Report(sweep.in_order(), failures=sweep.failures())
    report.tables += throughput_tables(report.rows)
    return report


def require_measurable(cases: Sequence[Case], settings: Settings) -> None:
    """Refuse dtypes and peers that are unknown, a peer without a prompt, and more tokens than are countable."""
    if settings.against is not None and settings.against not in PEERS:
        raise ValueError(unknown("peer", settings.against, PEERS))
    if settings.against is not None and settings.random_cache:
        raise ValueError("--random-cache fills stores of ours, and --against compares with another's; leave one out")
    for case in cases:
        if case.dtype not in TOLERANCES:
            raise ValueError(f"dtype {case.dtype!r} is not one that decoders run in here: {', '.join(TOLERANCES)}")
        if capacity_for(case.context) > LARGEST_SIZE:
            raise ValueError(
                f"context {case.context} and {TURN_STEPS} steps more are beyond the {LARGEST_SIZE} tokens that "
                "a row can have; lower it"
            )


def _measured(
    case: Case,
    settings: Settings,
    decoder: Decoder,
    twins: Mapping[str, PreTrainedModel],
    agreement: Agreement,
    sweep: Sweep,
) -> tuple[list[Row], list[str]]:
    """The rows of what fits in memory and of what does not, and the checks that failed."""
    twins = {} if case.ragged else twins
    rows: list[Row] = []
    failures: list[str] = []
    refused: Refused = {}
    try:
        pack_weights(decoder, case.batch)
        case, peer_fits, refused = fitting(case, settings, decoder.cache_specs, len(twins), sweep.left())
        twins = twins if peer_fits else {}
        if case.stores or twins:
            before = load_average()
            measured, unquiet = contest(case, settings, decoder, twins, sweep.progress)
            assert case.budget is None or all(one.contestant.cache_bytes <= case.budget for one in measured)
            run = Run(sweep.bandwidth, sweep.rates[case.dtype], (before, load_average()), unquiet)
            failures = list(agreement.judge(case, measured))
            rows = list(throughput_rows(case, settings, decoder, measured, run))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        refused |= all_refused(case, "out of memory: " + " ".join(str(error).split()), peer=bool(twins))
        rows, failures = [], []
    return rows + unmeasured(case, settings, refused), failures
