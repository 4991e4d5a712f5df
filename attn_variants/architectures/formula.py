"""Formulas over a config's fields: how the family data says a size, a window or the kind of a layer.

A formula is one Python expression, such as `"hidden_size / num_attention_heads"` or
`"'full_attention' if (i + 1) % sliding_window_pattern == 0 else 'sliding_attention'"`. Names are fields of the config,
`i` is the layer's index, and `/` divides exactly or refuses, naming both sides. Formulas are written in this package
and are never read from a config.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any


def evaluate(formula: str, scope: Mapping[str, Any]) -> Any:
    """The formula's value, its names looked up in `scope`, which raises KeyError for those of `FUNCTIONS`.

    Raises ValueError where `/` leaves a remainder, an index misses, or a field that is null is computed with.
    """
    try:
        return eval(_compiled(formula), _GLOBALS, scope)
    except (TypeError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"{formula} cannot be computed: {_values(formula, scope)} ({error})") from None


@cache
def names(formula: str) -> tuple[str, ...]:
    """The fields a formula reads."""
    nodes = [node for node in ast.walk(ast.parse(formula, mode="eval")) if isinstance(node, ast.Name)]
    bound = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    return tuple(dict.fromkeys(node.id for node in nodes if node.id not in bound and node.id not in FUNCTIONS))


class _ExactDivision(ast.NodeTransformer):
    """Turns `a / b` into a call that knows how both sides are written."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        texts = [ast.Constant(ast.unparse(side)) for side in (node.left, node.right)]
        return ast.Call(ast.Name("exact", ast.Load()), [node.left, node.right, *texts], [])


@cache
def _compiled(formula: str) -> CodeType:
    tree = _ExactDivision().visit(ast.parse(formula, mode="eval"))
    return compile(ast.fix_missing_locations(tree), formula, "eval")


def _exact(left: int, right: int, left_text: str, right_text: str) -> int:
    if left % right:
        raise ValueError(f"{left_text} ({left}) must be a multiple of {right_text} ({right})")
    return left // right


def _last(kind: str, kinds: list[str], stop: int) -> int:
    """The last layer of a kind before layer `stop`."""
    found = [index for index in range(stop) if kinds[index] == kind]
    if not found:
        raise ValueError(f"no layer before layer {stop} is {kind!r}, whose cache later ones would share")
    return found[-1]


def _runs(runs: list[tuple[list[str], int]], count: int) -> list[str]:
    """Names written as runs, each some names and how often they come, spelled out to at most `count`."""
    spelled: list[str] = []
    for names_of_run, times in runs:
        spelled += names_of_run * min(times, count)
    return spelled[:count]


def _at(value: Any, index: int) -> Any:
    """A layer's own, where a list gives one for every layer; else what all have."""
    return value[index] if isinstance(value, list) else value


def _round_up(size: float, multiple: int) -> int:
    """The next multiple at or above a size."""
    return math.ceil(size / multiple) * multiple


def _linear(inputs: int, outputs: int, bias: bool = False) -> int:
    """Weights of a projection."""
    return inputs * outputs + (outputs if bias else 0)


def _mlp(hidden: int, inner: int, bias: bool = False) -> int:
    """Weights of an MLP of two projections."""
    return _linear(hidden, inner, bias) + _linear(inner, hidden, bias)


def _gated_mlp(hidden: int, inner: int, bias: bool = False) -> int:
    """Weights of an MLP whose inner layer is the product of two projections, one of them a gate."""
    return _mlp(hidden, inner, bias) + _linear(hidden, inner, bias)


FUNCTIONS: dict[str, Any] = {
    "linear": _linear,
    "mlp": _mlp,
    "gated_mlp": _gated_mlp,
    "at": _at,
    "min": min,
    "max": max,
    "len": len,
    "range": range,
    "sorted": sorted,
    "list": list,
    "last": _last,
    "runs": _runs,
    "round_up": _round_up,
    "exact": _exact,
}
_GLOBALS: dict[str, Any] = {"__builtins__": {}, **FUNCTIONS}


def _values(formula: str, scope: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {scope[name]!r}" for name in names(formula))
