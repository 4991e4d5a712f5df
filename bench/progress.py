"""Progress of long work, on stderr: one line that is rewritten on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time

QUIET_SECONDS = 2.0


class Progress:
    """Says where the work stands; `close` clears a terminal's line."""

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self.spoke = -QUIET_SECONDS
        self.shown = 0
        self.ends: float | None = None

    def expect(self, seconds: float | None) -> None:
        """From now on the work is thought to take so long; None is not known."""
        self.ends = None if seconds is None else time.monotonic() + seconds

    def at(self, what: str) -> None:
        """The next piece of the work begins."""
        self.done += 1
        now = time.monotonic()
        if now - self.spoke < QUIET_SECONDS:
            return
        line = f"{self.label} {self.done}/{self.total}: {what}"
        if self.ends is not None:
            line += f", about {spoken(self.ends - now)} left"
        if sys.stderr.isatty():
            sys.stderr.write("\r" + line.ljust(self.shown))
            self.shown = len(line)
        else:
            self.spoke = now
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Leave a clean line."""
        if self.shown:
            sys.stderr.write("\r" + " " * self.shown + "\r")
            sys.stderr.flush()


def spoken(seconds: float) -> str:
    """Roughly: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(10 * round(minutes / 10), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
