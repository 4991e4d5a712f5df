"""Linear layers on CPUs, whose products are slow in torch's own hands but for one row: copies packed for others.

Small batches, the verification of drafted tokens and prompts bring several rows at once. Two libraries inside of torch
multiply them faster with a copy of the weights that is packed for them (measured with AVX2 and two threads): oneDNN in
float32, eight rows at 0.6 of the rate at which memory is read instead of 0.3; and FBGEMM with float16 weights where the
CPU has no instructions for bfloat16, eight rows at 0.5 instead of 0.1, a prompt at 120 GFLOP/s instead of 20. FBGEMM
adds up in float32 and computes every row as if it were alone.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .turns import ROUNDS, cold, faster

FEW_ROWS = 16
"""The most rows that a copy is for which many rows do not want."""
MANY_ROWS = 64
"""Enough to tell how a prompt's rows are multiplied."""

Identity = tuple[tuple[int, int | None] | None, ...]
"""Where a layer's weight and bias lie, and which versions of them these are."""


Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Packed:
    """What multiplies a copy of a weight.

    of: the weight it is of.     least, most: the rows that it is for.
    """

    product: Product
    of: Identity
    least: int
    most: float


_packs: WeakKeyDictionary[nn.Module, Packed] = WeakKeyDictionary()
"""Apart from the layers, so that a copy of one has none."""


class PackedLinear(nn.Linear):
    """An `nn.Linear` that `pack_weights` made a packed copy for: some numbers of rows meet that, others the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        packed = packed_for(self, x)
        return super().forward(x) if packed is None else packed.product(x)


def packed_for(layer: nn.Module, x: Tensor) -> Packed | None:
    """The layer's copy if x (..., in) has as many rows as it is for; not one that is of another weight than it has now.

    Nor where gradients, autocast or a compiler want the weight itself.
    """
    if type(layer) is not PackedLinear or torch.compiler.is_compiling():
        return None
    packed = _packs.get(layer)
    if packed is None or not packed.least * x.shape[-1] <= x.numel() <= packed.most * x.shape[-1]:
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return None
    return packed if x.dtype == layer.weight.dtype and packed.of == _identity(layer) else None


def pack_weights(model: nn.Module, rows: int = 5) -> dict[str, str]:
    """Give layers on the CPU a packed copy where it is faster for so many rows, take others away, and say by shape.

    {"2048 x 768": "packed" or "own"}; nothing where torch lacks the library. In bfloat16 and float16 a copy that is
    faster for a prompt is made too. The copies are as large as the weights. Of bfloat16, a number below 2**-17 is
    rounded to a multiple of 2**-24 in them, others are the same; a layer with one that float16 does not hold has none.
    What changes a weight later leaves its copy unused, so lay weights out first. Layers that a subclass or a hook
    watches are left alone.
    """
    chosen: dict[str, str] = {}
    by_shape: dict[str, list[nn.Linear]] = defaultdict(list)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and _packable(layer, rows):
            by_shape[f"{layer.out_features} x {layer.in_features}"].append(layer)
    for shape, layers in by_shape.items():
        products = [_PRODUCTS[layer.weight.dtype](layer, rows) for layer in layers]
        span = _rows(layers, products, rows)
        chosen[shape] = "own" if span is None else "packed"
        for layer, product in zip(layers, products, strict=True):
            if span is None:
                layer.__class__ = nn.Linear
                _packs.pop(layer, None)
            else:
                layer.__class__ = PackedLinear
                _packs[layer] = Packed(product, _identity(layer), *span)
    return chosen


def _rows(layers: Sequence[nn.Linear], products: Sequence[Product], rows: int) -> tuple[int, float] | None:
    """The fewest and the most rows that these products are for; None if they are not worth their memory."""
    halves = layers[0].weight.dtype != torch.float32
    one = halves and _faster(layers, products, 1)
    few = one if rows == 1 else _faster(layers, products, rows)
    if not few and not halves:
        return None
    many = _faster(layers[:1], products[:1], MANY_ROWS)
    if not few and not many:
        return None
    return 1 if one else 2 if few else MANY_ROWS, math.inf if many else FEW_ROWS


def _packable(layer: nn.Linear, rows: int) -> bool:
    weight = layer.weight
    if type(layer) not in (nn.Linear, PackedLinear) or "forward" in vars(layer) or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.float32:
        # One row is served as fast by weights that are laid out.
        return rows > 1 and bool(torch.backends.mkldnn.is_available())
    if weight.dtype not in _PRODUCTS or "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    return bool(weight.abs().amax() <= torch.finfo(torch.float16).max)


def _fbgemm(layer: nn.Linear, rows: int) -> Product:
    """With a copy of the weight in float16."""
    with warnings.catch_warnings():
        # It says that it is for inference.
        warnings.simplefilter("ignore")
        bias = None if layer.bias is None else layer.bias.detach().float()
        packed = torch.ops.quantized.linear_prepack_fp16(layer.weight.detach().float().contiguous(), bias)

    def product(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), packed)
        return out.to(x.dtype)

    return product


def _onednn(layer: nn.Linear, rows: int) -> Product:
    """With a copy of the weight in blocks for so many rows."""
    packed: Any = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), rows)
    bias = None if layer.bias is None else layer.bias.detach()

    def product(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return product


_PRODUCTS: dict[torch.dtype, Callable[[nn.Linear, int], Product]] = {
    torch.float32: _onednn,
    torch.bfloat16: _fbgemm,
    torch.float16: _fbgemm,
}


def _identity(layer: nn.Linear) -> Identity:
    # Tensors made in inference mode count no versions.
    return tuple(
        None if each is None else (each.data_ptr(), None if each.is_inference() else each._version)
        for each in (layer.weight, layer.bias)
    )


def _faster(layers: Sequence[nn.Linear], products: Sequence[Product], rows: int) -> bool:
    several = cold(len(layers), layers[0].weight.nbytes)
    weights = [layer.weight.detach() for layer in layers[:several]]
    x = torch.ones(rows, layers[0].in_features, dtype=weights[0].dtype)
    # Many rows take long, and are alike.
    rounds = ROUNDS if rows < MANY_ROWS else 3
    return faster(
        lambda: [product(x) for product in products[:several]],
        lambda: [F.linear(x, weight) for weight in weights],
        rounds,
    )
