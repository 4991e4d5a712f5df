"""The tables of `generate`: counts and speeds, what a draft was worth, and the likeliest tokens of each place."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Row
from .session import Session
from .tables import Column, Table, exact, figure, size

TURN = (Column("turn", "turn"),)
FED = (Column("fed_tokens", "tokens read", exact),)
SAMPLE = (Column("sample", "sample"),)
COUNTS = (
    Column("prompt_tokens", "prompt tokens", exact),
    Column("new_tokens", "new tokens", exact),
    Column("reason", "ended by", right=False),
    Column("ttft_ms", "TTFT ms", figure),
    Column("tokens_per_s", "tokens/s", figure),
    Column("cache_bytes", "cache", size),
    Column("cache_bytes_used", "used", size),
)
CHOICE = {
    None: (),
    "best": (Column("mean_logprob", "log p a token", "{:.3f}".format), Column("chosen", "chosen")),
    "vote": (Column("votes", "votes"), Column("chosen", "chosen")),
}
SPECULATION = (
    Column("acceptance_rate", "accepted", "{:.1%}".format),
    Column("tokens_per_call", "tokens per call", figure),
    Column("tokens_per_s", "tokens/s", figure),
    Column("plain_tokens_per_s", "plain", figure),
    Column("speedup", "speed-up", "{:.2f}".format),
    Column("draft_cost", "draft's step over the model's", figure),
    Column("expected_speedup", "expected speed-up", "{:.2f}".format),
)
SPECULATION_NOTE = (
    "accepted: of the proposals that were tested. tokens per call: of the model, whose every call writes at least one. "
    "plain: the same without the draft, in this run. expected: from the share accepted and the draft's cost, if every "
    "round proposed {tokens} tokens (here {mean:.1f}) and verifying them took as long as one step."
)
PLACES = 20
ALTERNATIVES = (
    Column("place", "place"),
    Column("token", "token", right=False),
    Column("logprob", "log p", "{:.3f}".format),
    Column("likeliest", "likeliest", right=False),
)


def columns(*groups: Sequence[Column]) -> tuple[Column, ...]:
    """All of these, side by side."""
    return tuple(column for group in groups for column in group)


def speculation_table(rows: Sequence[Row], tokens: int) -> Table:
    """What a draft that proposes so many tokens was worth to each sequence."""
    rounds, proposed = (sum(row[name] for row in rows) for name in ("rounds", "proposed"))
    note = SPECULATION_NOTE.format(tokens=tokens, mean=proposed / rounds if rounds else 0)
    headings = TURN if rows and rows[0]["turn"] is not None else SAMPLE if len(rows) > 1 else ()
    return Table("Speculation", columns(headings, SPECULATION), rows, note)


def alternatives_table(session: Session, row: Row) -> Table:
    """The first places of a sequence with their likeliest tokens."""
    where = f", sample {row['sample']}" if session.how.n > 1 else ""
    where += f", turn {row['turn']}" if row["turn"] is not None else ""
    places = [
        {
            "place": place,
            "token": repr(session.tokenizer.decode([id])),
            "logprob": logprob,
            "likeliest": ", ".join(f"{other['text']!r} {_short(other['logprob'])}" for other in likeliest),
        }
        for place, (id, logprob, likeliest) in enumerate(
            zip(row["ids"], row["logprobs"], row["alternatives"], strict=True)
        )
    ]
    more = len(places) - PLACES
    note = f"{more} more places are in --format json." if more > 0 else ""
    return Table(f"Log-probabilities{where}", ALTERNATIVES, places[:PLACES], note)


def _short(logprob: float | None) -> str:
    return "-inf" if logprob is None else f"{logprob:.2f}"
