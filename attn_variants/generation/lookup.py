"""Prompt lookup: what followed a sequence's newest tokens where they stood before is proposed to follow them again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from attn_variants.contract import require_size

from .drafts import Pick, Proposal

MEMORY = 0.9
"""What an observation counts for after each later one of its kind: the last ten or so decide."""


@dataclass(frozen=True)
class Lookup:
    """No model: what followed the sequence's newest tokens where they occurred before, prompt included.

    Of the newest n tokens, n from `longest` to `shortest`, the first that occurred before, and of its occurrences the
    most recent (prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding).
    tokens: the most it proposes at once.
    least: it proposes where it expects so many of its tokens to be taken, or half of them where it has fewer than twice
    as many, since it takes time to verify them; by how often it was right lately, proposed or not. 0 proposes always.
    """

    tokens: int = 8
    longest: int = 3
    shortest: int = 1
    least: float = 1.0

    def __post_init__(self) -> None:
        require_size("tokens", self.tokens)
        require_size("shortest", self.shortest)
        require_size("longest", self.longest)
        if self.longest < self.shortest:
            raise ValueError(f"longest ({self.longest}) must be at least shortest ({self.shortest})")
        if not self.least >= 0:
            raise ValueError(f"least ({self.least}) must be a number of at least 0")

    def open(self, *, batch: int, capacity: int, vocab_size: int) -> LookupDrafting:
        """With an index per row."""
        return LookupDrafting(self)


class LookupDrafting:
    """Looks proposals up in an index that each new token adds to. A `Drafting`."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._rows: dict[int, Occurrences] = {}
        self._records: dict[int, Record] = {}

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """Index the prompt, which says nothing of what will be written: a text may copy one that repeats nothing."""
        assert row not in self._rows
        self._rows[row] = Occurrences(self._lookup.longest, self._lookup.shortest)
        self._records[row] = Record()
        for token in prompt:
            self._rows[row].append(token)

    def grow(self, row: int, ids: Sequence[int]) -> None:
        """Index these too, each after a look at what would have been proposed for it."""
        for token in ids:
            size, guess = self._rows[row].continuation(1)
            if guess:
                self._records[row].note(size, guess[0] == token)
            self._rows[row].append(token)

    def end(self, row: int) -> None:
        """Forget the row."""
        del self._rows[row], self._records[row]

    def propose(self, limits: Mapping[int, int], pick: Pick) -> dict[int, Proposal]:
        """Nothing is picked: the tokens are no draws."""
        return {row: Proposal(tuple(self._proposed(row, limit))) for row, limit in limits.items()}

    def _proposed(self, row: int, limit: int) -> list[int]:
        size, ids = self._rows[row].continuation(min(limit, self._lookup.tokens))
        needed = min(self._lookup.least, self._lookup.tokens / 2)
        return ids if size and self._expected(row, size) >= needed else []

    def _expected(self, row: int, size: int) -> float:
        """Tokens of a whole proposal behind a run of this size that are taken: a run grows by each of them."""
        sizes = (min(size + place, self._lookup.longest) for place in range(self._lookup.tokens))
        return math.fsum(accumulate((self._records[row].rate(size) for size in sizes), mul))


class Record:
    """How often what followed a run of so many tokens was what had followed it before, lately."""

    def __init__(self) -> None:
        self._right: dict[int, float] = {}
        self._all: dict[int, float] = {}

    def note(self, size: int, right: bool) -> None:
        """One more that came true, or did not."""
        self._right[size] = MEMORY * self._right.get(size, 1.0) + right
        self._all[size] = MEMORY * self._all.get(size, 1.0) + 1

    def rate(self, size: int) -> float:
        """The share that came true, as if one had before the first."""
        return self._right.get(size, 1.0) / self._all.get(size, 1.0)


class Occurrences:
    """A sequence and, for each run of `shortest` to `longest` of its tokens, where the newest one before its end ends.

    A token costs longest - shortest + 1 entries of a dictionary, whatever the sequence's length.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        """What ended with the token before has a continuation now."""
        for run in self._newest():
            self._ends[run] = len(self._ids)
        self._ids.append(token)

    def continuation(self, limit: int) -> tuple[int, list[int]]:
        """How long a run occurred before, and at most `limit` tokens after it; (0, []) where none did.

        One that comes to the end of the sequence goes on in itself, so that what repeats is repeated further.
        """
        found = next((run for run in self._newest() if run in self._ends), None)
        if found is None:
            return 0, []
        start = self._ends[found]
        period = len(self._ids) - start
        return len(found), [self._ids[start + index % period] for index in range(limit)]

    def _newest(self) -> list[tuple[int, ...]]:
        """The runs that the sequence ends with, the longest first."""
        return [tuple(self._ids[-size:]) for size in self._sizes if size <= len(self._ids)]
