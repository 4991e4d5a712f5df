"""The same weights in transformers' own models: logits, prompts and cached decoding alike."""

import pytest
import torch

from attn_variants import Decoder, DecoderConfig, GQAConfig, MLAConfig, RopeConfig
from tests.tiny import error, kv_cache, sharpen

transformers = pytest.importorskip("transformers", reason="parity with transformers is checked where it is installed")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
GROUPS = {"num_key_value_heads": 2, "head_dim": 8}
LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 12}
DENSE = {"first_k_dense_replace": 99, "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}

THETA = {"rope_theta": 500.0}
LLAMA3 = {
    **THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {**THETA, "factor": 8.0, "original_max_position_embeddings": 32}
ROPES = {
    "default": ("default", THETA),
    "linear": ("linear", {**THETA, "factor": 3.0}),
    "llama3": ("llama3", LLAMA3),
    "yarn": ("yarn", YARN),
    "yarn untruncated, factor given": ("yarn", {**YARN, "truncate": False, "attention_factor": 0.7}),
    "yarn with mscales": ("yarn", {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}),
    "yarn with equal mscales": ("yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
}


def pair(kind, theirs, attention, rope="default", interleaved=False, partial=1.0, eps=1e-5, tie=False):
    """Their model and ours with the same sharp weights; the configs are built by hand on both sides."""
    rope_type, parameters = ROPES[rope]
    config = getattr(transformers, f"{kind}Config")(
        **SIZES,
        **theirs,
        rms_norm_eps=eps,
        tie_word_embeddings=tie,
        rope_parameters={"rope_type": rope_type, **parameters},
        attn_implementation="sdpa",
    )
    peer = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    attention = attention(
        hidden_size=36,
        num_attention_heads=6,
        rope=RopeConfig(rope_type=rope_type, interleaved=interleaved, partial_rotary_factor=partial, **parameters),
    )
    ours = Decoder(
        DecoderConfig(50, 2, 44, attention, rms_norm_eps=eps, tie_word_embeddings=tie, max_position_embeddings=256)
    )
    sharpen(peer)
    missing, unexpected = ours.load_state_dict(peer.state_dict(), strict=True)
    assert not missing
    assert not unexpected
    return peer, ours.eval()


def grouped(**options):
    return lambda **sizes: GQAConfig(**sizes, **GROUPS, **options)


def latent(**options):
    return lambda **sizes: MLAConfig(**sizes, **LATENT, **options)


CASES = {
    **{f"llama, rope {rope}": ("Llama", GROUPS, grouped(rms_norm_eps=1e-5), {"rope": rope}) for rope in ROPES},
    "llama with biases": (
        "Llama",
        {**GROUPS, "attention_bias": True},
        grouped(attention_bias=True, output_bias=True),
        {},
    ),
    "llama, multi-head": (
        "Llama",
        {"num_key_value_heads": 6, "head_dim": 8},
        lambda **sizes: GQAConfig(**sizes, head_dim=8),
        {},
    ),
    "llama, multi-query, tied": (
        "Llama",
        {"num_key_value_heads": 1, "head_dim": 8},
        lambda **sizes: GQAConfig(**sizes, num_key_value_heads=1, head_dim=8),
        {"tie": True},
    ),
    "qwen2": ("Qwen2", GROUPS, grouped(attention_bias=True), {}),
    "qwen3": ("Qwen3", GROUPS, grouped(qk_norm=True, rms_norm_eps=1e-5), {}),
    **{
        f"deepseek, q rank {rank}, rope {rope}": (
            "DeepseekV3",
            {**LATENT, **DENSE, "q_lora_rank": rank, "rope_interleave": interleaved},
            latent(q_lora_rank=rank),
            {"rope": rope, "interleaved": interleaved},
        )
        for rank, rope, interleaved in (
            (None, "default", True),
            (18, "default", False),
            (18, "linear", True),
            (None, "yarn", True),
            (18, "yarn with mscales", True),
            (None, "yarn with equal mscales", False),
        )
    },
    "deepseek with biases": (
        "DeepseekV3",
        {**LATENT, **DENSE, "q_lora_rank": 18, "rope_interleave": True, "attention_bias": True},
        latent(q_lora_rank=18, attention_bias=True),
        {"interleaved": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_theirs_uncached_and_cached(case):
    kind, theirs, attention, options = CASES[case]
    peer, ours = pair(kind, theirs, attention, **options)
    ids = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(3))
    wanted = peer(ids).logits
    assert error(ours(ids), wanted) < 1e-5

    store, memory, mine, their = kv_cache(ours, capacity=40), transformers.DynamicCache(), [], []
    for run in ids.split([30, 1, 1, 6, 1, 1], 1):
        mine.append(ours(run, store))
        their.append(peer(run, cache=memory, use_cache=True).logits)
    assert error(torch.cat(their, 1), wanted) < 1e-5
    assert error(torch.cat(mine, 1), wanted) < 1e-5


@pytest.mark.parametrize("case", ["llama, rope llama3", "qwen3", "deepseek, q rank 18, rope yarn with mscales"])
@torch.no_grad()
def test_a_left_padded_batch_is_theirs_and_each_row_s_own(case):
    kind, theirs, attention, options = CASES[case]
    peer, ours = pair(kind, theirs, attention, **options)
    ids, mask = torch.tensor([[9, 9, 5, 6, 7], [1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    wanted = peer(ids, attention_mask=mask, position_ids=positions).logits
    store = kv_cache(ours, capacity=16)
    logits = ours(ids, store, mask=mask)
    assert error(logits[0, 2:], wanted[0, 2:]) < 1e-5
    assert error(logits[1], wanted[1]) < 1e-5

    said, tokens = [[5, 6, 7], [1, 2, 3, 4, 5]], logits[:, -1].argmax(-1)
    for _ in range(8):
        for row in range(2):
            said[row].append(int(tokens[row]))
        tokens = ours(tokens[:, None], store)[:, -1].argmax(-1)
    for ids in said:
        alone = peer.generate(
            torch.tensor([ids[:-8]]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert alone[0].tolist() == ids
