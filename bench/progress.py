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

    def at(self, what: str) -> None:
        """The next piece of the work begins."""
        self.done += 1
        now = time.monotonic()
        if now - self.spoke < QUIET_SECONDS:
            return
        line = f"{self.label} {self.done}/{self.total}: {what}"
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
