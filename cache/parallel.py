"""How a cache is split over the ranks of a deployment. Imports no torch.

Four ways, which combine: tensor parallelism (tp) splits heads and keeps what has none whole on every rank; pipeline
stages (pp) split layers; data-parallel attention (dp) splits sequences; context parallelism (cp) splits tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from attn_variants.contract import Entry, State, require_size


@dataclass(frozen=True)
class Split:
    """Ranks each way; ranks in all are their product."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp"):
            require_size(name, getattr(self, name))

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tp * self.pp * self.dp * self.cp

    def heads(self, name: str, heads: int) -> int:
        """Heads of one rank: heads / tp, or one that tp / heads ranks share; anything else is refused."""
        if heads % self.tp and self.tp % heads:
            raise ValueError(f"tp ({self.tp}) must divide {name} ({heads}) or be a multiple of it")
        return max(1, heads // self.tp)

    def entry_heads(self, entry: Entry) -> int:
        """Heads of an entry on one rank; what tensor parallelism does not split is whole on each."""
        return self.heads(f"the heads of {entry.name}", entry.heads) if entry.sharded else entry.heads

    def state_numbers(self, state: State) -> int:
        """Numbers of a state on one rank."""
        if not state.sharded:
            return state.numel
        kept = sum(
            length // heads * self.heads(f"the heads of the {state.name} state", heads)
            for length, heads in state.sharded
        )
        return state.numel // state.shape[0] * kept

    def tokens(self, count: int, rank: int = 0) -> int:
        """Tokens of one context-parallel rank, dealt out in turn; rank 0 has the most."""
        return (count + self.cp - 1 - rank) // self.cp

    def sequences(self, batch: int, rank: int = 0) -> int:
        """Sequences of one data-parallel rank, dealt out in turn; rank 0 has the most."""
        return (batch + self.dp - 1 - rank) // self.dp

    def stages(self, layers: int) -> list[range]:
        """The layers of each pipeline stage, as even as can be, the earlier ones larger."""
        if self.pp > layers:
            raise ValueError(f"pp ({self.pp}) must be at most the number of layers ({layers})")
        size, larger = divmod(layers, self.pp)
        ends = [stage * size + min(stage, larger) for stage in range(self.pp + 1)]
        return [range(start, end) for start, end in itertools.pairwise(ends)]

    def require_query_heads(self, heads: int) -> None:
        """Refuse a tp that does not divide the query heads."""
        if heads % self.tp:
            raise ValueError(f"tp ({self.tp}) must divide num_attention_heads ({heads})")


WHOLE = Split()
"""One rank."""
