"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stopping:
    """A sequence ends after `max_new_tokens`, or with one of the `eos` ids, which is then its last.

    eos: one id or several; None takes the model's own, () never ends by one.
    """

    max_new_tokens: int = 128
    eos: int | Iterable[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens ({self.max_new_tokens!r}) must be an integer of at least 0")
        if self.eos is not None:
            ids = (self.eos,) if isinstance(self.eos, int) else tuple(self.eos)
            if wrong := [eos for eos in ids if isinstance(eos, bool) or not isinstance(eos, int)]:
                raise ValueError(f"eos ({wrong[0]!r}) must be token ids, integers")
            object.__setattr__(self, "eos", ids)

    def reason(self, token: int, new_tokens: int, model_eos: tuple[int, ...]) -> str | None:
        """`eos`, `length`, or None to go on, for the newest token of a sequence that has grown by `new_tokens`."""
        ends = model_eos if self.eos is None else self.eos
        assert not isinstance(ends, int)
        if token in ends:
            return "eos"
        return "length" if new_tokens == self.max_new_tokens else None
