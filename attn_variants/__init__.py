"""Attention variants for decoders (MHA, MQA, GQA, MLA), each declaring what it keeps per token.

Names load at their first use, so that sizing a cache costs no import of torch. `attn_variants.attend` is the submodule:
the function of that name is not exported here, which keeps `from attn_variants import attend` unambiguous.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    name: module
    for module, names in {
        "config": (
            "DecoderConfig",
            "ExpandedMLAConfig",
            "GQAConfig",
            "Geometry",
            "MHAConfig",
            "MLAConfig",
            "MQAConfig",
        ),
        "contract": ("CacheSpec", "Entry", "Record", "State", "Step"),
        "decoder": ("Decoder",),
        "gqa": ("GroupedQueryAttention", "MultiHeadAttention", "MultiQueryAttention"),
        "mla": ("ExpandedMultiHeadLatentAttention", "MultiHeadLatentAttention"),
        "options": ("AttentionOptions",),
        "registry": ("VARIANTS", "Variant"),
        "rope_config": ("RopeConfig",),
        "transient": ("fresh_step", "visible"),
    }.items()
    for name in names
}
__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from .config import DecoderConfig as DecoderConfig
    from .config import ExpandedMLAConfig as ExpandedMLAConfig
    from .config import Geometry as Geometry
    from .config import GQAConfig as GQAConfig
    from .config import MHAConfig as MHAConfig
    from .config import MLAConfig as MLAConfig
    from .config import MQAConfig as MQAConfig
    from .contract import CacheSpec as CacheSpec
    from .contract import Entry as Entry
    from .contract import Record as Record
    from .contract import State as State
    from .contract import Step as Step
    from .decoder import Decoder as Decoder
    from .gqa import GroupedQueryAttention as GroupedQueryAttention
    from .gqa import MultiHeadAttention as MultiHeadAttention
    from .gqa import MultiQueryAttention as MultiQueryAttention
    from .mla import ExpandedMultiHeadLatentAttention as ExpandedMultiHeadLatentAttention
    from .mla import MultiHeadLatentAttention as MultiHeadLatentAttention
    from .options import AttentionOptions as AttentionOptions
    from .registry import VARIANTS as VARIANTS
    from .registry import Variant as Variant
    from .rope_config import RopeConfig as RopeConfig
    from .transient import fresh_step as fresh_step
    from .transient import visible as visible
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# In a checkout, cache/ and bench/ lie beside this folder; in an installed package they lie inside it.
if not (Path(__file__).parent / "cache").is_dir():
    __path__.append(str(Path(__file__).parents[1]))
