"""Autoregressive generation over any variant and any store."""

from __future__ import annotations

from .loop import Result, Token, generate, stream
from .sampling import GREEDY, Sampling
from .scoring import perplexity, score
from .stopping import Stopping

__all__ = ["GREEDY", "Result", "Sampling", "Stopping", "Token", "generate", "perplexity", "score", "stream"]
