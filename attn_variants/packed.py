"""bfloat16 layers that meet a few rows at once, as the verification of drafted tokens gives them, and small batches.

A CPU without instructions for bfloat16 multiplies one row as fast as it reads the weights, and five in three times
that. FBGEMM's products with float16 weights, packed for it, take 1.3 times as long for five rows as for one, and for
one as long as torch's own (measured, AVX2). They add up in float32, and every row is computed as if it were alone.
"""

from __future__ import annotations

import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .linear import COLD_BYTES, GAIN, ROUNDS, seconds

MOST_ROWS = 16
"""With more rows torch's own products are as fast, and with one."""

Weights = tuple[int, int | None]
"""Where a weight lies and which version of it that is."""

_packs: WeakKeyDictionary[nn.Module, tuple[Any, Weights]] = WeakKeyDictionary()
"""Apart from the layers, so that a copy of one has none."""


class PackedLinear(nn.Linear):
    """An `nn.Linear` that `pack_weights` made a packed copy for: few rows meet that, and others the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`; a copy that is not of the present weight is not used."""
        few = x.dtype == torch.bfloat16 and x.shape[-1] < x.numel() <= MOST_ROWS * x.shape[-1]
        if few and not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            packed, of = _packs.get(self, (None, None))
            if packed is not None and of == _identity(self.weight):
                return _product(x, packed)
        return super().forward(x)


def pack_weights(model: nn.Module, rows: int = 5) -> dict[str, str]:
    """Give bfloat16 layers on the CPU a packed copy where it is faster for so many rows, and say which, by shape.

    {"2048 x 768": "packed" or "own"}; nothing where torch has no FBGEMM. The copies are as large as the weights. A
    number below 2**-17 is rounded to a multiple of 2**-24 in them, others are the same; a layer with one that float16
    does not hold has none. What changes a weight later leaves its copy unused. Layers that a subclass or a hook
    watches are left alone.
    """
    chosen: dict[str, str] = {}
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return chosen
    by_shape: dict[str, list[nn.Linear]] = defaultdict(list)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, PackedLinear) and _packable(layer):
            by_shape[f"{layer.out_features} x {layer.in_features}"].append(layer)
    for shape, layers in by_shape.items():
        packs = [_pack(layer) for layer in layers]
        chosen[shape] = "packed" if _faster(layers, packs, rows) else "own"
        for layer, packed in zip(layers, packs, strict=True) if chosen[shape] == "packed" else ():
            layer.__class__ = PackedLinear
            _packs[layer] = packed, _identity(layer.weight)
    return chosen


def _packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    held = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return held and "forward" not in vars(layer) and bool(weight.abs().amax() <= torch.finfo(torch.float16).max)


def _pack(layer: nn.Linear) -> Any:
    with warnings.catch_warnings():
        # It says that it is for inference.
        warnings.simplefilter("ignore")
        bias = None if layer.bias is None else layer.bias.detach().float()
        return torch.ops.quantized.linear_prepack_fp16(layer.weight.detach().float().contiguous(), bias)


def _product(x: Tensor, packed: Any) -> Tensor:
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), packed)
    return product.to(x.dtype)


def _identity(weight: Tensor) -> Weights:
    # Tensors made in inference mode count no versions.
    return weight.data_ptr(), None if weight.is_inference() else weight._version


def _faster(layers: Sequence[nn.Linear], packs: Sequence[Any], rows: int) -> bool:
    """The median over rounds in which the two take turns, over more weights than a cache holds where there are."""
    several = max(1, min(len(layers), COLD_BYTES // layers[0].weight.nbytes))
    weights = [layer.weight.detach() for layer in layers[:several]]
    x = torch.ones(rows, layers[0].in_features, dtype=torch.bfloat16)
    with torch.inference_mode():
        own: Callable[[], object] = lambda: [F.linear(x, weight) for weight in weights]  # noqa: E731
        other: Callable[[], object] = lambda: [_product(x, packed) for packed in packs[:several]]  # noqa: E731
        own(), other()
        turns = [(seconds(other), seconds(own)) for _ in range(ROUNDS)]
    return statistics.median(one / two for one, two in turns) < GAIN
