"""torch's fused CPU kernel, asked for the log-sum-exp too: what parts of an attention need to be merged exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN = torch.finfo(torch.float32).min / 2
"""What is added to the score of a hidden key. Beside -inf the kernel gives a row that sees nothing a sum of e^0."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def takes(q: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel computes this: on the CPU, in one dtype, a value no wider than its key.

    Neither gradients, which a merge by log-sum-exps lacks, nor autocast, which does not know the operator.
    """
    if q.device.type != "cpu" or q.dtype not in DTYPES or not q.dtype == key.dtype == value.dtype:
        return False
    if value.shape[-1] > key.shape[-1] or torch.is_autocast_enabled("cpu"):
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, key, value)))


def flash(q: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output (N, heads, T, Dv) and the log-sum-exp of the scores (N, heads, T), in float32 at least.

    q (N, heads, T, Dk), key (N, heads, S, Dk), value (N, heads, S, Dv); mask: true where visible, of a shape that
    broadcasts to (N, heads, T, S). A query that sees nothing gets a mean of all values and a log-sum-exp near `HIDDEN`.
    A value narrower than its key is padded, which copies it.
    """
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - width))
    added = None
    if mask is not None:
        # The kernel takes any mask of float32 for one of the query's dtype, and reads float64 wrongly through it.
        added = torch.where(mask, 0.0, HIDDEN).to(torch.promote_types(q.dtype, torch.float32))
    # It takes the numbers of a vector for neighbours, and reads other memory where they are not.
    q, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, key, value, attn_mask=added, scale=scale)
    return out[..., :width], lse


def parts(q: Tensor, group: int) -> int:
    """Into how many runs the heads that share one key are split: the kernel gives each its own thread."""
    if q.device.type != "cpu":
        return 1
    return math.gcd(group, max(1, threads() // q.shape[0]))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def threads() -> int:
    """How many work, a constant to a compiler."""
    return torch.get_num_threads()
