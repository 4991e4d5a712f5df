"""The flags of `generate`, in bundles, and what they ask for; what cannot be is refused here, by the flag's name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attn_variants.contract import LARGEST_SIZE

from .asked import read_text
from .options import require_positive
from .results import require_writable

if TYPE_CHECKING:
    from attn_variants.generation import Sampling, Stopping

NEW_TOKENS = 128
PLOT_SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class Prompting:
    """What is continued, or answered."""

    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None
    file: Annotated[str | None, typer.Option(help="A UTF-8 file with that text, whole; - reads stdin.")] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Answer it as a user's message, by the checkpoint's template; without --prompt and --file hold a "
            "conversation, a line a turn, until an empty one.",
        ),
    ] = False
    system: Annotated[str | None, typer.Option(help="The conversation's system message.")] = None

    @property
    def converses(self) -> bool:
        """Whether the turns come line by line."""
        return self.chat and self.prompt is None and self.file is None

    def text(self) -> str:
        """The one prompt. Raises ValueError for none, for two, and for an empty one."""
        if self.prompt is not None and self.file is not None:
            raise ValueError("--prompt and --file exclude each other; give one of them")
        for flag, value in (("--prompt", self.prompt), ("--system", self.system)):
            if value is not None and not _is_unicode(value):
                raise ValueError(f"{flag} {value!r} is no UTF-8 text; convert it, or give another")
        if self.system is not None and not self.chat:
            raise ValueError("--system is a message of a conversation; give --chat too")
        if self.file is not None:
            return read_text("--file", self.file)
        if self.prompt is None and not self.chat:
            raise ValueError("there is no prompt; give --prompt TEXT, --file PATH (- is stdin), or --chat to converse")
        if self.prompt == "":
            raise ValueError("--prompt is empty; give some text to continue")
        return self.prompt or ""


@dataclass(frozen=True)
class Drawing:
    """How a token is chosen."""

    temperature: Annotated[
        float | None,
        typer.Option(help="What logits are divided by; 0 is greedy.", show_default="0; 1 with --n or another of these"),
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Draw from the K likeliest tokens.")] = None
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that add up to P.")] = None
    min_p: Annotated[float | None, typer.Option(help="Draw from tokens at least P times as likely as the first.")] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 tokens that occurred become less likely; below, more.")
    ] = None
    penalise_prompt: Annotated[
        bool, typer.Option("--penalise-prompt/--no-penalise-prompt", help="The prompt's tokens occurred too.")
    ] = True

    def sampling(self, seed: int, *, several: bool) -> Sampling:
        """Greedy where nothing is said, and several samples of a prompt are not asked for."""
        from attn_variants.generation import GREEDY, Sampling

        if not self.penalise_prompt and self.repetition_penalty is None:
            raise ValueError("--no-penalise-prompt is about the penalty; give --repetition-penalty too")
        said = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        if said == {"penalise_prompt": True} and not several:
            return GREEDY
        try:
            return Sampling(**said, seed=seed)
        except ValueError as error:
            raise _by_flag(error) from None


@dataclass(frozen=True)
class Ending:
    """What ends a sequence: the first of these that holds."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to write at most.", show_default=f"{NEW_TOKENS}, or what --max-length leaves"),
    ] = None
    max_length: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="A text to end before; repeatable.")] = None
    stop_regex: Annotated[list[str] | None, typer.Option(help="A regular expression likewise; repeatable.")] = None
    stop_unit: Annotated[
        Literal["json", "bracket"] | None,
        typer.Option(help="End with a whole JSON value, or with the bracket that closes the first opened."),
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end.")] = False

    def stopping(self) -> Stopping:
        """The same for the library."""
        from attn_variants.generation import Stopping

        for text in self.stop or ():
            _stop("--stop", text, strings=text)
        for pattern in self.stop_regex or ():
            _stop("--stop-regex", pattern, regex=pattern)
        require_positive(max_length=self.max_length)
        most = LARGEST_SIZE if self.max_length is not None else NEW_TOKENS
        if self.max_new_tokens:
            require_positive(max_new_tokens=self.max_new_tokens)
        try:
            return Stopping(
                most if self.max_new_tokens is None else self.max_new_tokens,
                max_length=self.max_length,
                eos=() if self.ignore_eos else None,
                strings=self.stop or (),
                regex=self.stop_regex or (),
                unit=self.stop_unit,
            )
        except ValueError as error:
            raise _by_flag(error) from None


@dataclass(frozen=True)
class How:
    """How it is run, how often, and what is shown beside the text."""

    n: Annotated[int, typer.Option("--n", help="Samples of the prompt, which share its memory on pages.")] = 1
    choose: Annotated[
        Literal["best", "vote"] | None,
        typer.Option(help="Of several samples: the likeliest per token, or the text that most of them are."),
    ] = None
    alternatives: Annotated[
        int, typer.Option(help="Show log-probabilities, with the K likeliest tokens of each place.")
    ] = 0
    prefill_chunk: Annotated[int | None, typer.Option(help="Tokens of the prompt to read at once at most.")] = None
    speculative: Annotated[
        str | None, typer.Option(help="What proposes tokens to verify: a smaller model like --model, or lookup.")
    ] = None
    draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens it proposes at once at most.", show_default="4; 8 of lookup")
    ] = None
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Do it again without a cache, and compare what each token costs.")
    ] = False
    plot: Annotated[Path | None, typer.Option(help="Draw that comparison: FILE.png or FILE.svg.")] = None

    def require_sound(self, *, converses: bool) -> None:
        """Refuse what cannot be done together."""
        require_positive(n=self.n, prefill_chunk=self.prefill_chunk, draft_tokens=self.draft_tokens)
        if not 0 <= self.alternatives <= LARGEST_SIZE:
            raise ValueError(f"--alternatives ({self.alternatives}) must be an integer of 0 to {LARGEST_SIZE}")
        if self.choose and self.n == 1:
            raise ValueError(f"--choose {self.choose} is between samples; give --n too, of at least 2")
        if self.draft_tokens is not None and self.speculative is None:
            raise ValueError("--draft-tokens is what a draft proposes; give --speculative too")
        if self.speculative == "":
            raise ValueError("--speculative is empty; give a model or lookup")
        if self.no_cache and self.speculative is not None:
            raise ValueError("--no-cache and --speculative exclude each other: a draft needs the cache; leave one out")
        if self.no_cache and self.n > 1:
            raise ValueError(f"--no-cache compares one sequence with itself; leave out --n {self.n}")
        if converses and (self.no_cache or self.n > 1):
            flag = "--no-cache" if self.no_cache else f"--n {self.n}"
            raise ValueError(f"{flag} is about one prompt, and a conversation has many; give --prompt or --file too")
        if self.plot is not None:
            self._require_plot(self.plot)

    def _require_plot(self, plot: Path) -> None:
        if not self.no_cache:
            raise ValueError("--plot draws what --no-cache measures; give that too")
        if plot.suffix.lower() not in PLOT_SUFFIXES:
            raise ValueError(f"--plot {plot} must end in {' or '.join(PLOT_SUFFIXES)}")
        require_writable(plot, flag="--plot")
        if find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'attn-variants[plots]' brings it")


def _is_unicode(text: str) -> bool:
    """Whether it can be written down: bytes of an argument that are no UTF-8 reach Python as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _stop(flag: str, value: str, **field: str) -> None:
    from attn_variants.generation import Stopping

    try:
        Stopping(**field)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{flag} {value!r}: {error}") from None


def _by_flag(error: ValueError) -> ValueError:
    """The library's message, which begins with the name of a field, about the flag of that name."""
    name, _, rest = str(error).partition(" ")
    return ValueError(f"--{name.replace('_', '-')} {rest}")
