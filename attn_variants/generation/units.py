"""Complete syntactic units, found piece by piece: a JSON value, or a text in brackets."""

from __future__ import annotations

import json

import regex

from .matches import Match

CLOSING = {"(": ")", "[": "]", "{": "}", '"': '"'}
WHITESPACE = " \t\n\r"
WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
NUMBER = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# Only the end of a value is asked for: numbers stay texts, however long they are.
DECODER = json.JSONDecoder(parse_int=str, parse_float=str)


class Enclosed:
    """A text in brackets or double quotes, read from its opening character on.

    Brackets of the opening's kind are counted; those between double quotes, where a backslash escapes the next
    character, are text. Single quotes are apostrophes as often as not and enclose nothing.
    """

    def __init__(self, opening: str) -> None:
        self._opening, self._closing = opening, CLOSING[opening]
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, piece: str) -> int | None:
        """How many characters of `piece` belong to it, the closing one included; None where that is yet to come."""
        for count, character in enumerate(piece, 1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character == self._opening) - (character == self._closing)
            if not (self._depth or self._quoted):
                return count
        return None


class BracketUnit:
    """The text up to the bracket that closes the first opened of ()[]{}, whatever stands before that one.

    Only brackets of that kind count: `(see [1)` is complete. Between double quotes inside of it they do not count.
    A character is looked at once.
    """

    held = 0

    def __init__(self) -> None:
        self._end = 0
        self._enclosed: Enclosed | None = None
        self._value: list[str] = []

    def feed(self, piece: str) -> Match | None:
        """The unit, if it is complete with `piece`."""
        start, self._end = self._end, self._end + len(piece)
        if self._enclosed is None:
            at = next((at for at, character in enumerate(piece) if character in "([{"), None)
            if at is None:
                return None
            self._enclosed = Enclosed(piece[at])
            start, piece = start + at, piece[at:]
        count = self._enclosed.feed(piece)
        self._value.append(piece[:count])
        return None if count is None else Match(start + count, "unit", "".join(self._value))


class JsonUnit:
    """The text up to the end of the JSON value that it begins with, after white space; as Python's json reads it.

    A number ends with the first character that cannot continue it: `12` may go on to `123`, and the `.` of `12.` waits
    for what follows. A text that begins with anything else, or a value that json refuses, never becomes a unit.
    A character is looked at once, and a complete value once more; a number is read again with each of its pieces.
    """

    def __init__(self) -> None:
        self.held = 0
        self._end = 0
        self._enclosed: Enclosed | None = None
        self._value: list[str] = []
        self._broken = False

    def feed(self, piece: str) -> Match | None:
        """The unit, if it is complete with `piece`."""
        self._end += len(piece)
        if not self._value:
            piece = piece.lstrip(WHITESPACE)
            if piece[:1] in ("{", "[", '"'):
                self._enclosed = Enclosed(piece[0])
        if self._broken or not piece:
            return None
        self._value.append(piece)
        if self._enclosed is None:
            return self._word("".join(self._value))
        return None if self._enclosed.feed(piece) is None else self._match("".join(self._value))

    def _word(self, value: str) -> Match | None:
        """A number or a name; what may yet turn out not to belong to the number is held."""
        if NUMBER.fullmatch(value, partial=True):
            self.held = len(value) - (_value_end(value) or len(value))
            return None
        self.held = 0
        waits = any(word != value and word.startswith(value) for word in WORDS)
        return None if waits else self._match(value)

    def _match(self, value: str) -> Match | None:
        end = _value_end(value)
        if end is None:
            self._broken = True
            return None
        return Match(self._end - len(value) + end, "unit", value[:end])


def _value_end(text: str) -> int | None:
    """Where the JSON value that `text` begins with ends; None without one, and for one nested too deeply for json."""
    try:
        return DECODER.raw_decode(text)[1]
    except (ValueError, RecursionError):
        return None
