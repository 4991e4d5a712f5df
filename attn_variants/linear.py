"""Linear layers as decoding reads them: how their weights lie in memory, and several of one input in one product.

A decode step multiplies every weight by one row and does little else, so it is as fast as weights can be read. Which
order reads faster, row by row or column by column, depends on the machine's matrix products and on the shape, so it is
measured. By columns, weights that meet the same input can also lie side by side and be read in one run: on one CPU the
two 2048 x 768 halves of a SwiGLU took 0.90 ms so and 1.48 by rows, while 768 x 2048 took 0.77 by columns and 0.54 by
rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as everywhere

from .packed import PackedLinear, packed_for
from .turns import cold, faster

Group = tuple[nn.Linear, ...]
"""Layers that read the same input; most stand alone."""

PLAIN = (nn.Linear, PackedLinear)


def project(x: Tensor, *layers: nn.Linear) -> list[Tensor]:
    """Each layer of the one input x, (..., in) to (..., out) each.

    One product where `lay_out_weights` has put their weights side by side; that is looked up in the weights
    themselves, so that a model which was moved, copied or loaded since computes them one by one, as others do. So do
    layers whose packed copies are for so many rows.
    """
    joint = None if packed_for(layers[0], x) else _side_by_side(layers)
    if joint is None:
        return [layer(x) for layer in layers]
    outs = F.linear(x, joint).split([layer.out_features for layer in layers], dim=-1)
    return [out if layer.bias is None else out + layer.bias for out, layer in zip(outs, layers, strict=True)]


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """(B, H, T, N) times (H, N, R) per head, without a copy of the weight per row of the batch.

    On a CPU in float32, for which a copy of the weight is made: torch's own product of a few rows of bfloat16 takes up
    to seven times as long as that and the product (measured).
    """
    batch, heads, tokens, width = x.shape
    rows = x.transpose(0, 1).reshape(heads, batch * tokens, width)
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        product = torch.bmm(rows.float(), weight.float()).to(x.dtype)
    else:
        product = torch.bmm(rows, weight)
    out: Tensor = product.unflatten(1, (batch, tokens)).transpose(0, 1)
    return out


def lay_out_weights(model: nn.Module) -> dict[str, str]:
    """Store the weights of each shape in the faster order, and say which: {"out x in": "rows" or "columns"}.

    Values, shapes, names and gradients stay what they are; strides change. Layers that their module names in
    `same_input`, to be used through `project`, are laid side by side in one storage and called "out + out x in": what
    writes tensors by storage, as safetensors does, wants `.contiguous()` of each. A weight that is also an embedding
    keeps its rows, which lookups read, and so does one that its module names in `by_rows`, for other products than the
    layer's own. On a GPU, whose products read both orders alike, nothing is done.
    """
    by_shape = defaultdict(list)
    for group in _groups(model):
        if all(layer.weight.device.type == "cpu" for layer in group):
            by_shape[_shape(group)].append(group)
    chosen = {}
    for shape, groups in by_shape.items():
        chosen[shape] = "columns" if _columns_are_faster(groups) else "rows"
        for group in groups:
            weights = [layer.weight.detach() for layer in group]
            laid = _by_columns(weights) if chosen[shape] == "columns" else [weight.contiguous() for weight in weights]
            for layer, weight in zip(group, laid, strict=True):
                layer.weight.data = weight
    return chosen


def weights_by_columns(model: nn.Module) -> list[str]:
    """The shapes, as `lay_out_weights` calls them, whose weights lie by columns."""
    return sorted({_shape(group) for group in _groups(model) if not group[0].weight.is_contiguous()})


def _groups(model: nn.Module) -> Iterator[Group]:
    """Every linear layer whose order is free, those of one input together."""
    kept = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        kept |= {id(getattr(module, name).weight) for name in getattr(module, "by_rows", ())}
    taken: set[int] = set()
    for module in model.modules():
        for names in getattr(module, "same_input", ()):
            group = tuple(getattr(module, name) for name in names)
            if all(type(layer) in PLAIN and id(layer.weight) not in kept for layer in group):
                taken |= {id(layer) for layer in group}
                yield group
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module) not in taken and id(module.weight) not in kept:
            yield (module,)


def _shape(group: Group) -> str:
    return f"{' + '.join(str(layer.out_features) for layer in group)} x {group[0].in_features}"


def _side_by_side(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The (sum of out, in) matrix whose rows are these layers' in turn, if memory holds one and nothing watches them.

    Gradients, hooks and compilers want each layer for itself.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or any(map(_watched, layers)):
        return None
    total = sum(layer.out_features for layer in layers)
    first = layers[0].weight
    if first.stride() != (1, total) or first.shape[0] == total:
        return None
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for layer in layers:
        weight = layer.weight
        here = weight.untyped_storage().data_ptr(), weight.storage_offset()
        if weight.stride() != (1, total) or here != (storage, offset):
            return None
        offset += layer.out_features
    return first.as_strided((total, first.shape[1]), (1, total))


def _watched(layer: nn.Linear) -> bool:
    """Whether a call of the layer is more than its product: a class, a forward or hooks of somebody's own."""
    return (
        type(layer) not in PLAIN
        or "forward" in vars(layer)
        or bool(layer._forward_hooks or layer._forward_pre_hooks or everywhere._global_forward_hooks)
        or bool(everywhere._global_forward_pre_hooks)
    )


def _columns_are_faster(groups: Sequence[Group]) -> bool:
    several = cold(len(groups), sum(layer.weight.nbytes for layer in groups[0]))
    rows = [[layer.weight.detach().contiguous() for layer in group] for group in groups[:several]]
    columns = [[_joined(weights)] for weights in rows]
    x = torch.ones(1, rows[0][0].shape[1], dtype=rows[0][0].dtype)
    return faster(lambda: _products(x, columns), lambda: _products(x, rows))


def _products(x: Tensor, groups: Sequence[Sequence[Tensor]]) -> None:
    for weights in groups:
        for weight in weights:
            F.linear(x, weight)


def _by_columns(weights: Sequence[Tensor]) -> list[Tensor]:
    """The same matrices, as runs of rows of one whose columns are contiguous."""
    joint = _joined(weights)
    ends = list(accumulate(len(weight) for weight in weights))
    return [joint[end - len(weight) : end] for weight, end in zip(weights, ends, strict=True)]


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([weight.t() for weight in weights], dim=1).t()
