"""What speculation is worth: how often proposals were taken, and the speed that this lets one expect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Rounds:
    """Counts of speculative rounds, a sequence's part in one pass of the model each.

    proposed: tokens that drafts gave.    accepted: those taken.    emitted: tokens that results hold because of them,
    fewer than accepted + 1 where a stop cut the block.
    tested: proposals that the rule was asked about. What comes after a rejection is not, so that the rate of
    acceptance is accepted / tested and not accepted / proposed, which falls with the length of the draft.
    """

    rounds: int = 0
    proposed: int = 0
    tested: int = 0
    accepted: int = 0
    emitted: int = 0

    def add(self, *, proposed: int, accepted: int, emitted: int) -> None:
        """One round. Raises ValueError for more accepted than proposed, or emitted than accepted and one more."""
        if not 0 <= accepted <= proposed or not 0 <= emitted <= accepted + 1:
            raise ValueError(f"a round cannot accept {accepted} of {proposed} proposals and emit {emitted} tokens")
        self.rounds += 1
        self.proposed += proposed
        self.tested += min(accepted + 1, proposed)
        self.accepted += accepted
        self.emitted += emitted

    @property
    def acceptance_rate(self) -> float | None:
        """The share of tested proposals that were taken; None where none was tested."""
        return self.accepted / self.tested if self.tested else None

    @property
    def tokens_per_call(self) -> float | None:
        """Tokens emitted per round: 1 is plain decoding's."""
        return self.emitted / self.rounds if self.rounds else None


def expected_tokens(acceptance_rate: float, drafts: int) -> float:
    """Tokens per pass of the model, (1 - a^(k + 1)) / (1 - a), and k + 1 at a = 1 (arXiv 2211.17192, equation 1).

    It assumes that each of the k proposals is taken with the same probability a, whatever came before.
    Raises ValueError for a rate outside 0 to 1 and for a negative number of drafts.
    """
    if not 0 <= acceptance_rate <= 1:
        raise ValueError(f"acceptance_rate ({acceptance_rate}) must lie between 0 and 1")
    if drafts < 0:
        raise ValueError(f"drafts ({drafts}) must be at least 0")
    # The sum itself: the quotient loses its digits near a = 1.
    return sum(acceptance_rate**taken for taken in range(drafts + 1))


def expected_speedup(acceptance_rate: float, drafts: int, cost: float) -> float:
    """Of speculation over plain decoding, (1 - a^(k + 1)) / ((1 - a) (k c + 1)) (arXiv 2211.17192, theorem 3.8).

    cost: c, the time of a step of the draft over a step of the model. It assumes, beside what `expected_tokens` does,
    that the model's pass over k + 1 tokens takes as long as its step over one, as where reading the weights is all
    that takes time, and that the rule itself takes none. Raises ValueError for a negative cost too.
    """
    if not cost >= 0:
        raise ValueError(f"cost ({cost}) must be at least 0")
    return expected_tokens(acceptance_rate, drafts) / (drafts * cost + 1)
