"""The measuring: contestants take turns in one process, on the same weights and ids.

Decoding goes on from the context, as generation does, so every contestant's n-th step reads the same number of tokens.
A sample is one step, the choice of the next token included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_variants.config import Geometry
from attn_variants.decoder import Decoder

from .batch_spec import BatchSpec
from .case import SEES_ALL, Sight
from .contestants import Compiled, Contestant, Ours, Transformers
from .measure import Quiet, Timings, largest_allocation
from .progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TURN_STEPS, TURN_SECONDS = 8, 1.0
"""A contestant's turn: this many decode steps, fewer where they would take longer than this."""

PREFILL_SECONDS = 3.0
"""A contestant's prefill is repeated only while it has taken less than this in all."""

WARM_UP_TOKENS = 64
"""An untimed prefill before the timed ones."""


@dataclass(frozen=True)
class Case:
    """One decoder at one batch size and context, on several stores; `subject` is what the reader calls it.

    stores: (store, codec) each.     ragged: the rows' lengths where they differ; `context` is then the longest.
    """

    subject: str
    variant: str
    geometry: Geometry
    dtype: str
    batch: int
    context: int
    stores: tuple[tuple[str, str], ...] = (("full", "plain"),)
    sight: Sight = SEES_ALL
    ragged: BatchSpec | None = None

    def __str__(self) -> str:
        sees = f" {self.sight}" if self.sight.limited else ""
        lengths = f"batch {self.batch} context {self.context}" if self.ragged is None else f"batch {self.ragged}"
        return f"{self.subject} {self.variant}{sees} {self.dtype} {lengths}"

    @property
    def rows(self) -> BatchSpec:
        """How many sequences hold how many tokens."""
        return self.ragged or BatchSpec(((self.batch, self.context),))

    @property
    def weights(self) -> tuple[str, Geometry, str, Sight]:
        """What decides the decoder: cases that agree share one."""
        return self.variant, self.geometry, self.dtype, self.sight


@dataclass(frozen=True)
class Settings:
    """What is the same for every case of a run."""

    device: str
    seed: int = 0
    against: str | None = None
    compiled: bool = False
    shuffled: bool = False
    random_cache: bool = False
    repeats: int = 5
    warmup: int = 3


@dataclass
class Measured:
    """A contestant's samples in one case, and the token it would write next."""

    contestant: Contestant
    prefill: Timings = field(default_factory=Timings)
    decode: Timings = field(default_factory=Timings)
    logits: Tensor | None = None
    token: Tensor | None = None
    turn: int = TURN_STEPS
    largest_allocation: int = 0

    def fill(self, ids: Tensor) -> None:
        """Prefill, and choose the first new token."""
        self.logits = self.contestant.prefill(ids)
        self.token = self.logits[:, -1].argmax(-1, keepdim=True)

    def step(self) -> None:
        """Append the token and choose the next."""
        assert self.token is not None
        self.token = self.contestant.decode(self.token)[:, -1].argmax(-1, keepdim=True)


def contest(
    case: Case, settings: Settings, decoder: Decoder, twins: Mapping[str, PreTrainedModel], progress: Progress
) -> tuple[list[Measured], bool]:
    """Everyone's samples, ours first, and whether the cores were shared with others (`unquiet`).

    twins: transformers' model for each of its caches; none where it does not take part.
    """
    measured = [Measured(contestant) for contestant in _entered(case, settings, decoder, twins)]
    quiet = Quiet()
    with torch.inference_mode():
        if settings.random_cache:
            _fill(case, settings, measured, progress)
        else:
            _prefill(case, settings, measured, quiet, progress)
        for one in measured:
            _warm_up(one, settings)
        _decode(case, settings, measured, quiet, progress)
        for one in measured:
            one.largest_allocation = largest_allocation(settings.device, one.step)
    return measured, quiet.unquiet


def _entered(
    case: Case, settings: Settings, decoder: Decoder, twins: Mapping[str, PreTrainedModel]
) -> list[Contestant]:
    """The contestants of a case, each on an empty cache that holds every step to come."""
    capacity = case.context + steps_of(settings)
    contestants: list[Contestant] = []
    for store, codec in case.stores:
        sizes: dict[str, Any] = {"batch": case.batch, "capacity": capacity, "store": store, "codec": codec}
        sizes["ragged"] = case.ragged
        contestants.append(Ours(decoder, **sizes, shuffled=settings.shuffled))
        if settings.compiled:
            contestants.append(Compiled(decoder, **sizes))
    return contestants + [Transformers(twin, cache=cache, capacity=capacity) for cache, twin in twins.items()]


def steps_of(settings: Settings) -> int:
    """The most steps of a contestant in one case, all warm-ups included."""
    return 2 * settings.warmup + settings.repeats * TURN_STEPS + 1


def _prefill(case: Case, settings: Settings, measured: Sequence[Measured], quiet: Quiet, progress: Progress) -> None:
    """The whole context, more than once where it is quick; the last time leaves every cache filled."""
    progress.at(f"{case}: prefill")
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(case.geometry.vocab_size, (case.batch, case.context), generator=generator).to(settings.device)
    for one in measured:
        one.fill(ids[:, :WARM_UP_TOKENS])
    for _ in range(settings.repeats):
        for one in measured:
            if sum(one.prefill.wall) < PREFILL_SECONDS:
                one.contestant.clear()
                one.prefill.time(settings.device, partial(one.fill, ids))
        quiet.probe()


def _fill(case: Case, settings: Settings, measured: Sequence[Measured], progress: Progress) -> None:
    """Random keys and values in the place of a prompt's: what a step reads takes as long whatever it is."""
    progress.at(f"{case}: random keys and values")
    for one in measured:
        assert isinstance(one.contestant, Ours)
        one.contestant.fill(case.context, settings.seed)
        one.token = torch.zeros(case.batch, 1, dtype=torch.int64, device=settings.device)


def _warm_up(one: Measured, settings: Settings) -> None:
    """Untimed steps; those that have two ways to attend take as many in each, and keep the faster."""
    ways = one.contestant.ways
    fastest: dict[str, float] = {}
    for way in ways:
        one.contestant.choose(way)
        trial = Timings()
        for _ in range(settings.warmup * 2 // len(ways)):
            trial.time(settings.device, one.step)
        fastest[way] = min(trial.wall)
    best = min(fastest, key=lambda way: fastest[way])
    one.contestant.choose(best)
    one.turn = max(1, min(TURN_STEPS, int(TURN_SECONDS / fastest[best])))


def _decode(case: Case, settings: Settings, measured: Sequence[Measured], quiet: Quiet, progress: Progress) -> None:
    """Steps in turns, A, B, A, B."""
    for turn in range(settings.repeats):
        progress.at(f"{case}: decode, turn {turn + 1} of {settings.repeats}")
        for one in measured:
            for _ in range(one.turn):
                one.decode.time(settings.device, one.step)
        quiet.probe()
