"""`generate --no-cache`: what the cache saves, token by token."""

import json
from xml.etree import ElementTree

import pytest

from attn_variants import Decoder
from attn_variants.bench.cli import main
from attn_variants.bench.uncached import costs


def test_stretches_cover_the_sequence_by_their_medians():
    cached, uncached = [1.0] * 16, [float(step) for step in range(1, 17)]
    found = costs(10, cached, uncached)
    # Steps 0 and 1, then 2 and 3, ...; the first follows the prompt and one new token.
    assert [row["length"] for row in found] == [11, 13, 15, 17, 19, 21, 23, 25]
    assert [row["uncached_ms"] for row in found] == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5, 13.5, 15.5]
    assert [row["ratio"] for row in found] == [row["uncached_ms"] for row in found]


def test_a_run_that_ended_earlier_is_compared_as_far_as_it_came():
    assert costs(10, [1.0, 2.0, 4.0], [3.0, 8.0]) == [
        {"length": 11, "cached_ms": 1.0, "uncached_ms": 3.0, "ratio": 3.0},
        {"length": 12, "cached_ms": 2.0, "uncached_ms": 8.0, "ratio": 4.0},
    ]
    assert costs(10, [], []) == []


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_both_are_run_told_and_drawn(speaker, capsys, monkeypatch, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    lengths: list[int] = []
    forward = Decoder.forward
    monkeypatch.setattr(
        Decoder,
        "forward",
        lambda self, ids, *rest, **more: lengths.append(ids.shape[1]) or forward(self, ids, *rest, **more),
    )
    plot = tmp_path / f"cost.{suffix}"
    flags = ["--prompt", "abcd", "--max-new-tokens", "4", "--no-cache", "--plot", str(plot)]
    assert main(["generate", "--model", str(speaker), *flags, "--format", "json"]) == 0
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["rows"]
    # A prompt and then token by token; without a cache all of it each time.
    assert lengths == [4, 1, 1, 1, 4, 5, 6, 7]
    assert row["uncached_ids_equal"] is True
    assert len(row["step_ms"]) == len(row["uncached_step_ms"]) == 3
    assert [cost["length"] for cost in row["costs"]] == [5, 6, 7]
    assert printed.err == f"wrote {plot}\n"
    if suffix == "png":
        assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    else:
        assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_a_reader_sees_the_cost_at_several_lengths(speaker, capsys):
    flags = ["--prompt", "abcd", "--max-new-tokens", "20", "--no-cache"]
    assert main(["generate", "--model", str(speaker), *flags]) == 0
    assert "tokens before it" in capsys.readouterr().out
