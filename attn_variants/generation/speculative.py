"""Speculative decoding (arXiv 2211.17192, 2302.01318): a draft proposes tokens, one pass of the model verifies them.

What is emitted is distributed as without a draft, and greedy is the same, as far as a pass over several tokens computes
what steps over one do. Two things make it differ by their rounding: in bfloat16 a block's products add up in another
order, so that logits which nearly tie may turn; and with a codec that codes keys together (KIVI) tokens are coded once
they are out of a rewind's reach, which hangs on how far a row has been, and so on what was proposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from .drafts import Draft, Pick, Proposal
from .feeding import Cached
from .picking import distributions, drawn, log_probabilities, picked
from .row import Row, Token
from .sampling import broken, broken_message
from .speedup import Rounds
from .verification import Verified, matched, verified


class Speculation:
    """Rounds of a draft and a model over the same rows."""

    def __init__(self, draft: Draft, feed: Cached, vocab_size: int, alternatives: int) -> None:
        self._feed = feed
        self._most = draft.tokens
        self._alternatives = alternatives
        self._drafting = draft.open(batch=feed.cache.batch, capacity=feed.cache.capacity + 1, vocab_size=vocab_size)

    def round(self, rows: Sequence[Row]) -> Iterator[Token]:
        """At least one token for each of these rows, or its failure."""
        for row in rows:
            if row.rounds is None:
                row.rounds = Rounds()
                self._drafting.begin(row.number, row.ids)
        proposals = self._drafting.propose(
            {row.number: min(self._most, row.left - 1) for row in rows}, self._pick(rows)
        )
        logits = self._feed.block({row.number: [row.newest, *proposals[row.number].ids] for row in rows})
        before = {row.number: len(row.watch.ids) for row in rows}
        try:
            for row, block in zip(rows, logits, strict=True):
                proposal = proposals[row.number]
                yield from self._taken(row, block[: len(proposal.ids) + 1], proposal)
                if row.reason is None:
                    self._drafting.grow(row.number, row.watch.ids[before[row.number] :])
                else:
                    self._drafting.end(row.number)
        finally:
            # Also for who takes no more tokens in the middle of a round: a cache holds no others than were given.
            new = {row.number: len(row.watch.ids) - before[row.number] for row in rows}
            self._feed.drop({row: len(proposals[row].ids) - max(count - 1, 0) for row, count in new.items()})

    def _taken(self, row: Row, logits: Tensor, proposal: Proposal) -> Iterator[Token]:
        """The row goes on with what the model takes of its proposal, and one token more; logits (k + 1, vocab)."""
        assert row.rounds is not None
        sound = _front(~broken(logits))
        if not sound:
            yield row.fail(broken_message(row.number, row.position))
            return
        logits, ids = logits[:sound], proposal.ids[: sound - 1]
        verdict = self._verdict(row, logits, ids, proposal.probabilities)
        tokens = [*ids[: verdict.accepted], verdict.token]
        known = log_probabilities(logits[: len(tokens)], tokens, self._alternatives)
        emitted = 0
        for token, (logprob, alternatives) in zip(tokens, known, strict=True):
            yield row.push(token, logprob, alternatives)
            emitted += 1
            if row.reason is not None:
                break
        row.rounds.add(proposed=len(ids), accepted=verdict.accepted, emitted=emitted)

    def _verdict(self, row: Row, logits: Tensor, ids: Sequence[int], draft: Tensor | None) -> Verified:
        places = [row] * len(logits)
        behind = [ids[:place] for place in range(len(logits))]
        if row.sampling.greedy:
            return matched(picked(logits, places, behind), ids)
        target = distributions(logits, places, behind)
        return verified(target, ids, None if draft is None else draft[: len(ids)], row.uniform)

    def _pick(self, rows: Sequence[Row]) -> Pick:
        """A draft's tokens are chosen as the model's are, by random numbers of their own."""
        by_number = {row.number: row for row in rows}

        def pick(
            logits: Tensor, numbers: Sequence[int], proposed: Sequence[Sequence[int]]
        ) -> tuple[Sequence[int | None], Tensor | None]:
            of = [by_number[number] for number in numbers]
            if all(row.sampling.greedy for row in of):
                tokens, q = picked(logits, of, proposed), None
            else:
                q = distributions(logits, of, proposed)
                tokens = drawn(q, of, proposed, "draft")
            return [None if lost else token for token, lost in zip(tokens, broken(logits).tolist(), strict=True)], q

        return pick


def _front(sound: Tensor) -> int:
    """How many places from the first on are sound."""
    return int(sound.long().cumprod(0).sum())
