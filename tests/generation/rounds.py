"""Speculation written out, round by round: proposals, one ragged pass, verification, both caches rewound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from attn_variants import VARIANTS, Decoder, DecoderConfig
from attn_variants.cache import KVCache
from attn_variants.generation.drafts import Draft, Proposal
from attn_variants.generation.draws import draw
from attn_variants.generation.speedup import Rounds
from attn_variants.generation.verification import verified
from tests.tiny import GEOMETRY, sharpen

Probabilities = Callable[[torch.Tensor], torch.Tensor]
Uniform = Callable[[int, int, str], float]
"""Of a row, a position in its sequence and a purpose."""


def argmax(logits):
    """Greedy decoding's distribution: one at the most probable token."""
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()


def softmax(logits):
    return logits.double().softmax(-1)


@dataclass
class Speculation:
    """What came out: new tokens per row, counts per row, and what was proposed in each round, by row."""

    ids: list[list[int]]
    rounds: list[Rounds]
    proposals: list[dict[int, Proposal]] = field(default_factory=list)


@torch.no_grad()
def speculate(
    model: Decoder,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    *,
    new: Sequence[int],
    probabilities: Probabilities = argmax,
    uniform: Uniform = lambda row, position, purpose: 0.5,
    mistaken: Callable[[int, int, int], int] | None = None,
    store: str = "full",
    codec: str = "plain",
) -> Speculation:
    """`new[row]` tokens for each prompt; rows end each at their own time.

    mistaken: what a draft model proposes instead of a token, by row and position; then it is no draw.
    """
    batch, capacity = len(prompts), max(len(prompt) + count - 1 for prompt, count in zip(prompts, new, strict=True))
    held = KVCache(
        model.cache_specs,
        batch=batch,
        capacity=capacity,
        dtype=model.dtype,
        store=store,
        codec=codec,
        burst=draft.tokens + 1,
    )
    drafting = draft.open(batch=batch, capacity=capacity, vocab_size=model.config.vocab_size)
    sequences = [list(prompt) for prompt in prompts]
    done = Speculation([[] for _ in prompts], [Rounds() for _ in prompts])

    def pick(logits, rows, proposed):
        q = probabilities(logits)
        places = [len(sequences[row]) + len(ids) for row, ids in zip(rows, proposed, strict=True)]
        tokens = [draw(*given) for given in zip(q, map(uniform, rows, places, ["draft"] * len(rows)), strict=True)]
        if mistaken:
            return list(map(mistaken, rows, places, tokens)), None
        return tokens, q

    def push(row, ids):
        sequences[row] += ids
        done.ids[row] += ids
        drafting.grow(row, ids)
        if len(done.ids[row]) == new[row]:
            drafting.end(row)

    first = probabilities(model(padded(prompts), held, counts=[len(prompt) for prompt in prompts], last=True)[:, -1])
    for row, prompt in enumerate(prompts):
        drafting.begin(row, prompt)
        push(row, [draw(first[row], uniform(row, len(prompt), "draw"))])
    while going := [row for row in range(batch) if len(done.ids[row]) < new[row]]:
        proposals = drafting.propose({row: new[row] - len(done.ids[row]) - 1 for row in going}, pick)
        done.proposals.append(proposals)
        fed = [[sequences[row][-1], *proposals[row].ids] if row in going else [] for row in range(batch)]
        p = probabilities(model(padded(fed), held, counts=list(map(len, fed))))
        drops = [0] * batch
        for row in going:
            proposed, place = proposals[row].ids, len(sequences[row])
            result = verified(
                p[row, : len(fed[row])],
                proposed,
                proposals[row].probabilities,
                lambda offset, purpose, row=row, place=place: uniform(row, place + offset, purpose),
            )
            drops[row] = len(proposed) - result.accepted
            push(row, [*proposed[: result.accepted], result.token])
            done.rounds[row].add(proposed=len(proposed), accepted=result.accepted, emitted=result.accepted + 1)
        held.rewind(drops)
        assert held.lengths.tolist() == [len(sequence) - 1 for sequence in sequences]
    return done


@torch.no_grad()
def plain(model: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@cache
def model_of(name: str, *, layers: int = 2, vocab_size: int = 50, seed: int = 0) -> Decoder:
    """A decoder of a variant with sharp weights; `gqa-windowed` sees 7 tokens and 2 sinks."""
    variant, _, windowed = name.partition("-")
    sizes = replace(GEOMETRY, layers=layers, vocab_size=vocab_size)
    config = DecoderConfig.from_geometry(sizes, VARIANTS[variant].config)
    if windowed:
        config = replace(config, attention=replace(config.attention, sliding_window=7, sink_tokens=2))
    return sharpen(Decoder(config).double(), seed).eval()


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
