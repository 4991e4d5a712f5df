"""Chat templates: messages to text, through the jinja2 program that a checkpoint carries, in a sandbox.

A template is a stranger's program. It runs in jinja2's immutable sandbox, which lets it neither reach Python's
internals nor change what it was given, and with the names that published templates rely on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(
    template: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """The text of a conversation, ready to be encoded.

    messages: dicts with `role` and `content`, oldest first.
    add_generation_prompt: end with the opening of the assistant's turn, so that a model answers.
    variables: what else the template may read, such as `bos_token`.
    Raises ValueError when the template is broken, refuses the conversation, or leaves the sandbox.
    """
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"a message ({message!r}) must be a dict with `role` and `content`")
    try:
        return _compiled(template).render(
            **{"tools": None, "documents": None, **variables},
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
        )
    except TemplateError as error:
        raise ValueError(f"the chat template cannot render this conversation: {error}") from error
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"the chat template fails on this conversation ({error}); messages are dicts with `role` and `content`"
        ) from error


class GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's tokens for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
