"""A llama-architecture GGUF file as a Hugging Face folder: weights dequantised to float32, and the tokenizer rebuilt.

Only what the file says is used. What has no counterpart here (another architecture, another pre-tokenizer, a tensor of
an unknown name) is refused by name. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from attn_variants.architectures import hf_config
from attn_variants.config import DecoderConfig, GQAConfig
from attn_variants.rope_config import RopeConfig

from .folder import write_json
from .shards import SINGLE

MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of each module, and the checkpoint's."""

SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""The tokenizer's name of each special token, and GGUF's."""


def write_folder(gguf: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    float32, 4 bytes a weight, holds dequantised weights without a further loss. Raises ValueError, naming the field,
    for a file of another kind.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, value in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if fields.get(name) != value:
            raise ValueError(f"{gguf.name}: {name} is {fields.get(name)!r}; only {value!r} is read")
    tensors = {checkpoint_name(tensor.name): tensor for tensor in reader.tensors}
    config = _decoder_config(fields, tied="lm_head.weight" not in tensors)
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {name: _weight(tensor, heads) for name, tensor in tensors.items()}
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})
    write_json(folder / "config.json", {**hf_config(config), "dtype": "float32"})
    write_json(folder / "generation_config.json", _special_ids(fields))
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))


def checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`. Raises ValueError for a name not known."""
    *layer, module, kind = name.split(".")
    if module not in MODULES or (layer and layer[0] != "blk"):
        raise ValueError(f"GGUF tensor {name!r} has no counterpart in a Llama checkpoint")
    return ".".join((*(("model.layers", layer[1]) if layer else ()), MODULES[module], kind))


def unpermuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of q or k in the order of a Hugging Face checkpoint.

    GGUF stores the rotary pairs of each head interleaved: its row 2i is row i of the head's first half, 2i + 1 row i of
    the second.
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _weight(tensor: ReaderTensor, heads: dict[str, int]) -> NDArray[np.float32]:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    module = tensor.name.split(".")[-2]
    return np.ascontiguousarray(unpermuted(values, heads[module]) if module in heads else values)


def _decoder_config(fields: dict[str, Any], *, tied: bool) -> DecoderConfig:
    def field(name: str) -> Any:
        return fields[f"llama.{name}"]

    # Stored as float32: the shortest decimal that rounds to it is the number that was meant (1e-05).
    eps = float(str(np.float32(field("attention.layer_norm_rms_epsilon"))))
    heads = field("attention.head_count")
    return DecoderConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        num_hidden_layers=field("block_count"),
        intermediate_size=field("feed_forward_length"),
        attention=GQAConfig(
            hidden_size=field("embedding_length"),
            num_attention_heads=heads,
            num_key_value_heads=field("attention.head_count_kv"),
            head_dim=field("rope.dimension_count"),
            rope=RopeConfig(rope_theta=field("rope.freq_base")),
            rms_norm_eps=eps,
        ),
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
        max_position_embeddings=field("context_length"),
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=(fields["tokenizer.ggml.eos_token_id"],),
    )


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    """`bos_token_id` and its like, as generation_config.json has them."""
    ids = {f"{name}_id": fields.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in SPECIAL_TOKENS.items()}
    return {name: value for name, value in ids.items() if value is not None and name != "unk_token_id"}


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE whose digits stand alone; control tokens are special."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens(control)
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {name: fields.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in SPECIAL_TOKENS.items()}
    return {
        # The class that takes tokenizer.json as it is; one bound to a model would rebuild the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        **{name: tokens[id] for name, id in ids.items() if id is not None},
    }
