"""What can happen to the rows of a cache: one function each, which feeds `Rows` and leaves the checking to it.

All end with tokens that are read from the store: a step on an empty cache reads its own tensors and proves nothing.
Where rows part from what others hold, they go on in the second way of `BRANCHES`.
"""

from tests.cache.grid import CAPACITY, Rows


def one_token_over_a_page_boundary(rows: Rows) -> None:
    """One row ends in its page, one at its end, one begins the next."""
    rows.feed(4, 5, 6)
    rows.feed(1, 1, 1)
    rows.feed(1, 1, 1)


def chunk_on_a_warm_cache(rows: Rows) -> None:
    rows.feed(5, 3, 1)
    rows.feed(rows.burst, rows.burst, rows.burst)
    rows.feed(1, 1, 1)


def chunks_of_a_lone_row(rows: Rows) -> None:
    """Written side by side where it can be."""
    rows.feed(3, rows=[1])
    for count in (rows.burst, rows.burst, 1):
        rows.feed(count, rows=[1])


def left_padded(rows: Rows) -> None:
    rows.feed(mask=[[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    rows.feed(mask=[[0] * 2 + [1] * rows.burst, [0, 1] + [0] * rows.burst, [0] * (1 + rows.burst) + [1]])
    rows.feed(1, 1, 1)


def padded(rows: Rows) -> None:
    """inside, at the right, and a row of nothing else."""
    rows.feed(mask=[[1, 0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    rows.feed(mask=[[0, 0, 0], [1, 0, 0], [0, 1, 0]])
    rows.feed(1, 1, 1)


def ragged(rows: Rows) -> None:
    rows.feed(8, 2, 0)
    rows.feed(rows.burst, 0, 1)
    rows.feed(1, 1, rows=[2, 0])
    rows.feed(1, 1, 1)


def rewound(rows: Rows) -> None:
    """Other tokens come, are taken back as far as can be, and leave nothing behind."""
    rows.feed(8, 5, 6)
    rows.feed(rows.burst, rows.burst, rows.burst, branch=1)
    drops = [min(4, len(ids) - max(1, rows.cache.floor(row))) for row, ids in enumerate(rows.said)]
    assert min(drops) >= rows.burst - 1
    rows.rewind(*drops)
    rows.feed(1, 1, 1)
    rows.feed(1, 1, 1)


def forked(rows: Rows) -> None:
    """Both go on, in turns and by other ways."""
    rows.feed(7, 3, 8)
    twin = rows.fork([1, 0])
    twin.feed(1, 1, branch=1)
    rows.feed(1, 1, 1)
    twin.feed(rows.burst, 1, branch=1)
    rows.feed(rows.burst, 0, 1)


def reordered(rows: Rows) -> None:
    rows.feed(5, 7, 2)
    rows.reorder(1, 1, 0)
    rows.feed(1, 1, 0, branch=1)
    rows.reorder(2, 0, 1)
    rows.feed(1, 1, 0)


def past_the_end_of_a_ring(rows: Rows) -> None:
    rows.feed(8, 4, 1)
    for _ in range(6 // rows.burst):
        rows.feed(rows.burst, 1, rows.burst)
    rows.feed(1, 1, 1)


def reused_row(rows: Rows) -> None:
    rows.feed(9, 6, 7)
    rows.free(1)
    rows.feed(3, rows=[1], branch=1)
    rows.feed(1, 1, 1)
    rows.free(0)
    rows.feed(2, 0, 1)


def shared_prefix(rows: Rows) -> None:
    rows.feed(9, rows=[1])
    tokens = max(1, rows.cache.floor(1), 7)
    rows.cache.share(1, [0], tokens)
    rows.cache.share(1, [2])
    rows.said[0], rows.said[2] = rows.said[1][:tokens], rows.said[1]
    rows.feed(1, 1, 1)
    rows.feed(1, 0, 1)


def saved_and_loaded(rows: Rows, path) -> None:
    """in an order of its own, into another layout."""
    rows.feed(9, 3, 0)
    rows.feed(1, 1, 0)
    rows.cache.save(path, model=rows.model)
    # As many tokens share a scale there as here.
    store = {"paged:1": "paged:1", "paged:5": "ring"}.get(rows.options["store"], "paged:5")
    other = rows.fresh(store=store, static=False)
    other.cache.load(path, model=rows.model, rows=[2, 0])
    other.said[2], other.said[0] = rows.said[0], rows.said[1]
    other.feed(0, 1, 1)
    other.feed(0, 1, 1)


def full_to_the_last_slot(rows: Rows) -> None:
    rows.feed(CAPACITY - 2, CAPACITY - 1, CAPACITY - 3)
    rows.feed(1, 1, 1)
    rows.feed(1, 0, 1)


SITUATIONS = [
    one_token_over_a_page_boundary,
    chunk_on_a_warm_cache,
    chunks_of_a_lone_row,
    left_padded,
    padded,
    ragged,
    rewound,
    forked,
    reordered,
    past_the_end_of_a_ring,
    reused_row,
    shared_prefix,
    saved_and_loaded,
    full_to_the_last_slot,
]
IN_THE_SMALLEST_RING = [ragged, rewound, past_the_end_of_a_ring, reused_row, shared_prefix]
"""Of which a burst of one is asked too, where all that is not in sight is gone at once."""
