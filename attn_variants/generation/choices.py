"""More compute at test time, at its simplest: several samples, and one answer of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .row import Result


def best_of(results: Sequence[Result], score: Callable[[Result], float] | None = None) -> Result:
    """The result with the highest score, the first of equal ones; by default the mean log-probability of its tokens.

    A mean, because a sum prefers short answers. Results that ended in an error are left out, and
    a score that is NaN is the lowest. Raises ValueError where none is left.
    """
    sound = _sound(results)
    scores = [(_mean_logprob if score is None else score)(result) for result in sound]
    # A comparison with NaN is false, so that the first would stay the best.
    best = max(range(len(sound)), key=lambda place: -math.inf if math.isnan(scores[place]) else scores[place])
    return sound[best]


@dataclass(frozen=True)
class Vote:
    """What most samples say.

    answer: the winner, of equally many votes the one that was given first.     votes: for each answer how many.
    """

    answer: str
    votes: dict[str, int]


def majority_vote(results: Sequence[Result], answer: Callable[[Result], str | None] | None = None) -> Vote:
    """The most frequent answer (self-consistency, arXiv 2203.11171); a None abstains.

    answer: from a result to what is voted for; by default its text without surrounding blanks.
    Raises ValueError where nobody votes.
    """
    read = _text if answer is None else answer
    votes = Counter(said for result in _sound(results) if (said := read(result)) is not None)
    if not votes:
        raise ValueError(f"none of {len(results)} results gives an answer to vote for")
    return Vote(votes.most_common(1)[0][0], dict(votes))


def _sound(results: Sequence[Result]) -> list[Result]:
    sound = [result for result in results if result.reason != "error"]
    if not sound:
        raise ValueError(f"none of {len(results)} results is without an error")
    return sound


def _mean_logprob(result: Result) -> float:
    return result.logprob / result.new_tokens if result.new_tokens else -math.inf


def _text(result: Result) -> str:
    if result.text is None:
        raise ValueError("results without a text need answer= to say what is voted for, or decode= in generate")
    return result.text.strip()
