"""A small GGUF file of a transformers Llama, written with the `gguf` package alone."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

transformers = pytest.importorskip("transformers")

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh12", "Ġ", "ab", "cd", "abcd", "Ġab", "12"]
MERGES = ["a b", "c d", "ab cd", "Ġ ab", "1 2"]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE, LAYERS = 64, 8, 2, 12, 128, 3
CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"

OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(*, tied):
    """A transformers Llama whose axes all differ."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=MIDDLE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def write_gguf(path, model, *, architecture="llama", pre="smollm", extra=()):
    """Write `model`, its matrices in Q4_1, and give the model the numbers that are left after that rounding."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT)
    kind = GGMLQuantizationType.Q4_1
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), values)
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            writer.add_tensor(_gguf_name(name), quants.quantize(_interleaved(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), quants.quantize(values, kind), raw_dtype=kind)
        rounded = quants.dequantize(quants.quantize(values, kind), kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(rounded))
    for name in extra:
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(rows):
    """Each head's rows as GGUF stores them: one of its first half, one of its second, in turn."""
    order = []
    for head in range(len(rows) // HEAD_DIM):
        for i in range(HEAD_DIM // 2):
            order += [head * HEAD_DIM + i, head * HEAD_DIM + HEAD_DIM // 2 + i]
    return rows[order]


def _gguf_name(name):
    module = name.removesuffix(".weight")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.weight"
    _, _, layer, inside = module.split(".", 3)
    return f"blk.{layer}.{INSIDE[inside]}.weight"
