"""Parity before speed: what contestants compute, against the float64 reference and against one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from attn_variants.decoder import Decoder

from .contest import Case, Measured
from .contestants import Ours
from .parity import TOLERANCES, relative, sample_ids, tolerance_of
from .reference import reference_logits


class Agreement:
    """What is right for one decoder.

    Ours have to be within the tolerance of their dtype and codec: in short sequences, from their prompt on, and in a
    step at the context, whose reference reads the same cache. A peer rounds where it likes, so that it is held against
    our first contestant, and both may be off by their tolerance: in the short sequences and after the whole prompt.
    """

    def __init__(self, decoder: Decoder, dtype: str, seed: int) -> None:
        self._decoder = decoder
        self._dtype = dtype
        self._ids = sample_ids(decoder, seed)
        self._truth = reference_logits(decoder, self._ids)
        self._tolerances: dict[tuple[str, str], float] = {}

    def judge(self, case: Case, measured: Sequence[Measured]) -> Iterator[str]:
        """Set error, tolerance and failure of each; yields a line for each that computes something else."""
        for one in measured:
            one.error, one.tolerance = self._error(one), self._tolerance(one)
        first = measured[0]
        for one in measured:
            by = one.contestant
            who = f"{case}: {by.peer} ({by.setting}, {by.store} {by.codec})"
            if isinstance(by, Ours) and not one.error <= one.tolerance:
                one.failure = f"{who} is off the float64 reference by {one.error:.1e}, beyond {one.tolerance:.1e}"
            elif one is not first and not (error := _apart(one, first)) <= one.tolerance + first.tolerance:
                one.failure = f"{who} computes other logits, error {error:.1e}"
            if one.failure is not None:
                yield one.failure

    def _tolerance(self, one: Measured) -> float:
        held = one.contestant.store, one.contestant.codec
        if not isinstance(one.contestant, Ours):
            return TOLERANCES[self._dtype]
        if held not in self._tolerances:
            self._tolerances[held] = tolerance_of(self._decoder, self._dtype, *held, self._ids, self._truth)
        return self._tolerances[held]

    def _error(self, one: Measured) -> float:
        """The largest against float64, of the short sequences and of the step at the context where that was made."""
        errors = [relative(logits, self._wanted(logits, one.prompt)) for logits in map(_exact, one.checked)]
        return _largest([*errors, *([] if one.step_error is None else [one.step_error])])

    def _wanted(self, logits: Tensor, prompt: int) -> Tensor:
        """The truth for logits (B, n, vocab) from the prompt's last token on; rows repeat the sample's."""
        rows, tokens = logits.shape[:2]
        truth = self._truth[:, prompt - 1 : prompt - 1 + tokens]
        return truth.repeat(-(-rows // len(truth)), 1, 1)[:rows]


def _apart(one: Measured, first: Measured) -> float:
    errors = [relative(_exact(logits), _exact(first.checked[0])) for logits in one.checked]
    if one.logits is not None and first.logits is not None:
        errors.append(relative(_exact(one.logits), _exact(first.logits)))
    return _largest(errors)


def _exact(logits: Tensor) -> Tensor:
    return logits.cpu().double()


def _largest(errors: Sequence[float]) -> float:
    """NaN, if there is one, which `max` may overlook."""
    return next((error for error in errors if error != error), max(errors))
