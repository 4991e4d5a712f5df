"""How positions turn queries and keys: the config of rotary embeddings, torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_variants.contract import require_size

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency, pairing, the part of the head that turns, and how it is stretched.

    interleaved: pairs are (x0, x1), (x2, x3), ... (DeepSeek); else the halves pair up, (x0, x[n/2]) (Llama).
    partial_rotary_factor: the leading share of the head dim that turns; the rest passes through.
    rope_type: `default`, `linear`, `llama3` or `yarn`; the remaining fields are the parameters of those kinds, with the
    names and defaults of published configs. `attention_factor` None lets YaRN compute it from the mscales.
    """

    rope_theta: float = 10000.0
    interleaved: bool = False
    partial_rotary_factor: float = 1.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {self.rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta ({self.rope_theta}) must be positive")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor ({self.partial_rotary_factor}) must be above 0 and at most 1")
        if self.rope_type != "default" and not self.factor >= 1:
            raise ValueError(f"factor ({self.factor}) of rope_type {self.rope_type!r} must be at least 1")
        if self.rope_type in ("llama3", "yarn"):
            require_size("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor ({self.low_freq_factor}), "
                "and both above 0"
            )
        if self.rope_type == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_fast ({self.beta_fast}) must be at least beta_slow ({self.beta_slow}), and both above 0"
            )

    def rotary_dim(self, head_dim: int, name: str = "head_dim") -> int:
        """Leading numbers of a head that turn; they come in pairs."""
        dim = int(head_dim * self.partial_rotary_factor)
        if dim < 2 or dim % 2:
            part = f" * partial_rotary_factor ({self.partial_rotary_factor})" if self.partial_rotary_factor != 1 else ""
            raise ValueError(
                f"the rope dim, {name} ({head_dim}){part} = {dim}, must be even and at least 2, since rotary numbers "
                f"turn in pairs: give another {name}"
            )
        return dim

    def softmax_mscale(self) -> float:
        """The factor by which YaRN's `mscale_all_dim` multiplies MLA's softmax scale; DeepSeek-V3's `mscale ** 2`."""
        if self.rope_type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature, 0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
