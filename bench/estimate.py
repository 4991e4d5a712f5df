"""How long a sweep still takes: what each case reads and computes, at the pace of the cases that are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_variants.cache.accounting import used_bytes
from attn_variants.contract import CacheSpec
from attn_variants.dtypes import dtype_bytes

from .contest import PREFILL_SECONDS, TURN_SECONDS, TURN_STEPS, Case, Settings
from .measure import PROBE_SECONDS

FLOPS_PER_BYTE = 10
"""Operations in the time of a byte read; off by some factor everywhere, which the pace of done cases takes up."""


@dataclass
class Estimate:
    """Seconds for cases to come.

    bandwidth: bytes read per second.     expected, taken: of the cases done, by the model alone and by the clock.
    """

    settings: Settings
    bandwidth: float
    expected: float = 0.0
    taken: float = 0.0

    def case(self, case: Case, specs: Sequence[CacheSpec], numbers: int) -> float:
        """By the model alone: turns of steps that read weights and cache, and prefills that compute with the weights.

        Both stop being repeated after some seconds, so that a long case does not cost as much as it would. The first
        contestant has a second seat.
        Nothing for a case without stores.     numbers: of the weights.
        """
        if not case.stores:
            return 0.0
        contestants = (2 if self.settings.compiled else 1) + (2 if self.settings.against else 0) / len(case.stores)
        total = 2 * PROBE_SECONDS * self.settings.repeats
        for index, (_, codec) in enumerate(case.stores):
            cached = sum(
                used_bytes(specs, batch=count, context=tokens, codec=codec, dtype=case.dtype)
                for count, tokens in case.rows.runs
            )
            step = (numbers * dtype_bytes(case.dtype) + cached) / self.bandwidth
            turn = max(step, min(TURN_STEPS * step, TURN_SECONDS))
            prefill = 2 * numbers * case.rows.tokens / (FLOPS_PER_BYTE * self.bandwidth)
            prefills = (
                0.0
                if self.settings.random_cache
                else max(prefill, min(self.settings.repeats * prefill, PREFILL_SECONDS))
            )
            turns = self.settings.repeats * turn
            total += contestants * (prefills + 2 * self.settings.warmup * step + turns)
            total += 0 if index else turn + turns
        return total

    def done(self, expected: float, taken: float) -> None:
        """A case that was expected to take so many seconds has taken so many."""
        self.expected += expected
        self.taken += taken

    def left(self, expected: Sequence[float]) -> float | None:
        """Seconds for cases of which the model expects these; None before there is a pace."""
        if not self.expected:
            return None
        return sum(expected) * self.taken / self.expected
