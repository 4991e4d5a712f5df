"""One config's fields by name: what config.json says, and where it is silent, what its family says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import COMMON, Computed, Default, Family, Free, Rule, Value
from .formula import FUNCTIONS, evaluate, names

MOST = 2**31 - 1
MOST_RUNS = 100
RUNS = frozenset({"H_cycles", "L_cycles", "loop_num_passes", "n_recurrent_loops"})
"""How often layers run per token; sizes apart, since every run keeps a cache."""
PER_LAYER = ("i", "layers", "kinds")
"""Names in formulas that no config.json gives."""
MAY_BE_ZERO = frozenset(
    {
        "attn_layer_offset",
        "first_k_dense_replace",
        "hidden_size_per_layer_input",
        "index_skip_topk_offset",
        "index_topk_freq",
        "loop_layer_index_start",
        "max_window_layers",
        "n_input_layers",
        "n_output_layers",
        "n_recurrent_layers",
        "n_shared_experts",
        "num_experts",
        "num_hash_layers",
        "num_kv_shared_layers",
        "qk_rope_head_dim",
        "zero_expert_num",
    }
)


class Fields(dict[str, Any]):
    """Looks a field up in the config, else in its family, checks it, and keeps it.

    `prefix` says in messages where in config.json the fields lie.
    """

    def __init__(self, config: Mapping[str, Any], family: Family, prefix: str = "") -> None:
        super().__init__()
        self.family = family
        self.prefix = prefix
        self._values, self._spelled = _by_field(config, family.aliases, prefix)

    def __missing__(self, name: str) -> Any:
        if name in FUNCTIONS:
            raise KeyError(name)
        value = self[name] = self._find(name)
        return value

    def given(self, name: str) -> bool:
        """Whether config.json gives the field a value."""
        return self._values.get(name) is not None

    def stated(self, name: str) -> Any:
        """What config.json says of a field that no family knows, unchecked; None where it says nothing."""
        return self._values.get(name)

    def spelled(self, name: str) -> str:
        """The field as config.json spells it."""
        return self.prefix + self._spelled.get(name, name)

    def with_changes(self, changes: Mapping[str, Any]) -> Fields:
        """The fields of a layer that has some of its own."""
        return Fields({**self._values, **changes}, self.family, self.prefix)

    def of(self, family: Family) -> Fields:
        """The same config's fields as another family means them."""
        return Fields(self._values, family, self.prefix)

    def whole(self, formula: str, least: int = 1) -> int:
        """A formula's value, which must be an integer of at least `least`."""
        value = evaluate(formula, self)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{formula} comes to {_shown(value)}; it must be an integer of at least {least} "
                f"({self.values_in(formula)})"
            )
        return value

    def names_in(self, formula: str) -> list[str]:
        """The fields a formula reads, as config.json spells them."""
        return [self.spelled(name) for name in names(formula)]

    def values_in(self, formula: str) -> str:
        """The fields a formula reads, with their values: `hidden_size = 96, num_attention_heads = 6`."""
        own = [name for name in names(formula) if name not in PER_LAYER]
        return ", ".join(f"{self.spelled(name)} = {self[name]!r:.40}" for name in own)

    def _find(self, name: str) -> Any:
        rule = self.family.fields.get(name, COMMON.get(name, _UNKNOWN))
        if isinstance(rule, Computed):
            return evaluate(rule.formula, self)
        if isinstance(rule, Free):
            return self._free(name, rule)
        if rule is _UNKNOWN and name not in self._values:
            raise ValueError(f"{self.prefix}{name} is missing, and nothing says what it would be: give it")
        if name not in self._values:
            return self._meaning(rule.missing if isinstance(rule, Default) else rule)
        value = self._values[name]
        if value is not None:
            return self._checked(name, value, rule)
        if not isinstance(rule, Default):
            raise ValueError(f"{self.spelled(name)} is null, which this model_type does not take: give its value")
        return self._meaning(rule.null)

    def _free(self, name: str, rule: Free) -> Any:
        value = self._values.get(name)
        if value is None or isinstance(value, rule.kinds):
            return value
        wanted = " or ".join(_JSON_NAMES[kind] for kind in rule.kinds)
        raise ValueError(f"{self.spelled(name)} ({_shown(value)}) must be {wanted}")

    def _meaning(self, value: Value) -> Any:
        return evaluate(value, self) if isinstance(value, str) else value

    def _checked(self, name: str, value: Any, rule: Rule) -> Any:
        usual = rule.missing if isinstance(rule, Default) else rule
        if isinstance(usual, bool):
            if not isinstance(value, bool):
                raise ValueError(f"{self.spelled(name)} ({_shown(value)}) must be true or false")
        elif isinstance(usual, float):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
                raise ValueError(f"{self.spelled(name)} ({_shown(value)}) must be a positive number")
        else:
            least, most = 0 if name in MAY_BE_ZERO else 1, MOST_RUNS if name in RUNS else MOST
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                wanted = "an integer of at least 0" if least == 0 else "a positive integer"
                raise ValueError(f"{self.spelled(name)} ({_shown(value)}) must be {wanted} and at most {most}")
        return value


_UNKNOWN = Default("unknown")
_JSON_NAMES = {list: "a list", dict: "an object", str: "a string", bool: "true or false", int: "an integer"}


def _by_field(
    config: Mapping[str, Any], aliases: Mapping[str, str], prefix: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """The config's values under the names the family uses, and how config.json spelled those names."""
    values, spelled = dict(config), {}
    for alias, name in aliases.items():
        outer, _, last = alias.rpartition(".")
        place = config.get(outer) if outer else config
        if place is None:
            continue
        if not isinstance(place, Mapping):
            raise ValueError(f"{prefix}{outer} ({_shown(place)}) must be an object")
        if last not in place:
            continue
        if place[last] is None and name in config:
            continue
        if config.get(name) is not None and config[name] != place[last]:
            raise ValueError(
                f"{prefix}{alias} ({_shown(place[last])}) and {prefix}{name} ({_shown(config[name])}) contradict each "
                "other: keep one"
            )
        values[name], spelled[name] = place[last], alias
    return values, spelled


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
