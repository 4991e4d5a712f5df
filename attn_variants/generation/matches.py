"""What ends a sequence by its text, found as the text comes: stop strings and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import regex

REGEX_SECONDS = 1.0
"""The longest that one search of one regular expression may take."""

SEARCH_PLACE = regex.compile(r"(?<!\\)(?:\\\\)*(\\[KG])")
"""What sets a match's start apart from where it was found, and what is true only where a search begins."""

Pattern: TypeAlias = regex.Pattern[str]
AnyPattern: TypeAlias = str | regex.Pattern[str] | re.Pattern[str]


@dataclass(frozen=True)
class Match:
    """The first `cut` characters of the sequence's text stay; `reason` ended it, `text` is what matched."""

    cut: int
    reason: str
    text: str


class Search(Protocol):
    """One kind of end, looked for in the text of one sequence.

    held: how many characters at the end of the text a match to come may still cut.
    """

    @property
    def held(self) -> int:
        """See the class."""
        ...

    def feed(self, piece: str) -> Match | None:
        """The match that is there once `piece` is; of several that which leaves the least text."""
        ...


class StringSearch:
    """Stop strings. Only the end of the text that may begin one is kept, so a piece costs the same after any text.

    Of two that begin at one place, the one that was given first.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._end = 0
        self._open = ""  # the end of the text that may be the front of a stop string

    @property
    def held(self) -> int:
        """Characters of the longest end of the text that some stop string begins with."""
        return len(self._open)

    def feed(self, piece: str) -> Match | None:
        """The first match in the text, which ends in `piece`."""
        text = self._open + piece
        self._end += len(piece)
        found = [(at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            at, string = min(found, key=lambda item: item[0])
            return Match(self._end - len(text) + at, "string", string)
        self._open = text[min(_front(text, string) for string in self._strings) :]
        return None


def _front(text: str, string: str) -> int:
    """Where the longest end of `text` begins that `string`, which is not in it, begins with."""
    at = text.find(string[0], max(0, len(text) - len(string) + 1))
    while at >= 0 and not string.startswith(text[at:]):
        at = text.find(string[0], at + 1)
    return len(text) if at < 0 else at


class RegexSearch:
    r"""Regular expressions, searched in the text so far: `$` and `\b` hold at its end, `+` takes what is there.

    The `regex` package tells where a match may have begun that more text would complete; a later search begins there,
    so that a piece costs a search of this open part and one copy of the text. A pattern such as `(?s).*end` leaves
    all of the text open. A place where more text alone makes a match, by not ending there (`\B`, `(?!$)`), is not
    seen as open: only what comes after it can match.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._text = ""
        self._open = dict.fromkeys(patterns, 0)  # where a match may begin

    @property
    def held(self) -> int:
        """Characters from where the first unfinished match may begin."""
        return len(self._text) - min(self._open.values())

    def feed(self, piece: str) -> Match | None:
        """The first match in the text. Raises ValueError when a search takes longer than REGEX_SECONDS."""
        self._text += piece
        found = [match for pattern in self._open if (match := self._search(pattern))]
        return min(found, key=lambda match: match.cut, default=None)

    def _search(self, pattern: Pattern) -> Match | None:
        try:
            found = pattern.search(self._text, self._open[pattern], partial=True, timeout=REGEX_SECONDS)
        except TimeoutError as error:
            raise ValueError(
                f"regex {pattern.pattern!r} took longer than {REGEX_SECONDS} s on {len(self._text)} characters; "
                "write it without nested or overlapping repetitions"
            ) from error
        if found and not found.partial:
            return Match(found.start(), "regex", found[0])
        self._open[pattern] = found.start() if found else len(self._text)
        return None


def stop_strings(strings: str | Iterable[str]) -> tuple[str, ...]:
    """One stop string or several. Raises ValueError for an empty one and for what is no text."""
    found = _several("strings", strings, str)
    for string in found:
        if not isinstance(string, str):
            raise ValueError(f"stop string {string!r} must be text")
        if not string:
            raise ValueError("a stop string is empty, which every text holds; give at least one character")
    return found


def stop_patterns(patterns: AnyPattern | Iterable[AnyPattern]) -> tuple[Pattern, ...]:
    """One regular expression or several, compiled or not.

    Raises ValueError for one that is invalid, that matches the empty text, that searches backwards or that hangs on
    where a search begins.
    """
    return tuple(map(_compiled, _several("regex", patterns, str, regex.Pattern, re.Pattern)))


def _compiled(pattern: AnyPattern) -> Pattern:
    flags = _flags(pattern) if isinstance(pattern, re.Pattern) else 0
    source = pattern if isinstance(pattern, str) else getattr(pattern, "pattern", pattern)
    if not isinstance(source, str):
        raise ValueError(f"regex {source!r} must be text, or a pattern compiled from text")
    try:
        # One that is compiled may hold named lists, which its source does not.
        compiled = pattern if isinstance(pattern, regex.Pattern) else regex.compile(source, flags)
    except regex.error as error:
        raise ValueError(f"regex {source!r} is invalid: {error}") from error
    if compiled.flags & regex.REVERSE:
        raise ValueError(f"regex {source!r} searches backwards, from an end that a growing text does not have yet")
    if hung := SEARCH_PLACE.search(compiled.pattern):
        raise ValueError(
            f"regex {source!r} hangs on where a search begins, by {hung[1]}, and a growing text is searched again from "
            "other places; a lookbehind does not: (?<=...)"
        )
    if compiled.search(""):
        raise ValueError(f"regex {source!r} matches the empty text, so it would end every sequence at its start")
    return compiled


def _flags(pattern: re.Pattern[str]) -> int:
    """The flags of the `re` module as `regex` has them; some have another number."""
    return sum(getattr(regex, name) for name in "IMSXA" if pattern.flags & getattr(re, name))


def _several(name: str, values: Any, *single: type) -> tuple[Any, ...]:
    if isinstance(values, single):
        return (values,)
    try:
        return tuple(values)
    except TypeError:
        raise ValueError(f"{name} ({values!r}) must be one text or several") from None
