"""Which attention kernels an H100 runs for a layer, as far as they decide the size of a block.

Each table is in the order in which vLLM tries (_get_backend_priorities, platforms/cuda.py): the first that takes the
layer's width, dtype and, where one is given, block size is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .dtypes import FP8, KV_DTYPES, SIXTEEN, KVDtype


@dataclass(frozen=True)
class Kernel:
    """An attention backend: the dtypes and head sizes it takes, and the number of tokens its blocks are multiples of.

    largest: the largest block it reads unsplit, None where it reads any; sliding layers then have no larger one.
    """

    name: str
    multiple: int
    dtypes: frozenset[str]
    takes: Callable[[int], bool] = lambda head_size: True
    largest: int | None = None


PER_TOKEN_HEAD = frozenset(name for name in KV_DTYPES if name.endswith("per_token_head"))
LATENTS = (320, 512, 576)

GROUPED = (
    Kernel("FLASH_ATTN", 16, SIXTEEN, lambda size: size % 8 == 0 and size <= 512),
    Kernel("FLASH_ATTN", 16, FP8, lambda size: size % 8 == 0 and size <= 256),
    # FlashAttention 4 reads fp8 in tiles of 64 tokens.
    Kernel("FLASH_ATTN", 64, FP8, lambda size: size == 512),
    Kernel("FLASHINFER", 16, SIXTEEN | FP8 | {"fp8_e5m2"}, lambda size: size in (64, 128, 256, 512), largest=64),
    Kernel("TRITON_ATTN", 16, SIXTEEN | FP8 | {"fp8_e5m2"} | PER_TOKEN_HEAD, lambda size: size >= 32),
    Kernel("FLEX_ATTENTION", 16, SIXTEEN),
)
LATENT = (
    Kernel("FLASH_ATTN_MLA", 16, SIXTEEN, lambda size: size in LATENTS),
    Kernel("FLASHMLA", 64, SIXTEEN | FP8, lambda size: size in LATENTS),
    Kernel("TRITON_MLA", 16, SIXTEEN | FP8),
)
INDEXED_LATENT = (
    Kernel("FLASH_ATTN_MLA_SPARSE", 64, SIXTEEN),
    # It takes fp8 as another name of its records, and no other name (backends/mla/flashmla_sparse.py).
    Kernel("FLASHMLA_SPARSE", 64, frozenset({"fp8", "fp8_ds_mla"}), lambda size: size == 576),
    Kernel("FLASHINFER_MLA_SPARSE_SM90", 64, FP8, lambda size: size == 576),
)
INDEXED = (Kernel("MINIMAX_M3_SPARSE", 128, SIXTEEN | FP8 | {"fp8_e5m2"}),)
STRIDED = (Kernel("FLASHMLA_SPARSE_DSV4", 256, frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"})),)


def kernel_for(kernels: tuple[Kernel, ...], head_size: int, kv_dtype: KVDtype, block_size: int | None) -> Kernel:
    """The first kernel that takes the layer; ValueError, naming what would help, where none does."""
    fitting = [kernel for kernel in kernels if kv_dtype.name in kernel.dtypes and kernel.takes(head_size)]
    if not fitting:
        named = sorted({name for kernel in kernels if kernel.takes(head_size) for name in kernel.dtypes})
        taken = f"give one of {', '.join(named)}" if named else "no other dtype is taken either"
        raise ValueError(
            f"kv_dtype ({kv_dtype.name!r}) is taken by no attention backend for heads of {head_size} numbers; {taken}"
        )
    for kernel in fitting:
        if block_size is None or block_size % kernel.multiple == 0:
            return kernel
    least = min(kernel.multiple for kernel in fitting)
    raise ValueError(
        f"block_size ({block_size}) is taken by no attention backend for heads of {head_size} numbers in "
        f"{kv_dtype.name}; give a multiple of {least}, or None"
    )
