"""The README's Python runs, and prints what it says."""

import ast
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
MODULES, HYBRID, DECODER, PROMPT, OWN_MODEL, GENERATION = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def printed(code: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    exec(compile(ast.parse(code), "README.md", "exec"), {})
    return capsys.readouterr().out.splitlines()


def test_the_modules_map_hidden_states_to_hidden_states(capsys):
    assert printed(MODULES, capsys) == ["torch.Size([2, 16, 512]) torch.Size([2, 16, 512])"]


def test_layers_may_differ_and_share_a_cache(capsys):
    assert printed(HYBRID, capsys) == ["torch.Size([1, 20, 100])", "[64, 64, 0]"]


def test_the_cache_gives_the_uncached_logits_and_the_formulas_bytes(capsys):
    difference, sizes = printed(DECODER, capsys)
    assert float(re.fullmatch(r"tensor\((.*)\)", difference)[1]) < 1e-5
    # 4 layers x 2 rows x 128 tokens x (64 + 16) numbers x 4 bytes, twice.
    assert sizes == "327680 327680"


def test_a_prompt_is_shared_and_saved(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert printed(DECODER + PROMPT, capsys)[2:] == ["tensor([10, 10,  6]) tensor([10])"]
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.safetensors"]


def test_layers_of_somebody_s_own_share_a_cache_and_a_step(capsys):
    assert printed(OWN_MODEL, capsys) == ["tensor([11, 11])", "torch.Size([2, 10, 256])"]


def test_generation_says_what_its_comments_say(capsys):
    *lines, scored = printed(GENERATION, capsys)
    assert lines == ["[8, 8] length", "True", "[0, 1, 2]", "True", "True"]
    shape, _, perplexity = scored.rpartition(" ")
    assert shape == "torch.Size([1, 4])"
    assert 32 < float(perplexity) < 512
