"""One pre-norm decoder for every variant: RMSNorm, attention, SwiGLU. Parameters bear the Hugging Face names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_variants.config import AttentionConfig, DecoderConfig
from attn_variants.contract import CacheSpec, LayerCache, Step
from attn_variants.linear import project
from attn_variants.norm import RMSNorm
from attn_variants.registry import variant_of
from attn_variants.transient import fresh_step, transients


class SequenceCache(Protocol):
    """What the decoder asks of a whole model's cache; `attn_variants.cache.KVCache` is one."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """One cache per layer."""
        ...

    def step(
        self,
        batch: int,
        tokens: int,
        *,
        counts: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        mask: Tensor | None = None,
    ) -> Step:
        """Where the next tokens stand; refused, and nothing changed, when they do not fit."""
        ...

    def advance(self, step: Step) -> None:
        """The step's tokens are now cached."""
        ...


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    same_input = (("gate_proj", "up_proj"),)

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same."""
        gate, up = project(x, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, attention: AttentionConfig) -> None:
        super().__init__()
        self.self_attn = variant_of(attention).module(attention)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """(B, T, hidden) to the same."""
        x = x + self.self_attn(self.input_layernorm(x), step, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderStack(nn.Module):
    """Embedding, layers and final norm: ids (B, T) to hidden states (B, T, hidden)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, attention) for attention in config.attentions)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor, step: Step, caches: Sequence[LayerCache]) -> Tensor:
        """Every layer reads and writes its own cache at the same step."""
        x: Tensor = self.embed_tokens(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, step, cache)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """A decoder-only language model whose attention is the config's: ids (B, T) to logits (B, T, vocab)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderStack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._transients = transients(config.cache_specs)

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer remembers: what a `KVCache` is made from."""
        return self.config.cache_specs

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of the keys and values."""
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.lm_head.weight.device

    def forward(
        self,
        ids: Tensor,
        cache: SequenceCache | None = None,
        *,
        counts: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        mask: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits (B, T, vocab); with a cache, ids are appended to its rows.

        counts: how many ids of each row are real, the rest being padding at the right.
        mask: (B, T), true on real ids, for padding anywhere.     rows: which rows of the cache these are.
        last: logits of each row's last real token only, (B, 1, vocab).

        Raises ValueError, before anything is computed or changed, for ids that are no (B, T) integers, and for what
        the cache cannot take.
        """
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32) or ids.numel() == 0:
            raise ValueError(
                f"ids must be int64 or int32 of shape (B, T), got {ids.dtype} of shape {tuple(ids.shape)}; "
                "both sizes at least 1"
            )
        batch, tokens = ids.shape
        if cache is None:
            if rows is not None:
                raise ValueError("rows name rows of a cache, and there is none")
            step = fresh_step(batch, tokens, counts=counts, mask=mask, device=ids.device)
            return self.compute(ids, step, self._transients, last=last)
        if len(cache.layers) != self.config.num_hidden_layers:
            raise ValueError(
                f"the cache has {len(cache.layers)} layers, the decoder {self.config.num_hidden_layers}: "
                "make the KVCache from this decoder's own cache_specs"
            )
        step = cache.step(batch, tokens, counts=counts, rows=rows, mask=mask)
        logits = self.compute(ids, step, cache.layers, last=last)
        cache.advance(step)
        return logits

    def compute(self, ids: Tensor, step: Step, caches: Sequence[LayerCache], *, last: bool = False) -> Tensor:
        """The part of `forward` that is tensors only; with a static cache it compiles whole, without a graph break."""
        hidden = self.model(ids, step, caches)
        logits: Tensor = self.lm_head(_last(hidden, step) if last else hidden)
        return logits

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
    ) -> Self:
        """The decoder in a Hugging Face folder; see `attn_variants.checkpoints.load_decoder` for what is refused."""
        from attn_variants.checkpoints import load_decoder

        return load_decoder(folder, dtype=dtype, device=device, kind=cls)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and safetensors that transformers reads back."""
        from attn_variants.checkpoints import save_decoder

        save_decoder(self, folder)


def _last(hidden: Tensor, step: Step) -> Tensor:
    """(B, 1, hidden) of each row's last real token; a row without one gives its last column."""
    if not step.padded:
        return hidden[:, -1:]
    columns = torch.arange(hidden.shape[1], device=hidden.device)
    newest = torch.where(step.positions >= 0, columns, -1).amax(1).clamp(min=0)
    return hidden[torch.arange(len(hidden), device=hidden.device), newest][:, None]
