"""The command line: arguments only. Every mistake is one line on stderr and an exit code, never a traceback.

Exit codes: 0, 1 a check failed, 2 usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attn_variants.cache.formats import format_named
from attn_variants.cache.quantize import codec_named
from attn_variants.config import Geometry
from attn_variants.dtypes import canonical_dtype
from attn_variants.registry import VARIANTS

from .asked import (
    batches_asked,
    buildable,
    dtypes_named,
    growing,
    question,
    read_text,
    require_ready,
    storable,
    variants_named,
)
from .canvas import require_drawable
from .case import (
    LLAMA_3_8B,
    PRESET_GEOMETRIES,
    SEES_ALL,
    SMALL,
    Sight,
    model_subject,
    named_subject,
    preset_geometry,
    variant_subject,
)
from .generate_flags import Drawing, Ending, How, Prompting
from .memory_left import out_of_memory
from .options import Common, Sizing, Stored, Written, given, listed, require_positive, sized, spread
from .results import Report, deliver, environment, to_stdout
from .tables import as_text

app = typer.Typer(add_completion=False)
COMMON = tuple(Common.__dataclass_fields__)
GEOMETRY = tuple(Geometry.__dataclass_fields__)

SEVERAL = "comma-separated or repeated"
Variants = Annotated[
    list[str] | None, typer.Option(help=f"Of {', '.join(VARIANTS)}; {SEVERAL}; all of them when not given.")
]
Dtypes = Annotated[list[str] | None, typer.Option(help=f"Dtypes, {SEVERAL}.")]


@app.callback(invoke_without_command=True)
@spread
def tour(ctx: typer.Context, common: Common) -> None:
    """Attention variants: what each one keeps, whether it is right, how fast it decodes.

    Without a command: the tour, which shows all three in about a minute, with nothing to download.
    """
    if ctx.invoked_subcommand is not None:
        if misplaced := given(ctx, *COMMON):
            raise ValueError(
                f"{', '.join(misplaced)} before {ctx.invoked_subcommand}: flags follow the command they are for"
            )
        return
    require_ready(common)
    device = resolved_device(common)

    from .tour import sections

    report = Report()
    for name, section in sections(device, common.seed):
        if shows_tables(common):
            to_stdout(as_text(section.tables))
        section.rows = [{"section": name} | row for row in section.rows]
        report.extend(section)
    finish(ctx, report, common, device, shown=shows_tables(common) and not common.output)


@app.command()
@spread
def memory(
    ctx: typer.Context,
    common: Common,
    sizing: Sizing,
    geometry: Geometry = LLAMA_3_8B,
    variant: Variants = None,
    model: Annotated[list[str] | None, typer.Option(help="Preset, config.json or its folder; repeatable.")] = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="List each stored tensor.")] = False,
    allocate: Annotated[bool, typer.Option("--allocate", help="Make the store and read its storages.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show the arithmetic.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run transformers' own model, weightless, and read its cache off."),
    ] = False,
) -> None:
    """Cache sizes of variants or published models: by formula, and as really allocated."""
    from .memory import memory_report

    require_ready(common)
    asked = question(sizing)
    if model and (sizes := given(ctx, "variant", *GEOMETRY)):
        raise ValueError(
            f"{', '.join(sizes)} and --model exclude each other: a model brings its own sizes; give one of them"
        )
    if model:
        subjects = [model_subject(name) for name in model]
    else:
        subjects = [variant_subject(name, geometry) for name in variants_named(variant)]
    # Sizes by formula need no torch, and so no device, unless one is asked for by name.
    device = resolved_device(common) if allocate or common.device == "cuda" else "cpu"
    made_on = device if allocate else None
    report = memory_report(subjects, asked, shapes=shapes, explain=explain, measure=measure, device=made_on)
    finish(ctx, report, common, device)


@app.command()
@spread
def compare(
    ctx: typer.Context,
    common: Common,
    sizing: Sizing,
    subjects: Annotated[list[str], typer.Argument(help="Presets, config.json files, folders or variants.")],
    geometry: Geometry = LLAMA_3_8B,
    explain: Annotated[bool, typer.Option("--explain", help="Show the arithmetic.")] = False,
) -> None:
    """Models or variants side by side: at equal context, or with --budget at equal bytes."""
    from .memory import memory_report

    require_ready(common)
    named = [named_subject(name, geometry) for name in subjects]
    asked = question(sizing)
    if asked.policy is None:
        # One question for all; a store of ours does not hold every model.
        asked = replace(asked, policy="ideal")
    finish(ctx, memory_report(named, asked, explain=explain, compared=True), common, "cpu")


@app.command()
@spread
def models(
    ctx: typer.Context,
    common: Common,
    context: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 8192,
    kv_dtype: Annotated[str, typer.Option(help="Dtype of the cache.")] = "bfloat16",
) -> None:
    """The bundled presets: what each keeps per token, what a sequence costs, and where that was read."""
    from .memory import models_report

    require_ready(common)
    require_positive(context=context)
    finish(ctx, models_report(context, format_named(kv_dtype).name), common, "cpu")


@app.command()
@spread
def parity(
    ctx: typer.Context,
    common: Common,
    stored: Stored,
    sight: Sight,
    geometry: Geometry = SMALL,
    variant: Variants = None,
    dtype: Dtypes = None,
    backend: Annotated[
        list[str] | None, typer.Option(help=f"Backends of attention, {SEVERAL}; all by default.")
    ] = None,
) -> None:
    """Is the output right? Every variant, store, backend and dtype, several ways, against a float64 reference.

    Without --store and --codec: full and plain, and in brief some pairs of others. A ring is checked at a window of 7
    where --window or --chunk give no other: without any it is a full store.
    """
    require_ready(common)
    require_positive(window=sight.window, chunk=sight.chunk)
    variants = buildable(variants_named(variant), geometry, sight)
    stores, codecs = storable(stored, variants, geometry, sight=sight)
    dtypes = dtypes_named(dtype or ["float32", "float16", "bfloat16"])
    device = resolved_device(common)

    from .parity import ALSO, parity_report

    brief = not given(ctx, "store", "codec", "backend")
    backends = None if backend is None else listed("--backend", backend)
    report = parity_report(
        variants,
        geometry,
        dtypes=dtypes,
        stores=stores,
        codecs=codecs,
        also=ALSO if brief else (),
        backends=backends,
        sight=None if sight == SEES_ALL else sight,
        device=device,
        seed=common.seed,
    )
    finish(ctx, report, common, device)


@app.command()
@spread
def throughput(
    ctx: typer.Context,
    common: Common,
    stored: Stored,
    sight: Sight,
    geometry: Geometry = SMALL,
    preset: Annotated[
        str | None,
        typer.Option("--preset-geometry", help=f"Sizes and variant by name: {', '.join(PRESET_GEOMETRIES)}."),
    ] = None,
    variant: Variants = None,
    context: Annotated[
        list[str] | None, typer.Option(help=f"Tokens cached before the first step, {SEVERAL}.", show_default="512,2048")
    ] = None,
    batch: Annotated[list[str] | None, typer.Option(help=f"Batch sizes, {SEVERAL}.", show_default="1")] = None,
    batch_spec: Annotated[
        list[str] | None,
        typer.Option(help=f"Instead of both: 4x8k is 4 sequences of 8192 tokens, 32x1k+1x32k a ragged 33; {SEVERAL}."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes of cache, weights aside, as 512MiB: each is measured at the largest batch that fits."),
    ] = None,
    dtype: Dtypes = None,
    against: Annotated[str | None, typer.Option(help="A peer on the same weights: transformers.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Measure compiled decode steps too.")] = False,
    shuffled: Annotated[
        bool, typer.Option("--shuffled", help="Pages lie in random order in a pool twice as large as needed.")
    ] = False,
    random_cache: Annotated[
        bool,
        typer.Option("--random-cache", help="Fill caches with random numbers, not a prompt: long contexts in seconds."),
    ] = False,
    repeats: Annotated[int, typer.Option(help="Turns of each contestant; below 6 there is no interval.")] = 6,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.")] = 3,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what --output FILE.jsonl holds, or begin it.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="A folder for pictures of what was measured, as SVG.")] = None,
) -> None:
    """How fast? Prefill and decode at a context that is really cached, beside what memory allows.

    Stores and codecs of one decoder take turns, so that their steps can be compared. With --output FILE.jsonl each case
    is on the disk when it is measured. What memory does not hold is a row that says so, and exit code 1 if all is.
    """
    require_ready(common)
    require_positive(repeats=repeats, warmup=warmup, window=sight.window, chunk=sight.chunk)
    if budget is not None and (sizes := given(ctx, "batch", "batch_spec")):
        raise ValueError(
            f"--budget and {' and '.join(sizes)} exclude each other: a budget says the largest batch; give one of them"
        )
    room = None if budget is None else sized("--budget", budget)
    if plot is not None:
        require_drawable("--plot", plot)
    subject = "small" if geometry == SMALL else "as given"
    if preset is not None:
        if sizes := given(ctx, *GEOMETRY):
            raise ValueError(f"{', '.join(sizes)} and --preset-geometry exclude each other; give one of them")
        subject, (own, geometry) = preset, preset_geometry(preset)
        variant = variant or [own]
    variants = buildable(variants_named(variant), geometry, sight)
    stores, codecs = storable(stored, variants, geometry, static=compiled, sight=sight)
    if shuffled and not any(store.startswith("paged") for store in stores):
        raise ValueError(f"--shuffled is about pages, and --store is {','.join(stores)}; add one such as paged:64")
    batches = batches_asked(ctx, batch_spec, batch, context)
    dtypes = dtypes_named(dtype or ["float32"])
    grown = growing(common, resume=resume)
    device = resolved_device(common)

    from .budget import filling
    from .contest import Case, Settings
    from .pictures import draw_pictures
    from .records import Entry
    from .throughput import require_measurable, throughput_report

    held = tuple(itertools.product(stores, codecs))
    cases = [
        Case(subject, name, geometry, kind, rows.batch, rows.longest, held, sight, rows if rows.ragged else None)
        for name in variants
        for kind in dtypes
        for rows in batches
    ]
    settings = Settings(device, common.seed, against, compiled, shuffled, random_cache, repeats, warmup)
    if room is not None:
        cases = filling(room, cases, settings)
    facts = environment(ctx.obj, seed=common.seed, device=device, threads=common.threads)
    if grown is None:
        report = throughput_report(cases, settings)
    else:
        from .sweep import recorded

        require_measurable(cases, settings)
        with recorded(grown, cases, settings, facts, resume=resume) as record:
            report = throughput_report(cases, settings, record)
        print(f"wrote {grown}", file=sys.stderr)
        # Where the lines are all that was asked for, a reader still sees the tables.
        common = replace(common, output=[path for path in common.output or () if path != grown] or None)
    finish(ctx, report, common, device)
    if plot is not None:
        for line in draw_pictures([Entry(row, facts) for row in report.rows], plot):
            print(line, file=sys.stderr)


@app.command()
@spread
def generate(
    ctx: typer.Context,
    common: Common,
    stored: Stored,
    prompting: Prompting,
    drawing: Drawing,
    ending: Ending,
    how: How,
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or a model that was fetched.")],
    dtype: Annotated[str | None, typer.Option(help="Dtype to compute in.", show_default="the checkpoint's")] = None,
) -> None:
    """Continue a prompt or converse: the text as it comes, statistics at the end.

    Greedy unless a flag of sampling is given; --seed then decides, whatever the store. --speculative is compared with
    plain decoding in the same run.
    """
    require_ready(common)
    how.require_sound(converses=prompting.converses)
    chosen = None if dtype is None else canonical_dtype(dtype)
    stored = Stored(stored.store, codec_named(stored.codec).name)
    sampling, stopping = drawing.sampling(common.seed, several=how.n > 1), ending.stopping()
    text = prompting.text()
    device = resolved_device(common)

    from .generate import generate_report

    report = generate_report(
        model,
        prompting,
        text,
        sampling=sampling,
        stopping=stopping,
        how=how,
        stored=stored,
        dtype=chosen,
        device=device,
        say=to_stdout if shows_tables(common) else (lambda piece: None),
    )
    finish(ctx, report, common, device)


@app.command()
@spread
def score(
    ctx: typer.Context,
    common: Common,
    stored: Stored,
    model: Annotated[str, typer.Option(help="A Hugging Face folder, or a model that was fetched.")],
    text: Annotated[str, typer.Option(help="A UTF-8 file; - reads stdin.")],
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Dtypes to compute in, {SEVERAL}.", show_default="the checkpoint's")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Score the first tokens of the text only.")] = None,
    chunk: Annotated[
        int,
        typer.Option(help="Tokens per step through the cache, after a first one alone; 1 is as in decoding, and slow."),
    ] = 16,
) -> None:
    """Perplexity of a text per variant, store and codec: what a codec costs in quality, beside its bytes.

    MLA is scored with its own cache and with the expanded one. full and plain always run, to compare the others with.
    """
    require_ready(common)
    require_positive(chunk=chunk)
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"--max-tokens ({max_tokens}) must be at least 2: the first token has none before it")
    stores, codecs = listed("--store", [stored.store]), listed("--codec", [stored.codec])
    dtypes = dtypes_named(dtype) if dtype else [None]
    device = resolved_device(common)

    from .score import score_report

    report = score_report(
        model,
        read_text("--text", text),
        dtypes=dtypes,
        stores=stores,
        codecs=list(dict.fromkeys(codec_named(name).name for name in codecs)),
        max_tokens=max_tokens,
        chunk=chunk,
        device=device,
    )
    finish(ctx, report, common, device)


@app.command()
@spread
def fetch(
    ctx: typer.Context,
    common: Common,
    name: Annotated[str, typer.Argument(help="smollm2-135m, or a Hugging Face id owner/name.")],
    force: Annotated[bool, typer.Option("--force", help="Bring it again.")] = False,
) -> None:
    """Bring a checkpoint here; prints the folder it lies in."""
    from attn_variants.checkpoints.fetch import fetch as fetched

    require_ready(common)
    folder = fetched(name, force=force, progress=lambda line: print(line, file=sys.stderr))
    if shows_tables(common):
        # Bare, for a shell to use.
        to_stdout(f"{folder}\n")
    report = Report([{"model": name, "folder": str(folder)}])
    finish(ctx, report, common, "cpu", shown=shows_tables(common) and not common.output)


@app.command()
@spread
def diff(
    ctx: typer.Context,
    written: Written,
    old: Annotated[
        Path,
        typer.Argument(
            metavar="OLD", help="A record that --output FILE.json wrote, or one with a row per line, .jsonl."
        ),
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A later record of the same command.")],
) -> None:
    """Two records side by side: tells a change from noise.

    Speeds get an interval and a verdict, a row of shared cores none; bytes, checks and perplexities are compared
    exactly. Exit code 1 when a row got slower beyond noise, a peer's included, or a check that held does not.
    """
    from .diff import diff_report

    common = Common(written.format, written.output)
    require_ready(common)
    finish(ctx, diff_report(old, new), common, "cpu")


def shows_tables(common: Common) -> bool:
    """Whether stdout is for a reader: it is where a table is asked for, and where the results go to files."""
    return bool(common.output) or common.format in (None, "table")


def resolved_device(common: Common) -> str:
    """The device the flags ask for, with threads and seed set; imports torch."""
    from .measure import prepare

    return prepare(common.device, seed=common.seed, threads=common.threads)


def finish(ctx: typer.Context, report: Report, common: Common, device: str, *, shown: bool = False) -> None:
    """Deliver a report together with where it comes from; a check that failed makes the exit code 1."""
    if not shown:
        facts = environment(ctx.obj, seed=common.seed, device=device, threads=common.threads)
        deliver(report, common.format, common.output or (), facts)
    for failure in report.failures:
        print(f"failed: {failure}", file=sys.stderr)
    if report.failures:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    # torch's C++ side and its profiler log their own starts and stops, which nobody asked about.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        return int(command.main(args=words, prog_name="attn-bench", standalone_mode=False, obj=words) or 0)
    except typer.TyperException as error:
        return _refuse(
            _with_value(error.format_message(), words),
            ["attn-bench --help and attn-bench COMMAND --help list what there is"],
        )
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{name}{error.strerror or error}", getattr(error, "__notes__", []))
    except ValueError as error:
        return _refuse(str(error), getattr(error, "__notes__", []))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _refuse(
            "there is not enough memory for these sizes",
            ["give a smaller --batch, --context, --max-new-tokens, --n or geometry"],
        )


def _with_value(message: str, words: Sequence[str]) -> str:
    """A usage message with the value it is about, which typer leaves out where a number does not parse."""
    named = re.search(r"'(--[\w-]+)'", message)
    for word, follower in zip(words, [*words[1:], ""], strict=True):
        flag, joined, value = word.partition("=")
        value = value if joined else follower
        if named and flag == named[1] and value not in message:
            return f"{message} (got {value!r})"
    return message


def _refuse(message: str, hints: Sequence[str]) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    for hint in hints:
        print(f"hint: {hint}", file=sys.stderr)
    return 2
