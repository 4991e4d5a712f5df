"""The cases of one run of `throughput`: which are still to be measured, what is kept of each, and how long is left."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .case import decoder_config
from .contest import Case, Settings
from .estimate import Estimate
from .memory_left import memory_left
from .progress import Progress
from .results import Row
from .room import fitting, numbers_of
from .sweep_file import Key, SweepFile


def sweep_facts(cases: Sequence[Case], settings: Settings) -> Row:
    """What is the same in all cases and decides what they measure."""
    first = cases[0]
    stores = list(dict.fromkeys(held for case in cases for held in case.stores))
    if first.budget is not None:
        # Each case has those that hold as many sequences: in what order depends on which cases there are.
        stores.sort()
    return {
        "subject": first.subject,
        "geometry": asdict(first.geometry),
        "sees": str(first.sight),
        "stores": [list(held) for held in stores],
        "budget": first.budget,
        **asdict(settings),
    }


def case_key(case: Case) -> Key:
    """The values of `sweep_file.CASE`."""
    return case.variant, case.dtype, str(case.rows)


@contextmanager
def recorded(
    path: Path, cases: Sequence[Case], settings: Settings, environment: Row, *, resume: bool
) -> Iterator[SweepFile]:
    """The record of these cases, begun or continued; an interruption says how to go on."""
    asked = [case_key(case) for case in cases]
    record = SweepFile(path, environment=environment, sweep=sweep_facts(cases, settings), asked=asked, resume=resume)
    try:
        yield record
    except KeyboardInterrupt:
        print(f"\n{path} holds {len(record.done)} of {len(cases)} cases; --resume goes on", file=sys.stderr)
        raise
    finally:
        record.close()


@dataclass
class Sweep:
    """Rows by case, those of a record that is continued among them; new ones are added to it as they come."""

    cases: Sequence[Case]
    settings: Settings
    record: SweepFile | None = None
    rows: dict[Key, list[Row]] = field(default_factory=dict)
    bandwidth: float = math.nan
    rates: Mapping[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.record is not None:
            self.rows |= self.record.done
        self.todo = [case for case in self.cases if case_key(case) not in self.rows]
        self.progress = Progress("throughput", len(self.todo) * (self.settings.repeats + 1) + 1)
        if len(self.todo) < len(self.cases):
            done = len(self.cases) - len(self.todo)
            print(f"{done} of {len(self.cases)} cases are in the record already", file=sys.stderr)
        ragged = [str(case.rows) for case in self.todo if case.ragged]
        if ragged and self.settings.against:
            print(
                f"note: {self.settings.against} takes no part in {', '.join(dict.fromkeys(ragged))}: its caches hold "
                "rows of one length, the others padded to it",
                file=sys.stderr,
            )

    def begin(self, bandwidth: float, rates: Mapping[str, dict[str, float]]) -> None:
        """Measuring starts, on memory that is read so fast and, by dtype, products that are made so fast."""
        self.bandwidth, self.rates = bandwidth, rates
        estimate = Estimate(self.settings, bandwidth)
        self._estimate = estimate
        self._expected = {}
        left = self.left()
        for case in self.todo:
            config = decoder_config(case.variant, case.geometry, case.sight)
            fits, _, _ = fitting(case, self.settings, config.cache_specs, 0, left)
            self._expected[case_key(case)] = estimate.case(fits, config.cache_specs, numbers_of(config))
        self._since = time.monotonic()

    def add(self, case: Case, rows: Iterable[Row], failures: Sequence[str] = ()) -> None:
        """A case is done: its rows are kept, with the checks that failed in it."""
        kept = [row | {"failures": list(failures)} for row in rows]
        if self.record is not None:
            kept = self.record.add(kept)
        self.rows[case_key(case)] = kept
        now = time.monotonic()
        expected = self._expected.pop(case_key(case))
        if not any(row.get("error") for row in kept):
            self._estimate.done(expected, now - self._since)
        self._since = now
        self.progress.expect(self._estimate.left(list(self._expected.values())))

    def in_order(self) -> list[Row]:
        """The rows of all cases, as the cases were asked for."""
        return [row for case in self.cases for row in self.rows[case_key(case)]]

    def failures(self) -> list[str]:
        """What did not hold in any case, and that nothing could be measured."""
        rows = self.in_order()
        failed = dict.fromkeys(failure for row in rows for failure in row["failures"])
        nothing = ["no case fits in memory"] if all(row.get("error") for row in rows) else []
        return [*failed, *nothing]

    def left(self) -> int | None:
        """Bytes of memory for the case that comes next, what the last one held given back."""
        gc.collect()
        if self.settings.device == "cuda":
            torch.cuda.empty_cache()
        return memory_left(self.settings.device)
