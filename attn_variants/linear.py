"""How a linear layer's weight lies in memory, chosen by timing the product that decoding is made of.

A decode step multiplies every weight by one row and does little else, so it is as fast as weights can be read. Which
order reads faster, row by row or column by column, depends on the machine's matrix products and on the shape. So it is
measured: on one CPU a head of 32000 x 768 took 9.1 ms by columns and 13.0 by rows, an MLP's last half of 768 x 2048
took 0.78 and 0.55.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COLD_BYTES = 64 * 2**20
"""Weights of one shape are timed over this many bytes, if there are so many: one in the cores' cache says nothing."""

ROUNDS = 5
GAIN = 0.97
"""Columns have to take less than this share of the rows' time: a tie is not worth a copy."""


def lay_out_weights(model: nn.Module) -> dict[tuple[int, int], str]:
    """Store the weights of each shape in the faster order, and say which: {(out, in): "rows" or "columns"}.

    Values, shapes, names and gradients stay what they are; strides alone change. A weight that is also an embedding
    keeps its rows, which lookups read, and so does one that its module names in `by_rows`, for other products than the
    layer's own. On a GPU, whose products read both orders alike, nothing is done.
    """
    kept = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        kept |= {id(getattr(module, name).weight) for name in getattr(module, "by_rows", ())}
    by_shape = defaultdict(list)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.device.type == "cpu" and id(module.weight) not in kept:
            by_shape[module.out_features, module.in_features].append(module.weight)
    chosen = {}
    for shape, weights in by_shape.items():
        chosen[shape] = "columns" if _columns_are_faster(weights) else "rows"
        for weight in weights:
            weight.data = _by_columns(weight.data) if chosen[shape] == "columns" else weight.data.contiguous()
    return chosen


def weights_by_columns(model: nn.Module) -> list[str]:
    """The shapes, "out x in", whose weights lie by columns."""
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    return sorted({f"{x.out_features} x {x.in_features}" for x in linears if not x.weight.is_contiguous()})


def _columns_are_faster(weights: Sequence[Tensor]) -> bool:
    several = max(1, min(len(weights), COLD_BYTES // weights[0].nbytes))
    rows = [weight.detach().contiguous() for weight in weights[:several]]
    columns = [_by_columns(weight) for weight in rows]
    x = torch.randn(1, rows[0].shape[1], dtype=rows[0].dtype)
    with torch.inference_mode():
        # The two take turns, so that what else the machine does falls on both.
        turns = [(_seconds(lambda: _products(x, rows)), _seconds(lambda: _products(x, columns))) for _ in range(ROUNDS)]
    by_rows, by_columns = (min(times) for times in zip(*turns, strict=True))
    return bool(by_columns < GAIN * by_rows)


def _products(x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _by_columns(weight: Tensor) -> Tensor:
    """The same matrix, its columns contiguous."""
    return weight.t().contiguous().t()
