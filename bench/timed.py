"""Generation against the clock: the tokens of a prompt's samples as they come, and when each came."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from attn_variants.generation import Result, Token

Say = Callable[[str], object]
"""Is given the text piece by piece, whole characters only."""


def silent(piece: str) -> None:
    """Says nothing."""


@dataclass
class Timed:
    """What came of one call of `stream`, row by row.

    tokens: of each row.     seconds: since the start, when each of them came.     results: of the rows that ended.
    """

    start: float = field(default_factory=time.perf_counter)
    tokens: dict[int, list[Token]] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    ended: dict[int, Result] = field(default_factory=dict)

    def take(self, tokens: Iterator[Token], say: Say = silent) -> Timed:
        """All of them. What came before an interruption stays here."""
        for token in tokens:
            if token.id is not None:
                self.seconds.setdefault(token.row, []).append(time.perf_counter() - self.start)
            self.tokens.setdefault(token.row, []).append(token)
            if token.result is not None:
                self.ended[token.row] = token.result
            say(token.text)
        return self

    @property
    def results(self) -> list[Result]:
        """Of all rows, in their order."""
        return [self.ended[row] for row in sorted(self.ended)]

    def interrupted(self, prompt_tokens: int) -> Result:
        """What the first row had come to when it was interrupted."""
        tokens = [token for token in self.tokens.get(0, []) if token.id is not None]
        return Result(
            ids=tuple(token.id for token in tokens if token.id is not None),
            text="".join(token.text for token in tokens),
            reason="interrupted",
            logprobs=tuple(token.logprob for token in tokens if token.logprob is not None),
            prompt_tokens=prompt_tokens,
            new_tokens=len(tokens),
            alternatives=tuple(token.alternatives for token in tokens),
        )

    def ttft_ms(self, row: int = 0) -> float | None:
        """Milliseconds to the row's first token, its prompt's prefill included."""
        came = self.seconds.get(row)
        return came[0] * 1e3 if came else None

    def tokens_per_s(self, row: int = 0) -> float | None:
        """Of the tokens after the first."""
        came = self.seconds.get(row, [])
        return (len(came) - 1) / (came[-1] - came[0]) if len(came) > 1 else None

    def step_ms(self, row: int = 0) -> list[float]:
        """Milliseconds from each token to the next."""
        came = self.seconds.get(row, [])
        return [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(came)]
