"""Published architectures as data, their reader, and presets. Torch-free; names load with their first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config_file import read_config as read_config
    from .decoder import decoder_config as decoder_config
    from .decoder import hf_config as hf_config
    from .parameter_count import parameters as parameters
    from .presets import PRESETS as PRESETS
    from .presets import Preset as Preset
    from .presets import preset as preset
    from .reader import Architecture as Architecture
    from .reader import architecture as architecture

_MODULES = {
    "PRESETS": "presets",
    "Architecture": "reader",
    "Preset": "presets",
    "architecture": "reader",
    "decoder_config": "decoder",
    "hf_config": "decoder",
    "parameters": "parameter_count",
    "preset": "presets",
    "read_config": "config_file",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
