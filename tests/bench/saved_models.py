"""Saved checkpoints with a tokenizer and a chat template, tiny enough to run in every test of the command."""

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from attn_variants.bench.case import decoder_config, random_decoder
from tests import tiny

LETTERS = "\n" + "".join(map(chr, range(32, 127)))
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def save_model(folder: Path, tokenizer: Tokenizer, *, seed: int, layers: int = 2, **fields: object) -> Path:
    """Random weights, that tokenizer, and further fields of config.json."""
    geometry = replace(tiny.GEOMETRY, vocab_size=tokenizer.get_vocab_size(), hidden_size=48, layers=layers)
    decoder = random_decoder(decoder_config("gqa", geometry), dtype="float32", device="cpu", seed=seed)
    decoder.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def letters(alphabet: str = LETTERS) -> Tokenizer:
    """One token a letter, so that every text is the same tokens again."""
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
