"""The arithmetic that is shown is the arithmetic that is done."""

import re

import pytest

from attn_variants.architectures import PRESETS
from attn_variants.cache import model_cache
from attn_variants.cache.explain import explained

SIZES = {"batch": 3, "context": 5000}


def test_deepseek_v3_by_hand():
    lines = explained(model_cache("deepseek-v3").pricing(), batch=8, context=131_072)
    assert lines == [
        "61 x full_attention: 61 x (latent 1 x 512 x 2 B x 131,072 tokens + k_rope 1 x 64 x 2 B x 131,072 tokens)"
        " = 9,210,691,584",
        "one sequence: 9,210,691,584 bytes",
        "8 sequences x 9,210,691,584 = 73,685,532,672 bytes (68.625 GiB)",
    ]


def value(line):
    """What the terms of a line multiply and add up to."""
    count, terms = re.fullmatch(r".*?: (\d+) x \((.*)\) = [\d,]+", line).groups()
    total = 0
    for term in re.split(r" \+ ", terms):
        term = re.sub(r" \((window|chunk) [\d,]+\)", "", term).replace(",", "")
        if share := re.search(r"state [\d x]+ (\d+) of its \d+ numbers on a rank x (\d+) B", term):
            total += int(share[1]) * int(share[2])
            continue
        term = re.sub(r" \(\d+ in [^)]*\)", "", term)
        numbers = [int(number) for number in re.findall(r"(?<![\w:])(\d+)(?![\w:])", term)]
        product = 1
        for number in numbers:
            product *= number
        total += product
    return int(count) * total


OPTIONS = {
    "plain": {},
    "int4": {"kv_dtype": "int4:32:100"},
    "two ranks": {"tp": 2},
    "transformers": {"policy": "transformers"},
}
# Heads of 80 numbers take no groups of 32, and odd numbers of heads no two ranks.
REFUSED = {("phi-2", "int4")} | {
    (name, "two ranks") for name in ("falcon-7b", "gpt2-xl", "smollm2-135m", "smollm2-360m")
}


@pytest.mark.parametrize(("name", "option"), sorted(REFUSED))
def test_a_model_that_does_not_come_in_a_format_or_split_is_refused(name, option):
    with pytest.raises(ValueError, match="divide"):
        explained(model_cache(name).pricing(**OPTIONS[option]), **SIZES)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in PRESETS for option in OPTIONS if (name, option) not in REFUSED]
)
def test_every_line_multiplies_out_and_the_lines_add_up(name, option):
    priced = model_cache(name).pricing(**OPTIONS[option])
    *groups, one, total = explained(priced, **SIZES)
    given = [int(line.rsplit(" = ", 1)[1].replace(",", "")) for line in groups]
    for line, result in zip(groups, given, strict=True):
        if "(" in line:
            assert value(line) == result, line
    assert one == f"one sequence: {sum(given):,} bytes"
    assert f"= {priced.fullest(**SIZES):,} bytes" in total


def test_layers_that_keep_the_same_are_one_line():
    """GLM-5.2 keeps an indexer's keys in 21 of its 78 layers, wherever these lie."""
    *groups, _, _ = explained(model_cache("glm-5.2").pricing(), **SIZES)
    assert [line.partition(":")[0] for line in groups] == ["21 x indexed_attention", "57 x indexed_attention"]


def test_a_chunk_is_called_one_and_what_is_pooled_belongs_to_no_window():
    chunked, _ = explained(model_cache("llama-4-scout").pricing(), batch=1, context=9000)[:2]
    assert "(chunk 8,192)" in chunked
    _, pooled = explained(model_cache("deepseek-v4-flash").pricing(), batch=1, context=4096)[:2]
    assert "kv 1 x 512 x 2 B x 128 tokens (window 128) + compressed 1 x 512 x 2 B x 1,024 tokens +" in pooled


def test_blocks_of_vllm_by_hand():
    """Llama-3.1-8B: 8 heads of 128, twice, 2 bytes, blocks of 16 tokens: 65,536 bytes a layer."""
    lines = explained(model_cache("llama-3.1-8b").pricing(policy="vllm"), batch=3, context=1000)
    assert lines == [
        "32 full layers x 65,536 B per block of 16 tokens: 63 blocks",
        "one request: 63 blocks x 2,097,152 bytes = 132,120,576 bytes",
        "3 x 132,120,576 = 396,361,728 bytes (0.369 GiB)",
    ]
