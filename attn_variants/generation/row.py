"""One sequence that grows, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import draws
from .sampling import Sampling, seen_in
from .speedup import Rounds
from .stopping import Watch

Alternatives = tuple[tuple[int, float], ...]
"""The likeliest tokens of a place with their log-probabilities, the likeliest first."""


@dataclass(frozen=True)
class Result:
    """What one sequence became.

    ids: the new tokens alone, the one that ended it included.     text: theirs, cut at the stop; None without `decode`.
    reason: "eos", "string", "regex", "unit", "length", or "error", which `error` then explains.
    logprobs, alternatives: of each new token, by the model alone, before temperature and the like.
    prompt, sample: which prompt it goes on with, and which of its samples it is.
    matched: what the text was stopped by.     rounds: what a draft was worth to it; None without one.
    """

    ids: tuple[int, ...]
    text: str | None
    reason: str
    logprobs: tuple[float, ...]
    prompt_tokens: int
    new_tokens: int
    prompt: int = 0
    sample: int = 0
    alternatives: tuple[Alternatives, ...] = ()
    matched: str | None = None
    error: str | None = None
    rounds: Rounds | None = None

    @property
    def logprob(self) -> float:
        """Of all new tokens together: the log of the product of their conditionals."""
        return sum(self.logprobs)


@dataclass(frozen=True)
class Token:
    """One new token of a row, or its end without one.

    id: None where the row ends without a token: at an error, or where none was asked for.
    text: what can be shown since the last one, which no stop will cut; "" where nothing can, or without a `decode`.
    logprob, alternatives: as in `Result`.     result: all of the row, with its last token.
    """

    row: int
    id: int | None
    text: str = ""
    logprob: float | None = None
    alternatives: Alternatives = ()
    result: Result | None = None

    @property
    def reason(self) -> str | None:
        """Why the row ended, with its last token."""
        return None if self.result is None else self.result.reason


class Row:
    """The state of one sequence.

    held: tokens that its row of the cache holds before the prompt, so that positions are those of the whole sequence.
    history: these tokens, or nothing where they are not known.
    alike: how its logits are processed, which rows of different seeds have in common.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        *,
        which: int,
        sample: int,
        held: int,
        history: Sequence[int],
        sampling: Sampling,
        watch: Watch,
    ) -> None:
        self.number = number
        self.sampling = sampling
        self.alike = replace(sampling, seed=0)
        self.watch = watch
        self.prompt = list(prompt)
        self.which, self.sample = which, sample
        self.held, self.history = held, history
        self.error: str | None = None
        self.newest = self.prompt[-1]
        self.rounds: Rounds | None = None
        self._logprobs: list[float] = []
        self._alternatives: list[Alternatives] = []
        self._seen: Tensor | None = None

    @property
    def reason(self) -> str | None:
        """Why it ended; None while it goes on."""
        return self.watch.reason

    @property
    def left(self) -> int:
        """New tokens that it may still get."""
        return self.watch.left

    @property
    def position(self) -> int:
        """Of the next token in its sequence."""
        return self.held + len(self.prompt) + len(self._logprobs)

    @property
    def ids(self) -> list[int]:
        """All that is known of its sequence."""
        return [*self.history, *self.prompt, *self.watch.ids]

    def uniform(self, place: int, purpose: str) -> float:
        """A random number for the token `place` after the next one."""
        return draws.uniform(self.sampling.seed, self.sample, self.position + place, purpose)

    def seen(self, vocab_size: int, device: torch.device, proposed: Sequence[int] = ()) -> Tensor | None:
        """(vocab,) bool, or None where nothing is penalised: the tokens so far, and these."""
        if self.sampling.repetition_penalty == 1:
            return None
        if self._seen is None:
            counted = [*self.history, *self.prompt] if self.sampling.penalise_prompt else []
            self._seen = seen_in([[*counted, *self.watch.ids]], vocab_size, device=device)[0]
        if not proposed:
            return self._seen
        seen = self._seen.clone()
        seen[list(proposed)] = True
        return seen

    def push(self, token: int, logprob: float, alternatives: Alternatives) -> Token:
        """The sequence goes on with this token."""
        self.newest = token
        self._logprobs.append(logprob)
        self._alternatives.append(alternatives)
        if self._seen is not None:
            self._seen[token] = True
        try:
            self.watch.push(token)
        except ValueError as error:  # a regular expression that takes too long
            return self._ended(token, logprob, alternatives, str(error))
        return Token(self.number, token, self.watch.shown(), logprob, alternatives, self._result())

    def fail(self, error: str) -> Token:
        """It cannot go on."""
        return self._ended(None, None, (), error)

    def end(self) -> Token:
        """No token was asked for."""
        return Token(self.number, None, result=self._result())

    def _ended(self, token: int | None, logprob: float | None, alternatives: Alternatives, error: str) -> Token:
        self.error = error
        self.watch.end("error")
        return Token(self.number, token, self.watch.shown(), logprob, alternatives, self._result())

    def _result(self) -> Result | None:
        if self.reason is None:
            return None
        return Result(
            ids=tuple(self.watch.ids),
            text=self.watch.text,
            reason=self.reason,
            logprobs=tuple(self._logprobs),
            prompt_tokens=len(self.prompt),
            new_tokens=len(self.watch.ids),
            prompt=self.which,
            sample=self.sample,
            alternatives=tuple(self._alternatives),
            matched=self.watch.matched,
            error=self.error,
            rounds=self.rounds,
        )
