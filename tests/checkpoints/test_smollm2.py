"""Real weights: SmolLM2-135M-Instruct says here what it says in transformers, token for token."""

import json
from pathlib import Path

import pytest
import torch

from attn_variants import Decoder
from attn_variants.cache import KVCache
from attn_variants.checkpoints import load_tokenizer
from tests.checkpoints.hf_models import error, transformers

pytestmark = [pytest.mark.download, pytest.mark.slow]

ROWS = json.loads((Path(__file__).parents[1] / "data" / "smollm2_tokens.json").read_text())["rows"]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a valley between two mountains,",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def decoder(smollm2):
    return Decoder.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2):
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2).eval()


def continued(decoder, ids, new_tokens):
    """Greedy ids, one at a time through a cache, up to and with the first end token."""
    cache = KVCache(decoder.cache_specs, batch=1, capacity=len(ids) + new_tokens, dtype=decoder.dtype)
    out, feed = [], ids
    with torch.inference_mode():
        while len(out) < new_tokens and not (out and out[-1] in decoder.config.eos_token_ids):
            logits = decoder(torch.tensor([feed]), cache, last=True)
            out.append(int(logits[0, -1].argmax()))
            feed = out[-1:]
    return out


def test_the_ids_are_an_independent_tokenizers(tokenizer):
    assert len(ROWS) == 40
    for row in ROWS:
        assert tokenizer.encode(row["text"]) == row["ids"]
        assert tokenizer.decode(row["ids"]) == row["text"]


def test_transformers_reads_the_same_tokenizer(tokenizer, smollm2):
    loaded = transformers.AutoTokenizer.from_pretrained(smollm2)
    for row in ROWS:
        assert loaded(row["text"])["input_ids"] == row["ids"]
    messages = [{"role": "user", "content": "Is 1 < 2?"}, {"role": "assistant", "content": "Yes."}]
    assert tokenizer.chat(messages) == loaded.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_the_config_is_the_published_models(decoder):
    config = decoder.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.attention.num_attention_heads, config.attention.kv_heads, config.attention.dim) == (9, 3, 64)
    assert config.attention.rope.rope_theta == 100000.0
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == 134_515_008


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(decoder, theirs, tokenizer, prompt):
    ids = tokenizer.encode(prompt)
    with torch.inference_mode():
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :].tolist()
        assert error(decoder(torch.tensor([ids])), theirs(torch.tensor([ids])).logits) < 1e-5
    assert continued(decoder, ids, 64) == expected


def test_it_answers_a_question(decoder, tokenizer):
    ids = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = continued(decoder, ids, 24)
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] == tokenizer.token_id("eos_token")
