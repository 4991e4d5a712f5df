"""What tp must divide besides heads for vLLM to make a model's weights: the widths of MLPs, and the vocabulary.

The cache does not depend on them, but vLLM refuses a split of which they leave a remainder. Only what config.json
states is held against it, and of MLPs only those of model types whose weights are described.
"""

from __future__ import annotations

from attn_variants.architectures import Architecture
from attn_variants.architectures.parameter_count import mlp_widths

from .dtypes import quantization_of
from .pages import ceil_div

VOCABULARY_MULTIPLE = 64
"""Embedding and head are padded to a multiple of this many tokens (layers/vocab_parallel_embedding.py)."""


def require_split(architecture: Architecture, tp: int) -> None:
    """Refuse, in one line, a tp by which vLLM cannot split the weights."""
    if tp == 1:
        return
    assert architecture.fields is not None
    vocabulary = architecture.fields.stated("vocab_size")
    if isinstance(vocabulary, int) and ceil_div(vocabulary, VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE % tp:
        name = architecture.fields.spelled("vocab_size")
        raise ValueError(
            f"tp ({tp}) must divide {name} ({vocabulary}) rounded up to a multiple of {VOCABULARY_MULTIPLE}: "
            "give a tp that does"
        )
    blocks = _weight_blocks(architecture)
    for field, width, dense in mlp_widths(architecture):
        if width % tp:
            raise ValueError(f"tp ({tp}) must divide {field} (an MLP of {width} numbers): give a tp that does")
        # Experts are not held to whole blocks (validate_fp8_block_shape, layers/quantization/utils/fp8_utils.py).
        for block in blocks if dense else ():
            if width // tp % block:
                raise ValueError(
                    f"tp ({tp}) must leave each rank whole blocks of {block} numbers of {field} (an MLP of {width} "
                    "numbers), which quantization_config.weight_block_size scales together: give a smaller tp"
                )


def _weight_blocks(architecture: Architecture) -> list[int]:
    """Sides of the blocks of an fp8 checkpoint that share a scale."""
    quantization, _ = quantization_of(architecture)
    blocks = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or not isinstance(blocks, list):
        return []
    return [block for block in blocks if isinstance(block, int) and block > 0]
