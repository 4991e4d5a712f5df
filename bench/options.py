"""Dataclasses as command-line flags: one flag per field, so that a geometry's fields are named once."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from attn_variants.contract import LARGEST_SIZE

Format = Literal["table", "json", "csv", "markdown"]


@dataclass(frozen=True)
class Written:
    """Where results go: all that a command takes which only reads."""

    format: Annotated[
        Format | None,
        typer.Option(help="How results are written.", show_default="table, or what an output's suffix says"),
    ] = None
    output: Annotated[
        list[Path] | None, typer.Option(help="Write results to this file, whole or not at all; may be repeated.")
    ] = None


@dataclass(frozen=True)
class Common(Written):
    """What every other command takes."""

    seed: Annotated[int, typer.Option(help="Seed of random weights, token ids and sampling.")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where tensors live; auto takes a GPU.")] = (
        "auto"
    )
    threads: Annotated[int | None, typer.Option(help="CPU threads; unset leaves torch's choice.")] = None


STORE = "Where tokens live: full, ring (windows only hold what they see), paged:PAGE."
CODEC = "How numbers are stored: plain, int8, int4 (each :GROUP, :sym, :asym), int8-kivi, int4-kivi, fp8, fp8-mla."


@dataclass(frozen=True)
class Stored:
    """The store of what is run: its layout and its codec. Commands that make several take comma lists."""

    store: Annotated[str, typer.Option(help=STORE)] = "full"
    codec: Annotated[str, typer.Option(help=CODEC)] = "plain"


@dataclass(frozen=True)
class Sizing:
    """What a cache is sized for."""

    batch: Annotated[int, typer.Option(help="Sequences.")] = 1
    context: Annotated[int, typer.Option(help="Tokens in each sequence.")] = 8192
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="A dtype (bfloat16, float16, float32), auto (the model's), or fp8, int8:GROUP, int4:64, q8_0 ..."
        ),
    ] = "bfloat16"
    policy: Annotated[
        str | None,
        typer.Option(help="Of ideal, allocated, transformers, vllm: which question?"),
    ] = None
    store: Annotated[
        str | None,
        typer.Option(
            help=f"{STORE} Of other policies: dynamic or static (transformers), held or planned (vllm).",
            show_default="full",
        ),
    ] = None
    codec: Annotated[str, typer.Option(help=CODEC)] = "plain"
    tp: Annotated[int, typer.Option(help="Ranks of tensor parallelism.")] = 1
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1
    dp: Annotated[int, typer.Option(help="Ranks of data-parallel attention.")] = 1
    cp: Annotated[int, typer.Option(help="Ranks of context parallelism.")] = 1
    budget: Annotated[str | None, typer.Option(help="Bytes per rank, as 80GiB: what fits?")] = None
    weights: Annotated[str | None, typer.Option(help="Bytes of the model's weights, or auto to count them.")] = None


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with each dataclass parameter replaced by one keyword per field, and built again at the call.

    A dataclass parameter's default gives its fields' defaults; without one the fields' own hold.
    """
    hints = get_type_hints(function, include_extras=True)
    bundles = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in bundles:
            parameters += _field_parameters(bundles[parameter.name], parameter.default)
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        for name, kind in bundles.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return function(**values)

    by_keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    call.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in by_keyword}
    return call


def _field_parameters(kind: type, default: Any) -> list[inspect.Parameter]:
    source = kind() if default is inspect.Parameter.empty else default
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(source, field.name),
            annotation=_flag(hints[field.name], kind.__name__, field.metadata.get("help")),
        )
        for field in fields(kind)
    ]


def _flag(hint: Any, panel: str, meaning: str | None) -> Any:
    """A field without an option of its own gets one in the help's panel of its dataclass."""
    return hint if get_origin(hint) is Annotated else Annotated[hint, typer.Option(rich_help_panel=panel, help=meaning)]


def given(context: typer.Context, *names: str) -> list[str]:
    """Which of these parameters were set on the command line, as the flags a user typed."""
    flags = []
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flags.append("--" + name.replace("_", "-"))
    return flags


def listed(flag: str, values: Sequence[str]) -> list[str]:
    """The items of a flag that takes comma lists and may be repeated, in the order given; none at all is refused."""
    items = [item.strip() for value in values for item in value.split(",") if item.strip()]
    if not items:
        raise ValueError(
            f"{flag} {', '.join(map(repr, values))} names nothing; give one value or several, comma-separated"
        )
    return list(dict.fromkeys(items))


def numbered(flag: str, values: Sequence[str]) -> list[int]:
    """The same, of positive integers."""
    items = listed(flag, values)
    for item in items:
        if not item.isdecimal() or not 1 <= int(item) <= LARGEST_SIZE:
            raise ValueError(f"{flag} ({item}) must be an integer of 1 to {LARGEST_SIZE}, or several, comma-separated")
    return [int(item) for item in items]


def require_positive(most: int = LARGEST_SIZE, **values: int | None) -> None:
    """Refuse a flag whose value is zero, negative or beyond `most`."""
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise ValueError(f"{flag} ({value}) must be at least 1")
        if value is not None and value > most:
            raise ValueError(f"{flag} ({value}) must be at most {most}")


SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{binary}b": base**power
    for power, letter in enumerate("kmgt", 1)
    for binary, base in (("", 1000), ("i", 1024))
}


def sized(flag: str, text: str) -> int:
    """Bytes, from a whole number of them or a number with a unit: 80GiB is 80 * 2**30, 80GB is 80 * 10**9."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in SIZE_UNITS or ("." in found[1] and not found[2]):
        raise ValueError(f"{flag} ({text}) must be bytes or a number with a unit, as 80GiB (2**30) or 80GB (10**9)")
    whole = Decimal(found[1]) * SIZE_UNITS[found[2].lower()]
    return int(whole)
