"""Text to token ids and back, from the files that lie beside the weights: tokenizer.json and a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from .chat import render
from .folder import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Tokenizer:
    """Text <-> ids, and conversations -> ids.

    backend: the tokenizer that tokenizer.json describes.
    special_tokens: their texts by name, such as `bos_token`: what a chat template may read.
    chat_template: the jinja2 source, None where the checkpoint has none.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with what the tokenizer itself puts around it (Llama's begin-of-text; SmolLM2: nothing).

        Special tokens spelled out in the text become their ids.
        """
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are no whole character become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as text. Raises ValueError without a chat template, or when it refuses the messages."""
        if self.chat_template is None:
            raise ValueError(
                "this checkpoint has no chat template (chat_template.jinja, or `chat_template` in "
                "tokenizer_config.json); give plain text instead"
            )
        known = {**self.special_tokens, **variables}
        return render(self.chat_template, messages, add_generation_prompt=add_generation_prompt, **known)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of the conversation; the template alone places special tokens, so none is doubled."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def token_id(self, name: str) -> int | None:
        """The id of the special token called `bos_token`, `eos_token`, ...; None where there is none."""
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises ValueError, naming the file, when tokenizer.json is missing or broken.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json, the only tokenizer format that is read; "
            "transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises nothing narrower
        raise ValueError(f"{path} is no tokenizer that can be read: {error}; fetch the file again") from error
    # Some files carry the limits their authors trained with; a prompt is cut by its caller or not at all.
    backend.no_truncation()
    backend.no_padding()
    config = {**_read_if_there(folder / "special_tokens_map.json"), **_read_if_there(folder / "tokenizer_config.json")}
    return Tokenizer(backend, _special_tokens(config), _chat_template(folder, config))


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The `*_token` fields; each is a text, or an object whose `content` is one."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja before `chat_template` of tokenizer_config.json; of several named ones, `default`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template if isinstance(template, str) else None
