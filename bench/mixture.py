"""A draft for benchmarks whose proposals are accepted as often as is asked, and whose cost is a real draft's.

Random weights make drafts that are hardly ever right, and trained ones of every size are not at hand; yet the speed of
speculation depends on how often proposals are accepted and on what they cost. The first is set here, by drawing from
q = w p + (1 - w) r: p is the model's own distribution, r the draft decoder's, and w is chosen at each place so that
sum_x min(p(x), q(x)) = 1 - (1 - w) TV(p, r) is the acceptance that was asked for.

No honest draft knows p. So that a timed run does not have to compute it, there are two runs over the same prompts:

1. the rehearsal, not timed, with a `MixedDraft`: beside the draft decoder it runs the model itself on every guess, one
   token at a time, mixes, draws, and writes down what it proposed and from what;
2. the timed run, with a `ScriptedDraft`: it runs the draft decoder over the same tokens, chooses from its logits as any
   draft does, and then proposes what was written down instead.

All the passes of draft and model that speculation takes are in the second, and no other. It takes the path of the first
because every random number is a function of its place and not of what came before; a run that leaves it is refused.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_variants.config import Geometry
from attn_variants.decoder import Decoder
from attn_variants.generation.drafts import ModelDraft, ModelDrafting, Pick, Proposal, require_vocabulary
from attn_variants.generation.draws import draw
from attn_variants.generation.following import Follower
from attn_variants.generation.verification import one_hot

Guess = tuple[int, int, int, tuple[int, ...]]
"""A row, the length and last token of its sequence, and what was proposed behind it."""


@dataclass(frozen=True)
class Line:
    """One place of some rows: where they stood, the tokens proposed, and the (n, V) mixtures they were drawn from."""

    guesses: tuple[Guess, ...]
    tokens: tuple[int, ...]
    probabilities: Tensor


def mixed(p: Tensor, r: Tensor, acceptance: float) -> Tensor:
    """(V,) float64: w p + (1 - w) r of which a proposal is accepted with this probability.

    r itself where that is accepted as often or more.
    """
    p, r = p.double(), r.double()
    distance = float((p - r).abs().sum() / 2)
    weight = 1 - (1 - acceptance) / distance if distance > 1 - acceptance else 0.0
    return torch.lerp(r, p, weight)


def draft_geometry(geometry: Geometry) -> Geometry:
    """Two layers of a quarter of the widths, whose weights are about a tenth of those of the models of 100 million."""
    return replace(
        geometry,
        layers=2,
        hidden_size=geometry.hidden_size // 4,
        heads=max(1, geometry.heads // 4),
        kv_heads=max(1, geometry.kv_heads // 4),
        kv_lora_rank=max(1, geometry.kv_lora_rank // 4),
        intermediate_size=geometry.intermediate_size // 4,
    )


@dataclass
class MixedDraft:
    """The draft of the rehearsal; `script` is what it wrote down since it was opened last. A `Draft`.

    Raises ValueError for an acceptance outside 0 to 1.
    """

    decoder: Decoder
    model: Decoder
    tokens: int = 4
    acceptance: float = 0.8
    seed: int = 0
    script: list[Line] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance ({self.acceptance}) must lie between 0 and 1")

    def open(self, *, batch: int, capacity: int, vocab_size: int) -> MixedDrafting:
        """With a cache for the draft and one for the model. Raises ValueError for another vocabulary."""
        require_vocabulary(self.decoder, vocab_size)
        self.script = []
        return MixedDrafting(self, batch=batch, capacity=capacity)


class MixedDrafting(ModelDrafting):
    """Follows the sequences with both decoders. A `Drafting`."""

    def __init__(self, draft: MixedDraft, *, batch: int, capacity: int) -> None:
        burst = draft.tokens + 1
        super().__init__(draft.decoder, batch=batch, capacity=capacity, burst=burst)
        self._model = Follower(draft.model, batch=batch, capacity=capacity, burst=burst)
        self._draft = draft
        self._draws = random.Random(draft.seed)

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """Both follow the prompt."""
        super().begin(row, prompt)
        self._model.begin(row, prompt)

    def grow(self, row: int, ids: Sequence[int]) -> None:
        """Both follow what came."""
        super().grow(row, ids)
        self._model.grow(row, ids)

    def end(self, row: int) -> None:
        """The row is free in both."""
        super().end(row)
        self._model.end(row)

    def propose(self, limits: Mapping[int, int], pick: Pick) -> dict[int, Proposal]:
        """Draws from the mixture, written down."""

        def from_mixture(
            logits: Tensor, rows: Sequence[int], proposed: Sequence[Sequence[int]]
        ) -> tuple[Sequence[int], Tensor]:
            model = self._model.after(dict(zip(rows, proposed, strict=True)))
            both = (_distributions(each, rows, proposed, pick) for each in (model, logits))
            mixtures = torch.stack([mixed(p, r, self._draft.acceptance) for p, r in zip(*both, strict=True)])
            tokens = tuple(draw(mixture, self._draws.random()) for mixture in mixtures)
            self._draft.script.append(Line(_guesses(self, rows, proposed), tokens, mixtures))
            return tokens, mixtures

        return super().propose(limits, from_mixture)


@dataclass(frozen=True)
class ScriptedDraft(ModelDraft):
    """The draft of the timed run: what `ModelDraft` costs, and what the script says. A `Draft`.

    Proposing raises RuntimeError where sequences are not those of the rehearsal.
    """

    script: Sequence[Line] = ()

    def open(self, *, batch: int, capacity: int, vocab_size: int) -> ScriptedDrafting:
        """From the script's beginning. Raises ValueError for another vocabulary."""
        require_vocabulary(self.decoder, vocab_size)
        return ScriptedDrafting(self, batch=batch, capacity=capacity)


class ScriptedDrafting(ModelDrafting):
    """Follows the sequences with the draft decoder. A `Drafting`."""

    def __init__(self, draft: ScriptedDraft, *, batch: int, capacity: int) -> None:
        super().__init__(
            draft.decoder,
            batch=batch,
            capacity=capacity,
            burst=draft.tokens + 1,
            store=draft.store,
            codec=draft.codec,
        )
        self._lines = iter(draft.script)

    def propose(self, limits: Mapping[int, int], pick: Pick) -> dict[int, Proposal]:
        """The script's next lines, one for each pass of the decoder."""

        def from_script(
            logits: Tensor, rows: Sequence[int], proposed: Sequence[Sequence[int]]
        ) -> tuple[Sequence[int], Tensor]:
            pick(logits, rows, proposed)
            line, guesses = next(self._lines, None), _guesses(self, rows, proposed)
            if line is None or line.guesses != guesses:
                raise RuntimeError(
                    f"the run stands at {guesses} (row, length, last token, guess), where its rehearsal was at "
                    f"{line and line.guesses}; rehearse with the same model, prompts, sampling and limits"
                )
            return line.tokens, line.probabilities

        return super().propose(limits, from_script)


def _guesses(following: Follower, rows: Sequence[int], proposed: Sequence[Sequence[int]]) -> tuple[Guess, ...]:
    pairs = zip(rows, proposed, strict=True)
    return tuple((row, *following.stands(row), tuple(guess)) for row, guess in pairs)


def _distributions(
    logits: Tensor, rows: Sequence[int], proposed: Sequence[Sequence[int]], pick: Pick
) -> Tensor | list[Tensor]:
    """What `pick` draws from, row by row."""
    tokens, probabilities = pick(logits, rows, proposed)
    if probabilities is not None:
        return probabilities
    return [one_hot(_picked(token), row) for token, row in zip(tokens, logits, strict=True)]


def _picked(token: int | None) -> int:
    if token is None:
        raise ValueError(
            "a row's next token cannot be chosen from its logits; benchmark with weights that give numbers"
        )
    return token
