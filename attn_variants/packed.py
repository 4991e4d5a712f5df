"""Layers that meet a few rows at once, as small batches and the verification of drafted tokens give them.

Such products should take little longer than reading the weights does, and torch's own take 2 to 8 times that on a CPU:
its matrix products are made for many rows, and one row alone has a way of its own. Two libraries inside of torch do
better with a copy of the weights that is packed for them (measured for eight rows, AVX2, as a share of the rate at
which memory is read): oneDNN in float32, 0.6 against 0.3, and FBGEMM with float16 weights for bfloat16 and float16, 0.5
against 0.1. FBGEMM adds up in float32, computes every row as if it were alone, and is faster for one row of large
layers too.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .turns import cold, faster

MOST_ROWS = 16
"""With more rows torch's own products are as fast."""

Identity = tuple[tuple[int, int | None] | None, ...]
"""Where a layer's weight and bias lie, and which versions of them these are."""


@dataclass(frozen=True)
class Packed:
    """What multiplies a copy of a weight.     of: the weight it is of.     least: the fewest rows it is for."""

    product: Callable[[Tensor], Tensor]
    of: Identity
    least: int


_packs: WeakKeyDictionary[nn.Module, Packed] = WeakKeyDictionary()
"""Apart from the layers, so that a copy of one has none."""


class PackedLinear(nn.Linear):
    """An `nn.Linear` that `pack_weights` made a packed copy for: few rows meet that, and others the weight."""

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
    if packed is None or not packed.least * x.shape[-1] <= x.numel() <= MOST_ROWS * x.shape[-1]:
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return None
    return packed if x.dtype == layer.weight.dtype and packed.of == _identity(layer) else None


def pack_weights(model: nn.Module, rows: int = 5) -> dict[str, str]:
    """Give layers on the CPU a packed copy where it is faster for so many rows, take others away, and say by shape.

    {"2048 x 768": "packed" or "own"}; nothing where torch lacks the library. The copies are as large as the weights.
    Of bfloat16, a number below 2**-17 is rounded to a multiple of 2**-24 in them, others are the same; a layer with one
    that float16 does not hold has none. What changes a weight later leaves its copy unused, so lay weights out first.
    Layers that a subclass or a hook watches are left alone, and those that their module names in `by_rows`.
    """
    chosen: dict[str, str] = {}
    by_shape: dict[str, list[nn.Linear]] = defaultdict(list)
    others = {id(getattr(module, name)) for module in model.modules() for name in getattr(module, "by_rows", ())}
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and id(layer) not in others and _packable(layer):
            by_shape[f"{layer.out_features} x {layer.in_features}"].append(layer)
    for shape, layers in by_shape.items():
        products = [_PRODUCTS[layer.weight.dtype](layer, rows) for layer in layers]
        chosen[shape] = "packed" if _faster(layers, products, rows) else "own"
        least = 1 if chosen[shape] == "packed" and _faster(layers, products, 1) else 2
        for layer, product in zip(layers, products, strict=True):
            if chosen[shape] == "packed":
                layer.__class__ = PackedLinear
                _packs[layer] = Packed(product, _identity(layer), least)
            else:
                layer.__class__ = nn.Linear
                _packs.pop(layer, None)
    return chosen


def _packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    if type(layer) not in (nn.Linear, PackedLinear) or "forward" in vars(layer) or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.float32:
        return bool(torch.backends.mkldnn.is_available())
    if weight.dtype not in _PRODUCTS or "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    return bool(weight.abs().amax() <= torch.finfo(torch.float16).max)


def _fbgemm(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
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


def _onednn(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """With a copy of the weight in blocks for so many rows."""
    packed: Any = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), rows)
    bias = None if layer.bias is None else layer.bias.detach()

    def product(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return product


_PRODUCTS: dict[torch.dtype, Callable[[nn.Linear, int], Callable[[Tensor], Tensor]]] = {
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


def _faster(layers: Sequence[nn.Linear], products: Sequence[Callable[[Tensor], Tensor]], rows: int) -> bool:
    several = cold(len(layers), layers[0].weight.nbytes)
    weights = [layer.weight.detach() for layer in layers[:several]]
    x = torch.ones(rows, layers[0].in_features, dtype=weights[0].dtype)
    return faster(
        lambda: [product(x) for product in products[:several]], lambda: [F.linear(x, each) for each in weights]
    )
