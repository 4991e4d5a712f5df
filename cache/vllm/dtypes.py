"""What `--kv-cache-dtype` names, and which one a model's own quantization config means by `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_variants.architectures import Architecture
from attn_variants.names import unknown


@dataclass(frozen=True)
class KVDtype:
    """How numbers are stored: `bits` each, and `scale` bytes for each head's key, and again for its value."""

    name: str
    bits: int = 16
    scale: int = 0

    def width(self, numbers: int) -> int:
        """Bytes of one head's key or value."""
        return numbers * self.bits // 8 + self.scale


KV_DTYPES: Mapping[str, KVDtype] = {
    kind.name: kind
    for kind in (
        KVDtype("auto"),
        KVDtype("bfloat16"),
        KVDtype("float16"),
        KVDtype("fp8", 8),
        KVDtype("fp8_e4m3", 8),
        KVDtype("fp8_e5m2", 8),
        KVDtype("fp8_ds_mla", 8),
        KVDtype("int8_per_token_head", 8, scale=4),
        KVDtype("fp8_per_token_head", 8, scale=4),
        KVDtype("int4_per_token_head", 4, scale=4),
    )
}
"""Those of CacheDType (config/cache.py) that a Hopper GPU runs. A model's own numbers are 16 bits wide: vLLM casts
float32 down. Per-tensor fp8 scales lie outside the cache; per-token-head ones in it (backends/triton_attn.py)."""

SIXTEEN = frozenset({"auto", "bfloat16", "float16"})
FP8 = frozenset({"fp8", "fp8_e4m3"})

DTYPE_FIELDS = ("dtype", "torch_dtype")

ELSEWHERE = {
    "fp8_inc": "Gaudi",
    "nvfp4": "Blackwell",
    "nvfp4_4over6": "Blackwell",
    "nvfp4_ds_mla": "Blackwell",
    **dict.fromkeys(("octave_k3v4", "octave_k3v3", "octave_k3v3_compact"), "ROCm"),
}
PACKED = ("turboquant_", "ultraquant_")


def kv_dtype_named(name: str, architecture: Architecture) -> KVDtype:
    """The dtype called `name`; `auto` is what the checkpoint's quantization_config says, else the model's.

    Raises ValueError for names that vLLM does not know, for 16 bits of another kind than the model's, and for those
    whose layout is not counted here.
    """
    if not isinstance(name, str):
        raise ValueError(f"kv_dtype ({name!r}) must be a string; give one of {', '.join(KV_DTYPES)}")
    resolved = _of_checkpoint(architecture) if name == "auto" else name
    if resolved in ELSEWHERE:
        raise ValueError(
            f"kv_dtype ({resolved!r}) runs on {ELSEWHERE[resolved]} only, and these figures are an H100's; give 'fp8'"
        )
    if resolved.startswith(PACKED):
        raise ValueError(f"kv_dtype ({resolved!r}) has a packed layout that is not counted here; give 'fp8' or 'auto'")
    if resolved not in KV_DTYPES:
        raise ValueError(unknown("kv_dtype", resolved, KV_DTYPES))
    model = _of_model(architecture)
    if resolved in SIXTEEN - {"auto", model}:
        raise ValueError(f"kv_dtype ({resolved!r}) is not the model's dtype, {model}, which vLLM refuses: give 'auto'")
    return KV_DTYPES[resolved]


def _of_model(architecture: Architecture) -> str:
    """The dtype that a model runs in by default: float16 where config.json says so (_resolve_auto_dtype)."""
    assert architecture.fields is not None
    stated = [place(name) for place in (architecture.config.get, architecture.fields.stated) for name in DTYPE_FIELDS]
    return "float16" if next((name for name in stated if name), None) == "float16" else "bfloat16"


def _of_checkpoint(architecture: Architecture) -> str:
    """What a checkpoint asks for (resolve_kv_cache_dtype_string, utils/torch_utils.py; Attention, attention.py).

    Only compressed tensors have a scheme that attention reads, and attention over latents does not read it.
    """
    quantization, at_top = quantization_of(architecture)
    method = str(quantization.get("quant_method", ""))
    if method == "compressed-tensors":
        latent = any(record.name == "kv" for spec in architecture.layers for record in spec.records)
        return "fp8" if quantization.get("kv_cache_scheme") and not latent else "auto"
    if not method.startswith("modelopt") or not at_top:
        return "auto"
    inner = quantization.get("quantization")
    places = (inner if isinstance(inner, Mapping) else quantization, quantization)
    names = [(place, name) for name in ("kv_cache_scheme", "kv_cache_quant_algo") for place in places]
    asked = next((place[name] for place, name in names if place.get(name)), None)
    if isinstance(asked, Mapping):
        static = {8: "fp8"} if asked.get("dynamic") is False else {}
        asked = {**static, 4: "nvfp4"}.get(asked.get("num_bits", 0)) if asked.get("type") == "float" else None
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(asked).lower(), "auto")


def scales_fp8(architecture: Architecture) -> bool:
    """Whether a checkpoint brings scales for an fp8 cache, of e4m3 (_init_kv_cache_quant, attention.py)."""
    quantization, _ = quantization_of(architecture)
    method = str(quantization.get("quant_method", ""))
    if method == "compressed-tensors":
        return bool(quantization.get("kv_cache_scheme"))
    if method.startswith("modelopt") and quantization.get("quant_algo") == "MIXED_PRECISION":
        return _of_checkpoint(architecture) != "auto"
    return method == "fp8" or method.startswith("modelopt")


def quantization_of(architecture: Architecture) -> tuple[Mapping[str, Any], bool]:
    """A checkpoint's quantization_config, empty where there is none, and whether it lies at the top of config.json."""
    assert architecture.fields is not None
    top = architecture.config.get("quantization_config")
    found = top or architecture.fields.stated("quantization_config")
    return (found if isinstance(found, Mapping) else {}), bool(top)
