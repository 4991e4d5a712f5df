"""The page "How big is my KV cache?": reports/kv-cache-sizes.md, written whole from what the code computes.

    python -m attn_variants.bench.sizes_page [--output FILE.md]

Every figure on it is computed while it is written; the words around them are here. Imports no torch.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_variants.architectures import PRESETS
from attn_variants.cache import model_cache
from attn_variants.cache.explain import explained
from attn_variants.cache.formats import FORMATS, format_named
from attn_variants.contract import Entry
from attn_variants.dtypes import FLOATS

from .printed import PRINTED
from .results import environment, require_writable, to_stdout, write_whole
from .sizes_policies import CONTEXT, drawn, models_table, questions
from .sizes_traps import traps_table
from .sizes_walk import walk
from .tables import Column, Table, exact, size


@dataclass(frozen=True)
class Kind:
    """A kind of layer: what a layer of it keeps, in numbers, and models to show it on."""

    name: str
    formula: str
    says: str
    models: tuple[str, ...]


KINDS = (
    Kind(
        "Keys and values: MHA, GQA, MQA",
        "2 x K x D per token",
        "K key/value heads of D numbers, once for keys and once for values: K = H in multi-head attention, 1 in "
        "multi-query attention. Where the two differ in width it is K x (D of keys + D of values). D is `head_dim` "
        "where config.json gives it.",
        ("llama-2-7b", "llama-3.1-8b", "falcon-7b", "mimo-v2-flash"),
    ),
    Kind(
        "Latents: MLA",
        "R + P per token",
        "One latent of R numbers (`kv_lora_rank`) and one rotated key of P (`qk_rope_head_dim`) for all heads: no "
        "factor 2 and no number of heads.",
        ("deepseek-v3",),
    ),
    Kind(
        "Windows",
        "2 x K x D for each of min(T, W) tokens",
        "A layer with a window of W needs the newest W tokens, the current one included. Past W it stops growing.",
        ("gemma-3-27b",),
    ),
    Kind(
        "Chunks",
        "2 x K x D for each of min(T, C) tokens",
        "A token sees the tokens of its own chunk of C, so the layer is sized for a whole one.",
        ("llama-4-scout",),
    ),
    Kind(
        "States: linear attention, delta rules, state spaces",
        "one state and a convolution's tail per sequence, whatever T",
        "A state does not grow. It stays in float32 where the model computes it so, and a format of the cache (fp8, "
        "int4) leaves it as it is. Only the attention layers between add bytes per token.",
        ("qwen3-next-80b-a3b", "kimi-k3", "nemotron-3-nano-30b-a3b"),
    ),
    Kind(
        "Indexers",
        "one key per token, besides what the layer keeps anyway",
        "Sparse attention reads few tokens and still keeps all; its indexer's key is more cache, not less. In some "
        "models not every layer has one.",
        ("deepseek-v3.2", "glm-5.2", "minimax-m3"),
    ),
    Kind(
        "Pooled tokens: DeepSeek-V4",
        "a window of states, and one entry per r tokens",
        "Key and value are one vector. Besides its window a layer keeps an entry for every complete stride of r "
        "tokens, and what the next entry is made from, so that growth is a saw-tooth. (`tokens` counts entries here.)",
        ("deepseek-v4-flash",),
    ),
    Kind(
        "Shared caches",
        "nothing",
        "A layer that reads the cache of an earlier one owns none.",
        ("gemma-3n-e4b",),
    ),
)

HEAD = """\
# How big is my KV cache?

For each layer: what it keeps per token times the tokens it keeps, and what it keeps once per sequence. Add up the
layers; times bytes per number, times sequences. What is hard is to know what each layer of a model keeps, and which of
several honest questions is asked. Every figure here is computed by this project's code, from each model's config.json,
while the page is written. For your own model, `attn-bench memory --model FOLDER_OR_CONFIG --context T --explain` shows
the same arithmetic.

- [One formula per kind of layer](#one-formula-per-kind-of-layer)
- [Bytes per number](#bytes-per-number)
- [Several GPUs](#several-gpus)
- [Traps](#traps)
- [Which question?](#which-question)
- [{presets} models](#{presets}-models)
- [Will Kimi-K2 fit on 8 GPUs at 128k?](#will-kimi-k2-fit-on-8-gpus-at-128k)
- [Printed figures that do not recompute](#printed-figures-that-do-not-recompute)

T is the number of tokens in a sequence. KiB, MiB and GiB are powers of 1024, GB is 10^9 bytes. Where nothing else is
said, a size is that of one sequence of {context:,} tokens in bfloat16, 2 bytes a number, under the policy `ideal`.

Made by `python -m attn_variants.bench.sizes_page` on {date}{commit}.
"""


def page() -> str:
    """The whole page."""
    sections = (_head(), _formulas(), _numbers(), _ranks(), _traps(), questions(), models_table(), walk(), _printed())
    return "\n".join(line for section in sections for line in section)


def _head() -> Iterator[str]:
    facts = environment([], seed=0, device="cpu", threads=None)
    commit = f" at commit {facts['commit']}" if facts["commit"] else ""
    yield HEAD.format(presets=len(PRESETS), context=CONTEXT, date=facts["date"], commit=commit)


def _formulas() -> Iterator[str]:
    yield "## One formula per kind of layer"
    yield ""
    yield (
        "Each formula counts the numbers that one layer keeps. Below it stand real models, one line for the layers "
        "that keep the same: `layers x kind: layers x (entry heads x dim x bytes x tokens + ...) = bytes`."
    )
    yield ""
    for kind in KINDS:
        yield from (f"### {kind.name}", "", f"**{kind.formula}.** {kind.says}", "", "```text")
        for name in kind.models:
            *groups, _ = explained(model_cache(name).pricing(), batch=1, context=CONTEXT)
            yield from (name, *(f"  {line}" for line in groups))
        yield from ("```", "")


def _numbers() -> Iterator[str]:
    head, latent, rope = Entry("k", 1, 128), Entry("latent", 1, 512), Entry("k_rope", 1, 64)
    plain = format_named("bfloat16").token_bytes(head)
    rows: list[dict[str, Any]] = []
    grouped = {"int8": ("int8", "int8:32"), "int4": ("int4", "int4:64", "int4:32")}
    for name in (*FLOATS, *(spelled for base in FORMATS for spelled in grouped.get(base, (base,)))):
        form = format_named(name)
        row: dict[str, Any] = {"name": name, "meaning": form.meaning or "no scales"}
        if name == "fp8-mla":
            row |= {"latent": form.token_bytes(latent) + form.token_bytes(rope)}
        else:
            row |= {"bytes": form.token_bytes(head), "ratio": form.token_bytes(head) / plain}
        rows.append(row)
    columns = (
        Column("name", "format", right=False),
        Column("bytes", f"bytes of {head.dim} numbers", exact),
        Column("ratio", "over bfloat16", "{:.3f}".format),
        Column("latent", f"bytes of a latent of {latent.dim} and a rope key of {rope.dim}", exact),
        Column("meaning", "beside the numbers", right=False),
    )
    yield "## Bytes per number"
    yield ""
    yield (
        "Scales and zero points are cache too, and so are the newest tokens that some formats keep as they are "
        "(`int4:64:128`: groups of 64, 128 plain tokens). Names as `--kv-dtype` takes them."
    )
    yield ""
    yield from drawn(Table("One head of one token", columns, rows))


def _ranks() -> Iterator[str]:
    ways = (1, 2, 4, 8, 16)
    rows = []
    for name in ("llama-3.1-70b", "gemma-3-27b", "falcon-7b", "qwen3-next-80b-a3b", "deepseek-v3"):
        row: dict[str, Any] = {"model": name}
        for tp in ways:
            try:
                row[f"tp_{tp}"] = model_cache(name).bytes(context=CONTEXT, tp=tp)
            except ValueError as error:
                row.setdefault("refused", f"tp {tp}: {error}")
        rows.append(row)
    columns = (
        Column("model", "model", right=False),
        *(Column(f"tp_{tp}", f"tp {tp}", size) for tp in ways),
        Column("refused", "refused", right=False),
    )
    yield "## Several GPUs"
    yield ""
    yield (
        "Tensor parallelism (`--tp`) splits heads: K / tp on a rank, or one head that tp / K ranks each keep whole "
        "where tp is larger. Latents, an indexer's keys and the one head of multi-query attention have nothing to "
        "split and are whole on every rank. States split by their heads. Pipeline stages (`--pp`) split layers, "
        "data-parallel attention (`--dp`) sequences, context parallelism (`--cp`) tokens. What does not divide is "
        "refused."
    )
    yield ""
    yield from drawn(Table("On one rank", columns, rows))


def _traps() -> Iterator[str]:
    table = traps_table()
    yield "## Traps"
    yield ""
    yield f"{len(table.rows)} ways to get it wrong; the wrong figure is what comes of the wrong reading."
    yield ""
    yield from drawn(table)


def _printed() -> Iterator[str]:
    yield "## Printed figures that do not recompute"
    yield ""
    yield (
        "The tests recompute the cache sizes that papers, reports and posts print, from the inputs they print. For the "
        f"{len(PRINTED)} figures below, which stand beside them, they do not, for these reasons."
    )
    yield ""
    for reason, count in Counter(figure.reason for figure in PRINTED).items():
        yield f"{count} {'figure' if count == 1 else 'figures'}: {reason}."
        yield ""
        for figure in PRINTED:
            if figure.reason == reason:
                value = f"{figure.value:,.15g} {figure.unit}{_instead(figure.preset, figure.context)}"
                yield f"- {figure.source}, {figure.claim}: {value}"
        yield ""


def _instead(name: str | None, context: int) -> str:
    """What our code makes of a printed figure's inputs."""
    if name is None:
        return ""
    cache = model_cache(name)
    ideal, whole = (cache.bytes(context=context, policy=policy) / 10**9 for policy in ("ideal", "allocated"))
    return f" (computed: {ideal:.2f} GB with windows, {whole:.2f} GB without)"


def main() -> None:
    """The command."""
    parser = ArgumentParser(prog="python -m attn_variants.bench.sizes_page", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the page to this file")
    output: Path | None = parser.parse_args().output
    if output is None:
        to_stdout(page())
        return
    require_writable(output)
    write_whole(output, page())


if __name__ == "__main__":
    main()
