"""A plain GPT with our attention dropped in: it trains as before, and decodes with a cache.

Everything but two places is an ordinary small GPT. The attention is a module of (B, T, hidden) to the same, so a model
without a cache changes one line; to decode, `forward` also says where the tokens stand and gives each block its cache.

    python tests/examples/plain_gpt.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_variants import GQAConfig, GroupedQueryAttention, MLAConfig, MultiHeadLatentAttention, fresh_step
from attn_variants.cache import KVCache

HIDDEN, HEADS, LAYERS, CONTEXT, VOCAB = 48, 4, 2, 48, 128


class Block(nn.Module):
    """Attention and an MLP, each added to the residual stream."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        x = x + self.attention(self.norm_1(x), *where)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Token and learned position embeddings, blocks, head: ids (B, T) to logits (B, T, VOCAB)."""

    def __init__(self, attention_of: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        # First place: this line used to read Block(CausalSelfAttention(HIDDEN, HEADS)).
        self.blocks = nn.ModuleList(Block(attention_of()) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        # Second place: where these tokens stand, once for all blocks, and, after the last block, that they are cached.
        step = fresh_step(*ids.shape, device=ids.device) if cache is None else cache.step(*ids.shape)
        layers = [None] * LAYERS if cache is None else cache.layers
        x = self.tokens(ids) + self.positions(step.positions)
        for block, layer in zip(self.blocks, layers, strict=True):
            x = block(x, step, layer)
        if cache is not None:
            cache.advance(step)
        return self.head(self.norm(x))


def gqa() -> GroupedQueryAttention:
    """Four query heads over two key/value heads; the model's position embeddings say where, so no RoPE."""
    return GroupedQueryAttention(GQAConfig(HIDDEN, HEADS, num_key_value_heads=2, rope=None))


def mla() -> MultiHeadLatentAttention:
    """One latent of 16 numbers and one rope key of 4 for all heads; MLA has that key in any model."""
    sizes = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12}
    return MultiHeadLatentAttention(MLAConfig(HIDDEN, HEADS, **sizes))


TEXT = "one latent, keys of many heads; "


def train(model: GPT, steps: int = 60) -> list[float]:
    """Next-character loss of each step on one sentence over and over, from a random place every time."""
    text = torch.tensor([ord(character) for character in TEXT * 3])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(TEXT), (8, 1))
        windows = text[starts + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def decode(model: GPT, prompt: Tensor, new: int, cache: KVCache | None) -> tuple[Tensor, Tensor]:
    """Greedy ids (1, T + new) and the logits (new, VOCAB) they were picked from; with a cache a pass is one token."""
    ids, picked, feed = prompt, [], prompt
    for _ in range(new):
        picked.append(model(feed, cache)[:, -1])
        newest = picked[-1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, newest], dim=1)
        feed = ids if cache is None else newest
    return ids, torch.cat(picked)


def main() -> dict[str, dict[str, Any]]:
    """Train and decode with each attention; prints and returns what was found."""
    results = {}
    for name, attention_of in (("gqa", gqa), ("mla", mla)):
        torch.manual_seed(0)
        model = GPT(attention_of)
        losses = train(model)
        prompt = torch.tensor([[ord(character) for character in "one late"]])
        # A cache is made from what each layer declares; the last token is never fed, hence the - 1.
        specs = [block.attention.cache_spec for block in model.blocks]
        new = 36
        cache = KVCache(specs, batch=1, capacity=prompt.shape[1] + new - 1)
        ids, logits = decode(model, prompt, new, None)
        cached_ids, cached_logits = decode(model, prompt, new, cache)
        error = float((cached_logits - logits).abs().max() / logits.abs().max())
        text = "".join(chr(index) for index in cached_ids[0].tolist())
        print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, {text!r}")
        same = "the same text" if torch.equal(ids, cached_ids) else "ANOTHER TEXT"
        print(f"     without the cache {same}, logits within {error:.0e}; {cache.nbytes} B of cache")
        results[name] = {"losses": losses, "ids": (ids, cached_ids), "error": error, "cache": cache}
    return results


if __name__ == "__main__":
    main()
