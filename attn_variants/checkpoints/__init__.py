"""Checkpoints in and out: safetensors weights, tokenizers, chat templates, and what fetches them.

The only part that imports safetensors, tokenizers, jinja2, gguf and huggingface_hub. Names load with their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tokenizer import Tokenizer as Tokenizer
    from .tokenizer import load_tokenizer as load_tokenizer
    from .weights import load_decoder as load_decoder
    from .weights import load_weights as load_weights
    from .weights import save_decoder as save_decoder

_MODULES = {
    "Tokenizer": "tokenizer",
    "load_decoder": "weights",
    "load_tokenizer": "tokenizer",
    "load_weights": "weights",
    "save_decoder": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
