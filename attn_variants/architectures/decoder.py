"""`DecoderConfig` from a config.json, and the config.json that transformers reads back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from attn_variants.config import DecoderConfig, ExpandedMLAConfig, GQAConfig, MHAConfig, MLAConfig, MQAConfig
from attn_variants.names import nearest

from .config_file import Source, load
from .decoder_classes import DECODERS, LATENT_EPS, SUPPORTED, DecoderClass
from .families import FAMILIES
from .family import Family
from .fields import Fields
from .formula import evaluate
from .reader import read_architecture
from .rope_fields import rope_config, rope_parameters

COMPUTED = (GQAConfig, MHAConfig, MQAConfig, MLAConfig, ExpandedMLAConfig)
"""The configs whose attention transformers has a class for; what is derived from one may compute something else."""


def decoder_config(source: Source) -> DecoderConfig:
    """The decoder that a config.json describes, given as a file, a folder, a dict or a preset's name.

    Raises ValueError in one line that names the source and the field for what our decoder does not compute: another
    family, windows of a class that has none, mixtures of experts, another kind of rope, an option of `SUPPORTED` at
    another value, quantised weights; and for all that `architecture` refuses.
    """
    config, name = load(source)
    try:
        return _read(config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of this decoder for a transformers class that computes the same; `decoder_config` reads it back.

    Raises ValueError naming the fields for which no class does.
    """
    for attention in config.attentions:
        if type(attention) not in COMPUTED:
            raise ValueError(
                f"no transformers class computes this decoder: its attention is a {type(attention).__name__}; "
                f"the classes are {', '.join(DECODERS)}"
            )
    turned = all(getattr(attention, "rope", None) is not None for attention in config.attentions)
    latent = isinstance(config.attentions[0], MLAConfig)
    wanted = _plain(config)
    nearest_difference: list[str] | None = None
    for model_type, decoder in DECODERS.items():
        if decoder.latent != latent or not turned:
            continue
        written = _written(config, model_type, decoder)
        fields = Fields(written, Family(decoder.fields))
        differences = [formula for formula in decoder.buildable if not evaluate(formula, fields)]
        differences += _differences(wanted, _plain(_read(written)))
        if not differences:
            return written
        if nearest_difference is None or len(differences) < len(nearest_difference):
            nearest_difference = differences
    reason = ", ".join(nearest_difference or [type(config.attentions[0]).__name__, "attention.rope"])
    raise ValueError(f"no transformers class computes this decoder: {reason}; the classes are {', '.join(DECODERS)}")


def _read(config: Mapping[str, Any]) -> DecoderConfig:
    model_type = config.get("model_type")
    decoder = DECODERS.get(model_type) if isinstance(model_type, str) else None
    if decoder is None:
        sized = "; its cache can be sized, not its weights run" if model_type in FAMILIES else ""
        near = "" if sized else nearest(str(model_type), DECODERS)
        raise ValueError(
            f"model_type {model_type!r:.40} is not one the decoder computes{sized}{near}; "
            f"it computes {', '.join(DECODERS)}"
        )
    _refuse_unsupported(config)
    fields = Fields(config, Family(decoder.fields))
    windows = _windows(config, decoder, fields)
    attention = _latent_attention(config, decoder, fields) if decoder.latent else _attention(config, decoder, fields)
    layers = tuple(replace(attention, sliding_window=window) for window in windows)
    return DecoderConfig(
        vocab_size=fields["vocab_size"],
        num_hidden_layers=fields["num_hidden_layers"],
        intermediate_size=fields["intermediate_size"],
        attention=layers[0] if len(set(layers)) == 1 else layers,
        rms_norm_eps=fields["rms_norm_eps"],
        tie_word_embeddings=fields["tie_word_embeddings"],
        mlp_bias=evaluate(decoder.mlp_bias, fields),
        max_position_embeddings=fields["max_position_embeddings"],
        bos_token_id=_token("bos_token_id", config.get("bos_token_id", decoder.bos)),
        eos_token_ids=_tokens("eos_token_id", config.get("eos_token_id", decoder.eos)),
    )


def _attention(config: Mapping[str, Any], decoder: DecoderClass, fields: Fields) -> GQAConfig:
    """The variant bears the name of its K: multi-head for K = H, multi-query for K = 1."""
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    variant = MHAConfig if kv_heads == heads else MQAConfig if kv_heads == 1 else GQAConfig
    attention = variant(
        hidden_size=fields["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=fields["head_dim"],
        rope=rope_config(config, max_position_embeddings=fields["max_position_embeddings"], interleaved=False),
        qk_norm=decoder.qk_norm,
        attention_bias=evaluate(decoder.qkv_bias, fields),
        output_bias=evaluate(decoder.output_bias, fields),
    )
    return replace(attention, rms_norm_eps=fields["rms_norm_eps"]) if decoder.qk_norm else attention


def _latent_attention(config: Mapping[str, Any], decoder: DecoderClass, fields: Fields) -> MLAConfig:
    _refuse_experts(fields)
    return MLAConfig(
        hidden_size=fields["hidden_size"],
        num_attention_heads=fields["num_attention_heads"],
        kv_lora_rank=fields["kv_lora_rank"],
        qk_nope_head_dim=fields["qk_nope_head_dim"],
        qk_rope_head_dim=fields["qk_rope_head_dim"],
        v_head_dim=fields["v_head_dim"],
        q_lora_rank=fields["q_lora_rank"],
        rope=rope_config(
            config,
            max_position_embeddings=fields["max_position_embeddings"],
            interleaved=evaluate(decoder.interleaved, fields),
        ),
        attention_bias=evaluate(decoder.qkv_bias, fields),
        rms_norm_eps=LATENT_EPS,
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for name, values in SUPPORTED.items():
        value = config.get(name)
        if value is not None and value not in values:
            allowed = " or ".join(map(repr, (*values, None)))
            raise ValueError(f"{name} ({value!r:.60}) is not supported; the decoder computes {name} = {allowed}")


def _windows(config: Mapping[str, Any], decoder: DecoderClass, fields: Fields) -> list[int | None]:
    """The window of every layer; refused where the class computes none whatever the config says."""
    layers = read_architecture(config).layers
    for index, spec in enumerate(layers):
        if spec.chunk is not None or (spec.window is not None and decoder.windows == "none"):
            raise ValueError(
                f"layer {index} sees a window of {spec.window or spec.chunk} tokens "
                f"(sliding_window = {fields['sliding_window']!r}); {decoder.name} computes full attention only"
            )
    return [spec.window for spec in layers]


def _refuse_experts(fields: Fields) -> None:
    experts, dense = fields["n_routed_experts"], fields["first_k_dense_replace"]
    if experts is not None and dense < fields["num_hidden_layers"]:
        raise ValueError(
            f"n_routed_experts ({experts!r}) from layer first_k_dense_replace ({dense!r}) on is a mixture of experts; "
            "the decoder computes dense layers only"
        )


def _token(name: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(f"{name} ({value!r:.40}) must be a token id or null")


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    ids = tuple(_token(name, item) for item in listed)
    if None in ids:
        raise ValueError(f"{name} ({value!r:.40}) must be a token id, a list of them, or null")
    return ids  # type: ignore[return-value]


def _written(config: DecoderConfig, model_type: str, decoder: DecoderClass) -> dict[str, Any]:
    attention, eos = config.attentions[0], config.eos_token_ids
    assert isinstance(attention, GQAConfig | MLAConfig)
    assert attention.rope is not None
    written: dict[str, Any] = {
        "architectures": [decoder.name],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": attention.num_attention_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_parameters(attention.rope),
        "attention_bias": attention.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        **decoder.always,
    }
    if "mlp_bias" in decoder.fields:
        written["mlp_bias"] = config.mlp_bias
    if isinstance(attention, GQAConfig):
        written |= _written_windows(config, decoder)
        return {**written, "num_key_value_heads": attention.kv_heads, "head_dim": attention.dim}
    if "rope_interleave" in decoder.fields:
        written["rope_interleave"] = attention.rope.interleaved
    return {
        **written,
        "num_key_value_heads": attention.num_attention_heads,
        "kv_lora_rank": attention.kv_lora_rank,
        "q_lora_rank": attention.q_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "first_k_dense_replace": config.num_hidden_layers,
    }


def _written_windows(config: DecoderConfig, decoder: DecoderClass) -> dict[str, Any]:
    """The fields from which readers of any age see which layers have a window, if any has."""
    windows = [getattr(attention, "sliding_window", None) for attention in config.attentions]
    widths = {window for window in windows if window is not None}
    if not widths or decoder.windows == "none":
        return {}
    written: dict[str, Any] = {"sliding_window": max(widths)}
    if decoder.windows == "some":
        written["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if "use_sliding_window" in decoder.fields:
        first = next(layer for layer, window in enumerate(windows) if window is not None)
        written |= {"use_sliding_window": True, "max_window_layers": first}
    return written


def _plain(config: DecoderConfig) -> dict[str, Any]:
    """The config by dotted field, without what it does not use; a tuple where layers differ."""
    values = asdict(config)
    del values["attention"]
    layers = [_plain_attention(attention) for attention in config.attentions]
    for name in dict.fromkeys(name for layer in layers for name in layer):
        each = tuple(layer.get(name) for layer in layers)
        values[f"attention.{name}"] = each[0] if len(set(each)) == 1 else each
    return values


def _plain_attention(attention: Any) -> dict[str, Any]:
    values = asdict(attention)
    if isinstance(attention, GQAConfig) and not (attention.qk_norm or attention.qk_norm_after_rope or attention.v_norm):
        del values["rms_norm_eps"]
    if attention.floor_scale is None:
        del values["attn_scale"]
    rope = values.pop("rope") or {}
    return {**values, **{f"rope.{name}": value for name, value in rope.items()}}


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {value!r}" for name, value in wanted.items() if found.get(name) != value]
