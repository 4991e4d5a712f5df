"""Prompt lookup: what followed a sequence's newest tokens where they stood before is proposed to follow them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attn_variants.contract import require_size

from .drafts import Pick, Proposal


@dataclass(frozen=True)
class Lookup:
    """No model: what followed the sequence's newest tokens where they occurred before, prompt included.

    Of the newest n tokens, n from `longest` to `shortest`, the first that occurred before, and of its occurrences the
    most recent (prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding).
    tokens: the most it proposes at once.
    """

    tokens: int = 8
    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        require_size("tokens", self.tokens)
        require_size("shortest", self.shortest)
        require_size("longest", self.longest)
        if self.longest < self.shortest:
            raise ValueError(f"longest ({self.longest}) must be at least shortest ({self.shortest})")

    def open(self, *, batch: int, capacity: int, vocab_size: int) -> LookupDrafting:
        """With an index per row."""
        return LookupDrafting(self)


class LookupDrafting:
    """Looks proposals up in an index that each new token adds to. A `Drafting`."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._rows: dict[int, Occurrences] = {}

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """Index the prompt."""
        assert row not in self._rows
        self._rows[row] = Occurrences(self._lookup.longest, self._lookup.shortest)
        self.grow(row, prompt)

    def grow(self, row: int, ids: Sequence[int]) -> None:
        """Index these too."""
        for token in ids:
            self._rows[row].append(token)

    def end(self, row: int) -> None:
        """Forget the row."""
        del self._rows[row]

    def propose(self, limits: Mapping[int, int], pick: Pick) -> dict[int, Proposal]:
        """Nothing is picked: the tokens are no draws."""
        return {
            row: Proposal(tuple(self._rows[row].continuation(min(limit, self._lookup.tokens))))
            for row, limit in limits.items()
        }


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

    def continuation(self, limit: int) -> list[int]:
        """At most `limit` tokens; none where nothing occurred before.

        One that comes to the end of the sequence goes on in itself, so that what repeats is repeated further.
        """
        start = next((self._ends[run] for run in self._newest() if run in self._ends), None)
        if start is None:
            return []
        period = len(self._ids) - start
        return [self._ids[start + index % period] for index in range(limit)]

    def _newest(self) -> list[tuple[int, ...]]:
        """The runs that the sequence ends with, the longest first."""
        return [tuple(self._ids[-size:]) for size in self._sizes if size <= len(self._ids)]
