"""What a reader is shown of speeds: a line per contestant, tokens/s over the contexts, and speed at equal memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .budget import equal_memory
from .case import SEES_ALL
from .contestants import Ours
from .results import Row
from .tables import Column, Table, exact, figure, folded, size

SAME = ("subject", "variant", "sees", "dtype", "batch_spec", "batch", "context")
"""What two contestants agree on when they can be compared."""

HELD = ("store", "codec")

COLUMNS = (
    Column("subject", "subject", right=False),
    Column("variant", "variant", right=False),
    Column("sees", "sees", right=False),
    Column("dtype", "dtype", right=False),
    Column("batch_spec", "batch spec", right=False),
    Column("batch", "batch"),
    Column("context", "context", exact),
    Column("store", "store", right=False),
    Column("codec", "codec", right=False),
    Column("by", "by", right=False),
    Column("ttft", "TTFT ms", figure),
    Column("prompt_tokens_per_s", "prompt tok/s", figure),
    Column("ms_p50", "step ms", figure),
    Column("ms_p50_interval", "95 %", lambda interval: " to ".join(map(figure, interval))),
    Column("ms_p95", "p95", figure),
    Column("tokens_per_s", "tok/s", figure),
    Column("fraction_of_limit", "of limit", "{:.0%}".format),
    Column("fraction_of_operator_limit", "of operators'", "{:.0%}".format),
    Column("noise", "A/A", "{:.1%}".format),
    Column("ratio", "x peer", "{:.2f}".format),
    Column("over_full", "step / full's", "{:.2f}".format),
    Column("cache_bytes", "cache", size),
    Column("largest_allocation", "largest alloc.", size),
    Column("unquiet", "", lambda unquiet: "unquiet" if unquiet else "", right=False),
    Column("wrong", "", lambda wrong: "WRONG" if wrong else "", right=False),
    Column("error", "out of memory", lambda error: error.removeprefix("out of memory: "), right=False),
)
NOTE = (
    "TTFT: the prompt and the choice of the first token. step: a token more for every sequence, the median, at the "
    "context and no more than a turn beyond it. 95 %: the median's interval, from the order of the turns' medians; "
    "there is none below six turns. of limit: time to read the weights and the cache once, at the rate measured in "
    "this run, over a step's; of operators': the same for the sum over the operators of reading or multiplying, "
    "whichever takes longer. What the cores' caches hold may be read faster. A/A: what our first line, measured "
    "twice, differed by; ratios closer to 1 are no difference. largest alloc.: of one decode step. Our weights lie by "
    "rows or by columns, or some rows meet a packed copy, as measured faster. unquiet: the cores were not ours alone, "
    "so take no speed from this line. "
    "WRONG: nor from this one, whose logits are not those of the reference."
)


def throughput_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One line per contestant, its prefill and its decode side by side; then tokens/s over the contexts."""
    lines = [
        _line(before if before["phase"] == "prefill" else {}, row, rows)
        for before, row in zip([{"phase": None}, *rows], rows, strict=False)
        if row["phase"] == "decode"
    ]
    where = f"{rows[0]['device']}, {rows[0]['threads']} threads"
    # A sweep that was interrupted measured the ceiling again.
    if rates := sorted({f"{row['read_bandwidth'] / 1e9:.1f}" for row in rows if row["read_bandwidth"]}, key=float):
        where += f", memory read at {' to '.join(dict.fromkeys([rates[0], rates[-1]]))} GB/s"
    if rows[0]["budget"] is not None:
        where += f", each cache within {size(rows[0]['budget'])}"
    columns = [column for column in COLUMNS if any(_said(column, line) for line in lines)]
    same = [column.field for column in columns if column.field in (*SAME, *HELD)]
    yield folded(f"Speed on {where}", columns, lines, NOTE, same=same)
    even = [line for line in lines if not line["error"] and not _is_ragged(line)]
    if rows[0]["budget"] is not None:
        if even:
            yield equal_memory(even)
    elif len({line["context"] for line in even}) > 1:
        yield _over_contexts(even, [column for column in columns if column.field in same])


def _said(column: Column, line: Row) -> bool:
    """Whether a column tells something of this line."""
    if column.field == "batch_spec":
        return _is_ragged(line)
    return line.get(column.field) is not None and not (column.field == "sees" and line["sees"] == str(SEES_ALL))


def _is_ragged(row: Row) -> bool:
    return "+" in row["batch_spec"]


def _line(prefill: Row, decode: Row, rows: Sequence[Row]) -> Row:
    ours = decode["peer"] == Ours.peer
    rivals = [
        row["tokens_per_s"]
        for row in rows
        if row["phase"] == "decode"
        and row["peer"] != Ours.peer
        and row["tokens_per_s"]
        and all(row[name] == decode[name] for name in SAME)
    ]
    return decode | {
        "contestant": f"ours, {decode['setting']}" if ours else decode["peer"],
        "by": f"ours, {decode['setting']}" if ours else f"{decode['peer']}, {decode['setting']}",
        "ttft": prefill.get("ms_p50"),
        "prompt_tokens_per_s": prefill.get("tokens_per_s"),
        "ratio": decode["tokens_per_s"] / max(rivals) if rivals and ours and not decode["error"] else None,
        "wrong": decode["wrong"] or None,
    }


def _over_contexts(lines: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Decode tokens/s, a line per contestant and a column per context."""
    import pandas as pd

    shown = [column for column in columns if column.field not in ("context", "batch_spec")]
    shown.append(Column("contestant", "by", right=False))
    index = [column.field for column in shown]
    wide = pd.DataFrame(lines).pivot_table(index=index, columns="context", values="tokens_per_s", sort=False)
    shown += [Column(str(context), f"at {context:,}", figure) for context in sorted(wide.columns)]
    records = [
        {str(name): None if value != value else value for name, value in line.items()}
        for line in wide.reset_index().to_dict("records")
    ]
    return folded("Decode tokens/s", shown, records, "", same=index[:-1])
