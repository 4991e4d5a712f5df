"""A GGUF file becomes a folder that transformers reads: same weights, same row order, same tokenizer."""

import json
import re

import numpy as np
import pytest
import torch

from attn_variants.checkpoints import load_tokenizer
from attn_variants.checkpoints.gguf_llama import checkpoint_name, unpermuted, write_folder
from tests.checkpoints.gguf_files import CHAT, TOKENS, tiny_llama, transformers, write_gguf


def test_rows_of_a_head_are_put_back_by_halves():
    """Two heads of six rows: the file has 0 3 1 4 2 5, then 6 9 7 10 8 11."""
    stored = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    assert unpermuted(stored[:, None], 2).tolist() == [[row] for row in range(12)]
    assert unpermuted(stored, 2).tolist() == list(range(12))


def test_names_are_the_checkpoints():
    assert checkpoint_name("token_embd.weight") == "model.embed_tokens.weight"
    assert checkpoint_name("blk.13.ffn_norm.weight") == "model.layers.13.post_attention_layernorm.weight"
    for name in ("rope_freqs.weight", "blk.0.ffn_gate_inp.weight", "v.blk.0.attn_q.weight"):
        with pytest.raises(ValueError, match=f"GGUF tensor '{re.escape(name)}' has no counterpart"):
            checkpoint_name(name)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_the_same_model_back(tmp_path, tied):
    model = tiny_llama(tied=tied)
    write_gguf(tmp_path / "tiny.gguf", model)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(tmp_path / "tiny.gguf", folder)
    back = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert back.dtype == torch.float32
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], weight, rtol=0, atol=0)
    ids = torch.tensor([[1, 3, 4, 15, 17, 5, 2]])
    torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=0, atol=0)
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_parameters"):
        assert getattr(back.config, name) == getattr(model.config, name), name
    assert back.config.max_position_embeddings == 512
    assert back.generation_config.bos_token_id == 1
    assert back.generation_config.eos_token_id == 2


def test_the_tokenizer_is_rebuilt(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tied=True))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(tmp_path / "tiny.gguf", folder)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids = ours.encode("<|im_start|>abcd ab12<|im_end|>")
    assert [TOKENS[id] for id in ids] == ["<|im_start|>", "abcd", "Ġab", "1", "2", "<|im_end|>"]
    assert ids == theirs("<|im_start|>abcd ab12<|im_end|>")["input_ids"]
    assert ours.decode(ids, skip_special_tokens=True) == "abcd ab12"
    assert ours.chat_template == CHAT
    assert (ours.token_id("bos_token"), ours.token_id("eos_token")) == (1, 2)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2'; only 'llama' is read"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; only 'smollm' is read"),
        ({"extra": ["rope_freqs.weight"]}, "GGUF tensor 'rope_freqs.weight' has no counterpart"),
    ],
)
def test_another_kind_of_file_is_refused_by_name(tmp_path, changes, message):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tied=True), **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        write_folder(tmp_path / "tiny.gguf", tmp_path)
