"""Our `KVCache` as the cache of transformers' `generate`: the same tokens, in memory that is allocated once.

transformers' models hand every layer's new pair of tensors to `cache.update` and attend over what it returns. Llama and
Qwen3 hand over keys and values, DeepSeek-V3 its latent and its rope key: exactly the two entries that our specs name.
So the adapter translates calls and holds no tensor of its own.

    python tests/examples/transformers_generate_cache.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import CacheLayerMixin

from attn_variants import CacheSpec, GQAConfig, MLAConfig, Step
from attn_variants.cache import KVCache


def cache_specs(config: PreTrainedConfig) -> list[CacheSpec]:
    """What each layer of a Llama-like or DeepSeek-like transformers model remembers per token."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention: GQAConfig | MLAConfig
    if hasattr(config, "kv_lora_rank"):
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        attention = MLAConfig(hidden, heads, **{name: getattr(config, name) for name in sizes})
    else:
        attention = GQAConfig(hidden, heads, config.num_key_value_heads, config.head_dim)
    return [attention.cache_spec()] * config.num_hidden_layers


class TransformersKVCache(Cache):
    """A `KVCache` that transformers' models and `generate` can use.

    It needs one row per sequence that `generate` keeps: batch x num_beams (or num_return_sequences). Padding columns
    are stored like any other and hidden by transformers' own mask, as with its DynamicCache.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        for spec in kv_cache.specs:
            if len(spec.entries) != 2:
                names = ", ".join(entry.name for entry in spec.entries)
                raise ValueError(f"transformers hands over two tensors per layer, the KVCache's layers hold {names}")
        # transformers attends over every column it is given, in order: slots not yet written, or in another order,
        # would be attended without an error.
        lengths = kv_cache.lengths.tolist()
        if kv_cache.store != "full" or kv_cache.static or len(set(lengths)) > 1:
            raise ValueError(
                f"transformers needs a KVCache with store='full', static=False and rows of one length, got "
                f"store={kv_cache.store!r}, static={kv_cache.static}, lengths {lengths}"
            )
        self.kv_cache = kv_cache
        self.step: Step | None = None
        super().__init__(layers=[TransformersKVLayer(self, index) for index in range(len(kv_cache.specs))])

    def append(self, index: int, *pair: Tensor) -> tuple[Tensor, ...]:
        """Write a layer's two new tensors, (B, heads, T, dim) each; return those of all tokens so far."""
        if index == 0:
            # The clock stands still while a pass runs: it begins at the first layer, which is also where tokens that do
            # not fit are refused, and moves after the last.
            if self.step is not None:
                raise ValueError(
                    f"the pass before did not reach layer {len(self.layers) - 1}: make the KVCache from this model's "
                    "specs, or, if the pass was interrupted, forget it with crop(0)"
                )
            rows, _, tokens, _ = pair[0].shape
            if rows != self.kv_cache.batch:
                raise ValueError(
                    f"generate keeps {rows} sequences (prompts x num_beams or num_return_sequences), the KVCache has "
                    f"{self.kv_cache.batch} rows: make it with batch={rows}"
                )
            self.step = self.kv_cache.step(rows, tokens)
        assert self.step is not None
        names = [entry.name for entry in self.kv_cache.specs[index].entries]
        view = self.kv_cache.layers[index].append(self.step, **dict(zip(names, pair, strict=True)))
        if index == len(self.layers) - 1:
            self.kv_cache.advance(self.step)
            self.step = None
        return view.dense(*names)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens of every row, given as a negative number: rejected drafts of assisted decoding."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to forget, got {tokens_to_remove}")
        self.kv_cache.rewind(-tokens_to_remove)
        self.step = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: beam search."""
        self.kv_cache.reorder(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, in a new KVCache."""
        self.kv_cache = self.kv_cache.fork([row for row in range(self.kv_cache.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, in a new KVCache."""
        self.kv_cache = self.kv_cache.fork(torch.arange(self.kv_cache.batch)[indices.cpu()].tolist())

    def reset(self) -> None:
        """Empty every row; the memory stays."""
        self.kv_cache.free()
        self.step = None


class TransformersKVLayer(CacheLayerMixin):
    """One layer of a `TransformersKVCache`; what concerns rows or the clock is asked of the whole."""

    is_croppable = True

    def __init__(self, whole: TransformersKVCache, index: int) -> None:
        # Not the parent's __init__: its `keys` of None would look like an empty cache. Here reading them is an error.
        self.whole = whole
        self.index = index
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        """All keys and values so far. Attention also passes its own keyword arguments along; a store needs none."""
        return self.whole.append(self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        """Columns that finished passes have filled, the same in every row."""
        return int(self.whole.kv_cache.lengths[0])

    def get_max_length(self) -> int:
        """Columns there are."""
        return self.whole.kv_cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that the next pass's attention reads, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the KVCache allocated everything when it was made."""

    def _refuse(self, *args: object) -> None:
        raise NotImplementedError("a KVCache's layers share its clock and its device: call the whole cache's method")

    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


def compare(model: PreTrainedModel, prompt: Tensor, attention_mask: Tensor, **how: Any) -> dict[str, Any]:
    """`generate` with transformers' DynamicCache and with a KVCache of the same number of tokens."""
    new = 12
    rows = len(prompt) * how.get("num_beams", 1)
    # The last token is never fed back. Drafts are written before they are judged, so they need room too.
    columns = prompt.shape[1] + new - 1 + how.get("prompt_lookup_num_tokens", 0)
    dynamic = DynamicCache(config=model.config)
    ours = TransformersKVCache(KVCache(cache_specs(model.config), batch=rows, capacity=columns, dtype=model.dtype))
    tokens = []
    for cache in (dynamic, ours):
        torch.manual_seed(0)
        output = model.generate(prompt, attention_mask=attention_mask, cache=cache, max_new_tokens=new, **how)
        tokens.append(output[:, prompt.shape[1] :])
    dynamic_bytes = sum(tensor.nbytes for layer in dynamic.layers for tensor in (layer.keys, layer.values))
    return {"tokens": tokens, "dynamic_bytes": dynamic_bytes, "our_bytes": ours.kv_cache.nbytes, "cache": ours}


def tiny_models() -> dict[str, PreTrainedModel]:
    """Random models of three families; their weights are larger than usual, so that next tokens are far from a tie."""
    common = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    mla = {"kv_lora_rank": 20, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
    torch.manual_seed(0)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=2)).eval(),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**common, num_key_value_heads=3, head_dim=12)).eval(),
        # Every MLP dense: this is about attention's cache.
        "deepseek-v3": DeepseekV3ForCausalLM(DeepseekV3Config(**common, **mla, first_k_dense_replace=3)).eval(),
    }


# Two prompts of 4 and 7 tokens, padded at the left as `generate` wants them.
PADDED = torch.tensor([[0, 0, 0, 21, 5, 46, 9], [31, 7, 88, 21, 60, 2, 13]])
# Prompt lookup drafts what followed the newest tokens before, one row at a time.
REPETITIVE = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])

MODES: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "greedy": (PADDED, {}),
    "sampled": (PADDED, {"do_sample": True}),
    "beam search": (PADDED, {"num_beams": 3}),
    "prompt in chunks": (PADDED, {"prefill_chunk_size": 3}),
    "prompt lookup": (REPETITIVE, {"prompt_lookup_num_tokens": 3}),
}


def main() -> dict[tuple[str, str], dict[str, Any]]:
    """Every model in every mode; prints and returns what was found."""
    results = {}
    print(f"{'model':12} {'mode':17} {'same tokens':12} {'DynamicCache':>12} {'KVCache':>9}  kept per token and layer")
    for name, model in tiny_models().items():
        (spec, *_) = cache_specs(model.config)
        kept = " + ".join(f"{entry.name} {entry.heads} x {entry.dim}" for entry in spec.entries)
        for mode, (prompt, how) in MODES.items():
            found = results[name, mode] = compare(model, prompt, (prompt != 0).long(), **how)
            same = "yes" if torch.equal(*found["tokens"]) else "NO"
            print(f"{name:12} {mode:17} {same:12} {found['dynamic_bytes']:10} B {found['our_bytes']:7} B  {kept}")
    return results


if __name__ == "__main__":
    main()
