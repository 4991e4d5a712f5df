"""The benchmark of generation: its page says what its records do, and its ratios are those of their samples."""

from statistics import median

import pytest

from attn_variants.bench import generation, loop_cost, speculating
from attn_variants.bench.results import rendered
from attn_variants.config import Geometry
from attn_variants.generation.speedup import expected_speedup, expected_tokens

TINY = Geometry(
    layers=3, hidden_size=24, heads=6, kv_heads=2, head_dim=8, intermediate_size=40, vocab_size=50, kv_lora_rank=20
)
FACTS = {"versions": {}, "cpu": "a CPU", "cores": 2, "device": "cpu", "threads": 1, "commit": None, "command": "c"}


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTN_VARIANTS_CACHE", "/nowhere")
        patch.setattr("attn_variants.bench.measure.PROBE_SECONDS", 0.001)
        return generation.generation_report(
            "gqa", TINY, TINY, context=7, loop_turns=2, drafts=(2, 3), new=30, turns=2, lengths=(5, 9)
        )


def of(report, section):
    return [row for row in report.rows if row["section"] == section]


def turns(first, second):
    return median(one / other for one, other in zip(first, second, strict=True))


def test_every_ratio_is_the_median_of_its_turns(report):
    for row in of(report, "loop"):
        assert len(row["loop_ms"]) == len(row["bare_ms"]) == 2
        assert row["ratio"] == pytest.approx(turns(row["loop_ms"], row["bare_ms"]))
    for row in of(report, "speculation"):
        assert row["speedup"] == pytest.approx(turns(row["plain_ms"], row["speculative_ms"]))
    for row in of(report, "cache"):
        assert row["ratio"] == pytest.approx(turns(row["recomputed_ms"], row["cached_ms"]))


def test_all_that_was_asked_for_is_measured(report):
    assert len(of(report, "loop")) == 4
    assert [(row["sampling"], row["drafts"]) for row in of(report, "speculation")] == [
        (sampling, drafts) for sampling in ("greedy", "temperature 1") for drafts in (2, 3)
    ]
    assert [row["length"] for row in of(report, "cache")] == [5, 9]


def test_speculation_says_what_the_paper_expects_of_its_acceptance(report):
    for row in of(report, "speculation"):
        rate, drafts, cost = row["acceptance"], row["drafts"], row["cost"]
        assert 0 < rate <= 1 < row["tokens_per_call"] <= drafts + 1
        assert row["expected"] == pytest.approx(expected_speedup(rate, drafts, cost))
        assert row["expected_block"] == pytest.approx(expected_tokens(rate, drafts) / (drafts * cost + row["block"]))
        assert row["new_tokens"] == 30


def test_the_page_holds_the_records(report):
    page = rendered(report, "markdown", FACTS | {"date": "today"})
    for row in of(report, "loop"):
        assert f"| {row['dtype']} | {row['sampling']} |" in page
        assert f"| {row['ratio']:.3f} |" in page
    for row in of(report, "speculation"):
        assert f"| {row['speedup']:.2f} | {row['acceptance']:.2f} | {row['tokens_per_call']:.2f} |" in page
    for row in of(report, "cache"):
        assert f"| {row['ratio']:.2f} |" in page


def test_without_smollm2_the_page_says_so(report):
    assert not of(report, "lookup")
    assert "Not measured: smollm2-135m is not here yet; bring it with `attn-bench fetch smollm2-135m`" in rendered(
        report, "markdown", FACTS | {"date": "today"}
    )


def test_loop_and_bare_steps_take_the_same_passes(monkeypatch):
    """Of one token each, over as many cached tokens."""
    passes = []
    forward = loop_cost.Decoder.forward

    def counted(self, ids, cache=None, **more):
        passes.append((tuple(ids.shape), cache.length(0)))
        return forward(self, ids, cache, **more)

    monkeypatch.setattr(loop_cost.Decoder, "forward", counted)
    next(loop_cost.loop_rows("gqa", TINY, context=7, turns=1, seed=0))
    steps = [((1, 1), held) for held in range(7, 7 + loop_cost.STEPS)]
    assert passes == [((1, 7), 0), *steps * 4]


def test_lookup_is_counted_over_all_prompts():
    model = loop_cost.random_decoder(loop_cost.decoder_config("gqa", TINY), dtype="float32", device="cpu", seed=0)
    row = speculating._compared(model, [[1, 2, 1], [3]], 9, speculating.GREEDY, speculating.Lookup(3), turns=1)
    assert row["same"] is True
    assert row["new_tokens"] == 18
    assert row["speedup"] == row["plain_ms"][0] / row["speculative_ms"][0]
