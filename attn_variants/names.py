"""What to say of a name that does not exist: what is close, and what there is. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean a, b or c?"`, or nothing when no known name is close."""
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    if not close:
        return ""
    listed = " or ".join([", ".join(close[:-1]), close[-1]] if len(close) > 1 else close)
    return f"; did you mean {listed}?"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The whole message: the kind of thing, the name, what is close, and all there is."""
    names = list(known)
    return f"unknown {kind} {name!r}{nearest(name, names)} (known: {', '.join(names)})"
