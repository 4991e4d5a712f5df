"""Autoregressive generation over any variant and any store."""

from __future__ import annotations

from .loop import Result, Token, generate, stream
from .stopping import Stopping, Watch

__all__ = ["Result", "Stopping", "Token", "Watch", "generate", "stream"]
