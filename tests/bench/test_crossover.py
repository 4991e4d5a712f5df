"""The measured choice between MLA's two orders."""

import pytest

from attn_variants.bench import crossover


@pytest.mark.parametrize(
    ("ratios", "tokens"),
    [
        ({16: 0.5, 32: 1.5, 64: 2.0}, 24),
        ({16: 0.5, 32: 0.9, 64: 1.0}, 64),
        ({16: 2.0, 32: 3.0}, 8),
        ({16: 0.5, 32: 0.9}, None),
    ],
)
def test_equal_times_are_found_between_neighbours(ratios, tokens):
    assert crossover.equal_at(ratios) == tokens


def test_every_ratio_is_of_the_absorbed_time_over_the_expanded(monkeypatch):
    """A clock by which absorbed passes take 3 s and others 2 s."""
    monkeypatch.setattr(crossover, "TOKENS", (2, 5))
    asked = []

    def timed(self, device, work):
        asked.append(work)
        work()
        return 3.0 if len(asked) % 2 else 2.0

    monkeypatch.setattr(crossover.Timings, "time", timed)
    (row,) = crossover.crossover_report(heads=[2], cached=[3]).rows
    assert row["ratio_2"] == row["ratio_5"] == 1.5
    assert row["tokens"] == pytest.approx(2 / 1.5)
    # Of 4 keys: 4 * 131072 / (4 * 768 + 131072).
    assert row["share"] == pytest.approx(2 / 1.5 / (524288 / 134144))
