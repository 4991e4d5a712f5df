"""The page of cache sizes: it covers the presets, says why a figure is missing, and shows what the command prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attn_variants.architectures import PRESETS
from attn_variants.bench import sizes_page, sizes_policies, sizes_traps, sizes_walk
from attn_variants.bench.printed import PRINTED
from attn_variants.cache import model_cache


@pytest.fixture(scope="module")
def page():
    return sizes_page.page()


def cells(page, first):
    """The cells of the page's table row that begins with this one, in the last table that has it."""
    (*_, line) = re.findall(rf"^\| {re.escape(first)} \|.*\|$", page, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_a_row_for_every_preset_and_these_are_at_least_60(page):
    table = page.split(f"## {len(PRESETS)} models\n")[1].split("\n## ")[0]
    assert [name for name in re.findall(r"^\| (\S+) \|", table, re.MULTILINE) if name in PRESETS] == list(PRESETS)
    assert len(PRESETS) >= 60


def test_a_row_by_hand(page):
    """Gemma-3-27B: 16 heads of 128, twice, 2 bytes: 8192 bytes; 10 layers of 32,768 tokens and 52 of 1024."""
    full, window = 10 * 8192 * 32768, 52 * 8192 * 1024
    assert (full + window) / 2**30 == pytest.approx(2.906, abs=1e-3)
    row = cells(page, "gemma-3-27b")
    assert row[:6] == ["gemma-3-27b", "62", "81,920", "0", "2.906 GiB", "15.5 GiB"]


def test_every_dash_names_its_reason(page):
    table = page.split(f"## {len(PRESETS)} models\n")[1].split("\n## ")[0]
    named = set(re.findall(r"\| - \((\d+)\) ", table))
    assert named
    assert named == set(re.findall(r"^(\d+)\. .+\.$", table, re.MULTILINE))
    assert "| - |" not in table


def test_a_refused_question_is_answered_by_the_reason_and_the_others_by_bytes():
    found = sizes_policies.answers("deepseek-v4-flash", 1000)
    assert found["allocated"] == "layer 2 pools every 4 tokens into one, which no store holds"
    assert found["ideal"] == model_cache("deepseek-v4-flash").bytes(context=1000)
    found = sizes_policies.answers("kimi-k3", 1000)
    assert found["vllm_planned"] > found["vllm_held"]


def test_growth_of_pooled_tokens_is_the_mean_of_a_stride():
    """DeepSeek-V4-Flash: 512 + 128 numbers in 21 layers every 4 tokens, 512 in 20 every 128, 2 bytes each."""
    assert sizes_policies.growth_at("deepseek-v4-flash", 4096) == 21 * 640 * 2 // 4 + 20 * 512 * 2 // 128


def test_every_trap_is_one():
    found = list(sizes_traps.traps())
    assert all(trap.wrong != trap.right for trap in found)
    by_mistake = {trap.mistake: (trap.wrong, trap.right) for trap in found}
    # 61 layers of 128 heads of 7168 / 128 numbers, twice, against 61 of 512 + 64; 2 bytes each.
    assert by_mistake["MLA priced as multi-head attention"] == (1_748_992, 70_272)
    # 80 layers of one head of 128, twice, 2 bytes, over 131,072 tokens.
    assert by_mistake["K // tp heads a rank, with tp above K"] == (0, 80 * 2 * 128 * 2 * 131_072)


def test_the_walk_s_plans_by_hand():
    """61 x 576 x 2 bytes x 131,072 tokens a rank; a thousand 4-bit numbers on 8 ranks are 63 bytes, rounded up."""
    sequence = 61 * 576 * 2 * 131_072
    plan = sizes_walk.Plan("tight", gpus=8, memory=2 * sequence + 63, bits=4)
    assert sizes_walk.fitting(plan, 1000)["sequences"] == 2
    assert sizes_walk.fitting(plan, 1017)["sequences"] == 1
    assert sizes_walk.fitting(plan, 10**12)["sequences"] == 0


def test_the_walk_shows_what_the_command_prints(capsys):
    lines = list(sizes_walk.transcript("memory --model kimi-k2 --context 131072 --tp 8 --budget 1GiB --weights auto"))
    assert lines[1].startswith("$ attn-bench memory --model kimi-k2 ")
    assert any("does not fit: the weights alone are 238 GiB over the budget" in line for line in lines)
    assert capsys.readouterr() == ("", "")


def test_the_page_lists_every_printed_figure_that_does_not_recompute(page):
    listed = page.split("## Printed figures that do not recompute\n")[1]
    assert listed.count("\n- ") == len(PRINTED)
    assert all(f"- {figure.source}, {figure.claim}: " in listed for figure in PRINTED)


def test_links_lead_to_sections(page):
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.+)$", page, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == anchors


def test_the_command_writes_the_page_whole_and_imports_no_torch(tmp_path):
    path = tmp_path / "page.md"
    code = (
        "import sys; from attn_variants.bench import sizes_page; sys.argv = ['page', '--output', sys.argv[1]]; "
        "sizes_page.main(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=Path(__file__).parents[2])
    assert path.read_text(encoding="utf-8").startswith("# How big is my KV cache?\n")
