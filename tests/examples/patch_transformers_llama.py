"""Our `GroupedQueryAttention` inside a transformers Llama: the same weights, logits and generated tokens.

Only the attention changes. The cache stays transformers' own, so that `generate` works as it is, beam search and all;
transformers_generate_cache.py shows the other half, our memory under transformers' attention.

    python tests/examples/patch_transformers_llama.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM

from attn_variants import GQAConfig, GroupedQueryAttention, RopeConfig, Step
from attn_variants.contract import Plan, View
from attn_variants.transient import DenseView, step_mask

# What transformers passes to every attention and what ours need not read: the step replaces the first three, the others
# concern outputs and losses. Anything else might change the scores, so it is refused rather than dropped.
UNREAD = {"attention_mask", "position_ids", "position_embeddings"}
UNREAD |= {"use_cache", "output_hidden_states", "num_items_in_batch"}


class PatchedAttention(GroupedQueryAttention):
    """`GroupedQueryAttention` under LlamaAttention's signature. A subclass, so that parameters keep their names."""

    def __init__(self, config: GQAConfig, layer_idx: int) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx

    def forward(
        self, hidden_states: Tensor, *, step: Step, cache: Cache | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        """(B, T, hidden) to the same, and None where LlamaAttention may return weights."""
        asked = {name for name, value in others.items() if value is not None and value is not False}
        if ignored := sorted(asked - UNREAD):
            raise ValueError(f"this attention would ignore {', '.join(ignored)}: leave it out")
        layer = None if cache is None else BorrowedLayer(cache, self)
        return super().forward(hidden_states, step, layer), None


class BorrowedLayer:
    """One layer of a transformers cache as our `LayerCache`: it keeps k and v, and we read what it gives back."""

    def __init__(self, cache: Cache, attention: PatchedAttention) -> None:
        self.cache = cache
        self.attention = attention

    def append(self, step: Step, **entries: Tensor) -> View:
        """Write this pass's k and v, (B, K, T, D) each, and read those of all columns so far."""
        k, v = self.cache.update(entries["k"], entries["v"], self.attention.layer_idx)
        plan = step.plans["columns"]
        if k.shape[2] != plan.limit:
            raise ValueError(f"the cache returned {k.shape[2]} columns, not {plan.limit}: use a DynamicCache")
        return DenseView(self.attention.cache_spec, step, plan, {"k": k, "v": v}.__getitem__)


def place(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a pass of the whole model: say where its tokens stand, once for all layers.

    transformers thinks in columns and a mask over them, we in positions: column c of row b holds that row's token
    kv_positions[b, c], or padding, -1. LlamaModel hands keyword arguments that it does not know to every attention, and
    so the step gets there.
    """
    if args:
        raise ValueError("give the patched model's inputs by name: input_ids=..., attention_mask=...")
    inputs = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    cache, mask = kwargs.get("cache"), kwargs.get("attention_mask")
    past = 0 if cache is None else cache.get_seq_length()
    rows, columns = inputs.shape[0], past + inputs.shape[1]
    if mask is None:
        mask = torch.ones(rows, columns)
    if mask.shape != (rows, columns):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, this attention takes {(rows, columns)}: real columns of "
            "each row. It knows no pattern but causal"
        )
    real = mask.to(inputs.device, torch.bool)
    kv_positions = (real.cumsum(1) - 1).masked_fill(~real, -1)
    positions = kv_positions[:, past:]
    refuse_other_positions(kwargs.get("position_ids"), positions, past)
    # Fresh: a prompt whose padding, if any, lies at the right, so that a plain triangle is the whole mask.
    fresh = past == 0 and bool((real[:, 1:] <= real[:, :-1]).all())
    step = Step(positions, real.sum(1), fresh=fresh, padded=bool((positions < 0).any()))
    spec = model.layers[0].self_attn.cache_spec
    mask = None if fresh else step_mask(step, kv_positions, spec)
    step.plans["columns"] = Plan(kv_positions, causal=fresh, mask=mask, limit=columns)
    return args, kwargs | {"step": step}


def refuse_other_positions(position_ids: Tensor | None, positions: Tensor, past: int) -> None:
    """RoPE sees differences alone, so counting columns gives the scores of counting real tokens; nothing else does."""
    if position_ids is None:
        return
    columns = past + torch.arange(positions.shape[1], device=positions.device)
    if not any(torch.where(positions < 0, True, position_ids == count).all() for count in (columns, positions)):
        raise ValueError(f"position_ids {position_ids.tolist()} count neither columns nor real tokens: leave them out")


def patch(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Replace every attention of the model, in place; its weights move over."""
    config = model.config
    if config.attention_dropout:
        raise ValueError(f"attention_dropout ({config.attention_dropout}) is not supported: set it to 0")
    ours = GQAConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope=RopeConfig(**config.rope_parameters),
        attention_bias=config.attention_bias,
        output_bias=config.attention_bias,
    )
    for index, layer in enumerate(model.model.layers):
        attention = PatchedAttention(ours, index).to(model.device, model.dtype).train(model.training)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = attention
    model.model.register_forward_pre_hook(place, with_kwargs=True)
    return model


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random Llama; its weights are larger than usual, so that next tokens are far from a tie."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


# The same two prompts, of 4 and 7 tokens.
UNPADDED = torch.tensor([[31, 7, 88, 21, 60, 2, 13]])
LEFT = torch.tensor([[0, 0, 0, 21, 5, 46, 9], [31, 7, 88, 21, 60, 2, 13]])
RIGHT = torch.tensor([[21, 5, 46, 9, 0, 0, 0], [31, 7, 88, 21, 60, 2, 13]])


@torch.no_grad()
def main() -> dict[str, Any]:
    """Logits and tokens of the model before and after the patch; prints and returns what was found."""
    theirs, ours = tiny_llama(), patch(tiny_llama())
    found: dict[str, Any] = {}
    for name, ids in (("unpadded", UNPADDED), ("left-padded", LEFT), ("right-padded", RIGHT)):
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        before, after = (model(**inputs).logits[ids != 0] for model in (theirs, ours))
        found[name] = float((after - before).abs().max() / before.abs().max())
        print(f"{name + ' logits':22} largest difference {found[name]:.1e} of the largest logit")
    for name, how in (("greedy", {}), ("beam search", {"num_beams": 3})):
        inputs = {"input_ids": LEFT, "attention_mask": (LEFT != 0).long(), "max_new_tokens": 12}
        before, after = (model.generate(**inputs, **how) for model in (theirs, ours))
        found[name] = torch.equal(before, after)
        same = "the same" if found[name] else "DIFFERENT"
        print(f"{name + ' tokens':22} {same}: {after[0, LEFT.shape[1] :].tolist()}")
    return found


if __name__ == "__main__":
    main()
