"""Autoregressive generation over any variant and any store."""

from __future__ import annotations

from .choices import Vote, best_of, majority_vote
from .drafts import ModelDraft
from .lookup import Lookup
from .loop import generate, stream
from .row import Result, Token
from .sampling import GREEDY, Sampling
from .scoring import perplexity, score
from .stopping import Stopping, Watch

__all__ = [
    "GREEDY",
    "Lookup",
    "ModelDraft",
    "Result",
    "Sampling",
    "Stopping",
    "Token",
    "Vote",
    "Watch",
    "best_of",
    "generate",
    "majority_vote",
    "perplexity",
    "score",
    "stream",
]
