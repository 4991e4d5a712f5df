"""A pool of pages: which are free, and how many sequences hold each of the others."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence

from attn_variants.contract import LARGEST_SIZE, require_size


class OutOfPagesError(ValueError):
    """The pool has fewer free pages than a step needs; every sequence is as it was."""


class Pages:
    """Pages 1 to `total`, handed out lowest first, so that a sequence's pages lie side by side where they can.

    Page 0 is nobody's: it stands in a table where there is nothing to read. A page that several sequences hold goes
    back when the last of them lets go.
    """

    def __init__(self, total: int) -> None:
        require_size("pages", total, most=LARGEST_SIZE)
        self.total = total
        self._in_order = list(range(total + 1))
        self._rank = list(range(total + 1))
        self._free = list(range(1, total + 1))
        """Ranks of the free pages, a heap."""
        self._holders = [0] * (total + 1)

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many sequences hold this page."""
        return self._holders[page]

    def require(self, needed: int) -> None:
        """Raise OutOfPagesError unless so many pages are free."""
        if needed > self.free:
            raise OutOfPagesError(
                f"the step needs {needed} pages and {self.free} of {self.total} are free: free or rewind rows, or make "
                "the KVCache with more pages"
            )

    def take(self) -> int:
        """A free page, now held once."""
        self.require(1)
        page = self._in_order[heapq.heappop(self._free)]
        self._holders[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One sequence more holds each of these; page 0 is passed over."""
        for page in pages:
            if page:
                assert self._holders[page], f"page {page} is free"
                self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One sequence fewer holds each of these; page 0 is passed over."""
        for page in pages:
            if not page:
                continue
            assert self._holders[page], f"page {page} is free already"
            self._holders[page] -= 1
            if not self._holders[page]:
                heapq.heappush(self._free, self._rank[page])

    def shuffle(self, seed: int) -> None:
        """Hand pages out in a random order from now on, as a pool does that was long in use: for measurements."""
        free = [self._in_order[rank] for rank in self._free]
        pages = list(range(1, self.total + 1))
        random.Random(seed).shuffle(pages)
        self._in_order = [0, *pages]
        for rank, page in enumerate(self._in_order):
            self._rank[page] = rank
        self._free = sorted(self._rank[page] for page in free)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that these tables, all there are, hold each page as often as is counted, and no free one."""
        held = [0] * (self.total + 1)
        for table in tables:
            for page in table:
                held[page] += bool(page)
        assert held == self._holders, "pages are held by other tables than those given"
        free = sorted(self._in_order[rank] for rank in self._free)
        assert free == [page for page in range(1, self.total + 1) if not held[page]], "the free list is wrong"
