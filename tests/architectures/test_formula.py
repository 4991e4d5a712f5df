"""Formulas are the arithmetic of the family data: exact, and clear about what stands in the way."""

import pytest

from attn_variants.architectures.families import FAMILIES
from attn_variants.architectures.family import KINDS, Computed, Default, Family, Layer
from attn_variants.architectures.formula import evaluate, names


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


def formulas(family: Family) -> list[str]:
    """Every formula of a family."""
    found = [family.layer, family.listed, family.query_heads, family.slots, *family.requires]
    for rule in [*family.fields.values(), *family.transformers.values()]:
        meanings = (rule.missing, rule.null) if isinstance(rule, Default) else (rule,)
        found += [rule.formula] if isinstance(rule, Computed) else [text for text in meanings if isinstance(text, str)]
    layers: list[Layer] = [*family.kinds.values(), *KINDS.values()]
    for layer in layers:
        sizes = [size for entry in layer.entries for size in (entry.heads, entry.dim, entry.when)]
        found += [text for text in (*sizes, layer.window, layer.chunk) if isinstance(text, str)]
    return found


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if isinstance(family, Family)])
def test_every_formula_of_the_data_is_an_expression(model_type: str) -> None:
    family = FAMILIES[model_type]
    assert isinstance(family, Family)
    for formula in formulas(family):
        names(formula)
