"""Formulas are the arithmetic of the family data, exact and clear about what stands in the way; the data is whole."""

from collections.abc import Iterator

import pytest

from attn_variants.architectures import architecture, reader
from attn_variants.architectures.families import (
    FAMILIES,
    classic,
    convolutional,
    latent,
    linear,
    nested,
    plain,
    shared,
    sparse,
    state_spaces,
    windowed,
)
from attn_variants.architectures.family import COMMON, HEADS, Computed, Default, Family, grouped, sizes
from attn_variants.architectures.formula import evaluate, names
from attn_variants.contract import Entry


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("hidden_size / heads", 16),
        ("2 * hidden_size // 5", 38),
        ("'full' if (i + 1) % 3 == 0 else 'sliding'", "sliding"),
        ("pattern[i]", "b"),
        ("max(heads, 7) if window is None else window", 7),
    ],
)
def test_a_formula_is_an_expression_over_fields(formula: str, value: object) -> None:
    assert evaluate(formula, {"hidden_size": 96, "heads": 6, "i": 1, "pattern": "abc", "window": None}) == value


def test_division_is_exact_or_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_size \(100\) must be a multiple of heads \(6\)"):
        evaluate("2 * (hidden_size / heads)", {"hidden_size": 100, "heads": 6})


@pytest.mark.parametrize(
    ("formula", "says"),
    [
        ("window + 1", "window = None"),
        ("kinds[i]", "kinds = [], i = 4"),
        ("i % pattern", "i = 4, pattern = 0"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_the_values(formula: str, says: str) -> None:
    with pytest.raises(ValueError, match="cannot be computed") as refusal:
        evaluate(formula, {"window": None, "kinds": [], "i": 4, "pattern": 0})
    assert says in str(refusal.value)


def test_the_names_of_a_formula_are_its_fields() -> None:
    assert set(names("max(heads, 7) if window is None else window")) == {"heads", "window"}


def formulas(family: Family) -> Iterator[str]:
    """Every formula of a family, as the model and as transformers' cache have it."""
    for read in (family, family.as_held()):
        yield from (read.count, read.layer, read.listed, read.slots, *read.requires)
        yield from [read.shares] if read.shares else []
        yield from [read.query_heads] if HEADS in read.fields else []
        for rule in read.fields.values():
            if isinstance(rule, Computed):
                yield rule.formula
            else:
                meanings = (rule.missing, rule.null) if isinstance(rule, Default) else (rule,)
                yield from (text for text in meanings if isinstance(text, str))
        for layer in read.kinds.values():
            stride = layer.stride
            entries = [entry for record in layer.records for entry in record]
            entries += [*stride.pooled, *stride.pending, *stride.overlap] if stride else []
            sizes = [size for entry in entries for size in (entry.heads, entry.dim, entry.when)]
            sizes += [size for state in layer.states for size in (*state.shape, state.when)]
            sizes += [layer.window, layer.chunk, stride.every if stride else None]
            yield from (text for text in sizes if isinstance(text, str))


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if isinstance(family, Family)])
def test_every_formula_of_the_data_is_an_expression(model_type: str) -> None:
    """And reads only fields that its family or every config has."""
    family = FAMILIES[model_type]
    assert isinstance(family, Family)
    known = {*family.fields, *COMMON, "i", "layers", "kinds"}
    for formula in formulas(family):
        assert set(names(formula)) <= known, formula


def test_no_model_type_has_two_entries() -> None:
    files = (classic, convolutional, latent, linear, nested, plain, shared, sparse, state_spaces, windowed)
    assert sum(len(file.FAMILIES) for file in files) == len(FAMILIES)


def test_a_model_is_added_by_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Family(
        sizes(6, 48, 6, kv=2, window_length=7, full_every=3),
        layer="'full_attention' if (i + 1) % full_every == 0 else 'sliding_attention'",
        kinds={"sliding_attention": grouped(window="window_length")},
    )
    monkeypatch.setattr(reader, "FAMILIES", {"newcomer": entry})
    found = architecture({"model_type": "newcomer", "window_length": 9})
    assert [spec.window for spec in found.layers] == [9, 9, None, 9, 9, None]
    assert found.layers[0].entries == (Entry("k", 2, 8), Entry("v", 2, 8))
