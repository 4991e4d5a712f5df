"""When a sequence ends, and what of its text stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from attn_variants.names import unknown

from .matches import AnyPattern, RegexSearch, Search, StringSearch, stop_patterns, stop_strings
from .text import Detokenizer
from .units import BracketUnit, JsonUnit

UNITS: dict[str, type[JsonUnit] | type[BracketUnit]] = {"json": JsonUnit, "bracket": BracketUnit}


@dataclass(frozen=True)
class Stopping:
    """What ends a sequence: the first of these that holds.

    max_new_tokens: the most tokens that are generated; 0 generates none.
    max_length: the most tokens of prompt and generated text together, with those that a cache held before; a longer
        prompt gets no new token.
    eos: one id or several, each of which is then the last of its sequence; None takes the model's own, () none.
    strings: one text or several. They are looked for in the text, not among the ids: across tokens, inside of one,
        never in the prompt.
    regex: one pattern of the `regex` package or several, compiled or not (those of `re` too); looked for likewise.
    unit: `json`, when the text, after white space, is a whole JSON value; `bracket`, when the first opened of ()[]{}
        is closed. See units.py for what a unit is in a text that has none.

    Raises ValueError for a stop that could never be meant: no integer, an empty string, an invalid pattern or one that
    matches the empty text.
    """

    max_new_tokens: int = 128
    max_length: int | None = None
    eos: int | Iterable[int] | None = None
    strings: str | Iterable[str] = ()
    regex: AnyPattern | Iterable[AnyPattern] = ()
    unit: str | None = None

    def __post_init__(self) -> None:
        _require_count("max_new_tokens", self.max_new_tokens, least=0)
        if self.max_length is not None:
            _require_count("max_length", self.max_length, least=1)
        if self.unit is not None and self.unit not in UNITS:
            raise ValueError(unknown("unit", str(self.unit), UNITS))
        object.__setattr__(self, "eos", None if self.eos is None else _token_ids(self.eos))
        object.__setattr__(self, "strings", stop_strings(self.strings))
        object.__setattr__(self, "regex", stop_patterns(self.regex))

    def watch(
        self,
        decode: Callable[[Sequence[int]], str] | None = None,
        *,
        model_eos: Iterable[int] = (),
        prompt_tokens: int = 0,
    ) -> Watch:
        """The state of one sequence that follows a prompt of so many tokens.

        decode: a tokenizer's; without it there is no text. Raises ValueError when strings, regex or unit need one.
        """
        if decode is None and (self.strings or self.regex or self.unit):
            raise ValueError("strings, regex and unit are looked for in the text; give decode, the tokenizer's")
        most = self.max_new_tokens
        if self.max_length is not None:
            most = max(0, min(most, self.max_length - prompt_tokens))
        ends = frozenset(model_eos if self.eos is None else _token_ids(self.eos))
        return Watch(decode, most, ends, self._searches())

    def _searches(self) -> list[Search]:
        """In the order in which they win when two leave the same text: a unit ends where a string begins."""
        searches: list[Search] = [UNITS[self.unit]()] if self.unit else []
        if strings := stop_strings(self.strings):
            searches.append(StringSearch(strings))
        if patterns := stop_patterns(self.regex):
            searches.append(RegexSearch(patterns))
        return searches


class Watch:
    """One sequence as it grows: its ids, its text, and why it ended. Made by `Stopping.watch`.

    When several reasons hold at one token: `eos` first; then `unit`, `string` or `regex`, whichever leaves the
    least text (of equals, in this order); then `length`.

    ids: the new tokens, with the one that ended the sequence: an `eos`, or that in which a match ended. So they may say
        more than the text.
    reason: `eos`, `length`, `string`, `regex` or `unit`; None while the sequence goes on. With no token to generate it
        is `length` from the start.
    matched: the stop string, the regular expression's match, or the unit; else None.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str] | None, most: int, ends: frozenset[int], searches: Sequence[Search]
    ) -> None:
        self.ids: list[int] = []
        self.reason: str | None = None if most else "length"
        self.matched: str | None = None
        self._most, self._ends, self._searches = most, ends, searches
        self._detokenizer = None if decode is None else Detokenizer(decode)
        self._pieces: list[str] = []  # what nothing can take back
        self._length = 0  # characters of these
        self._shown = 0  # how many of these have been shown
        self._held = ""  # what a match to come may cut

    @property
    def text(self) -> str | None:
        """The text that nothing to come can take back, at the end all of it; None without `decode`.

        It ends before a stop string or a match of a regular expression, and with a unit; `eos` adds nothing to it.
        """
        return None if self._detokenizer is None else "".join(self._pieces)

    @property
    def left(self) -> int:
        """The most tokens that may still come; 0 at the end."""
        return 0 if self.reason is not None else self._most - len(self.ids)

    def shown(self) -> str:
        """What `text` has grown by since this was last asked: a piece that may be streamed, often empty."""
        piece = "".join(self._pieces[self._shown :])
        self._shown = len(self._pieces)
        return piece

    def push(self, id: int) -> str | None:
        """Take the next token and return the reason if it is the last.

        Raises ValueError when a regular expression takes too long; the sequence can then not go on.
        """
        assert self.reason is None, f"a token follows the end of a sequence ({self.reason})"
        self.ids.append(id)
        if id in self._ends:
            self._finish("eos")
        elif self._detokenizer and self._read(self._detokenizer.push(id)):
            pass
        elif len(self.ids) == self._most and not (self._detokenizer and self._read(self._detokenizer.flush())):
            self._finish("length")
        return self.reason

    def end(self, reason: str) -> None:
        """Nothing more comes, for a reason that is not the sequence's own."""
        if self.reason is None:
            self._finish(reason)

    def _read(self, piece: str) -> bool:
        """Whether a match ends in this piece of the text, which then ends there."""
        if not piece:
            return False
        self._held += piece
        found = [match for search in self._searches if (match := search.feed(piece))]
        if not found:
            self._keep(len(self._held) - max((search.held for search in self._searches), default=0))
            return False
        first = min(found, key=lambda match: match.cut)
        self._keep(first.cut - self._length)
        self._held = ""
        self.reason, self.matched = first.reason, first.text
        return True

    def _finish(self, reason: str) -> None:
        if self._detokenizer:
            self._held += self._detokenizer.flush()
        self._keep(len(self._held))
        self.reason = reason

    def _keep(self, count: int) -> None:
        """So many of the characters that were held are text for good."""
        assert 0 <= count <= len(self._held), "a match cuts what has been shown"
        if count:
            self._pieces.append(self._held[:count])
            self._held = self._held[count:]
            self._length += count


def _require_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} ({value!r}) must be an integer of at least {least}")


def _token_ids(eos: int | Iterable[int]) -> tuple[int, ...]:
    """One id or several. Raises ValueError for what is no token id."""
    try:
        ids = (eos,) if isinstance(eos, int) else tuple(eos)
    except TypeError:
        ids = (eos,)  # type: ignore[assignment]
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or id < 0:
            raise ValueError(f"eos ({id!r}) must be token ids, integers of at least 0")
    return ids
