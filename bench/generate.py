"""`generate`: what a model writes, as it comes, and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attn_variants.architectures import decoder_config
from attn_variants.cache import cache_shapes
from attn_variants.checkpoints import Tokenizer, load_tokenizer
from attn_variants.checkpoints.fetch import model_folder
from attn_variants.decoder import Decoder
from attn_variants.generation import Result, Sampling, Stopping, best_of, majority_vote
from attn_variants.packed import pack_weights

from .conversation import opening, turns
from .generate_flags import How, Prompting
from .generate_tables import CHOICE, COUNTS, FED, SAMPLE, TURN, alternatives_table, columns, speculation_table
from .options import Stored
from .results import Report, Row
from .session import Session, require_memory, slots_for
from .speculated import Clocked, draft_folder, draft_of, speeds
from .tables import Table
from .timed import Say, Timed, silent
from .uncached import cost_table, costs, draw


def generate_report(
    model: str,
    prompting: Prompting,
    text: str,
    *,
    sampling: Sampling,
    stopping: Stopping,
    how: How,
    stored: Stored,
    dtype: str | None,
    device: str,
    say: Say,
) -> Report:
    """What follows a text, or a conversation; `say` is given the answers, one sample alone piece by piece.

    model: a Hugging Face folder, or the name of a model that was fetched. Raises ValueError before weights are read for
    what cannot be loaded, a prompt without a token, a store that cannot be made or is larger than memory, and a draft
    with another vocabulary. `failures` names the sequences that ended in an error.
    """
    folder = model_folder(model)
    config, tokenizer = decoder_config(folder), load_tokenizer(folder)
    cache_shapes(config.cache_specs, batch=1, capacity=1, **vars(stored))
    drafting = None if how.speculative is None else draft_folder(how.speculative, config, tokenizer)
    ids = _ids(tokenizer, prompting, text)
    slots = slots_for(stopping, tokenizer, len(ids))
    require_memory(config, slots, how, stored, dtype=dtype, device=device)
    if slots >= config.max_position_embeddings:
        most = config.max_position_embeddings
        print(f"the model knows sequences of {most} tokens, and this may come to {slots + 1}", file=sys.stderr)
    draft = None
    if how.speculative is not None:
        draft = draft_of(drafting, how.draft_tokens, dtype=dtype, device=device)
    decoder = Decoder.from_pretrained(folder, dtype=dtype, device=device).eval()
    # Samples, and the tokens of a draft that are verified, come as a few rows at once.
    together = how.n * (1 if draft is None else draft.tokens + 1)
    if together > 1:
        pack_weights(decoder, together)
    session = Session(model, decoder, tokenizer, draft, sampling, stopping, how, stored)
    title = f"{Path(model).name} on {device}"
    if prompting.converses:
        rows = list(turns(session, prompting.system, say))
        report = Report(rows, [Table(title, columns(TURN, FED, COUNTS), rows)])
    else:
        report = _answered(session, ids, slots, title, say)
    if draft is not None:
        report.tables.append(speculation_table(report.rows, draft.tokens))
    if how.alternatives:
        report.tables += [alternatives_table(session, row) for row in report.rows]
    report.failures += [row["error"] for row in report.rows if row["reason"] == "error"]
    return report


def _ids(tokenizer: Tokenizer, prompting: Prompting, text: str) -> list[int]:
    """The prompt; none of a conversation that is yet to come, whose template is tried out."""
    if not prompting.chat:
        ids = tokenizer.encode(text)
    else:
        try:
            ids = tokenizer.chat([*opening(prompting.system), {"role": "user", "content": text}])
        except ValueError as error:
            raise ValueError(f"--chat: {error}") from None
    if not ids:
        raise ValueError(f"{'--prompt' if prompting.file is None else '--file'} is empty: no token is in it")
    return [] if prompting.converses else ids


def _answered(session: Session, ids: Sequence[int], slots: int, title: str, say: Say) -> Report:
    """One prompt, as often as is asked for, and then the runs that it is compared with."""
    how = session.how
    draft = None if session.draft is None else Clocked(session.draft)
    cache = session.cache(ids, slots=slots)
    timed = Timed().take(session.tokens(ids, cache, draft=draft), say if how.n == 1 else silent)
    rows = [session.row(result, timed, number, cache) for number, result in enumerate(timed.results)]
    if how.n == 1:
        say("\n")
    else:
        _tell(timed.results, rows, how.choose, say)
    heading = SAMPLE if how.n > 1 else ()
    report = Report(rows, [Table(title, columns(heading, COUNTS, CHOICE[how.choose]), rows)])
    if draft is not None:
        plain = Timed().take(replace(session, draft=None).tokens(ids, session.cache(ids, slots=slots)))
        for number, row in enumerate(rows):
            row |= speeds(row, number, plain, draft)
    if how.no_cache:
        uncached = Timed().take(session.tokens(ids, None))
        (row,) = rows
        steps = timed.step_ms(), uncached.step_ms()
        row |= {"uncached_ids_equal": uncached.results[0].ids == timed.results[0].ids}
        row |= dict(zip(("step_ms", "uncached_step_ms"), steps, strict=True)) | {"costs": costs(len(ids), *steps)}
        report.tables.append(cost_table(row["costs"]))
        if how.plot is not None:
            draw(how.plot, title, len(ids), *steps)
            print(f"wrote {how.plot}", file=sys.stderr)
    return report


def _tell(results: Sequence[Result], rows: Sequence[Row], choose: str | None, say: Say) -> None:
    """Each sample under its heading, then which is chosen; the rows learn of it."""
    for result in results:
        say(f"--- sample {result.sample}, ended by {result.reason}\n{result.text}\n")
    sound = [result for result in results if result.reason != "error"]
    if choose is None or not sound:
        return
    if choose == "best":
        best = best_of(sound)
        say(f"--- best: sample {best.sample}\n")
        for row, result in zip(rows, results, strict=True):
            mean = result.logprob / result.new_tokens if result.new_tokens else None
            row |= {"mean_logprob": mean, "chosen": result is best}
        return
    vote = majority_vote(sound)
    say(f"--- {vote.votes[vote.answer]} of {len(results)} say\n{vote.answer}\n")
    for row, result in zip(rows, results, strict=True):
        said = None if result.text is None else result.text.strip()
        votes = vote.votes.get(said or "", 0) if result.reason != "error" else 0
        row |= {"votes": votes, "chosen": bool(votes) and said == vote.answer}
