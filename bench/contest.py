"""The measuring: contestants take turns in one process, on the same weights and ids.

A turn decodes on from the context, as generation does, and is taken back after it, so that every contestant's n-th step
of a turn reads the same number of tokens, and none is further than a turn from the context. A sample is one step, the
choice of the next token included. Our first contestant sits there twice: what its two seats differ by is noise.
"""

from __future__ import annotations

import math
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
from .contestants import Compiled, Contestant, Ours
from .measure import Quiet, Timings, largest_allocation
from .memory_left import memory_left
from .parity import relative, sample_ids
from .peers import Transformers
from .progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TURN_STEPS, TURN_SECONDS = 8, 1.0
"""A contestant's turn: this many decode steps, fewer where they would take longer than this."""

CHECK_STEPS = 5
"""Of the short sequences that every contestant computes before it is timed, the tokens that are decoded."""

PREFILL_SECONDS = 3.0
"""A contestant's prefill is repeated only while it has taken less than this in all."""

WARM_UP_TOKENS = 64
"""An untimed prefill before the timed ones."""


@dataclass(frozen=True)
class Case:
    """One decoder at one batch size and context, on several stores; `subject` is what the reader calls it.

    stores: (store, codec) each.     ragged: the rows' lengths where they differ; `context` is then the longest.
    budget: bytes that `batch` was chosen to fill with the cache, see `budget`.
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
    budget: int | None = None

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
    repeats: int = 6
    warmup: int = 3


@dataclass
class Measured:
    """A contestant's samples in one case, and the token it would write next.

    turns: the steps of each turn.     begun: the token that every turn begins with.     since: steps of this turn.
    checked: logits (B, n, vocab) of short sequences from the last of `prompt` tokens on, for each way of decoding.
    second: this contestant's other seat.
    step_error: of a step at the context against float64 over the same cache.
    error, tolerance, failure: what `Agreement` says of its logits.
    """

    contestant: Contestant
    prefill: Timings = field(default_factory=Timings)
    decode: Timings = field(default_factory=Timings)
    logits: Tensor | None = None
    token: Tensor | None = None
    begun: Tensor | None = None
    since: int = 0
    turn: int = TURN_STEPS
    turns: list[int] = field(default_factory=list)
    largest_allocation: int = 0
    prompt: int = 0
    checked: list[Tensor] = field(default_factory=list)
    step_error: float | None = None
    error: float = math.nan
    tolerance: float = math.nan
    failure: str | None = None
    second: Measured | None = None

    def fill(self, ids: Tensor) -> None:
        """Prefill, and choose the first new token."""
        self.logits = self.contestant.prefill(ids)
        self.token = self.begun = self.logits[:, -1].argmax(-1, keepdim=True)
        self.since = 0

    def step(self) -> None:
        """Append the token and choose the next."""
        assert self.token is not None
        self.token = self.contestant.decode(self.token)[:, -1].argmax(-1, keepdim=True)
        self.since += 1

    def back(self) -> None:
        """To the context."""
        self.contestant.rewind(self.since)
        self.token, self.since = self.begun, 0


def contest(
    case: Case, settings: Settings, decoder: Decoder, twins: Mapping[str, PreTrainedModel], progress: Progress
) -> tuple[list[Measured], bool]:
    """Everyone's samples, ours first, and whether the cores were shared with others (`unquiet`).

    twins: transformers' model for each of its caches; none where it does not take part.
    """
    measured = [Measured(contestant) for contestant in _entered(case, settings, decoder, twins)]
    quiet = Quiet()
    ids = sample_ids(decoder, settings.seed).to(settings.device)
    with torch.inference_mode():
        for one in measured:
            _check(one, case, ids)
        if settings.random_cache:
            _fill(case, settings, measured, progress)
        else:
            _prefill(case, settings, measured, quiet, progress)
        for one in measured:
            if isinstance(one.contestant, Ours):
                _compare_step(one, one.contestant)
        measured[0].second = _second_seat(measured[0], settings)
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
    capacity = capacity_for(case.context)
    contestants: list[Contestant] = []
    for store, codec in case.stores:
        sizes: dict[str, Any] = {"batch": case.batch, "capacity": capacity, "store": store, "codec": codec}
        sizes |= {"rewinds": TURN_STEPS, "ragged": case.ragged}
        contestants.append(Ours(decoder, **sizes, shuffled=settings.shuffled))
        if settings.compiled:
            contestants.append(Compiled(decoder, **sizes))
    return contestants + [Transformers(twin, cache=cache, capacity=capacity) for cache, twin in twins.items()]


def _check(one: Measured, case: Case, ids: Tensor) -> None:
    """Compute short sequences (B, T) as it will be timed: a prompt, then single tokens, in each of its ways.

    All are of one length, also in a ragged batch: a prompt that the shortest row has room for.
    """
    contestant = one.contestant
    shortest = min(tokens for _, tokens in case.rows.runs)
    ids = ids.repeat(-(-case.batch // len(ids)), 1)[: case.batch, : shortest + CHECK_STEPS]
    one.prompt = ids.shape[1] - CHECK_STEPS
    for way in contestant.ways:
        contestant.clear()
        logits = [contestant.prefill(ids[:, : one.prompt])]
        contestant.choose(way)
        logits += [contestant.decode(ids[:, at : at + 1]) for at in range(one.prompt, ids.shape[1])]
        one.checked.append(torch.cat(logits, dim=1))
    contestant.clear()


def capacity_for(context: int) -> int:
    """Tokens that a row's cache is made for: the context and a turn's steps."""
    return context + TURN_STEPS


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
        one.token = one.begun = torch.zeros(case.batch, 1, dtype=torch.int64, device=settings.device)


def _compare_step(one: Measured, contestant: Ours) -> None:
    """A step at the context, as it will be timed, against the same in float64 over what the cache holds."""
    assert one.token is not None
    decoded = contestant.decode(one.token)
    contestant.rewind(1)
    one.step_error = relative(decoded.double(), contestant.reference(one.token))


def _second_seat(first: Measured, settings: Settings) -> Measured:
    """The contestant once more, on a cache of its own, or, where memory has no room for one, in turns on the same."""
    contestant = first.contestant
    left = memory_left(settings.device)
    if isinstance(contestant, Ours) and (left is None or contestant.cache_bytes <= left // 2):
        contestant = contestant.again()
    return Measured(contestant, token=first.token, begun=first.begun)


def _warm_up(one: Measured, settings: Settings) -> None:
    """Untimed steps; those that have two ways to attend take as many in each, and keep the faster."""
    ways = one.contestant.ways
    fastest: dict[str, float] = {}
    for way in ways:
        one.contestant.choose(way)
        trial = Timings()
        for _ in range(max(1, settings.warmup * 2 // len(ways))):
            trial.time(settings.device, one.step)
            if one.since == TURN_STEPS:
                one.back()
        fastest[way] = min(trial.wall)
        one.back()
    best = min(fastest, key=lambda way: fastest[way])
    one.contestant.choose(best)
    one.turn = max(1, min(TURN_STEPS, int(TURN_SECONDS / fastest[best])))
    if one.second is not None:
        for _ in range(one.turn):
            one.second.step()
        one.second.back()
        one.second.turn = one.turn


def _decode(case: Case, settings: Settings, measured: Sequence[Measured], quiet: Quiet, progress: Progress) -> None:
    """Steps in turns, A, B, A, B; the second seat comes last, as far from the first as can be."""
    seats = [*measured, *(one.second for one in measured if one.second is not None)]
    for turn in range(settings.repeats):
        progress.at(f"{case}: decode, turn {turn + 1} of {settings.repeats}")
        for one in seats:
            for _ in range(one.turn):
                one.decode.time(settings.device, one.step)
            one.turns.append(one.turn)
            one.back()
        quiet.probe()
