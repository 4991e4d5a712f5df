"""`generate --chat` without a prompt: turn by turn over one cache, each turn fed what the cache does not hold yet."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from attn_variants.cache import KVCache
from attn_variants.generation import Result

from .results import Row
from .session import Session, slots_for
from .speculated import Clocked
from .timed import Say, Timed

ROOM = 2048
"""Tokens that the first cache has room for. When it is spent, one twice as large reads the conversation again."""
BURST = 64
"""Tokens of a turn that are read at once where tokens pass out of sight or are coded together."""


class Conversation:
    """The messages so far, and the cache with what it holds of them.

    Each turn's prompt is the whole conversation as the template renders it. What the cache holds and the prompt begins
    with too stays there, token for token; the cache forgets the rest, or all where it can not go back that far.
    """

    def __init__(self, session: Session, system: str | None) -> None:
        self._session = session
        self._messages = opening(system)
        self._cache: KVCache | None = None
        self._held: list[int] = []

    def answer(self, message: str, say: Say) -> Row | None:
        """One turn; the answer goes to `say` as it comes. None where --max-length leaves no token for it.

        An interruption ends the answer, which stays as far as it came.
        """
        session, most = self._session, self._session.stopping.max_length
        self._messages.append({"role": "user", "content": message})
        ids = session.tokenizer.chat(self._messages)
        if most is not None and len(ids) >= most:
            return None
        timed = Timed()
        cache = self._room(ids, slots_for(session.stopping, session.tokenizer, len(ids)))
        held = len(self._held)
        draft = None if session.draft is None else Clocked(session.draft)
        try:
            (result,) = timed.take(session.tokens(ids[held:], cache, draft=draft, history=self._held), say).results
        except KeyboardInterrupt:
            result = timed.interrupted(len(ids) - held)
        row = session.row(result, timed, 0, cache) | {"prompt_tokens": len(ids), "fed_tokens": len(ids) - held}
        self._messages.append({"role": "assistant", "content": result.text or ""})
        self._keep(ids, result)
        return row

    def _room(self, ids: list[int], slots: int) -> KVCache:
        """A cache with room for this turn that holds what `_held` says, all of it the front of these ids."""
        if self._cache is None or self._cache.capacity < slots:
            room = ROOM if self._cache is None else 2 * self._cache.capacity
            self._cache = self._session.cache(ids, slots=max(slots, room), burst=BURST)
            self._held = []
        # The last token is fed in any case, for its logits.
        common = min(_agreed(self._held, ids), len(ids) - 1)
        if common < self._cache.floor(0):
            common = 0
            self._cache.free()
        self._cache.rewind(self._cache.length(0) - common)
        self._held = ids[:common]
        return self._cache

    def _keep(self, ids: list[int], result: Result) -> None:
        """Note what the cache holds: after an interruption it may be anything, and a new one is made."""
        if result.reason == "interrupted" or self._cache is None:
            self._cache, self._held = None, []
        else:
            self._held = [*ids, *result.ids][: self._cache.length(0)]


def opening(system: str | None) -> list[dict[str, str]]:
    """The messages that a conversation begins with."""
    return [] if system is None else [{"role": "system", "content": system}]


def turns(session: Session, system: str | None, say: Say) -> Iterator[Row]:
    """A row per line of stdin, until it ends or a line is empty; a terminal is asked for them."""
    conversation = Conversation(session, system)
    for turn, message in enumerate(_lines()):
        row = conversation.answer(message, say)
        if row is None:
            print(f"--max-length ({session.stopping.max_length}) leaves no token for an answer", file=sys.stderr)
            return
        say("\n")
        yield row | {"turn": turn}


def _lines() -> Iterator[str]:
    if sys.stdin is None:
        raise ValueError("--chat reads a conversation from stdin, which is closed; give --prompt or --file")
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin is no UTF-8 text ({error.reason}); convert it") from None
        message = line.rstrip("\r\n")
        if not message:
            if asks and not line:
                print(file=sys.stderr)
            return
        yield message


def _agreed(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
