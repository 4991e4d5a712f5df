"""Token ids to text as they come: what is given is never taken back, and is never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
LONGEST_WAIT = 32
"""Ids that may wait for a character to become whole, or for any text at all."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so the ids that one may be spread over."""


class Detokenizer:
    """The text of one sequence, given piece by piece: all pieces and the flush together are `decode` of all its ids.

    A token's text hangs on its neighbours: a character may be spread over several, words are joined by spaces and the
    space before the first is dropped. So an id is decoded together with those of the piece before it, and the piece is
    what they have more than these alone: a cost per id that does not grow with the sequence. U+FFFD at the end may be
    the front of a character; it alone waits for the next id, or for the flush.

    decode: ids to text, as a tokenizer does it. Where more ids change the text of earlier ones, other than a U+FFFD
        at its end, what was given stays as it was. A decoder with byte fallback does so when a wrong byte follows right
        ones: it then writes U+FFFD for them all.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # those of the piece before, then those that wait
        self._read = 0  # how many of them have been given
        self._given = ""  # the text of these alone, and what else has been given of those that wait

    def push(self, id: int) -> str:
        """The text that has become whole with `id`; often a word, sometimes none."""
        self._ids.append(id)
        text = self._decode(self._ids)
        waits = len(self._ids) - self._read > LONGEST_WAIT
        if len(text) <= len(self._given):
            if waits:
                self._forget(text)
            return ""
        whole = text.rstrip(REPLACEMENT)
        if whole == text:
            return self._give(len(self._ids), text)
        if len(whole) > len(self._given):
            piece, self._given = whole[len(self._given) :], whole
            return piece
        return self._give_front(text) if waits else ""

    def flush(self) -> str:
        """What still waits, at the end of the sequence: half a character is U+FFFD."""
        if self._read == len(self._ids):
            return ""
        return self._give(len(self._ids), self._decode(self._ids))

    def _give(self, read: int, text: str) -> str:
        """The piece that ends with the first `read` ids, whose text is `text`."""
        piece = text[len(self._given) :]
        context = self._ids[self._read : read]
        given = self._decode(context)
        # A decoder that drops leading spaces would drop those of the next word after a context of nothing else.
        if not given.strip() and read < LONGEST_WAIT:
            self._read, self._given = read, text
        else:
            self._ids, self._given = self._ids[self._read :], given
            self._read = len(context)
        return piece

    def _give_front(self, text: str) -> str:
        """The piece that leaves out the last character's ids, cut where both sides read as they do together."""
        last = len(self._ids) - LONGEST_CHARACTER
        for read in range(last, self._read, -1):
            front = self._decode(self._ids[:read])
            if len(front) > len(self._given) and front + self._decode(self._ids[read:]) == text:
                return self._give(read, front)
        return ""

    def _forget(self, text: str) -> None:
        """Drop the oldest id that waits without a text, if the text is the same without it."""
        rest = self._ids[: self._read] + self._ids[self._read + 1 :]
        if self._decode(rest) == text:
            self._ids = rest
