"""A batch spec is read as written, says itself in its shortest form, and is refused by the piece that is wrong."""

import pytest

from attn_variants.bench.batch_spec import BatchSpec, batch_specs

RIGHT = [
    ("4x8k", ((4, 8192),), 4, 8192, 32768),
    ("8k", ((1, 8192),), 1, 8192, 8192),
    ("512", ((1, 512),), 1, 512, 512),
    ("32x1k+1x32k", ((32, 1024), (1, 32768)), 33, 32768, 65536),
    ("1x32k+32x1k", ((1, 32768), (32, 1024)), 33, 32768, 65536),
    ("2x3+7+1x3", ((2, 3), (1, 7), (1, 3)), 4, 7, 16),
    ("1m", ((1, 1048576),), 1, 1048576, 1048576),
    ("4X8K", ((4, 8192),), 4, 8192, 32768),
    (" 2 x 5 + 1 x 9 ", ((2, 5), (1, 9)), 3, 9, 19),
    ("007x010", ((7, 10),), 7, 10, 70),
]


@pytest.mark.parametrize(("text", "runs", "batch", "longest", "tokens"), RIGHT)
def test_a_spec_is_its_runs_of_rows(text, runs, batch, longest, tokens):
    (spec,) = batch_specs("--batch-spec", [text])
    assert (spec.runs, spec.batch, spec.longest, spec.tokens) == (runs, batch, longest, tokens)
    assert spec.ragged == (len({tokens for _, tokens in runs}) > 1)
    # What it says of itself reads as the same.
    assert batch_specs("--batch-spec", [str(spec)]) == [spec]


@pytest.mark.parametrize(
    ("text", "said"),
    [("4x8192", "4x8k"), ("8k", "1x8k"), ("1024k", "1x1m"), ("1025", "1x1025"), ("1x5+1x5+2x6", "2x5+2x6")],
)
def test_one_batch_is_said_in_one_way(text, said):
    assert str(batch_specs("--batch-spec", [text])[0]) == said


def test_specs_come_by_commas_and_repeats_each_once():
    specs = batch_specs("--batch-spec", ["4x8k, 32x1k+1x32k", "4x8192", "2x1k,"])
    assert [str(spec) for spec in specs] == ["4x8k", "32x1k+1x32k", "2x1k"]


def test_rows_lie_in_the_order_of_the_runs():
    assert BatchSpec(((2, 3), (1, 7), (1, 3))).rows == [(range(2), 3), (range(2, 3), 7), (range(3, 4), 3)]


@pytest.mark.parametrize(
    "wrong",
    ["4x", "x8k", "x", "4*8k", "4x8kb", "4x8g", "1.5k", "-4x8k", "4x-8", "4x8x2", "four", "1e3", "٤x8", "4x8k 2x1k"],
)
def test_what_is_no_run_is_named_with_what_would_be(wrong):
    with pytest.raises(ValueError, match=r"is no batch; give sequences x tokens, as in 4x8k") as refused:
        batch_specs("--batch-spec", ["1x4," + wrong])
    assert f"--batch-spec ({wrong})" in str(refused.value)


@pytest.mark.parametrize("text", ["2x5+", "+2x5", "2x5++3x4", "2x5+3y4"])
def test_the_wrong_piece_of_several_is_named(text):
    piece = next(piece for piece in text.split("+") if piece in ("", "3y4"))
    with pytest.raises(ValueError, match="is no batch") as refused:
        batch_specs("--batch-spec", [text])
    assert f"({text}): {piece!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0x8k", "has 0 sequences"),
        ("4x0", "has 0 tokens"),
        ("4x0k", "has 0 tokens"),
        ("2048m", "has 2147483648 tokens"),
        ("2147483648x1", "has 2147483648 sequences"),
        ("2147483647x1+1x2", "has 2147483648 sequences"),
    ],
)
def test_sizes_that_nothing_has_are_refused(text, named):
    with pytest.raises(ValueError, match=named):
        batch_specs("--batch-spec", [text])


def test_none_at_all_is_refused():
    with pytest.raises(ValueError, match="--batch-spec ' , ' names nothing"):
        batch_specs("--batch-spec", [" , "])
