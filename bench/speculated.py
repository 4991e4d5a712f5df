"""`generate --speculative`: the draft, its steps against the clock, and what it was worth beside plain decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attn_variants.architectures import decoder_config
from attn_variants.checkpoints import Tokenizer, load_tokenizer
from attn_variants.checkpoints.fetch import model_folder
from attn_variants.config import DecoderConfig
from attn_variants.decoder import Decoder
from attn_variants.generation import Lookup, ModelDraft
from attn_variants.generation.drafts import Draft, Drafting, Pick, Proposal
from attn_variants.generation.speedup import Rounds, expected_speedup
from attn_variants.packed import pack_weights

from .results import Row
from .timed import Timed

LOOKUP = "lookup"


def draft_folder(name: str, config: DecoderConfig, tokenizer: Tokenizer) -> Path | None:
    """Where the draft lies, None for lookup; reads no weights.

    Raises ValueError where there is none, where it has another vocabulary than the model of this config and tokenizer.
    """
    if name == LOOKUP:
        return None
    try:
        folder = model_folder(name)
        size = decoder_config(folder).vocab_size
    except ValueError as error:
        raise ValueError(f"--speculative {name}: {error}") from None
    remedy = f"give a draft with the model's tokenizer, or {LOOKUP}, which needs none"
    if size != config.vocab_size:
        raise ValueError(
            f"--speculative {name}: the draft has a vocabulary of {size} tokens and the model one of "
            f"{config.vocab_size}; {remedy}"
        )
    if (folder / "tokenizer.json").is_file():
        known, own = (one.backend.get_vocab() for one in (tokenizer, load_tokenizer(folder)))
        other = sorted(known.items() ^ own.items(), key=lambda item: (item[1], item[0]))
        if other:
            raise ValueError(
                f"--speculative {name}: the draft's vocabulary is another one: {other[0][0]!r} is token "
                f"{_token(known, other[0][0])} of the model and {_token(own, other[0][0])} of the draft; {remedy}"
            )
    return folder


def draft_of(folder: Path | None, tokens: int | None, *, dtype: str | None, device: str) -> Draft:
    """The draft, which proposes `tokens` at once; None is its own default."""
    if folder is None:
        return Lookup() if tokens is None else Lookup(tokens)
    decoder = Decoder.from_pretrained(folder, dtype=dtype, device=device).eval()
    pack_weights(decoder)
    return ModelDraft(decoder) if tokens is None else ModelDraft(decoder, tokens)


@dataclass
class Clocked:
    """A draft whose steps are timed. A `Draft`.

    steps: seconds per token proposed, one number per round that proposed any.
    """

    draft: Draft
    steps: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """As the draft's."""
        return self.draft.tokens

    def open(self, *, batch: int, capacity: int, vocab_size: int) -> ClockedDrafting:
        """The draft at work, and a clock."""
        return ClockedDrafting(self, self.draft.open(batch=batch, capacity=capacity, vocab_size=vocab_size))


class ClockedDrafting:
    """Times another's proposals. A `Drafting`."""

    def __init__(self, clocked: Clocked, drafting: Drafting) -> None:
        self._clocked = clocked
        self._drafting = drafting

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """The same."""
        self._drafting.begin(row, prompt)

    def grow(self, row: int, ids: Sequence[int]) -> None:
        """The same."""
        self._drafting.grow(row, ids)

    def end(self, row: int) -> None:
        """The same."""
        self._drafting.end(row)

    def propose(self, limits: Mapping[int, int], pick: Pick) -> dict[int, Proposal]:
        """The same, with a note of how long a token of it took."""
        start = time.perf_counter()
        proposals = self._drafting.propose(limits, pick)
        if longest := max(len(proposal.ids) for proposal in proposals.values()):
            self._clocked.steps.append((time.perf_counter() - start) / longest)
        return proposals


def counts(rounds: Rounds | None) -> Row:
    """What became of a sequence's proposals."""
    rounds = Rounds() if rounds is None else rounds
    return {
        "rounds": rounds.rounds,
        "proposed": rounds.proposed,
        "tested": rounds.tested,
        "accepted": rounds.accepted,
        "acceptance_rate": rounds.acceptance_rate,
        "tokens_per_call": rounds.tokens_per_call,
    }


def speeds(row: Row, number: int, plain: Timed, draft: Clocked) -> Row:
    """The row's speed against the same sequence decoded plainly, and the speed-up that its acceptance lets one expect.

    draft_cost: the median time of a token of the draft over that of a step of the model.
    """
    slow, steps = plain.tokens_per_s(number), plain.step_ms(number)
    cost = statistics.median(draft.steps) * 1e3 / statistics.median(steps) if draft.steps and steps else None
    rate, fast = row["acceptance_rate"], row["tokens_per_s"]
    return {
        "plain_tokens_per_s": slow,
        "speedup": fast / slow if fast and slow else None,
        "draft_cost": cost,
        "expected_speedup": None if rate is None or cost is None else expected_speedup(rate, draft.tokens, cost),
    }


def _token(vocabulary: Mapping[str, int], text: str) -> str:
    return str(vocabulary.get(text, "nothing"))
